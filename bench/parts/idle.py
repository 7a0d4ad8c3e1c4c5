"""What stands still should cost nothing: memory of sandboxes and of our processes, CPU while nobody asks for anything."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from atoll.drivers.oci.config import RuntimeKind
from atoll.hostops import cgroups
from bench.clients import Made
from bench.findings import Finding, Verdict
from bench.product import OURS, pss_kib
from bench.stats import Sample, figure
from bench.world import CLASS, SIZE, World

WATCH_S: Final = 20.0
SANDBOXES: Final = 5
OURS_MIB_MAX: Final = 250.0
GUEST_MIB_MAX: Final = 8.0
CPU_SHARE_MAX: Final = 0.01


def sandbox_kib(world: World, made: Made) -> int:
    """Memory of a sandbox's processes on the host: its guest, and its runtime's where that stays."""
    layout = cgroups.detect()
    pids = cgroups.pids(layout, f"{world.api.instance.cgroup_parent}/{made.placement_id}")
    return sum(pss_kib(pid) for pid in pids)


async def measure(world: World) -> Finding:
    """A few sandboxes of each kind stand idle; then everything is looked at."""
    finding = Finding(
        name="idle",
        title="Idle",
        columns=["", "memory (PSS, MiB)", "CPU over 20 s (% of a core)"],
        about=f"{SANDBOXES} idle sandboxes of each kind stand beside; memory counts shared pages by share.",
    )
    made: list[Made] = []
    memory = {kind: Sample() for kind in CLASS}
    instance = world.api.instance
    try:
        for kind in CLASS:
            mine = [await world.api.create(CLASS[kind], **SIZE) for _ in range(SANDBOXES)]
            made += mine
            await asyncio.sleep(2.0)
            memory[kind].extend(sandbox_kib(world, one) / 1024 for one in mine)
        await asyncio.sleep(8.0)  # what the creates caused has ended
        names = (*OURS, "supervisor")
        before = {name: instance.cpu_s(name) for name in names}
        began = time.perf_counter()
        await asyncio.sleep(WATCH_S if not world.quick else 5.0)
        seconds = time.perf_counter() - began
        shares = {name: (instance.cpu_s(name) - before[name]) / seconds for name in names}
    finally:
        for one in made:
            await world.api.end(one.id)
    sizes = {name: sum(pss_kib(pid) for pid in instance.family(name)) / 1024 for name in names}
    for name in names:
        finding.rows.append([name, figure(sizes[name]), f"{shares[name] * 100:.2f}"])
    whole, share = sum(sizes[name] for name in OURS), sum(shares[name] for name in OURS)
    finding.rows.append(["control + agent + edge", figure(whole), f"{share * 100:.2f}"])
    for kind in CLASS:
        finding.rows.append([f"one sandbox, {kind}", figure(memory[kind].median), ""])
        finding.keep(f"{kind} (MiB)", memory[kind])
    finding.verdicts.append(
        Verdict(
            f"control + agent + edge: at most {OURS_MIB_MAX:.0f} MiB", f"{whole:.0f} MiB", f"{OURS_MIB_MAX:.0f} MiB", whole <= OURS_MIB_MAX
        )
    )
    guest = memory[RuntimeKind.CRUN].median
    finding.verdicts.append(
        Verdict(f"an idle guest: at most {GUEST_MIB_MAX:g} MiB", f"{guest:.1f} MiB", f"{GUEST_MIB_MAX:g} MiB", guest <= GUEST_MIB_MAX)
    )
    finding.verdicts.append(
        Verdict("control + agent + edge, idle: less than 1 % of a core", f"{share * 100:.2f} %", "1 %", share < CPU_SHARE_MAX)
    )
    return finding
