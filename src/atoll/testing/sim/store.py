"""The store of a simulation: SQLite in memory, every function run at once, and a look at the invariants after each commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from atoll.store.engine import Work

T = TypeVar("T")


class InlineStore:
    """Implements store.engine.Store. It outlives the control that uses it, as a database does."""

    def __init__(self, after_commit: Callable[[sa.Connection], None] = lambda _conn: None) -> None:
        self._engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"isolation_level": None})
        self._conn = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._conn.exec_driver_sql("PRAGMA foreign_keys=ON")
        self.after_commit = after_commit

    async def write(self, work: Work[T]) -> T:
        # A durable commit takes a moment: whoever can be killed while it waits for it, is.
        await asyncio.sleep(0)
        self._conn.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            result = work(self._conn)
        except BaseException:
            self._conn.exec_driver_sql("ROLLBACK")
            raise
        self._conn.exec_driver_sql("COMMIT")
        self.after_commit(self._conn)
        await asyncio.sleep(0)
        return result

    async def read(self, work: Work[T]) -> T:
        return work(self._conn)

    def require_room(self) -> None:
        """Memory has room."""

    async def close(self) -> None:
        """Nothing: the next control finds everything as it was."""

    def dispose(self) -> None:
        """The end of the simulation."""
        self._conn.close()
        self._engine.dispose()
