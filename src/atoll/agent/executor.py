"""Executor: brings each placement to its goal, one step at a time, many placements at once.

Theory of operation. `nudge` says that something about a placement changed. A placement that has something to do has one task, which
takes the durable record, asks `record.goal`, does that step, and looks again; a placement at rest has none. So the newest desired
state wins, and work on one placement is serial. When the goal becomes ABSENT, a step that is under way is cancelled: every verb of a
driver can be repeated, and `remove` clears what half a start left. Nothing is retried here but removal, which never gives up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from atoll.agent.backoff import Backoff
from atoll.agent.ledger import Ledger
from atoll.agent.record import Goal, Record, exited, goal, seen
from atoll.agent.steps import Steps
from atoll.base.errors import Code, Unavailable
from atoll.base.ids import Dice
from atoll.domain.placement import Observed
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

log = get_logger()

Make = Callable[[Record], Record | None]
"""From the newest record to the next; None when nothing changes."""


@dataclass(slots=True)
class _Worker:
    goal: Goal = Goal.REST
    step: asyncio.Task[None] | None = None


class Executor:
    """The workers of all placements. Works inside `run`."""

    def __init__(self, ledger: Ledger, steps: Steps, dice: Dice) -> None:
        self._ledger = ledger
        self._steps = steps
        self._dice = dice
        self._workers: dict[str, _Worker] = {}
        self._group: asyncio.TaskGroup | None = None
        self._early: list[tuple[str, Make]] = []
        """Decided while the inventory was still being settled."""

    async def run(self) -> None:
        """Work until cancelled; then every step is cancelled and nothing of a guest is touched."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._steps.spawn = self.spawn
            while self._early:
                self.decide(*self._early.pop(0))
            for record in self._ledger:
                self.nudge(record.placement_id)
            await asyncio.Event().wait()

    def inherit(self, placement_id: str) -> None:
        """What the machine has of this placement is of an earlier run: the next start takes it over."""
        self._steps.inherited.add(placement_id)

    def nudge(self, placement_id: str) -> None:
        """Look at this placement: its record has changed."""
        record = self._ledger.get(placement_id)
        if record is None or self._group is None:
            return
        wanted = goal(record)
        worker = self._workers.get(placement_id)
        if worker is None:
            if wanted is not Goal.REST:
                self._workers[placement_id] = _Worker()
                self.spawn(self._work(placement_id))
        elif worker.step is not None and (
            (wanted is Goal.ABSENT and worker.goal is not Goal.ABSENT) or (wanted is Goal.REST and record.observed is Observed.STOPPED)
        ):
            # Also of a guest that has just ended: nobody need wait for its answer.
            worker.step.cancel()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the workers; it must not raise. Dropped when the run is ending: the next one looks for itself."""
        try:
            if self._group is not None:
                self._group.create_task(work)
                return
        except RuntimeError:
            pass
        work.close()

    def decide(self, placement_id: str, make: Make) -> None:
        """Make a decision of the agent's own durable, however long that takes, then act on it."""
        if self._group is not None:
            self.spawn(self._decide(placement_id, make))
        else:
            self._early.append((placement_id, make))

    async def exited(self, placement_id: str, reason: str) -> None:
        """A driver says that a guest has ended by itself (drivers.port.OnExit)."""
        restart = self._steps.restarts
        self.decide(placement_id, lambda record: exited(record, reason=Code.GUEST_EXITED, detail=reason, restart=restart(record)))

    async def _decide(self, placement_id: str, make: Make) -> None:
        backoff = Backoff(self._dice, first_s=0.1, most_s=2.0)
        while True:
            try:
                await self._ledger.change(placement_id, make)
                break
            except Unavailable as error:
                if backoff.failures == 0:
                    log.warning(events.JOURNAL_REFUSED, placement_id=placement_id, code=error.code, message=error.message)
                await asyncio.sleep(backoff.next_s())
        self.nudge(placement_id)

    async def _work(self, placement_id: str) -> None:
        worker = self._workers[placement_id]
        backoff = Backoff(self._dice, first_s=0.5, most_s=30.0)
        assert self._group is not None
        try:
            while (record := self._ledger.get(placement_id)) is not None and (wanted := goal(record)) is not Goal.REST:
                worker.goal = wanted
                worker.step = self._group.create_task(self._step(wanted, record, backoff))
                await asyncio.wait({worker.step})
        finally:
            del self._workers[placement_id]

    async def _step(self, wanted: Goal, record: Record, backoff: Backoff) -> None:
        """One step; one that cannot even say how it failed is taken again after a pause."""
        try:
            await self._steps.carry_out(wanted, record)
            backoff.reset()
            return
        except Unavailable as error:
            log.warning(events.JOURNAL_REFUSED, placement_id=record.placement_id, code=error.code, message=error.message)
        except Exception as error:
            log.exception(events.COMMAND_FAILED, placement_id=record.placement_id, code=Code.INTERNAL)
            if wanted is not Goal.ABSENT:
                detail = f"{type(error).__name__} in the agent"
                self.decide(record.placement_id, lambda now: _at_fault(now, record.desired_revision, detail))
        await asyncio.sleep(backoff.next_s())


def _at_fault(record: Record, revision: int, detail: str) -> Record | None:
    if record.absent:
        return None
    return seen(record, Observed.ERROR, reason=Code.INTERNAL, detail=detail, failed_revision=revision, ready=False)
