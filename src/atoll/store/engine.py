"""How store functions run: SQLite with one writer thread and group commit.

Theory of operation. A store function is synchronous, takes a connection and awaits nothing. Writes go to one thread, which takes all
that wait, runs each in a savepoint of one transaction and commits once (WAL, synchronous=FULL: a commit is on disk before anybody
hears of it). A function that raises rolls back its own savepoint only. Reads run at once on the caller's thread, on a connection
that sees the last commit: they are short by contract. One control process per file, held by a lock on `<file>.lock`. Blocks ahead of
the log (`room`) let removals be recorded on a full disk.

Source: a durable commit costs 0.2 ms alone and far less in a group (docs/PERFORMANCE.md).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from atoll.base.errors import AtollError, Bug, Code, Refused, Unavailable
from atoll.store.room import Room

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

_BATCH_MAX: Final = 128


class Stale(Bug):
    """A row is no longer at the revision that was read. One writer rules that out; a shared store runs the function again."""

    def __init__(self, what: str) -> None:
        super().__init__(Code.INTERNAL, f"{what} is no longer at the revision that was read")


class Store(Protocol):
    """*Errors* of both: what the function raises; Unavailable STORE_UNAVAILABLE or STORE_FULL when the database could not do it, and
    then nothing was changed; of `write` on a shared database OutcomeUnknown, when its answer to a commit was lost.
    """

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction; its result is given once that is durable."""
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


Observer = Callable[[int, float, str | None], None]
"""Hears of each transaction: how many changes it held, how many seconds it took, and the code with which it failed."""


@runtime_checkable
class Observable(Protocol):
    """A store that tells how it is doing; from its own threads."""

    observer: Observer | None


class _Job:
    __slots__ = ("future", "loop", "work")

    def __init__(self, work: Work[Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
        self.work = work
        self.loop = loop
        self.future = future

    def tell(self, result: Any, error: BaseException | None) -> None:
        def deliver() -> None:
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)

        try:
            self.loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            return


def _engine(path: str) -> sa.Engine:
    # `autocommit=True`-like driver mode: transactions are begun and ended here in SQL, not by the driver's guesses.
    engine = sa.create_engine(
        f"sqlite:///{path}",
        poolclass=StaticPool,
        connect_args={"check_same_thread": False, "isolation_level": None, "timeout": 10.0},
    )

    @sa.event.listens_for(engine, "connect")
    def _pragmas(connection: sqlite3.Connection, _record: object) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000", "cache_size=-16000"):
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
        self._closed = False
        self.observer: Observer | None = None
        self._room = Room(Path(f"{path}-wal"))
        self._room.keep()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    async def write(self, work: Work[T]) -> T:
        if self._closed:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(work, loop, future))
        # Shielded: a caller that is cancelled does not undo a decision that may already be on disk.
        return await asyncio.shield(future)

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
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        self._reader.close()
        self._writer.close()
        self._release()
        self._room.close()

    def _release(self) -> None:
        self._reader_engine.dispose()
        self._writer_engine.dispose()
        os.close(self._lock_fd)

    # The writer's thread.

    def _run(self) -> None:
        while (first := self._jobs.get()) is not None:
            batch = [first]
            stop = False
            while len(batch) < _BATCH_MAX:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is None:
                    stop = True
                    break
                batch.append(job)
            self._commit(batch)
            if stop:
                return

    def _commit(self, batch: list[_Job]) -> None:
        outcomes: list[tuple[_Job, Any, BaseException | None]] = []
        began, refused = time.perf_counter(), None
        try:
            self._say("BEGIN IMMEDIATE")
            if len(batch) == 1:
                outcomes.append((batch[0], *self._alone(batch[0])))
            else:
                for job in batch:
                    outcomes.append((job, *self._one(job)))
                self._say("COMMIT")
        except Exception as error:  # noqa: BLE001 - nothing of the batch is on disk: tell each that
            self._roll_back()
            failure = translate(error)
            refused = failure.code if isinstance(failure, AtollError) else Code.INTERNAL
            outcomes = [(job, None, failure) for job in batch]
        for job, result, raised in outcomes:
            job.tell(result, raised)
        if self.observer is not None:
            self.observer(len(batch), time.perf_counter() - began, refused)
        self._room.keep()

    def _alone(self, job: _Job) -> tuple[Any, BaseException | None]:
        """The only one of its transaction needs no savepoint in it."""
        try:
            result = job.work(self._writer)
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            self._say("ROLLBACK")
            return None, translate(error)
        self._say("COMMIT")
        return result, None

    def _one(self, job: _Job) -> tuple[Any, BaseException | None]:
        self._say("SAVEPOINT work")
        try:
            result = job.work(self._writer)
        except Exception as error:  # noqa: BLE001 - the boundary of a task: its own savepoint goes, the others stay
            self._say("ROLLBACK TO work")
            self._say("RELEASE work")
            return None, translate(error)
        self._say("RELEASE work")
        return result, None

    def _say(self, statement: str) -> None:
        """A word about the transaction, straight to the driver: there are five in each commit."""
        self._driver.execute(statement).close()

    def _roll_back(self) -> None:
        try:
            self._say("ROLLBACK")
        except sqlite3.Error:  # SQLite has rolled back by itself (e.g. a full disk)
            return
