"""Coming to rest and back, beside the runtime's own checkpoint and restore."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from atoll.drivers.oci.config import RuntimeKind
from bench.bare import Prepared
from bench.clients import TRUE, Inside, Made
from bench.findings import Finding, Verdict
from bench.stats import Sample, figure, paired, ratio
from bench.world import CLASS, PIDS_MAX, SIZE, World

HEAPS_MIB: Final = (0, 64)
MORE_MS_MAX: Final = 20.0
WAKE_MS_MAX: Final = 15.0
CLONES: Final = 20
TIMES_MAX: Final = 1.15
REST_S: Final = 1.0
"""How long it rests before it is brought back: what a suspend leaves to be cleared away is done by then, as the bare one's is."""
HOLD: Final = "import os,sys,time; held=os.urandom({mib} << 20); open('/tmp/held','w').close(); time.sleep(3600)"

Pair = tuple[Sample, Sample]
"""Ours, and what it is compared with."""


async def measure(world: World) -> Finding:
    """Suspend, resume and wake until a first command has ended, and clones, each beside the same without us in the same round."""
    finding = Finding(
        name="rest",
        title="Suspend, resume, wake on traffic, snapshots and forks, gVisor (ms)",
        columns=["", "ours p50", "p95", "p99", "n", "beside p50", "more, pair by pair"],
        about=(
            "A process holds so many MiB that cannot be compressed. Beside a suspend: `runsc pause` and `checkpoint --leave-running`; beside a resume: `restore` "
            "with everything made ahead that can be, until the guest has been initialised and has run /bin/true. Ours: POST suspend and POST resume until they are "
            f"answered, with the same command through the edge, after {REST_S:.0f} s at rest; *at once* is a resume right after the suspend's answer. A wake is that "
            "command sent to a sandbox that rests, until it has ended, beside our own resume of the same sandbox. Each round measures ours and the other one after "
            "the other, in turn the one or the other first. A snapshot is POST snapshots beside `checkpoint --leave-running`; clones are POST forks until each "
            "has run the command, beside as many restores at once of one image, with its checkpoint."
        ),
    )
    for mib in HEAPS_MIB:
        saves, backs, wakes, hasty = (Sample(), Sample()), (Sample(), Sample()), (Sample(), Sample()), (Sample(), Sample())
        for number in range(world.count(20, 2)):
            await in_turn(
                number,
                lambda: _ours(world, mib, saves[0], backs[0], hasty[0], wakes),  # noqa: B023 - awaited within the round
                lambda: _bare(world, mib, saves[1], backs[1]),  # noqa: B023
            )
            hasty[1].add(backs[1].values[-1])
        _compare(finding, f"suspend, {mib} MiB", saves, MORE_MS_MAX)
        _compare(finding, f"resume and a command, {mib} MiB", backs, MORE_MS_MAX)
        _compare(finding, f"resume and a command, {mib} MiB, at once", hasty, None)
        _compare(finding, f"wake on traffic, {mib} MiB, beside our resume", wakes, WAKE_MS_MAX)
    await _kept(world, finding)
    return finding


async def in_turn(number: int, ours: Callable[[], Awaitable[None]], theirs: Callable[[], Awaitable[None]]) -> None:
    """Both, the one or the other first: whoever is second finds the machine as the first has left it."""
    for one in (ours, theirs) if number % 2 == 0 else (theirs, ours):
        await one()


def _compare(finding: Finding, what: str, pair: Pair, more_ms_max: float | None) -> None:
    ours, other = pair
    more = paired(ours.values, other.values) * 1e3
    finding.rows.append([what, *ours.cells(), figure(other.median * 1e3), figure(more)])
    finding.keep(f"{what}, ours", ours)
    finding.keep(f"{what}, beside", other)
    if more_ms_max is not None:
        allowed = f"{more_ms_max:.0f} ms"
        finding.verdicts.append(Verdict(f"{what}: {allowed} more at most", f"{more:+.1f} ms", allowed, more <= more_ms_max))


async def _kept(world: World, finding: Finding) -> None:
    """Snapshots of a guest that goes on, one clone, and many clones of one moment at once: until each has run a command, divided by how many."""
    mib = HEAPS_MIB[-1]
    for held in HEAPS_MIB:
        keeps, forks = (Sample(), Sample()), (Sample(), Sample())
        for number in range(world.count(15, 2)):
            await in_turn(
                number,
                lambda: _our_clones(world, held, 1, keeps[0], forks[0]),  # noqa: B023 - awaited within the round
                lambda: _bare_clones(world, held, 1, keeps[1], forks[1]),  # noqa: B023
            )
        _compare(finding, f"snapshot, {held} MiB", keeps, None)
        _compare(finding, f"fork and a command, {held} MiB", forks, MORE_MS_MAX)
    count, many = world.count(CLONES, 3), (Sample(), Sample())
    for number in range(world.count(6, 1)):
        await in_turn(
            number,
            lambda: _our_clones(world, mib, count, Sample(), many[0]),
            lambda: _bare_clones(world, mib, count, Sample(), many[1]),
        )
    _compare(finding, f"each of {count} clones at once, {mib} MiB", many, None)
    times = ratio(many[0].values, many[1].values)
    finding.verdicts.append(
        Verdict(f"{count} forks at once: bare x {TIMES_MAX} at most", f"x {times:.2f}", f"x {TIMES_MAX}", times <= TIMES_MAX)
    )


async def _our_clones(world: World, mib: int, count: int, keep: Sample, fork: Sample) -> None:
    made = await world.api.create(CLASS[RuntimeKind.RUNSC], **SIZE)
    clones: list[Made] = []
    try:
        await hold(world.api.through_edge(made), mib)
        began = time.perf_counter()
        snapshot_id = await world.api.snapshot(made)
        keep.add(time.perf_counter() - began)
        await world.api.drop(snapshot_id)
        await asyncio.sleep(REST_S)
        began = time.perf_counter()
        clones = await world.api.fork(made, count)
        await asyncio.gather(*(world.api.through_edge(one).run(TRUE) for one in clones))
        fork.add((time.perf_counter() - began) / count)
    finally:
        for one in (made, *clones):
            await world.api.end(one.id)


async def _bare_clones(world: World, mib: int, count: int, keep: Sample, fork: Sample) -> None:
    parent = await world.bare.prepare(RuntimeKind.RUNSC, **SIZE, pids_max=PIDS_MAX)
    clones: list[Prepared] = []
    async with _image() as image:
        try:
            await hold(await world.bare.start(parent), mib)
            began = time.perf_counter()
            await world.bare.keep(parent, image)
            took_s = time.perf_counter() - began
            keep.add(took_s)
            for _ in range(count):
                clones.append(world.bare.beginning(await world.bare.prepare(RuntimeKind.RUNSC, **SIZE, pids_max=PIDS_MAX), image))
            await asyncio.sleep(REST_S)
            began = time.perf_counter()
            await asyncio.gather(*(_begin(world, one) for one in clones))
            # A fork has its moment to take, too.
            fork.add((took_s + time.perf_counter() - began) / count)
        finally:
            for one in (parent, *clones):
                await world.bare.remove(one)


async def _begin(world: World, prepared: Prepared) -> None:
    await (await world.bare.start(prepared)).run(TRUE)


async def hold(inside: Inside, mib: int) -> None:
    """Have a process there that holds so much that cannot be compressed."""
    if mib:
        command = f'(python3 -c "{HOLD.format(mib=mib)}" >/dev/null 2>&1 &); until [ -e /tmp/held ]; do sleep 0.05; done'
        await inside.run(("/bin/sh", "-c", command))


async def _ours(world: World, mib: int, save: Sample, back: Sample, hasty: Sample, wakes: Pair) -> None:
    made = await world.api.create_waking()
    try:
        inside = world.api.through_edge(made)
        await hold(inside, mib)
        await _suspend(world, made, save)
        await asyncio.sleep(REST_S)
        await _resume(world, made, inside, back)
        await _suspend(world, made, Sample())
        await _resume(world, made, inside, hasty)
        await _suspend(world, made, Sample())
        await asyncio.sleep(REST_S)
        began = time.perf_counter()
        await inside.run(TRUE)
        wakes[0].add(time.perf_counter() - began)
        wakes[1].add(back.values[-1])
    finally:
        await world.api.end(made.id)


async def _suspend(world: World, made: Made, sample: Sample) -> None:
    began = time.perf_counter()
    await world.api.rest(made, "suspend")
    sample.add(time.perf_counter() - began)


async def _resume(world: World, made: Made, inside: Inside, sample: Sample) -> None:
    began = time.perf_counter()
    await world.api.rest(made, "resume")
    await inside.run(TRUE)
    sample.add(time.perf_counter() - began)


async def _bare(world: World, mib: int, save: Sample, back: Sample) -> None:
    prepared = await world.bare.prepare(RuntimeKind.RUNSC, **SIZE, pids_max=PIDS_MAX)
    async with _image() as image:
        try:
            await hold(await world.bare.start(prepared), mib)
            began = time.perf_counter()
            await world.bare.save(prepared, image)
            save.add(time.perf_counter() - began)
            prepared = await world.bare.again(prepared, image)
            await asyncio.sleep(REST_S)
            began = time.perf_counter()
            inside = await world.bare.start(prepared)
            await inside.run(TRUE)
            back.add(time.perf_counter() - began)
        finally:
            await world.bare.remove(prepared)


@asynccontextmanager
async def _image() -> AsyncIterator[Path]:
    """Where an image can be written; gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="atoll-image.", dir="/var/tmp"))
    try:
        yield directory / "image"
    finally:
        shutil.rmtree(directory)
