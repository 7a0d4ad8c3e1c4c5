"""Coming to rest and back, beside the runtime's own checkpoint and restore."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from atoll.drivers.oci.config import RuntimeKind
from bench.clients import TRUE, Inside
from bench.findings import Finding, Verdict
from bench.stats import Sample, figure, paired
from bench.world import CLASS, PIDS_MAX, SIZE, World

HEAPS_MIB: Final = (0, 64)
MORE_MS_MAX: Final = 20.0
HOLD: Final = "import os,sys,time; held=os.urandom({mib} << 20); open('/tmp/held','w').close(); time.sleep(3600)"


async def measure(world: World) -> Finding:
    """Suspend, and resume until a first command has ended, each beside the same without us; pause in place has no such baseline."""
    finding = Finding(
        name="rest",
        title="Suspend and resume, gVisor (ms)",
        columns=["", "ours p50", "p95", "p99", "n", "bare p50", "more, pair by pair"],
        about=(
            "A process holds so many MiB that cannot be compressed. Bare: `runsc pause` and `checkpoint --leave-running`; then `restore` with everything "
            "made ahead that can be, until the guest has been initialised and has run /bin/true. Ours: POST suspend and POST resume until they are "
            "answered, with the same command through the edge. Pairs are measured one after the other."
        ),
    )
    for mib in HEAPS_MIB:
        saves, backs = (Sample(), Sample()), (Sample(), Sample())
        for _ in range(world.count(12, 2)):
            await _ours(world, mib, saves[0], backs[0])
            await _bare(world, mib, saves[1], backs[1])
        for what, (ours, bare) in ((f"suspend, {mib} MiB", saves), (f"resume and a command, {mib} MiB", backs)):
            more = paired(ours.values, bare.values) * 1e3
            finding.rows.append([what, *ours.cells(), figure(bare.median * 1e3), figure(more)])
            finding.keep(f"{what}, ours", ours)
            finding.keep(f"{what}, bare", bare)
            finding.verdicts.append(
                Verdict(f"{what}: bare + {MORE_MS_MAX:.0f} ms at most", f"{more:+.1f} ms", f"{MORE_MS_MAX:.0f} ms", more <= MORE_MS_MAX)
            )
    return finding


async def _hold(inside: Inside, mib: int) -> None:
    if mib:
        command = f'(python3 -c "{HOLD.format(mib=mib)}" >/dev/null 2>&1 &); until [ -e /tmp/held ]; do sleep 0.05; done'
        await inside.run(("/bin/sh", "-c", command))


async def _ours(world: World, mib: int, save: Sample, back: Sample) -> None:
    made = await world.api.create(CLASS[RuntimeKind.RUNSC], **SIZE)
    try:
        inside = world.api.through_edge(made)
        await _hold(inside, mib)
        began = time.perf_counter()
        await world.api.rest(made, "suspend")
        save.add(time.perf_counter() - began)
        began = time.perf_counter()
        await world.api.rest(made, "resume")
        await inside.run(TRUE)
        back.add(time.perf_counter() - began)
    finally:
        await world.api.end(made.id)


async def _bare(world: World, mib: int, save: Sample, back: Sample) -> None:
    prepared = await world.bare.prepare(RuntimeKind.RUNSC, **SIZE, pids_max=PIDS_MAX)
    directory = Path(tempfile.mkdtemp(prefix="atoll-image.", dir="/var/tmp"))
    try:
        await _hold(await world.bare.start(prepared), mib)
        began = time.perf_counter()
        await world.bare.save(prepared, directory / "image")
        save.add(time.perf_counter() - began)
        prepared = await world.bare.again(prepared, directory / "image")
        began = time.perf_counter()
        inside = await world.bare.start(prepared)
        await inside.run(TRUE)
        back.add(time.perf_counter() - began)
    finally:
        await world.bare.remove(prepared)
        shutil.rmtree(directory)
