"""How long an end takes: until it is answered, and until nothing of the sandbox is left on the host."""

from __future__ import annotations

import asyncio
import time

from bench.findings import Finding
from bench.stats import Sample
from bench.world import CLASS, SIZE, World


async def measure(world: World) -> Finding:
    """One at a time."""
    finding = Finding(
        name="deletes",
        title="Delete, one at a time (ms)",
        columns=["", "p50", "p95", "p99", "n"],
        about=(
            "`answered`: from then on nobody reaches it. `gone`: processes, control groups, namespace, mounts, rules and files were looked "
            "for and not found, and control has recorded that."
        ),
    )
    for kind in CLASS:
        answered, gone = Sample(), Sample()
        for _ in range(world.count(30, 5)):
            made = await world.api.create(CLASS[kind], **SIZE)
            await asyncio.sleep(0.5)
            began = time.perf_counter()
            await world.api.delete(made.id)
            answered.add(time.perf_counter() - began)
            await world.api.wait_gone(made.id)
            gone.add(time.perf_counter() - began)
            await asyncio.sleep(0.2)
        for label, sample in ((f"{kind}, answered", answered), (f"{kind}, gone", gone)):
            finding.rows.append([label, *sample.cells()])
            finding.keep(label, sample)
    return finding
