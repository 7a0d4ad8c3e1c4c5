"""Many small sandboxes at once: 200 of a tenth of a core and 64 MiB, sharing the host's kernel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from atoll.drivers.oci.config import RuntimeKind
from bench.clients import TRUE, Made
from bench.findings import Finding
from bench.parts.idle import sandbox_kib
from bench.product import OURS, pss_kib
from bench.stats import Sample, figure
from bench.world import CLASS, World

T = TypeVar("T")

COUNT: Final = 200
AT_ONCE: Final = 8
SMALL: Final = {"cpu_millis": 100, "memory_mib": 64, "disk_mib": 256}


async def measure(world: World) -> Finding:
    """Create all, run a command in each, look at their memory, delete all."""
    kind, count = RuntimeKind.CRUN, world.count(COUNT, 40)
    finding = Finding(
        name="dense",
        title=f"{count} sandboxes of 0.1 vCPU and 64 MiB, {kind} (ms)",
        columns=["", "p50", "p95", "p99", "n", "all of them"],
        about="Eight requests are under way at any time. `deleted` ends with the answer, `gone` when nothing of it is left on the host.",
    )
    made: list[Made] = []
    api, instance = world.api, world.api.instance

    async def create(_: int) -> None:
        made.append(await api.create(CLASS[kind], **SMALL))

    try:
        await _row(finding, "created, ready", range(count), create)
        await asyncio.sleep(2.0)
        await _row(finding, "`/bin/true` in each", made, lambda one: api.through_edge(one).run(TRUE))
        memory = Sample([sandbox_kib(world, one) / 1024 for one in made])
        ours = sum(pss_kib(pid) for pid in instance.family(*OURS)) / 1024
        cpu, began = instance.cpu_s(), time.perf_counter()
        await asyncio.sleep(5.0)
        share = (instance.cpu_s() - cpu) / (time.perf_counter() - began)
        finding.notes.append(
            f"Memory of one: {figure(memory.median)} MiB (p50), {figure(memory.p95)} (p95). With all of them standing idle, control, agent "
            f"and edge have {ours:.0f} MiB together and use {share * 100:.2f} % of a core."
        )
    finally:
        left, began = list(made), time.perf_counter()
        await _row(finding, "deleted", left, lambda one: api.delete(one.id))
        for one in left:
            await api.wait_gone(one.id)
        finding.rows.append(["gone", "", "", "", str(len(left)), f"{time.perf_counter() - began:.1f} s"])
    return finding


async def _row(finding: Finding, label: str, items: Sequence[T], work: Callable[[T], Awaitable[object]]) -> None:
    sample, left = Sample(), iter(items)

    async def worker() -> None:
        for item in left:
            began = time.perf_counter()
            await work(item)
            sample.add(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    finding.rows.append([label, *sample.cells(), f"{time.perf_counter() - began:.1f} s"])
    finding.keep(label, sample)
