"""An event loop whose clock jumps: when nothing can run, time is the next timer's. No real waiting, no real time."""

from __future__ import annotations

import asyncio
import heapq
import selectors
from typing import Any


class Stuck(RuntimeError):
    """Nothing can ever run again: no task is ready and no timer is set."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic as long as nobody does real I/O or uses threads."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(selectors.SelectSelector())

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        # These two are the loop's own queues (asyncio.base_events); there is no public way to know that nothing is left to run.
        ready: Any = self._ready  # type: ignore[attr-defined]
        scheduled: Any = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            self._timer_cancelled_count = max(0, self._timer_cancelled_count - 1)  # type: ignore[has-type]
        if not ready:
            if not scheduled and not self._stopping:  # type: ignore[attr-defined]
                raise Stuck("no task is ready and no timer is set")
            if scheduled:
                self._virtual_s = max(self._virtual_s, scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]
