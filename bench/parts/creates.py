"""Create → ready → first command done: ours through `/v1` and through the unmodified SDK, beside the bare runtime."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from atoll.drivers.oci.config import RuntimeKind
from bench.bare import Prepared
from bench.clients import LOGIN_TRUE, TRUE, Made
from bench.findings import Finding, Verdict
from bench.stats import Sample, figure, paired
from bench.world import CLASS, PIDS_MAX, SIZE, World

OVERHEAD_MS: Final = 20.0
SETTLE_S: Final = 0.35
"""After each start: longer than the agent waits before it makes the slot anew that was taken."""
AT_ONCE: Final = (4, 16)


@dataclass(slots=True)
class Series:
    """What one way to a first command took. *Units*: seconds."""

    up: Sample = field(default_factory=Sample)
    """Until commands can be run."""
    first: Sample = field(default_factory=Sample)
    """The first command."""
    total: Sample = field(default_factory=Sample)
    cpu: Sample = field(default_factory=Sample)
    """CPU time of control, agent and edge together."""

    def add(self, began: float, up: float, done: float) -> None:
        self.up.add(up - began)
        self.first.add(done - up)
        self.total.add(done - began)


async def ours(world: World, kind: RuntimeKind, series: Series) -> None:
    """Through /v1, by a client that keeps its connections."""
    cpu = world.api.instance.cpu_s()
    began = time.perf_counter()
    made = await world.api.create(CLASS[kind], **SIZE)
    up = time.perf_counter()
    await world.api.through_edge(made).run(TRUE)
    series.add(began, up, time.perf_counter())
    series.cpu.add(world.api.instance.cpu_s() - cpu)
    await world.api.end(made.id)
    await asyncio.sleep(SETTLE_S)


async def bare(world: World, kind: RuntimeKind, series: Series, command: tuple[str, ...] = TRUE) -> None:
    """The runtime alone."""
    prepared = await prepare(world, kind)
    await asyncio.sleep(SETTLE_S)
    try:
        await _start(world, prepared, series, command)
    finally:
        await world.bare.remove(prepared)


async def prepare(world: World, kind: RuntimeKind) -> Prepared:
    """A bare start of the size that ours has."""
    return await world.bare.prepare(kind, pids_max=PIDS_MAX, **SIZE)


async def _start(world: World, prepared: Prepared, series: Series, command: tuple[str, ...] = TRUE) -> None:
    began = time.perf_counter()
    inside = await world.bare.start(prepared)
    up = time.perf_counter()
    await inside.run(command)
    series.add(began, up, time.perf_counter())


async def sdk(world: World, series: Series) -> None:
    """Through E2B's Python SDK as it is, one thread, new connections each time: what a script sees."""
    from e2b import Sandbox

    def work() -> tuple[str, float, float, float]:
        began = time.perf_counter()
        sandbox = Sandbox.create()
        up = time.perf_counter()
        sandbox.commands.run("true")
        done = time.perf_counter()
        sandbox.kill()
        return sandbox.sandbox_id, began, up, done

    sandbox_id, *times = await asyncio.to_thread(work)
    series.add(*times)
    await world.api.wait_gone(sandbox_id)
    await asyncio.sleep(SETTLE_S)


async def one_at_a_time(world: World, kind: RuntimeKind) -> Finding:
    """In turn: ours, bare, SDK, bare with the SDK's command; the next round the other way about."""
    series = {name: Series() for name in ("v1", "bare", "sdk", "bare login")}
    steps: list[Callable[[], Awaitable[None]]] = [
        lambda: ours(world, kind, series["v1"]),
        lambda: bare(world, kind, series["bare"]),
    ]
    if kind is RuntimeKind.RUNSC:
        steps += [lambda: sdk(world, series["sdk"]), lambda: bare(world, kind, series["bare login"], LOGIN_TRUE)]
    for step in steps:
        await step()  # the first of everything pays for caches
    for one in series.values():
        for sample in (one.up, one.first, one.total, one.cpu):
            sample.values.clear()
    for turn in range(world.count(30, 5)):
        for step in steps if turn % 2 == 0 else reversed(steps):
            await step()
    return _table(kind, series)


def _table(kind: RuntimeKind, series: dict[str, Series]) -> Finding:
    finding = Finding(
        name=f"create-{kind}",
        title=f"Create to first command, {kind}, one at a time (ms)",
        columns=["", "ready", "first command", "total p50", "p95", "p99", "n"],
        about=(
            "`ready` ends when commands can be run: the create is answered, or the bare guest has taken its init. The first command is "
            "`/bin/true`; in the SDK's rows it is `bash -l -c true`, which is what `commands.run` sends."
        ),
    )
    labels = {
        "v1": "`POST /v1/sandboxes`, then a command through the edge",
        "bare": f"bare `{kind} run`, then a command straight to the guest",
        "sdk": "`Sandbox.create()`, `commands.run()` of the Python SDK",
        "bare login": f"bare `{kind} run`, then `bash -l` straight to the guest",
    }
    for name, label in labels.items():
        one = series[name]
        if len(one.total):
            finding.rows.append([label, figure(one.up.median * 1e3), figure(one.first.median * 1e3), *one.total.cells()])
            finding.keep(name, one.total)
            finding.keep(f"{name} ready", one.up)
    for name, other, what in (("v1", "bare", "create to first command"), ("sdk", "bare login", "the same through the SDK")):
        if len(series[name].total):
            extra = paired(series[name].total.values, series[other].total.values) * 1e3
            finding.verdicts.append(
                Verdict(
                    f"{what}, {kind}: at most {OVERHEAD_MS:g} ms over bare (p50 of pairs)",
                    f"{extra:+.1f} ms",
                    f"+{OVERHEAD_MS:g} ms",
                    extra <= OVERHEAD_MS,
                )
            )
    finding.notes.append(f"Our processes use {figure(series['v1'].cpu.median * 1e3)} ms of CPU for one create with its first command.")
    return finding


async def at_once(world: World, kind: RuntimeKind) -> Finding:
    """Several started in the same moment; each is timed from that moment."""
    finding = Finding(
        name=f"create-{kind}-at-once",
        title=f"Create to first command, {kind}, several at once (ms)",
        columns=["", "ready p50", "total p50", "p95", "p99", "n", "a second"],
        about="Every one is counted from the moment in which all were asked for. `a second` is how many had done their first command per second.",
    )
    for number in AT_ONCE:
        series = {"v1": Series(), "bare": Series(), "sdk": Series()}
        rates = {name: Sample() for name in series}
        for turn in range(world.count(5, 1)):
            ways = [("v1", _ours_at_once), ("bare", _bare_at_once), *([("sdk", _sdk_at_once)] if kind is RuntimeKind.RUNSC else [])]
            for name, way in ways if turn % 2 == 0 else reversed(ways):
                seconds = await way(world, kind, series[name], number)
                rates[name].add(number / seconds)
        for name, label in (("v1", "`/v1`"), ("bare", "bare"), ("sdk", "SDK (async)")):
            one = series[name]
            if len(one.total):
                finding.rows.append(
                    [f"{label}, {number} at once", figure(one.up.median * 1e3), *one.total.cells(), figure(rates[name].median)]
                )
                finding.keep(f"{name} {number}", one.total)
        cpu = series["v1"].cpu.median / number * 1e3
        finding.notes.append(f"{number} at once through /v1: {figure(cpu)} ms of CPU in our processes for each.")
    return finding


async def _ours_at_once(world: World, kind: RuntimeKind, series: Series, number: int) -> float:
    made: list[Made] = []

    async def one() -> None:
        sandbox = await world.api.create(CLASS[kind], **SIZE)
        made.append(sandbox)
        up = time.perf_counter()
        await world.api.through_edge(sandbox).run(TRUE)
        series.add(began, up, time.perf_counter())

    cpu = world.api.instance.cpu_s()
    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(number)))
    seconds = time.perf_counter() - began
    series.cpu.add(world.api.instance.cpu_s() - cpu)
    await asyncio.gather(*(world.api.end(sandbox.id) for sandbox in made))
    await asyncio.sleep(2 * SETTLE_S)
    return seconds


async def _bare_at_once(world: World, kind: RuntimeKind, series: Series, number: int) -> float:
    prepared = [await prepare(world, kind) for _ in range(number)]
    await asyncio.sleep(SETTLE_S)

    async def one(ready: Prepared) -> None:
        inside = await world.bare.start(ready)
        up = time.perf_counter()
        await inside.run(TRUE)
        series.add(began, up, time.perf_counter())

    began = time.perf_counter()
    await asyncio.gather(*(one(ready) for ready in prepared))
    seconds = time.perf_counter() - began
    for ready in prepared:
        await world.bare.remove(ready)
    return seconds


async def _sdk_at_once(world: World, kind: RuntimeKind, series: Series, number: int) -> float:  # noqa: ARG001 - one shape for all ways
    from e2b import AsyncSandbox

    made: list[AsyncSandbox] = []

    async def one() -> None:
        sandbox = await AsyncSandbox.create()
        made.append(sandbox)
        up = time.perf_counter()
        await sandbox.commands.run("true")
        series.add(began, up, time.perf_counter())

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(number)))
    seconds = time.perf_counter() - began
    for sandbox in made:
        await sandbox.kill()
        await world.api.wait_gone(sandbox.sandbox_id)
    await asyncio.sleep(2 * SETTLE_S)
    return seconds
