"""The shared store: PostgreSQL, for deployments with several control replicas.

Theory of operation. The same store functions as on SQLite, in one transaction each (READ COMMITTED), on a pool of connections. What one
writer thread rules out there is refused here: a row that is no longer at the revision that was read raises `Stale`, a deadlock or a
serialization failure is the database's own word, and in each case the function is run again from its first read on what is true now.
A function has no effect but its transaction, so that running it again is harmless. Rows are locked in the order host, placement,
sandbox; a host's row is locked before its holdings are summed, so that two reservations never both see the last room.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from atoll.base.errors import AtollError, Code, Unavailable
from atoll.base.ids import Dice
from atoll.store.engine import Stale, Work

T = TypeVar("T")

_TRIES: Final = 12
_PAUSE_S: Final = 0.002
_AGAIN: Final = frozenset({"40001", "40P01"})
"""serialization_failure, deadlock_detected. Source: PostgreSQL's appendix on error codes."""
_FULL: Final = frozenset({"53100"})
"""disk_full."""


class PostgresStore:
    """Implements store.engine.Store. `url`: `postgresql+asyncpg://...`; keep it out of logs, it holds a password."""

    def __init__(self, url: str, *, dice: Dice, connections: int = 8) -> None:
        self._engine = create_async_engine(url, pool_size=connections, max_overflow=0, pool_timeout=10.0, isolation_level="READ COMMITTED")
        self._dice = dice

    async def write(self, work: Work[T]) -> T:
        """As Store.write. A function that loses a race is run again, up to a dozen times."""
        for attempt in range(_TRIES):
            try:
                async with self._engine.begin() as conn:
                    return await conn.run_sync(work)
            except Stale:
                pass
            except sa.exc.DBAPIError as error:
                if isinstance(error, sa.exc.IntegrityError):
                    raise
                if _state(error) not in _AGAIN:
                    raise _translated(error) from error
            except (OSError, TimeoutError) as error:
                raise Unavailable(Code.STORE_UNAVAILABLE, f"the database cannot be reached: {type(error).__name__}") from error
            # Losers of a race for one row come again one after the other, not all at once.
            await asyncio.sleep(_PAUSE_S * (attempt + 1) * (1 + self._dice(1)[0] / 255))
        raise Unavailable(Code.STORE_UNAVAILABLE, "the same rows were changed by others each time")

    async def read(self, work: Work[T]) -> T:
        """As Store.read."""
        try:
            async with self._engine.connect() as conn:
                return await conn.run_sync(work)
        except sa.exc.DBAPIError as error:
            raise _translated(error) from error
        except (OSError, TimeoutError) as error:
            raise Unavailable(Code.STORE_UNAVAILABLE, f"the database cannot be reached: {type(error).__name__}") from error

    async def wall(self) -> float | None:
        """As Store.wall."""
        return await self.read(lambda conn: float(conn.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one()))

    def require_room(self) -> None:
        """As Store.require_room: its disk is another machine's business."""

    async def close(self) -> None:
        """Give back the connections."""
        await self._engine.dispose()


def _state(error: sa.exc.DBAPIError) -> str:
    """The database's five-character error code; empty when there is none."""
    return str(getattr(error.orig, "sqlstate", "") or "")


def _translated(error: sa.exc.DBAPIError) -> AtollError:
    state = _state(error)
    code = Code.STORE_FULL if state in _FULL else Code.STORE_UNAVAILABLE
    return Unavailable(code, f"the database refused: {state or type(error.orig).__name__}")
