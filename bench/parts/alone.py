"""What control and agent add to any runtime: creates and deletes against a driver that only pretends."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import aiohttp

from bench import alone
from bench.findings import Finding, Verdict
from bench.parts.stores import sqlite_rate
from bench.product import CannotMeasure, cpu_s, pss_kib
from bench.stats import Sample, figure
from bench.world import World

PAIRS_WANTED: Final = 300.0


async def measure(world: World) -> Finding:
    """Create and delete, one at a time and many at once, in pairs a second."""
    finding = Finding(
        name="alone",
        title="Control and agent without a runtime (ms)",
        columns=["", "create p50", "p95", "p99", "n", "pairs a second", "CPU control", "CPU agent"],
        about=(
            "Creates and deletes straight at control, with a real agent whose driver does nothing: all that is left is admission, commits, "
            "the poll, the journal and the answer. CPU is for one create with its delete; the client shares the machine."
        ),
    )
    rate = 0.0
    async with alone.pair() as pair:
        for number, count in ((1, world.count(300, 100)), (16, world.count(1600, 320))):
            sample = Sample()
            await _pairs(pair, Sample(), number, 64)
            control, agent, began = cpu_s(pair.control), cpu_s(pair.agent), time.perf_counter()
            await _pairs(pair, sample, number, count)
            seconds = time.perf_counter() - began
            rate = count / seconds
            cpu = [figure((cpu_s(pid) - before) / count * 1e3) for pid, before in ((pair.control, control), (pair.agent, agent))]
            finding.rows.append([f"{number} at once", *sample.cells(), figure(rate), *cpu])
            finding.keep(f"{number} at once", sample)
        finding.verdicts.append(
            Verdict(
                f"create and delete, no runtime, 16 at once: at least {PAIRS_WANTED:.0f} pairs a second (agent and client beside)",
                f"{rate:.0f}",
                f"{PAIRS_WANTED:.0f}",
                rate >= PAIRS_WANTED,
            )
        )
        finding.notes.append(f"SQLite alone makes {figure(sqlite_rate(2.0))} durable commits of one row a second here, one at a time.")
        finding.notes.append(
            f"Afterwards control has {figure(pss_kib(pair.control) / 1024)} MiB of memory (PSS), the agent {figure(pss_kib(pair.agent) / 1024)} MiB."
        )
    return finding


async def _pairs(pair: alone.Pair, sample: Sample, number: int, count: int) -> None:
    left = iter(range(count))
    async with aiohttp.ClientSession() as session:

        async def worker(index: int) -> None:
            headers = {"X-API-KEY": pair.keys[index % len(pair.keys)]}
            for _ in left:
                began = time.perf_counter()
                async with session.post(f"{pair.url}/v1/sandboxes", json={"timeoutSeconds": 600}, headers=headers) as answer:
                    body = await answer.json()
                if answer.status != 201:
                    raise CannotMeasure(f"a create was answered with {answer.status}: {body}")
                sample.add(time.perf_counter() - began)
                async with session.delete(f"{pair.url}/v1/sandboxes/{body['id']}", headers=headers) as answer:
                    await answer.read()

        await asyncio.gather(*(worker(index) for index in range(number)))
