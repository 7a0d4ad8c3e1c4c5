"""One verb at a time for a placement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Lock:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Locks:
    """A lock for each placement that somebody is at; the last one to leave takes it away."""

    def __init__(self) -> None:
        self._locks: dict[str, _Lock] = {}

    @contextlib.asynccontextmanager
    async def of(self, placement_id: str) -> AsyncIterator[None]:
        """Be alone with a placement."""
        lock = self._locks.setdefault(placement_id, _Lock())
        lock.users += 1
        try:
            async with lock.lock:
                yield
        finally:
            lock.users -= 1
            if lock.users == 0:
                self._locks.pop(placement_id, None)
