"""Coming to rest and back, beside the runtime's own checkpoint and restore."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from atoll.drivers.oci.config import RuntimeKind
from bench.bare import Prepared
from bench.clients import TRUE, Inside, Made
from bench.findings import Finding, Verdict
from bench.stats import Sample, figure, paired
from bench.world import CLASS, PIDS_MAX, SIZE, World

HEAPS_MIB: Final = (0, 64)
MORE_MS_MAX: Final = 20.0
CLONES: Final = 20
TIMES_MAX: Final = 1.15
HOLD: Final = "import os,sys,time; held=os.urandom({mib} << 20); open('/tmp/held','w').close(); time.sleep(3600)"


async def measure(world: World) -> Finding:
    """Suspend, and resume until a first command has ended, each beside the same without us; pause in place has no such baseline."""
    finding = Finding(
        name="rest",
        title="Suspend, resume, snapshots and forks, gVisor (ms)",
        columns=["", "ours p50", "p95", "p99", "n", "bare p50", "more, pair by pair"],
        about=(
            "A process holds so many MiB that cannot be compressed. Bare: `runsc pause` and `checkpoint --leave-running`; then `restore` with everything "
            "made ahead that can be, until the guest has been initialised and has run /bin/true. Ours: POST suspend and POST resume until they are "
            "answered, with the same command through the edge. Pairs are measured one after the other. A snapshot is POST snapshots beside `checkpoint "
            "--leave-running`; clones are POST forks until each has run the command, beside as many restores at once of one image, with its checkpoint."
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
    await _kept(world, finding)
    return finding


async def _kept(world: World, finding: Finding) -> None:
    """Snapshots of a guest that goes on, and many clones of one moment at once: until each has run a command, divided by how many."""
    keeps, forks = (Sample(), Sample()), (Sample(), Sample())
    count = world.count(CLONES, 3)
    for _ in range(world.count(5, 1)):
        await _our_clones(world, count, keeps[0], forks[0])
        await _bare_clones(world, count, keeps[1], forks[1])
    mib = HEAPS_MIB[-1]
    for what, (ours, bare) in ((f"snapshot, {mib} MiB", keeps), (f"each of {count} clones at once, {mib} MiB", forks)):
        more = paired(ours.values, bare.values) * 1e3
        finding.rows.append([what, *ours.cells(), figure(bare.median * 1e3), figure(more)])
        finding.keep(f"{what}, ours", ours)
        finding.keep(f"{what}, bare", bare)
    ratio = forks[0].median / forks[1].median
    finding.verdicts.append(
        Verdict(f"{count} forks at once: bare x {TIMES_MAX} at most", f"x {ratio:.2f}", f"x {TIMES_MAX}", ratio <= TIMES_MAX)
    )


async def _our_clones(world: World, count: int, keep: Sample, fork: Sample) -> None:
    made = await world.api.create(CLASS[RuntimeKind.RUNSC], **SIZE)
    clones: list[Made] = []
    try:
        await hold(world.api.through_edge(made), HEAPS_MIB[-1])
        began = time.perf_counter()
        snapshot_id = await world.api.snapshot(made)
        keep.add(time.perf_counter() - began)
        await world.api.drop(snapshot_id)
        began = time.perf_counter()
        clones = await world.api.fork(made, count)
        await asyncio.gather(*(world.api.through_edge(one).run(TRUE) for one in clones))
        fork.add((time.perf_counter() - began) / count)
    finally:
        for one in (made, *clones):
            await world.api.end(one.id)


async def _bare_clones(world: World, count: int, keep: Sample, fork: Sample) -> None:
    parent = await world.bare.prepare(RuntimeKind.RUNSC, **SIZE, pids_max=PIDS_MAX)
    directory = Path(tempfile.mkdtemp(prefix="atoll-image.", dir="/var/tmp"))
    clones: list[Prepared] = []
    try:
        await hold(await world.bare.start(parent), HEAPS_MIB[-1])
        began = time.perf_counter()
        await world.bare.keep(parent, directory / "image")
        took_s = time.perf_counter() - began
        keep.add(took_s)
        for _ in range(count):
            clones.append(world.bare.beginning(await world.bare.prepare(RuntimeKind.RUNSC, **SIZE, pids_max=PIDS_MAX), directory / "image"))
        began = time.perf_counter()
        await asyncio.gather(*(_begin(world, one) for one in clones))
        # A fork has its moment to take, too.
        fork.add((took_s + time.perf_counter() - began) / count)
    finally:
        for one in (parent, *clones):
            await world.bare.remove(one)
        shutil.rmtree(directory)


async def _begin(world: World, prepared: Prepared) -> None:
    await (await world.bare.start(prepared)).run(TRUE)


async def hold(inside: Inside, mib: int) -> None:
    """Have a process there that holds so much that cannot be compressed."""
    if mib:
        command = f'(python3 -c "{HOLD.format(mib=mib)}" >/dev/null 2>&1 &); until [ -e /tmp/held ]; do sleep 0.05; done'
        await inside.run(("/bin/sh", "-c", command))


async def _ours(world: World, mib: int, save: Sample, back: Sample) -> None:
    made = await world.api.create(CLASS[RuntimeKind.RUNSC], **SIZE)
    try:
        inside = world.api.through_edge(made)
        await hold(inside, mib)
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
        await hold(await world.bare.start(prepared), mib)
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
