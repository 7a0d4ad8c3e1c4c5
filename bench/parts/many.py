"""Many sandboxes that stand still: what they cost control, and the agents of many hosts, in CPU and memory."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import aiohttp

from bench import alone
from bench.findings import Finding, Verdict
from bench.product import CannotMeasure, cpu_s, pss_kib
from bench.stats import figure
from bench.world import World

SANDBOXES: Final = 50_000
HOSTS: Final = 50
SETTLE_S: Final = 40.0
WATCH_S: Final = 60.0
SHARE_MAX: Final = 0.05
LIFE_S: Final = 86_400
UNLIMITED: Final = """version: 1
limits:
  client: {request_rate: unlimited, sandboxes: unlimited}
  team: {request_rate: unlimited, sandboxes: unlimited, records: unlimited}
  deployment: {sandboxes: unlimited, records: unlimited}
classes:
  default: {placement: {policy: spread}}
"""


async def measure(world: World) -> Finding:
    """Fill hosts whose drivers only pretend, then let everything stand."""
    sandboxes, hosts = world.count(SANDBOXES, 1000), world.count(HOSTS, 2)
    finding = Finding(
        name="many",
        title=f"{sandboxes} idle sandboxes on {hosts} hosts",
        columns=["", f"CPU over {WATCH_S:.0f} s (% of a core)", "memory (PSS, MiB)", "more for each 10,000 sandboxes (MiB)"],
        about=(
            "Created through the API, with a day to live; the hosts' agents share one process, and their drivers do nothing. Then nobody asks "
            "for anything: what is left are the hosts' polls, which carry what they hold, control's sweeps, and the agents' own looks."
        ),
    )
    async with alone.pair(hosts) as pair:
        await _apply(pair)
        empty = {name: pss_kib(pid) for name, pid in _processes(pair)}
        seconds = await _fill(pair, sandboxes)
        await asyncio.sleep(SETTLE_S if not world.quick else 5.0)
        before, began = {name: cpu_s(pid) for name, pid in _processes(pair)}, time.perf_counter()
        await asyncio.sleep(WATCH_S)
        watched = time.perf_counter() - began
        share = {name: (cpu_s(pid) - before[name]) / watched for name, pid in _processes(pair)}
        for name, pid in _processes(pair):
            memory = pss_kib(pid)
            more = (memory - empty[name]) / sandboxes * 10_000 / 1024
            finding.rows.append([name, f"{share[name] * 100:.2f}", figure(memory / 1024), figure(more)])
        finding.notes.append(f"They were made in {seconds:.0f} s, {figure(sandboxes / seconds)} a second, 16 at once.")
    finding.verdicts.append(
        Verdict(
            f"control with {sandboxes} idle sandboxes: less than 5 % of a core",
            f"{share['control'] * 100:.2f} %",
            "5 %",
            share["control"] < SHARE_MAX,
        )
    )
    return finding


def _processes(pair: alone.Pair) -> tuple[tuple[str, int], ...]:
    return ("control", pair.control), ("agents", pair.agent)


async def _apply(pair: alone.Pair) -> None:
    async with aiohttp.ClientSession(headers={"X-API-KEY": pair.operator}) as session:
        async with session.get(f"{pair.url}/v1/config") as answer:
            revision = (await answer.json())["revision"]
        body: dict[str, Any] = {"document": UNLIMITED, "revision": revision}
        async with session.put(f"{pair.url}/v1/config", json=body) as answer:
            if answer.status != 200:
                raise CannotMeasure(f"the document was refused: {await answer.text()}")


async def _fill(pair: alone.Pair, count: int) -> float:
    left, began = iter(range(count)), time.perf_counter()
    async with aiohttp.ClientSession() as session:

        async def worker(index: int) -> None:
            headers = {"X-API-KEY": pair.keys[index % len(pair.keys)]}
            for _ in left:
                async with session.post(f"{pair.url}/v1/sandboxes", json={"timeoutSeconds": LIFE_S}, headers=headers) as answer:
                    body = await answer.json()
                if answer.status != 201:
                    raise CannotMeasure(f"a create was answered with {answer.status}: {body}")

        await asyncio.gather(*(worker(index) for index in range(16)))
    return time.perf_counter() - began
