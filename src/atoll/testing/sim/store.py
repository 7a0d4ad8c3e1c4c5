"""The store of a simulation: one database in memory, and a look at what every commit changed.

Theory of operation. Every control process uses it through a handle of its own (`handle.py`). What a commit changed is noted by triggers in
the same transaction, as pairs of rows before and after; `after_commit` gets them. What any statement says is shown to `on_statement`,
values included: that is how a secret is found that was in a column for one moment only. Where several processes share it, transactions
read now and write later (`interleaving.py`), and messages from one to the others pass through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool
from sqlalchemy.util import greenlet_spawn

from atoll.store import hints, restoring, schema
from atoll.store.engine import Work
from atoll.store.hints import Collected
from atoll.testing.sim.clock import EPOCH_S
from atoll.testing.sim.interleaving import Gone, Interleaving, Key, Late

T = TypeVar("T")
Row = Mapping[str, Any]

_HEARD_S: Final = 0.003
_WATCHED: Final[Mapping[str, tuple[str, ...]]] = {
    "sandboxes": (
        "id", "revision", "state", "generation", "placement_id", "host_id", "reason", "end_at", "started_at", "request_id", "unseen",
        "conditions", "bootstrap_exposed", "moment", "team_id", "claimable",
    ),
    "placements": (
        "id", "sandbox_id", "host_id", "generation", "holding", "held_cpu_millis", "held_memory_mib", "held_disk_mib", "held_slots",
        "desired", "desired_revision", "observed", "seq", "applied_revision", "ready", "address",
    ),
    "hosts": ("id", "name", "admin", "revision", "cpu_millis", "memory_mib", "disk_mib", "slots", "credential_version", "epoch", "seen_at", "isolations", "problems"),
    "snapshots": ("id", "revision", "state", "purpose", "host_id", "sandbox_id", "held_disk_mib", "copy", "moment"),
    "copies": ("host_id", "snapshot_id", "disk_mib", "leaving"),
    "events": ("seq", "type", "sandbox_id", "generation", "state", "reason"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One row of a commit. `before` is None for a new one, `after` for one that is gone."""

    table: str
    before: Row | None
    after: Row | None

    @property
    def row(self) -> Row:
        """As it is, or was."""
        row = self.after if self.after is not None else self.before
        assert row is not None
        return row


@dataclass(slots=True)
class StoreWeather:
    """Shares of transactions, and seconds."""

    races: float = 0.0
    forgets: float = 0.0
    slow_s: float = 0.0
    down: bool = False
    late: float = 0.03
    """Of processes that share it."""


class SharedConnection(sqlite3.Connection):
    """Every statement on it goes through SQLAlchemy, where `Interleaving` sees it (store.prepared takes the driver's own for what it is)."""


class Database:
    """It outlives every process that uses it."""

    def __init__(
        self,
        *,
        on_statement: Callable[[str], None],
        shared: bool = True,
        wall: Callable[[], float] = lambda: EPOCH_S + asyncio.get_running_loop().time(),
    ) -> None:
        """`shared`: several processes use it. `wall`: its machine has a clock of its own, which is right."""
        self.wall = wall
        self.weather = StoreWeather()
        self.commits = 0
        self.after_commit: Callable[[Sequence[Change]], None] = lambda _changes: None
        factory = SharedConnection if shared else sqlite3.Connection
        self._engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"isolation_level": None, "factory": factory})
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
        self._interleaving = Interleaving(self._engine, say=self._say, changed=lambda: _keys(self._changes()))
        self._ears: dict[int, Callable[[str], None]] = {}

    def commit(self, work: Work[T], noted: Collected | None = None) -> T:
        """Run it, keep it, and look at what it changed. `noted`: gets what it tells to others. *Errors*: Blocked: nothing was kept."""
        hints.collect(self.conn, into=noted)
        self._driver.execute("BEGIN IMMEDIATE")
        try:
            result = work(self.conn)
            changes = self._finish(None)
        except BaseException:
            self._driver.execute("ROLLBACK")
            raise
        self.after_commit(changes)
        return result

    async def commit_late(self, work: Work[T], late: Late) -> T:
        """As `commit`, with time between what it reads and what it writes. *Errors*: also Stale, Unavailable."""

        def run() -> tuple[T, Sequence[Change]]:
            self._interleaving.enter(self.conn, late)
            try:
                result = work(self.conn)
                self._interleaving.before_commit(self.conn, late)
                return result, self._finish(late) if late.began else ()
            except BaseException:
                if late.began:
                    self._driver.execute("ROLLBACK")
                raise
            finally:
                self._interleaving.leave(late)

        result, changes = await _through(run)
        self.after_commit(changes)
        return result

    async def read_late(self, work: Work[T], late: Late) -> T:
        """Read, with time between one statement and the next."""

        def run() -> T:
            self._interleaving.enter(self.conn, late)
            try:
                return work(self.conn)
            finally:
                self._interleaving.leave(late)

        return await _through(run)

    def lose(self, work: Work[T]) -> None:
        """Run it, and roll it back: somebody else was quicker."""
        self._driver.execute("BEGIN IMMEDIATE")
        try:
            work(self.conn)
        finally:
            self._driver.execute("ROLLBACK")

    def _finish(self, late: Late | None) -> Sequence[Change]:
        changes = self._changes()
        self._interleaving.check(_keys(changes), late)
        if changes:
            self._driver.execute("DELETE FROM temp.changes")
        self._driver.execute("COMMIT")
        self.commits += 1
        return changes

    def _changes(self) -> Sequence[Change]:
        found = self._driver.execute("SELECT of, was, now FROM temp.changes ORDER BY n").fetchall()
        return [Change(of, json.loads(was) if was else None, json.loads(now) if now else None) for of, was, now in found]

    def _say(self, statement: str, parameters: Any = (), *, many: bool = False) -> sqlite3.Cursor:
        return self._driver.executemany(statement, parameters) if many else self._driver.execute(statement, parameters)

    def back_up(self) -> bytes:
        """What is committed now, as a file."""
        return self._driver.serialize()

    def take_back(self, backup: bytes, *, now: float, chance: Callable[[int], bytes]) -> None:
        """Be as that backup is, and begin the next life, as an operator's restore does. Nobody may use it meanwhile."""
        with contextlib.closing(sqlite3.connect(":memory:")) as kept:
            kept.deserialize(backup)
            kept.backup(self._driver)
        self._interleaving.forget()
        self._ears.clear()
        self._driver.execute("BEGIN IMMEDIATE")
        restoring.next_life(self.conn, now=now, chance=chance)
        self._driver.execute("DELETE FROM temp.changes")
        self._driver.execute("COMMIT")

    def rows(self) -> Sequence[Change]:
        """Every row that is watched, as if it were new."""
        return [
            Change(table, None, json.loads(row))
            for table, columns in _WATCHED.items()
            for (row,) in self._driver.execute(f"SELECT {_object(table, columns)} FROM {table}").fetchall()  # noqa: S608 - its own names
        ]

    def listen(self, ear: object, heard: Callable[[str], None]) -> Callable[[], None]:
        """Have `heard` called with each message, until what this gives is called. Messages come in order, a moment after they were sent."""
        self._ears[id(ear)] = heard

        def end() -> None:
            if self._ears.get(id(ear)) is heard:
                del self._ears[id(ear)]

        return end

    def notify(self, message: str) -> None:
        """Tell everybody who listens when it arrives."""

        def arrive() -> None:
            for heard in list(self._ears.values()):
                heard(message)

        asyncio.get_running_loop().call_later(_HEARD_S, arrive)

    def everything(self) -> dict[str, list[tuple[Any, ...]]]:
        """All rows of all tables."""
        names = [row[0] for row in self._driver.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")]
        return {name: self._driver.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}  # noqa: S608 - its own names

    def dispose(self) -> None:
        """The end of the simulation."""
        self.conn.close()
        self._engine.dispose()


def _keys(changes: Sequence[Change]) -> list[Key]:
    """Rows that somebody else may want; events are only ever added."""
    return [(change.table, change.row["id"]) for change in changes if "id" in change.row]


async def _through(run: Callable[[], T]) -> T:
    """A late transaction in its greenlet."""
    try:
        return await greenlet_spawn(run)
    except Gone:
        raise asyncio.CancelledError from None


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
