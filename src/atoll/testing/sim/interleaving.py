"""Interleaving: transactions that read now and write later, as those of several processes on one database do.

Theory of operation. A store function runs in a greenlet and stands still before some of its statements, while others commit; each statement
sees what is committed when it runs (READ COMMITTED), and what it has written itself. One connection carries all of them: while a
transaction stands still what it has written is rolled back, and written again when it goes on. Rows that it has locked (`FOR UPDATE`) or
changed are nobody else's until its end: who wants to lock or change one is rolled back, waits, and comes again. A database ends a
transaction that stands still for too long, as that of a frozen process does, and lets go of its rows.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.util import await_only

from atoll.base.errors import Code, Unavailable
from atoll.store import hints
from atoll.store.engine import Stale
from atoll.store.postgres import IDLE_S
from atoll.testing.sim.process import Process

Key = tuple[str, Any]
"""A row: its table and its primary key."""


class Blocked(Exception):
    """Somebody else has locked a row that this transaction wants: it is rolled back. `by` ends some time."""

    def __init__(self, by: Late) -> None:
        super().__init__("a row is locked")
        self.by = by


class Gone(Exception):
    """Its process has ended, or its caller has gone. A CancelledError among SQLAlchemy's own frames would cost everybody the connection."""


@dataclass(eq=False, slots=True)
class Late:
    """A transaction under way. `pause_s`: how long to stand still before a statement, given whether it writes."""

    process: Process
    pause_s: Callable[[bool], float]
    began: bool = False
    """The connection is in its transaction."""
    ended: bool = False
    """By the database, because it stood still for too long."""
    noted: hints.Collected = field(default_factory=hints.Collected)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """It has let go of its rows."""
    written: list[tuple[str, Any, bool, int]] = field(default_factory=list)
    """Statements that change something: text, parameters, whether these are many, and how many rows it changed."""


class Interleaving:
    """Of one database. `say` speaks to its driver; `changed` gives the rows that the connection's transaction has changed so far."""

    def __init__(self, engine: sa.Engine, *, say: Callable[..., Any], changed: Callable[[], Iterable[Key]]) -> None:
        self._say = say
        self._changed = changed
        self._locks: dict[Key, Late] = {}
        self._running: Late | None = None
        self._open: dict[Late, Late] = {}
        self._probing = False
        sa.event.listen(engine, "before_cursor_execute", self._before_statement)
        sa.event.listen(engine, "after_cursor_execute", self._after_statement)
        sa.event.listen(engine, "before_execute", self._before_clause, retval=True)

    def enter(self, conn: sa.Connection, late: Late) -> None:
        """Its function runs from here on."""
        self._running = self._open[late] = late
        hints.collect(conn, into=late.noted)

    def leave(self, late: Late) -> None:
        """Its function has ended, one way or the other."""
        self._running = None
        self._open.pop(late, None)
        self._release(late)

    def forget(self) -> None:
        """Everything that is under way ends: the database is another one."""
        for late in self._open:
            late.ended = True
            self._release(late)

    def before_commit(self, conn: sa.Connection, late: Late) -> None:
        """All is written, and nothing is committed yet."""
        pause_s = late.pause_s(False)
        if pause_s > 0:
            self._stand_still(conn, late, pause_s)

    def check(self, keys: Iterable[Key], late: Late | None) -> None:
        """Before a commit that changes these rows. *Errors*: Blocked."""
        if self._locks:
            for key in keys:
                owner = self._locks.get(key, late)
                if owner is not None and owner is not late:
                    raise Blocked(owner)

    def _release(self, late: Late) -> None:
        for key in [key for key, owner in self._locks.items() if owner is late]:
            del self._locks[key]
        late.over.set()

    # What SQLAlchemy calls.

    def _before_clause(self, conn: sa.Connection, clause: Any, many: Any, one: Any, _options: Any) -> tuple[Any, Any, Any]:
        locking = None if self._probing else getattr(clause, "_for_update_arg", None)
        late = self._running
        if locking is None or (late is None and not self._locks):
            return clause, many, one
        keys = self._keys(conn, clause, many[0] if many else one)
        if locking.skip_locked and any(self._locks.get(key, late) is not late for key in keys):
            # It asks for one row.
            return clause.where(sa.false()), many, one
        self.check(keys, late)
        if late is not None:
            self._locks.update(dict.fromkeys(keys, late))
        return clause, many, one

    def _keys(self, conn: sa.Connection, clause: Any, parameters: Any) -> list[Key]:
        named = clause._for_update_arg.of  # noqa: SLF001 - there is no public way to see what a statement locks
        table = named[0] if named else clause.get_final_froms()[0]
        probe = clause.with_only_columns(*table.primary_key.columns)
        probe._for_update_arg = None  # noqa: SLF001 - there is no public way to take it off a statement
        self._probing = True
        try:
            return [(table.name, row[0]) for row in conn.execute(probe, parameters).all()]
        finally:
            self._probing = False

    def _before_statement(self, conn: sa.Connection, _cursor: Any, statement: str, _parameters: Any, _context: Any, _many: Any) -> None:
        late = self._running
        if late is None or self._probing:
            return
        writes = _writes(statement)
        pause_s = late.pause_s(writes)
        if pause_s > 0:
            self._stand_still(conn, late, pause_s)
        if writes and not late.began:
            self._say("BEGIN IMMEDIATE")
            late.began = True

    def _after_statement(self, _conn: sa.Connection, cursor: Any, statement: str, parameters: Any, _context: Any, many: Any) -> None:
        if self._running is not None and not self._probing and _writes(statement):
            self._running.written.append((statement, parameters, many, cursor.rowcount))

    def _stand_still(self, conn: sa.Connection, late: Late, pause_s: float) -> None:
        """*Errors*: Blocked, Gone, Unavailable; then nothing of it is kept."""
        wrote = late.began
        if wrote:
            mine = list(self._changed())
            self.check(mine, late)
            self._locks.update(dict.fromkeys(mine, late))
            self._say("ROLLBACK")
            late.began = False
        self._running = None
        try:
            await_only(self._idle(late, pause_s))
        except asyncio.CancelledError:
            raise Gone from None
        self.enter(conn, late)
        if wrote:
            self._write_again(late)

    def _write_again(self, late: Late) -> None:
        self._say("BEGIN IMMEDIATE")
        late.began = True
        for statement, parameters, many, rows in late.written:
            try:
                cursor = self._say(statement, parameters, many=many)
            except sqlite3.IntegrityError:
                # Somebody else has made the same row meanwhile: a database had let this one wait, and fail then.
                raise Stale(statement) from None
            if cursor.rowcount != rows:
                # A row of a table that nobody watches, and so nobody has locked.
                raise Stale(statement)

    async def _idle(self, late: Late, pause_s: float) -> None:
        """*Errors*: Unavailable when the database has ended the transaction meanwhile."""

        def end() -> None:
            late.ended = True
            self._release(late)

        timer = asyncio.get_running_loop().call_later(IDLE_S, end)
        try:
            await asyncio.sleep(pause_s)
        finally:
            timer.cancel()
        late.process.check()
        if late.ended:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the database has ended a transaction that stood still")


def _writes(statement: str) -> bool:
    return statement.lstrip()[:6].upper() != "SELECT"
