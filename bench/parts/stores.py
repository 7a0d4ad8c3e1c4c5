"""What the two stores are good for on this disk, and what control makes of them."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Final

from atoll.telemetry.log import configure
from bench import postgres
from bench.findings import Finding
from bench.product import CannotMeasure
from bench.stats import figure
from bench.world import World

SECONDS: Final = 6.0
QUICK_S: Final = 1.0


def sqlite_rate(seconds: float) -> float:
    """Durable commits a second of one row each, one at a time, by SQLite alone (WAL, synchronous=FULL)."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
        driver = stack.enter_context(contextlib.closing(sqlite3.connect(Path(directory) / "bare.db", isolation_level=None)))
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            driver.execute(f"PRAGMA {pragma}").close()
        driver.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, value TEXT)").close()
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            driver.execute("INSERT INTO rows (value) VALUES ('x')").close()
            done += 1
        return done / (time.perf_counter() - began)


async def measure(world: World) -> Finding:
    """Bare commits of both, then creates with their releases through one control and two."""
    seconds = QUICK_S if world.quick else SECONDS
    configure("bench", "critical")
    finding = Finding(
        name="stores",
        title="Stores (a second)",
        columns=["", *(f"{at_once} at once" for at_once in postgres.AT_ONCE), "CPU (% of a core)"],
        about=(
            "Commits are of one row each, durable, by the database alone: the baseline. Pairs are creates with their releases through control, with a "
            "scripted agent; controls, agent and clients share one process, and so one core, whose use is said."
        ),
    )
    empty = ["–"] * (len(postgres.AT_ONCE) - 1)
    finding.rows.append(["commits, SQLite", figure(sqlite_rate(seconds)), *empty, ""])
    try:
        server = postgres.Server()
    except (ValueError, KeyError) as error:
        raise CannotMeasure(f"PostgreSQL is not installed: {error}") from error
    try:
        bare = [rates async for _, rates in postgres.commits(server, seconds)]
        finding.rows.append(["commits, PostgreSQL", *(figure(rates["bare"]) for rates in bare), ""])
        finding.rows.append(["the same, each followed by a hint", *(figure(rates["after"]) for rates in bare), ""])
        for where, count, what in ((None, 1, "SQLite"), (server, 1, "PostgreSQL"), (server, 2, "PostgreSQL, two controls")):
            found = [(rate, busy) async for _, rate, busy in postgres.pairs(where, count, f"pairs{count}", seconds)]
            used = " / ".join(f"{busy * 100:.0f}" for _, busy in found)
            finding.rows.append([f"pairs, {what}", *(figure(rate) for rate, _ in found), used])
    finally:
        server.stop()
    return finding
