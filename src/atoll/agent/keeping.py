"""Keeping: snapshots that control wants of this host's placements, or wants gone.

Theory of operation. An order is said again by control until its end is heard, so nothing of it is in the journal: a run that is killed leaves
a guest that goes on and a snapshot that is whole or not there (`drivers.port`), and the next run is ordered anew. There is one task for each
snapshot, and the newest order wins: a drop waits until the keeping of the same snapshot has come to its end, and then takes that away. A
placement that is to go waits for that, too. What came of an order is told, beside the poll, until control has heard it, and is forgotten then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.agent.backoff import Backoff
from atoll.agent.ledger import Ledger
from atoll.agent.record import DETAIL_MAX, Goal, Record, goal, order_of
from atoll.agent.resting import explain
from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import Dice
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation
from atoll.drivers.port import Driver
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire.agent import SNAPSHOTS_MAX, SnapshotOrder, SnapshotSeen, SnapshotState, SnapshotWish

log = get_logger()

Tell = Callable[[SnapshotSeen], Awaitable[None]]
"""Have control hear it. *Errors*: AtollError; then it is told again."""
DROP_AGAIN_S: Final = 30.0
LIST_EVERY_S: Final = 600.0
"""What is here is told again so often: control may have given some of it up while this host was away."""


@dataclass(slots=True)
class _Work:
    order: SnapshotOrder
    task: asyncio.Task[None] | None = None


class Keeping:
    """Carries the orders out. Works inside `run`."""

    def __init__(self, ledger: Ledger, drivers: Mapping[Isolation, Driver], dice: Dice, tell: Tell, *, parallel: int) -> None:
        self._ledger = ledger
        self._drivers = drivers
        self._dice = dice
        self._tell = tell
        self._work: dict[str, _Work] = {}
        self._keeps = asyncio.Semaphore(parallel)
        self._group: asyncio.TaskGroup | None = None
        self.on_kept: Callable[[str], None] = lambda _snapshot_id: None
        """A snapshot is here, and control has heard so."""
        self.on_drop: Callable[[str], Awaitable[None]] = _nothing
        """A snapshot is about to go."""
        self._untold: dict[str, None] = {}
        """What is here and control has not been told of since the last look."""
        self._looked = False

    async def run(self) -> None:
        """Work until cancelled; guests and what is kept stay as they are."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            while True:
                await self._look()
                await asyncio.sleep(LIST_EVERY_S)

    async def _look(self) -> None:
        backoff = Backoff(self._dice, first_s=0.5, most_s=60.0)
        while True:
            try:
                self._untold = dict.fromkeys([name for driver in self._distinct() for name in await driver.snapshots()])
                for name in self._untold:
                    if not self._looked and name not in self._work:
                        self.on_kept(name)
                self._looked = True
            except Exception as error:  # noqa: BLE001 - a task boundary: looked at again, and everything else goes on
                code, detail = explain(error, otherwise=Code.INTERNAL)
                log.warning(events.COMMAND_FAILED, operation="snapshots", code=code, message=detail)
            else:
                return
            await asyncio.sleep(backoff.next_s())

    def untold(self) -> list[str]:
        """What the next poll tells of what is here; `told` when it is answered."""
        return [name for name in self._untold if name not in self._work][:SNAPSHOTS_MAX]

    def told(self, names: Sequence[str]) -> None:
        """Control has heard that these are here."""
        for name in names:
            self._untold.pop(name, None)

    def under_way(self) -> dict[str, SnapshotWish]:
        """What control need not order again."""
        return {name: work.order.wish for name, work in list(self._work.items())[:SNAPSHOTS_MAX]}

    def take(self, orders: Sequence[SnapshotOrder]) -> bool:
        """Begin what is new; whether anything is. *Idempotency*: an order that is under way is left alone."""
        new = False
        for order in orders:
            known = self._work.get(order.id)
            if self._group is None or (known is not None and known.order.wish is order.wish):
                continue
            before = known.task if known is not None else None
            work = self._work[order.id] = _Work(order)
            work.task = self._group.create_task(self._carry_out(work, before))
            new = True
        return new

    async def drop_all(self) -> None:
        """Let go of everything: the host is fenced, and nobody will ever want it."""
        for driver in self._distinct():
            with contextlib.suppress(AtollError, OSError):
                for snapshot_id in await driver.snapshots():
                    await driver.drop(snapshot_id)

    async def _carry_out(self, work: _Work, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        if work.order.wish is SnapshotWish.DROP:
            await self.on_drop(work.order.id)
            await self._say(work, await self._drop(work.order))
            return
        seen = await self._keep(work.order)
        await self._say(work, seen)
        if seen.state is SnapshotState.KEPT:
            self.on_kept(seen.id)

    async def _say(self, work: _Work, seen: SnapshotSeen) -> None:
        backoff = Backoff(self._dice, first_s=0.05, most_s=5.0)
        while self._work.get(work.order.id) is work:
            try:
                await self._tell(seen)
                break
            except AtollError as error:
                log.info(events.COMMAND_FAILED, operation="snapshot", code=error.code, message=error.message)
            await asyncio.sleep(backoff.next_s())
        if self._work.get(work.order.id) is work:
            del self._work[work.order.id]

    async def _keep(self, order: SnapshotOrder) -> SnapshotSeen:
        try:
            record, driver = self._place(order)
            async with self._keeps:
                saved = await driver.snapshot(order_of(record), order.id, order.save_mode)
        except Exception as error:  # noqa: BLE001 - a task boundary: whatever it is, control has to hear of it
            code, detail = explain(error, otherwise=Code.SAVE_FAILED)
            log.warning(events.COMMAND_FAILED, operation="snapshot", placement_id=order.placement_id, code=code, message=detail)
            return SnapshotSeen(id=order.id, state=SnapshotState.FAILED, code=code, message=detail[:DETAIL_MAX])
        return SnapshotSeen(id=order.id, state=SnapshotState.KEPT, save_mode=saved.mode, size_bytes=saved.size_bytes)

    def _place(self, order: SnapshotOrder) -> tuple[Record, Driver]:
        """*Errors*: Refused PLACEMENT_LOST, ILLEGAL_STATE, RUNTIME_MISSING, NOT_SUPPORTED."""
        record = self._ledger.get(order.placement_id)
        if record is None or record.blueprint is None or record.absent or goal(record) is Goal.ABSENT:
            raise Refused(Code.PLACEMENT_LOST, "its sandbox is not on this host any more")
        if record.observed is not Observed.RUNNING or not record.ready:
            raise Refused(Code.ILLEGAL_STATE, f"its sandbox is {record.observed} there")
        driver = self._drivers.get(record.blueprint.spec.isolation)
        if driver is None:
            raise Refused(Code.RUNTIME_MISSING, f"this host has no driver for isolation {record.blueprint.spec.isolation}")
        if not driver.capabilities.snapshots:
            raise Refused(Code.NOT_SUPPORTED, f"{driver.capabilities.name} cannot keep a moment of a guest that goes on")
        return record, driver

    async def _drop(self, order: SnapshotOrder) -> SnapshotSeen:
        """Every driver is asked: it is not known whose it was. Never gives up."""
        backoff = Backoff(self._dice, first_s=0.1, most_s=DROP_AGAIN_S)
        while True:
            try:
                left = [driver for driver in self._distinct() if not await _dropped(driver, order.id)]
                if not left:
                    return SnapshotSeen(id=order.id, state=SnapshotState.ABSENT)
                log.warning(events.CLEANUP_FAILED, code=Code.CLEANUP_FAILED, detail=f"{order.id} is still there", operation="snapshot")
            except Exception as error:  # noqa: BLE001 - a task boundary: looked at again until it is gone
                code, detail = explain(error, otherwise=Code.CLEANUP_FAILED)
                log.warning(events.CLEANUP_FAILED, code=code, detail=detail, operation="snapshot")
            await asyncio.sleep(backoff.next_s())

    def _distinct(self) -> list[Driver]:
        return list({id(driver): driver for driver in self._drivers.values()}.values())


async def _nothing(_snapshot_id: str) -> None:
    """Where nobody wants to know."""


async def _dropped(driver: Driver, snapshot_id: str) -> bool:
    """Whether it is seen gone, once it was dropped."""
    await driver.drop(snapshot_id)
    return snapshot_id not in await driver.snapshots()
