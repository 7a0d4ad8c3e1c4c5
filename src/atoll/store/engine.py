"""How store functions run: SQLite, one transaction at a time, with group commit.

Theory of operation. A store function is synchronous, takes a connection and awaits nothing. Functions that write run on the event loop's
thread: all that wait, one after the other in one transaction. One other thread does what waits for the disk: it commits (WAL,
synchronous=FULL: a commit is on disk before anybody hears of it). Whoever comes meanwhile is of the next transaction, so groups grow by
themselves with the load. A function that raises takes nobody with it. Reads run at once, on a connection that sees the last
commit. All functions are short by contract. One control process per file, held by a lock on `<file>.lock`. Blocks ahead of the log (`room`)
let removals be recorded on a full disk.

Functions don't run on the committing thread, since SQLite's driver gives up the interpreter's lock around each statement: with a busy loop
beside it, every statement would wait for its turn, and two threads would spend their time on handing the lock over (adr/0021).
Source: a durable commit costs 0.2 ms alone and far less in a group (docs/PERFORMANCE.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from atoll.base.errors import AtollError, Bug, Code, OutcomeUnknown, Refused, Unavailable
from atoll.store.room import Room

T = TypeVar("T")
Work = Callable[[sa.Connection], T]
Tell = Callable[[T], object]
Doubt = Callable[[], object]

_STATEMENTS: Final = 512
"""That the driver keeps ready; an update has one for each set of columns that change together."""
_GROUP_MAX: Final = 128
_TURN_S: Final = 0.01
"""So long functions may hold up the loop before it looks at everybody else again."""
_BEGIN: Final = "BEGIN IMMEDIATE"
_BUSY_S: Final = 10.0
_BUSY_LOOK_S: Final = 0.01
_CLOSING_LOOK_S: Final = 0.001


class Stale(Bug):
    """A row is no longer at the revision that was read. One writer rules that out; a shared store runs the function again."""

    def __init__(self, what: str) -> None:
        super().__init__(Code.INTERNAL, f"{what} is no longer at the revision that was read")


class Store(Protocol):
    """*Errors* of both: what the function raises; Unavailable STORE_UNAVAILABLE or STORE_FULL when the database could not do it, and
    then nothing was changed; of `write` on a shared database OutcomeUnknown, when its answer to a commit was lost.
    """

    def write(self, work: Work[T], *, tell: Tell[T] | None = None, doubt: Doubt | None = None) -> Awaitable[T]:
        """Run `work` in a transaction; its result is given once that is durable. Whoever is cancelled does not undo it.

        `tell`: called with the result once that is durable, before the caller goes on, and also when the caller has gone: nobody else
        would say what was committed. `doubt`: called when nobody knows whether it was (OutcomeUnknown).
        """
        ...

    async def read(self, work: Work[T]) -> T:
        """Run `work` on the last committed state."""
        ...

    async def wall(self) -> float | None:
        """What the database's own wall clock shows, where several processes share it; None where only this process uses it."""
        ...

    def require_room(self) -> None:
        """Before more records are made. *Errors*: Unavailable STORE_FULL: what room is left is for what ends them."""
        ...

    async def close(self) -> None: ...


async def telling(writing: Callable[[], Awaitable[T]], tell: Tell[T] | None, doubt: Doubt | None) -> T:
    """What `writing()` gives, told of as `Store.write` promises. *Errors*: its own."""
    try:
        result = await writing()
    except OutcomeUnknown:
        if doubt is not None:
            doubt()
        raise
    if tell is not None:
        tell(result)
    return result


Observer = Callable[[int, float, str | None], None]
"""Hears of each transaction: how many changes it held, how many seconds it took, and the code with which it failed."""


@runtime_checkable
class Observable(Protocol):
    """A store that tells how it is doing; from its own threads."""

    observer: Observer | None


class _Job:
    __slots__ = ("error", "future", "result", "tell", "work")

    def __init__(self, work: Work[Any], tell: Tell[Any] | None, future: asyncio.Future[Any]) -> None:
        self.work = work
        self.tell = tell
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, conn: sa.Connection) -> None:
        """Keep what the function gives, or with what it fails."""
        self.result, self.error = None, None
        try:
            self.result = self.work(conn)
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            self.error = translate(error)

    def end(self) -> None:
        """Say how it ended."""
        if self.error is None and self.tell is not None:
            try:
                self.tell(self.result)
            except Exception as error:  # noqa: BLE001 - the caller's, if there is one
                self.error = error
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class _Group:
    """What is committed together."""

    __slots__ = ("began", "jobs", "loop", "refused", "waits")

    def __init__(self, jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs = jobs
        self.loop = loop
        self.began = time.perf_counter()
        self.waits = False
        """Another process holds the database: the committing thread waits for it, and the functions have not run yet."""
        self.refused: str | None = None
        """The code with which the transaction failed, as a whole."""

    def fail(self, error: BaseException) -> None:
        """Nothing of it is on disk: tell each that."""
        failure = translate(error)
        self.refused = failure.code if isinstance(failure, AtollError) else Code.INTERNAL
        for job in self.jobs:
            job.result, job.error = None, failure


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _engine(path: str) -> sa.Engine:
    # `autocommit=True`-like driver mode: transactions are begun and ended here in SQL, not by the driver's guesses.
    engine = sa.create_engine(
        f"sqlite:///{path}",
        poolclass=StaticPool,
        connect_args={"check_same_thread": False, "isolation_level": None, "timeout": _BUSY_S, "cached_statements": _STATEMENTS},
    )

    @sa.event.listens_for(engine, "connect")
    def _pragmas(connection: sqlite3.Connection, _record: object) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-16000"):
            connection.execute(f"PRAGMA {pragma}").close()

    return engine


def translate(error: BaseException) -> BaseException:
    """A database error as ours: STORE_FULL when the disk is full, else STORE_UNAVAILABLE; anything else as it is."""
    if isinstance(error, AtollError) or not isinstance(error, sa.exc.DBAPIError | sqlite3.Error):
        return error
    if isinstance(error, sa.exc.IntegrityError):
        return error
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    name = getattr(cause, "sqlite_errorname", "")
    code = Code.STORE_FULL if name.startswith("SQLITE_FULL") or name == "SQLITE_IOERR_WRITE" else Code.STORE_UNAVAILABLE
    ours = Unavailable(code, f"the database refused: {name or type(cause).__name__}")
    ours.__cause__ = error
    return ours


class SqliteStore:
    """The embedded store. `path` is a file; its directory must exist.

    *Errors* of opening: Refused STORE_LOCKED; Unavailable STORE_UNAVAILABLE or STORE_FULL when the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            raise Refused(
                Code.STORE_LOCKED,
                f"{path} is used by another process",
                hint="Stop the other control process. Several replicas need PostgreSQL: name it in secrets/database.url.",
            ) from None
        self._writer_engine = _engine(str(path))
        self._reader_engine = _engine(str(path))
        try:
            self._writer = self._writer_engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._reader = self._reader_engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        except sa.exc.DBAPIError as error:
            self._release()
            raise translate(error) from error
        driver = self._writer.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        self._driver = driver
        # From now on the loop does not wait for other processes: the committing thread does.
        self._say("PRAGMA busy_timeout=0")
        self._closed = False
        self.observer: Observer | None = None
        self._room = Room(Path(f"{path}-wal"))
        self._room.keep()
        self._waiting: deque[_Job] = deque()
        self._under_way = False
        """A group is, or is about to be: whoever comes now waits for the next."""
        self._groups: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def write(self, work: Work[T], *, tell: Tell[T] | None = None, doubt: Doubt | None = None) -> asyncio.Future[T]:  # noqa: ARG002
        """As Store.write; there is never a doubt."""
        if self._closed:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.append(_Job(work, tell, future))
        if not self._under_way:
            self._under_way = True
            # Not at once: who else is ready in this turn of the loop comes with it.
            loop.call_soon(self._begin, loop)
        # A caller that is cancelled takes this with it, and not the function: a decision that may already be on disk is not undone.
        return future

    async def read(self, work: Work[T]) -> T:
        if self._closed:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the store is closed")
        try:
            return work(self._reader)
        except sa.exc.DBAPIError as error:
            raise translate(error) from error

    async def wall(self) -> float | None:
        return None

    def require_room(self) -> None:
        if not self._room.keep():
            raise Unavailable(Code.STORE_FULL, "the disk of the database is full", retry_after_s=30.0)

    async def close(self) -> None:
        self._closed = True
        while self._under_way:  # noqa: ASYNC110 - once, at the end
            await asyncio.sleep(_CLOSING_LOOK_S)
        self._groups.put(None)
        await asyncio.to_thread(self._thread.join)
        self._reader.close()
        self._writer.close()
        self._release()
        self._room.close()

    def _release(self) -> None:
        self._reader_engine.dispose()
        self._writer_engine.dispose()
        os.close(self._lock_fd)

    # On the loop's thread: functions.

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        group = _Group([self._waiting.popleft() for _ in range(min(len(self._waiting), _GROUP_MAX))], loop)
        try:
            self._say(_BEGIN)
        except sqlite3.Error as error:
            if _is_busy(error):
                group.waits = True
            else:
                group.fail(error)
                self._done(group)
                return
        else:
            self._work(group)
        self._groups.put(group)

    def _work(self, group: _Group) -> None:
        """Run the functions; those for which this turn of the loop has no time are left to the next group, in front."""
        until = group.began + _TURN_S
        try:
            for number, job in enumerate(group.jobs):
                if number and time.perf_counter() > until:
                    self._waiting.extendleft(reversed(group.jobs[number:]))
                    del group.jobs[number:]
                    break
                before = self._driver.total_changes
                job.run(self._writer)
                if job.error is None:
                    continue
                if len(group.jobs) == 1:
                    # Also what is not counted as a change: one of the schema.
                    self._roll_back()
                elif self._driver.total_changes != before or not self._driver.in_transaction:
                    self._carefully(group, number + 1)
        except Exception as error:  # noqa: BLE001 - what is between the functions could not be said: nothing of the group is kept
            self._roll_back()
            group.fail(error)

    def _carefully(self, group: _Group, count: int) -> None:
        """Run the first `count` once more, from the beginning: each in a savepoint, so that one that fails takes nobody with it.

        Functions may run twice anyway (another store repeats what another process has overtaken); few fail after their first change.
        """
        self._roll_back()
        self._say(_BEGIN)
        for job in group.jobs[:count]:
            self._say("SAVEPOINT work")
            job.run(self._writer)
            if job.error is not None:
                self._say("ROLLBACK TO work")
            self._say("RELEASE work")

    def _done(self, group: _Group) -> None:
        if group.waits:
            group.waits = False
            group.began = time.perf_counter()
            self._work(group)
            self._groups.put(group)
            return
        for job in group.jobs:
            job.end()
        if self.observer is not None:
            self.observer(len(group.jobs), time.perf_counter() - group.began, group.refused)
        self._under_way = bool(self._waiting)
        if self._under_way:
            # After those who were told: what they ask for next is in the same group.
            group.loop.call_soon(self._begin, group.loop)

    # On the thread of its own: what waits for the disk, or for another process.

    def _run(self) -> None:
        while (group := self._groups.get()) is not None:
            if group.waits:
                self._await_turn(group)
            elif self._driver.in_transaction:
                self._commit(group)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
                group.loop.call_soon_threadsafe(self._done, group)

    def _commit(self, group: _Group) -> None:
        try:
            self._say("COMMIT")
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            self._roll_back()
            group.fail(error)
        self._room.keep()

    def _await_turn(self, group: _Group) -> None:
        """Begin the transaction once whoever else holds the database has let go."""
        until = time.perf_counter() + _BUSY_S
        while True:
            try:
                self._say(_BEGIN)
            except sqlite3.Error as error:
                if not _is_busy(error) or time.perf_counter() > until:
                    group.waits = False
                    group.fail(error)
                    return
                time.sleep(_BUSY_LOOK_S)
            else:
                return

    def _say(self, statement: str) -> None:
        """A word about the transaction, straight to the driver: there are some in each commit."""
        self._driver.execute(statement).close()

    def _roll_back(self) -> None:
        try:
            self._say("ROLLBACK")
        except sqlite3.Error:  # SQLite has rolled back by itself (e.g. a full disk)
            return
