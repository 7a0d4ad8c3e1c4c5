"""Creates that take over a guest that was made ahead: one at a time, and sixteen at once with the CPU that they cost; beside cold ones."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from atoll.drivers.oci.config import RuntimeKind
from bench.clients import TRUE, Api, Made
from bench.findings import Finding, Verdict
from bench.product import CannotMeasure
from bench.stats import Sample, figure
from bench.world import CLASS, SIZE, World

KEPT: Final = 16
AT_ONCE: Final = 16
FULL_S: Final = 120.0
CALM_S: Final = 0.5
"""After the last guest is ready: slots and whatever else was taken is made anew by then."""
AFTER_S: Final = 0.15
"""After the last answer: what a create leaves to do is done by then, and nothing is made ahead yet (`loops/warming.py`, CALM_S)."""
P50_MS: Final = 15.0
P99_MS: Final = 40.0
CPU_MS: Final = 6.0
_CLASS: Final = CLASS[RuntimeKind.RUNSC]


@dataclass(slots=True)
class Series:
    """*Units*: seconds."""

    ready: Sample = field(default_factory=Sample)
    total: Sample = field(default_factory=Sample)
    cpu: Sample = field(default_factory=Sample)
    """Of control, agent and edge, for each create."""
    split: dict[str, Sample] = field(default_factory=lambda: {"control": Sample(), "agent": Sample(), "edge": Sample()})


async def measure(world: World) -> Finding:
    """One at a time in turn with cold ones and with a call that makes nothing; then sixteen at once."""
    api = world.api
    warm, cold, floor, crowd, anew = Series(), Series(), Sample(), Series(), Sample()
    await _floor(api, Sample())
    await _one(world, cold, claimed=False)
    try:
        await api.keep_warm("base", _CLASS, KEPT, **SIZE)
        await _one(world, Series(), claimed=True)
        for _ in range(world.count(40, 8)):
            await _one(world, warm, claimed=True)
            await _floor(api, floor)
        for _ in range(world.count(10, 3)):
            await _crowd(world, crowd, anew)
    finally:
        await api.keep_warm("base", _CLASS, 0, **SIZE)
    await _empty(api)
    cold.ready.values.clear()
    cold.total.values.clear()
    for _ in range(world.count(15, 4)):
        await _one(world, cold, claimed=False)
    return _finding(warm, cold, floor, crowd, anew)


async def _one(world: World, series: Series, *, claimed: bool) -> None:
    api = world.api
    there = await _full(api) if claimed else set()
    await asyncio.sleep(CALM_S)
    cpu = api.instance.cpu_s()
    began = time.perf_counter()
    made = await api.create(_CLASS, **SIZE)
    up = time.perf_counter()
    series.cpu.add(api.instance.cpu_s() - cpu)
    await api.through_edge(made).run(TRUE)
    series.ready.add(up - began)
    series.total.add(time.perf_counter() - began)
    if claimed and made.id not in there:
        raise CannotMeasure(f"{made.id} was not made ahead")
    await api.end(made.id)


async def _floor(api: Api, sample: Sample) -> None:
    began = time.perf_counter()
    await api.ask("/v1/whoami")
    sample.add(time.perf_counter() - began)


async def _crowd(world: World, series: Series, anew: Sample) -> None:
    api = world.api
    there = await _full(api)
    await asyncio.sleep(CALM_S)
    made: list[Made] = []

    async def one() -> None:
        sandbox = await api.create(_CLASS, **SIZE)
        series.ready.add(time.perf_counter() - began)
        made.append(sandbox)

    before = {name: api.instance.cpu_s(name) for name in series.split}
    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    await asyncio.sleep(AFTER_S)
    spent = {name: api.instance.cpu_s(name) - cpu for name, cpu in before.items()}
    series.cpu.add(sum(spent.values()) / AT_ONCE)
    for name, cpu in spent.items():
        series.split[name].add(cpu / AT_ONCE)
    if strangers := {one.id for one in made} - there:
        raise CannotMeasure(f"{len(strangers)} of {AT_ONCE} were not made ahead")
    cpu = api.instance.cpu_s()
    await _full(api)
    anew.add((api.instance.cpu_s() - cpu) / AT_ONCE)
    await asyncio.gather(*(api.end(sandbox.id) for sandbox in made))


async def _full(api: Api) -> set[str]:
    """Wait until as many are ready as are kept; which ones. *Errors*: CannotMeasure."""
    deadline = time.monotonic() + FULL_S
    while time.monotonic() < deadline:
        there = await api.warm()
        if len(there) >= KEPT:
            return there
        await asyncio.sleep(0.1)
    raise CannotMeasure(f"{KEPT} guests were not ready within {FULL_S:.0f} s")


async def _empty(api: Api) -> None:
    for _ in range(int(FULL_S / 0.1)):
        if not await api.warm():
            return
        await asyncio.sleep(0.1)


def _finding(warm: Series, cold: Series, floor: Sample, crowd: Series, anew: Sample) -> Finding:
    finding = Finding(
        name="warm",
        title="Create to ready, guests made ahead, gVisor (ms)",
        columns=["", "ready p50", "p95", "p99", "n", "with first command p50"],
        about=(
            f"{KEPT} guests of `base` are kept ready (`atoll template warm`). One at a time, each begins when all are there again; cold ones in "
            "the same run are the baseline, and a call that makes nothing is what any answer costs."
        ),
    )
    for label, series in (("made ahead, one at a time", warm), ("cold, one at a time", cold), (f"made ahead, {AT_ONCE} at once", crowd)):
        total = figure(series.total.median * 1e3) if len(series.total) else "–"
        finding.rows.append([label, *series.ready.cells(), total])
        finding.keep(label, series.ready)
    finding.rows.append(["`GET /v1/whoami`", *floor.cells(), "–"])
    finding.keep("floor", floor)
    finding.keep("cpu at once", crowd.cpu)
    parts = ", ".join(f"{name} {figure(sample.median * 1e3)}" for name, sample in crowd.split.items())
    finding.notes.append(f"CPU of our processes for each of {AT_ONCE} at once: {figure(crowd.cpu.median * 1e3)} ms ({parts}).")
    finding.notes.append(f"To make one ahead costs them {figure(anew.median * 1e3)} ms of CPU, later, while nobody waits.")
    finding.notes.append(
        f"One at a time: {figure(warm.cpu.median * 1e3)} ms of CPU until the answer; cold {figure(cold.cpu.median * 1e3)} ms."
    )
    for name, value, most in (("p50", warm.ready.median, P50_MS), ("p99", warm.ready.p99, P99_MS)):
        measured = value * 1e3
        finding.verdicts.append(
            Verdict(f"warm create to ready, one at a time, {name}", f"{figure(measured)} ms", f"{most:g} ms", measured <= most)
        )
    cpu_ms = crowd.cpu.median * 1e3
    finding.verdicts.append(Verdict(f"CPU of a warm create, {AT_ONCE} at once", f"{figure(cpu_ms)} ms", f"{CPU_MS:g} ms", cpu_ms <= CPU_MS))
    return finding
