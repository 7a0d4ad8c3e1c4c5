"""An event loop whose clock jumps: when nothing can run, time is the next timer's. No real waiting, no real time."""

from __future__ import annotations

import asyncio
import heapq
import selectors
from typing import Any, Final

from atoll.testing.sim import process

SPINS_MAX: Final = 500_000
"""Turns of the loop in one moment: more is somebody who does not wait."""


class Stuck(RuntimeError):
    """Nothing can ever run again: no task is ready and no timer is set. Or the opposite: time does not go on."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic as long as nobody does real I/O; what is meant for a thread runs at once. Its tasks are those of `process`."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._turns = 0
        super().__init__(selectors.SelectSelector())
        self.set_task_factory(process.make_task)  # type: ignore[arg-type]  # the stubs want a protocol with a type variable of its own

    def calm(self) -> None:
        """Count turns anew: what comes now is the winding up."""
        self._turns = 0

    def time(self) -> float:
        return self._virtual_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """At once and here: a thread would end at another moment of virtual time in each run."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is its caller's
            future.set_exception(error)
        return future

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
            if scheduled and scheduled[0]._when > self._virtual_s:
                self._virtual_s = scheduled[0]._when
                self._turns = 0
        self._turns += 1
        if self._turns > SPINS_MAX:
            raise Stuck(f"time stands still at {self._virtual_s} s: somebody does not wait")
        super()._run_once()  # type: ignore[misc]
