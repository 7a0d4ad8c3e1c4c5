"""The store of a simulation: one database in memory, a handle for each control process, and a look at what every commit changed.

Theory of operation. A handle behaves as a client of a shared database does: a transaction takes a moment, may be run again because it
lost a race (its first run is rolled back), may find no database, and may be committed without its caller hearing of it. What a commit
changed is noted by triggers in the same transaction, as pairs of rows before and after; `after_commit` gets them. What any statement
says is shown to `on_statement`, values included: that is how a secret is found that was in a column for one moment only.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from atoll.base.errors import Code, OutcomeUnknown, Unavailable
from atoll.store import schema
from atoll.store.engine import Work
from atoll.testing.sim.clock import EPOCH_S
from atoll.testing.sim.process import Process

T = TypeVar("T")
Row = Mapping[str, Any]

_TRIES: Final = 12
_WATCHED: Final[Mapping[str, tuple[str, ...]]] = {
    "sandboxes": (
        "id", "revision", "state", "generation", "placement_id", "host_id", "reason", "end_at", "started_at", "request_id", "bootstrap_exposed",
    ),
    "placements": (
        "id", "sandbox_id", "host_id", "generation", "holding", "held_cpu_millis", "held_memory_mib", "held_disk_mib", "held_slots",
        "desired", "desired_revision", "observed", "seq", "applied_revision", "ready", "address",
    ),
    "hosts": ("id", "name", "admin", "revision", "cpu_millis", "memory_mib", "disk_mib", "slots", "credential_version", "epoch", "isolations", "problems"),
    "events": ("seq", "type", "sandbox_id", "generation", "state", "reason"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One row of a commit. `before` is None for a new one, `after` for one that is gone."""

    table: str
    before: Row | None
    after: Row | None


@dataclass(slots=True)
class StoreWeather:
    """Shares of transactions, and seconds."""

    races: float = 0.0
    forgets: float = 0.0
    slow_s: float = 0.0
    down: bool = False


class Database:
    """It outlives every process that uses it."""

    def __init__(
        self, *, on_statement: Callable[[str], None], wall: Callable[[], float] = lambda: EPOCH_S + asyncio.get_running_loop().time()
    ) -> None:
        """`wall`: its machine has a clock of its own, which is right."""
        self.wall = wall
        self.weather = StoreWeather()
        self.commits = 0
        self.after_commit: Callable[[Sequence[Change]], None] = lambda _changes: None
        self._engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"isolation_level": None})
        self.conn = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        driver = self.conn.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        self._driver = driver
        self._driver.execute("PRAGMA foreign_keys=ON")
        self._driver.execute("BEGIN")
        schema.migrate(self.conn)
        self._driver.execute("COMMIT")
        _watch(self._driver)
        self._driver.set_trace_callback(on_statement)

    def commit(self, work: Work[T]) -> T:
        """Run it, keep it, and look at what it changed."""
        result = self._run(work)
        changes = self._driver.execute("SELECT of, was, now FROM temp.changes ORDER BY n").fetchall()
        if changes:
            self._driver.execute("DELETE FROM temp.changes")
        self._driver.execute("COMMIT")
        self.commits += 1
        self.after_commit([Change(of, json.loads(was) if was else None, json.loads(now) if now else None) for of, was, now in changes])
        return result

    def lose(self, work: Work[T]) -> None:
        """Run it, and roll it back: somebody else was quicker."""
        self._run(work)
        self._driver.execute("ROLLBACK")

    def _run(self, work: Work[T]) -> T:
        self._driver.execute("BEGIN IMMEDIATE")
        try:
            return work(self.conn)
        except BaseException:
            self._driver.execute("ROLLBACK")
            raise

    def everything(self) -> dict[str, list[tuple[Any, ...]]]:
        """All rows of all tables."""
        names = [row[0] for row in self._driver.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")]
        return {name: self._driver.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}  # noqa: S608 - its own names

    def dispose(self) -> None:
        """The end of the simulation."""
        self.conn.close()
        self._engine.dispose()


class Handle:
    """Implements store.engine.Store for one process."""

    def __init__(self, database: Database, process: Process, dice: random.Random, *, shared: bool) -> None:
        self._database = database
        self._process = process
        self._dice = dice
        self._shared = shared

    async def write(self, work: Work[T]) -> T:
        """As Store.write."""
        weather = self._database.weather
        await asyncio.sleep(self._dice.random() * (0.002 + weather.slow_s))
        for _ in range(_TRIES):
            self._process.check()
            if weather.down:
                raise Unavailable(Code.STORE_UNAVAILABLE, "the simulated database is down")
            if self._dice.random() >= weather.races:
                break
            self._database.lose(work)
            await asyncio.sleep(self._dice.random() * 0.01)
        else:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the same rows were changed by others each time")
        self._process.check()
        result = self._database.commit(work)
        if self._dice.random() < weather.forgets:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the connection broke during the commit")
        await asyncio.sleep(self._dice.random() * 0.001)
        return result

    async def read(self, work: Work[T]) -> T:
        """As Store.read."""
        if self._shared:
            await asyncio.sleep(self._dice.random() * (0.001 + self._database.weather.slow_s))
        self._process.check()
        if self._database.weather.down:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the simulated database is down")
        return work(self._database.conn)

    async def wall(self) -> float | None:
        """As Store.wall."""
        if not self._shared:
            return None
        await asyncio.sleep(self._dice.random() * self._database.weather.slow_s)
        return self._database.wall()

    def require_room(self) -> None:
        """Memory has room."""

    async def close(self) -> None:
        """Nothing: the next control finds everything as it was."""


def _watch(driver: sqlite3.Connection) -> None:
    driver.execute("CREATE TEMP TABLE changes (n INTEGER PRIMARY KEY, of TEXT, was TEXT, now TEXT)")
    for table, columns in _WATCHED.items():
        old, new = (_object(side, columns) for side in ("OLD", "NEW"))
        for event, was, now in (("INSERT", "NULL", new), ("UPDATE", old, new), ("DELETE", old, "NULL")):
            driver.execute(
                f"CREATE TEMP TRIGGER watch_{table}_{event} AFTER {event} ON main.{table} BEGIN "  # noqa: S608 - names of this file
                f"INSERT INTO changes (of, was, now) VALUES ('{table}', {was}, {now}); END"
            )


def _object(side: str, columns: Sequence[str]) -> str:
    pairs = ", ".join(f"'{column}', {side}.{column}" for column in columns)
    return f"json_object({pairs})"
