"""Journal: the agent's own database, in which every intent is durable before its effect.

Theory of operation. SQLite, WAL, synchronous=FULL: a commit survives power loss (p50 0.2 ms where measured). One writer thread takes
whatever waits and commits it together, so sixteen placements at once cost about one flush; jobs run in the order in which they were
given. Readers don't exist after start-up: `ledger.py` keeps everything in memory. No secret is ever given to it. Blocks ahead of its log
(`store.room`) let removals be recorded on a full disk.
A simulator uses `inline=True`: same file format, no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from atoll.agent.record import BLUEPRINT, EndRule, Record
from atoll.base.errors import Code, Unavailable
from atoll.domain.command import Kind
from atoll.domain.moment import Moment
from atoll.domain.placement import Observed
from atoll.domain.spec import OnEnd, OnLeaseExpiry, SaveMode
from atoll.store.room import Room

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]
Waiting = tuple[Job[object], asyncio.Future[object]]

VERSION: Final = 3
_SCHEMA: Final = """
CREATE TABLE epochs (
    number INTEGER PRIMARY KEY,
    epoch TEXT NOT NULL UNIQUE,
    previous TEXT,
    boot_id TEXT NOT NULL,
    answered INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE placements (
    placement_id TEXT PRIMARY KEY,
    sandbox_id TEXT NOT NULL,
    team_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    desired TEXT NOT NULL,
    desired_revision INTEGER NOT NULL,
    command_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    blueprint TEXT,
    observed TEXT NOT NULL,
    seq INTEGER NOT NULL,
    applied_revision INTEGER NOT NULL,
    failed_revision INTEGER NOT NULL,
    ready INTEGER NOT NULL,
    address TEXT,
    reason TEXT,
    detail TEXT,
    guest_version TEXT,
    end_revision INTEGER,
    end_at_boot REAL,
    end_action TEXT,
    on_lease_expiry TEXT,
    ended_by TEXT,
    ended_reason TEXT,
    ended_detail TEXT,
    quarantined INTEGER NOT NULL
) WITHOUT ROWID;
"""
_REST: Final = """
ALTER TABLE placements ADD COLUMN save_mode TEXT;
ALTER TABLE placements ADD COLUMN unresponsive INTEGER NOT NULL DEFAULT 0;
ALTER TABLE placements ADD COLUMN own_rest TEXT;
"""
"""From version 1 to 2."""
_MOMENTS: Final = """
ALTER TABLE placements ADD COLUMN moment TEXT;
ALTER TABLE placements ADD COLUMN moment_size INTEGER;
ALTER TABLE placements ADD COLUMN moment_kind TEXT;
ALTER TABLE placements ADD COLUMN base TEXT;
"""
"""From version 2 to 3."""
_COLUMNS: Final = (
    "placement_id", "sandbox_id", "team_id", "generation", "desired", "desired_revision", "command_id", "digest", "boot_id", "blueprint",
    "observed", "seq", "applied_revision", "failed_revision", "ready", "address", "reason", "detail", "guest_version", "end_revision",
    "end_at_boot", "end_action", "on_lease_expiry", "ended_by", "ended_reason", "ended_detail", "quarantined", "save_mode", "unresponsive",
    "own_rest", "moment", "moment_size", "moment_kind", "base",
)  # fmt: skip
_PUT: Final = (
    f"INSERT INTO placements ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "  # noqa: S608 - constant names only
    f"ON CONFLICT (placement_id) DO UPDATE SET {', '.join(f'{c} = excluded.{c}' for c in _COLUMNS[1:])}"
)
_BATCH_MAX: Final = 256
_AHEAD_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class EpochRow:
    """One run of the agent. `answered`: control has taken it for the host's session at least once."""

    epoch: str
    previous: str | None
    answered: bool


class Journal:
    """The open journal. *Errors* of all writes: Unavailable STORE_FULL or STORE_UNAVAILABLE; then nothing of the job is kept."""

    def __init__(self, path: Path | str, *, inline: bool = False) -> None:
        self._path = str(path)
        self._room = Room(Path(f"{path}-wal"), ahead_bytes=_AHEAD_BYTES)
        self._jobs: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._inline = inline
        self._thread: threading.Thread | None = None
        self._connection = self._open()
        self._room.keep()
        if not inline:
            self._thread = threading.Thread(target=self._work, name="atoll-journal", daemon=True)
            self._thread.start()

    def _open(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            # The only connection: without others the log's index is in memory, and a full disk has no say in it.
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            # 1 MiB: moving so little is not felt, and little is to be read again at a start.
            connection.execute("PRAGMA wal_autocheckpoint=256")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                connection.executescript(f"BEGIN; {_SCHEMA} {_REST} {_MOMENTS} PRAGMA user_version={VERSION}; COMMIT;")
            elif version < VERSION:
                steps = (_REST, _MOMENTS)[version - 1 :]
                connection.executescript(f"BEGIN; {' '.join(steps)} PRAGMA user_version={VERSION}; COMMIT;")
            elif version > VERSION:
                raise Unavailable(Code.STORE_UNAVAILABLE, f"the journal {self._path} was written by a newer release (version {version})")
            return connection
        except sqlite3.Error as error:
            raise _weather(error, self._path) from error

    def close(self) -> None:
        """Finish what was given and close the file."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        self._connection.close()
        self._room.close()

    def submit(self, job: Job[T]) -> asyncio.Future[T]:
        """Run `job` in a transaction; the future is done when it is durable. Nothing takes it back once it is given."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._inline:
            self._commit_alone(job, future)
        else:
            self._jobs.put((job, future))  # type: ignore[arg-type]  # the future takes what its own job returns
        return future

    async def write(self, job: Job[T]) -> T:
        """`submit` and wait. A caller that is cancelled meanwhile takes nothing back."""
        return await asyncio.shield(self.submit(job))

    def read(self, job: Job[T]) -> T:
        """Run `job` at once; for start-up, before anything is written."""
        try:
            return job(self._connection)
        except sqlite3.Error as error:
            raise _weather(error, self._path) from error

    def _commit_alone(self, job: Job[T], future: asyncio.Future[T]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            result = job(self._connection)
            self._connection.execute("COMMIT")
            future.set_result(result)
            self._room.keep()
        except Exception as error:  # noqa: BLE001 - whoever waits for the job gets it
            _roll_back(self._connection)
            future.set_exception(_weather(error, self._path))

    def _work(self) -> None:
        while (first := self._jobs.get()) is not None:
            batch = [first]
            while len(batch) < _BATCH_MAX and not self._jobs.empty():
                item = self._jobs.get()
                if item is None:
                    self._jobs.put(None)
                    break
                batch.append(item)
            self._commit_together(batch)

    def _commit_together(self, batch: Sequence[Waiting]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            results = [job(self._connection) for job, _ in batch]
            self._connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - whoever waits for the job gets it
            _roll_back(self._connection)
            if len(batch) > 1:
                # One bad job must not take the others with it.
                for item in batch:
                    self._commit_together([item])
                return
            _tell(batch[0][1], _fail, _weather(error, self._path))
            return
        for (_, future), result in zip(batch, results, strict=True):
            _tell(future, _finish, result)
        self._room.keep()


def _tell(future: asyncio.Future[object], how: Callable[[asyncio.Future[object], Any], None], what: object) -> None:
    # A loop that has been closed meanwhile has nobody who waits.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(how, future, what)


def _finish(future: asyncio.Future[object], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[object], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _weather(error: Exception, path: str) -> Exception:
    if not isinstance(error, sqlite3.Error):
        return error
    return Unavailable(Code.STORE_FULL if _is_full(error) else Code.STORE_UNAVAILABLE, f"the journal {path}: {error}")


def _is_full(error: Exception) -> bool:
    """SQLite says FULL for a write that met ENOSPC, and for some (the WAL's index, a sync) only that I/O failed."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code == sqlite3.SQLITE_FULL or code & 0xFF == sqlite3.SQLITE_IOERR)


def put_record(record: Record) -> Job[None]:
    """Keep a placement's record as it is now."""
    blueprint = BLUEPRINT.dump_json(record.blueprint).decode() if record.blueprint else None
    end, moment = record.end, record.moment
    row = (
        record.placement_id, record.sandbox_id, record.team_id, record.generation, record.desired, record.desired_revision,
        record.command_id, record.digest, record.boot_id, blueprint, record.observed, record.seq, record.applied_revision,
        record.failed_revision, record.ready, record.address, record.reason, record.detail, record.guest_version,
        end.revision if end else None, end.at_boot if end else None, end.action if end else None, end.on_lease_expiry if end else None,
        record.ended_by, record.ended_reason, record.ended_detail, record.quarantined, record.save_mode, record.unresponsive, record.own_rest,
        moment.digest if moment else None, moment.size if moment else None, moment.kind if moment else None, record.base,
    )  # fmt: skip

    def job(connection: sqlite3.Connection) -> None:
        connection.execute(_PUT, row)

    return job


def drop_records(placement_ids: Sequence[str]) -> Job[None]:
    """Forget tombstones that control has confirmed."""

    def job(connection: sqlite3.Connection) -> None:
        connection.executemany("DELETE FROM placements WHERE placement_id = ? AND observed = 'absent'", [(i,) for i in placement_ids])

    return job


def load_records(connection: sqlite3.Connection) -> list[Record]:
    """Every placement that the last run left."""
    rows = connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM placements ORDER BY placement_id")  # noqa: S608
    return [_record(dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def _record(row: dict[str, object]) -> Record:
    end = None
    revision, at_boot, action, expiry = (row.pop(k) for k in ("end_revision", "end_at_boot", "end_action", "on_lease_expiry"))
    if isinstance(revision, int) and isinstance(at_boot, float):
        end = EndRule(revision, at_boot, OnEnd(str(action)), OnLeaseExpiry(str(expiry)))
    blueprint = row.pop("blueprint")
    digest, size, kind = (row.pop(k) for k in ("moment", "moment_size", "moment_kind"))
    row["moment"] = Moment(str(digest), int(str(size or 0)), str(kind or "")) if digest else None
    row["desired"] = Kind(str(row["desired"]))
    row["observed"] = Observed(str(row["observed"]))
    row["ready"] = bool(row["ready"])
    row["quarantined"] = bool(row["quarantined"])
    row["save_mode"] = SaveMode(str(row["save_mode"])) if row["save_mode"] else None
    row["unresponsive"] = bool(row["unresponsive"])
    return Record(**row, end=end, blueprint=BLUEPRINT.validate_json(str(blueprint)) if blueprint else None)  # type: ignore[arg-type]


def put_fact(key: str, value: str) -> Job[None]:
    """Keep a single value, e.g. the lease."""

    def job(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))

    return job


def load_facts(connection: sqlite3.Connection) -> dict[str, str]:
    """All single values."""
    return dict(connection.execute("SELECT key, value FROM facts").fetchall())


def begin_epoch(epoch: str, *, boot_id: str) -> Job[list[str]]:
    """Commit a new run with the one before it, and give the earlier runs that control may still hold for current, newest first.

    The last run may have ended before control heard of it, or before its answer came; so each run since the last one that was
    answered, and that one, is a proof.
    """

    def job(connection: sqlite3.Connection) -> list[str]:
        earlier: list[str] = []
        for name, answered in connection.execute("SELECT epoch, answered FROM epochs ORDER BY number DESC"):
            earlier.append(name)
            if answered:
                break
        connection.execute(
            "INSERT INTO epochs (epoch, previous, boot_id) VALUES (?, ?, ?)", (epoch, earlier[0] if earlier else None, boot_id)
        )
        return earlier

    return job


def answer_epoch(epoch: str) -> Job[None]:
    """Control has answered this run: older ones are no proof any more and are dropped."""

    def job(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE epochs SET answered = 1 WHERE epoch = ?", (epoch,))
        connection.execute("DELETE FROM epochs WHERE number < (SELECT number FROM epochs WHERE epoch = ?)", (epoch,))

    return job


def load_epochs(connection: sqlite3.Connection) -> list[EpochRow]:
    """The runs that are kept, oldest first."""
    rows = connection.execute("SELECT epoch, previous, answered FROM epochs ORDER BY number")
    return [EpochRow(epoch, previous, bool(answered)) for epoch, previous, answered in rows]
