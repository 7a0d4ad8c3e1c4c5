"""The shared store: PostgreSQL, for deployments with several control replicas.

Theory of operation. The same store functions as on SQLite, in one transaction each (READ COMMITTED), on a pool of connections. What one
writer thread rules out there is refused here: a row that is no longer at the revision that was read raises `Stale`, a deadlock or a
serialization failure is the database's own word, and in each case the function is run again from its first read on what is true now.
A function has no effect but its transaction, so that running it again is harmless. Rows are locked in the order host, placement,
sandbox; a host's row is locked before its holdings are summed, so that two reservations never both see the last room.
What a commit has changed is told to the other replicas right after it (`postgres_hints.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from atoll.base.errors import AtollError, Code, OutcomeUnknown, Unavailable
from atoll.base.ids import Dice
from atoll.store import hints
from atoll.store.engine import Doubt, Stale, Tell, Work, telling
from atoll.store.hints import Hints, Told
from atoll.store.postgres_hints import Line

T = TypeVar("T")

_TRIES: Final = 12
_PAUSE_S: Final = 0.002
_AGAIN: Final = frozenset({"40001", "40P01"})
"""serialization_failure, deadlock_detected. Source: PostgreSQL's appendix on error codes."""
_WALL: Final = sa.select(sa.func.extract("epoch", sa.func.clock_timestamp()))
_FULL: Final = frozenset({"53100"})
"""disk_full."""


IDLE_S: Final = 10.0
"""A transaction whose process stands still for longer (stopped, its machine suspended or cut off) is ended by the database, and lets go of
the rows that it has locked: else every other replica would wait for it, the polls of the hosts that it holds first of all."""
_BROKEN: Final = ("08", "57P")
"""connection_exception; admin_shutdown, crash_shutdown and their like."""


class _Again(Exception):
    """The commit lost a race: nothing of it is kept."""


class PostgresStore:
    """Implements store.engine.Store and store.hints.Shared. `url`: `postgresql+asyncpg://...`; keep it out of logs, it holds a password."""

    def __init__(self, url: str, *, dice: Dice, connections: int = 8) -> None:
        self._engine = create_async_engine(
            url,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=10.0,
            isolation_level="READ COMMITTED",
            connect_args={"server_settings": {"idle_in_transaction_session_timeout": str(int(IDLE_S * 1000))}},
        )
        self._dice = dice
        self._line = Line(url, dice=dice)
        self._writing: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def write(self, work: Work[T], *, tell: Tell[T] | None = None, doubt: Doubt | None = None) -> T:
        """As Store.write. A function that loses a race is run again, up to a dozen times.

        *Errors*: also OutcomeUnknown when the connection broke during the commit.
        """
        if self._closed:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the store is closed")
        writing = asyncio.ensure_future(telling(lambda: self._write(work), tell, doubt))
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        # Shielded: a caller that is cancelled does not cut off a decision that may already be on disk.
        return await asyncio.shield(writing)

    def _written(self, writing: asyncio.Future[Any]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            # Whoever waited may have gone, and an error that nobody takes would be reported as one of this program's.
            writing.exception()

    async def _write(self, work: Work[T]) -> T:
        for attempt in range(_TRIES):
            try:
                async with self._engine.connect() as conn:
                    result, changed = await conn.run_sync(_noted, work)
                    try:
                        await self._commit(conn)
                    except OutcomeUnknown:
                        # It may be on disk: the others look.
                        self.tell(changed)
                        raise
            except (Stale, _Again):
                pass
            except sa.exc.DBAPIError as error:
                if isinstance(error, sa.exc.IntegrityError):
                    raise
                if _state(error) not in _AGAIN:
                    raise _translated(error) from error
            except (OSError, TimeoutError, sa.exc.TimeoutError) as error:
                raise Unavailable(Code.STORE_UNAVAILABLE, f"the database cannot be reached: {type(error).__name__}") from error
            else:
                self.tell(changed)
                return result
            # Losers of a race for one row come again one after the other, not all at once.
            await asyncio.sleep(_PAUSE_S * (attempt + 1) * (1 + self._dice(1)[0] / 255))
        raise Unavailable(Code.STORE_UNAVAILABLE, "the same rows were changed by others each time")

    @staticmethod
    async def _commit(conn: AsyncConnection) -> None:
        """*Errors*: what the database refuses is refused; where it has not said anything, nobody knows."""
        try:
            await conn.commit()
        except sa.exc.DBAPIError as error:
            state = _state(error)
            if state in _AGAIN:
                raise _Again from error
            if not state or state.startswith(_BROKEN):
                raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the connection broke during the commit") from error
            raise
        except (OSError, TimeoutError) as error:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the connection broke during the commit") from error

    async def read(self, work: Work[T]) -> T:
        """As Store.read."""
        try:
            async with self._engine.connect() as conn:
                return await conn.run_sync(work)
        except sa.exc.DBAPIError as error:
            raise _translated(error) from error
        except (OSError, TimeoutError, sa.exc.TimeoutError) as error:
            raise Unavailable(Code.STORE_UNAVAILABLE, f"the database cannot be reached: {type(error).__name__}") from error

    async def wall(self) -> float | None:
        """As Store.wall."""
        return await self.read(lambda conn: float(conn.execute(_WALL).scalar_one()))

    def require_room(self) -> None:
        """As Store.require_room: its disk is another machine's business."""

    async def follow(self, told: Told) -> None:
        """As Shared.follow."""
        await self._line.run(told)

    def tell(self, hints: Hints) -> None:
        """As Shared.tell."""
        if hints:
            self._line.tell(hints)

    async def close(self) -> None:
        """Finish what was begun, and give back the connections."""
        self._closed = True
        await asyncio.gather(*self._writing, return_exceptions=True)
        await self._engine.dispose()


def _noted(conn: sa.Connection, work: Work[T]) -> tuple[T, Hints]:
    collected = hints.collect(conn)
    return work(conn), collected.hints()


def _state(error: sa.exc.DBAPIError) -> str:
    """The database's five-character error code; empty when there is none."""
    return str(getattr(error.orig, "sqlstate", "") or "")


def _translated(error: sa.exc.DBAPIError) -> AtollError:
    state = _state(error)
    code = Code.STORE_FULL if state in _FULL else Code.STORE_UNAVAILABLE
    return Unavailable(code, f"the database refused: {state or type(error.orig).__name__}")
