"""Work on a placement whose caller was cancelled; mixed into the driver.

Theory of operation. What runs in a thread cannot be ended, only made to fail: a start that nobody waits for any more would put its process into
a placement that is gone. So work that makes processes or files of a placement is known here until its thread has done with it, and whoever
takes the placement away ends its processes, again and again, until nothing of that kind is under way. A thread that has lost the
process that it talks to fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final, TypeVar

from atoll.base.errors import Refused
from atoll.drivers.oci import ending, look

T = TypeVar("T")

AGAIN_S: Final = 0.05


class Abiding:
    """Work that is outlasted."""

    _view: look.View
    _under_way: dict[str, set[asyncio.Future[Any]]]

    @abstractmethod
    async def _blocking(self, work: Callable[[], T]) -> T: ...

    @abstractmethod
    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]: ...

    async def _abide(self, placement_id: str, work: Callable[[], T]) -> T:
        """`_blocking`, for what makes something of a placement: a caller that is cancelled does not wait for it, and `_outlast` does."""
        begun = self._in_thread(work)
        self._under_way.setdefault(placement_id, set()).add(begun)

        def done(begun: asyncio.Future[T]) -> None:
            known = self._under_way.get(placement_id, set())
            known.discard(begun)
            if not known:
                self._under_way.pop(placement_id, None)
            # Nobody may be left who hears of it.
            _ = begun.cancelled() or begun.exception()

        begun.add_done_callback(done)
        return await asyncio.shield(begun)

    async def _outlast(self, placement_id: str) -> None:
        """Nothing that was begun for this placement is under way afterwards, and what it made runs no more."""
        while begun := self._under_way.get(placement_id):
            with contextlib.suppress(Refused, OSError):
                await self._blocking(lambda: ending.end_processes(self._view, placement_id, strays=True))
            if still := set(begun):
                await asyncio.wait(still, timeout=AGAIN_S)
