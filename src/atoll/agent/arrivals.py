"""Arrivals: moments that are fetched from the store, so that a guest can go on from them here.

Theory of operation. A moment is asked first what host it needs, then fetched into a directory of the driver's that is not there yet, then
handed to the driver, which has it appear as what is saved of the placement, or as a snapshot. Whatever is cut off in between leaves
nothing that anybody would begin from: the directory goes with the next try, and with the next opening of the driver. Of many that want
one snapshot, one fetches it. One that control wants gone is given up first: whoever has been told that there is nothing counts it no more.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from typing import Any, Final

from atoll.agent.moments import MomentStore
from atoll.base.errors import Code, Refused
from atoll.drivers.port import Driver, Order

PARALLEL: Final = 4


class Arrivals:
    """What is on its way here."""

    def __init__(self, store: MomentStore | None) -> None:
        """`store`: None where this host has no way to it."""
        self._store = store
        self._room = asyncio.Semaphore(PARALLEL)
        self._snapshots: dict[str, asyncio.Task[None]] = {}

    async def saved(self, driver: Driver, order: Order, digest: str) -> None:
        """Have this moment as what is saved of a placement. *Errors*: those of MomentStore and of Driver.receive."""
        await self._bring(driver, order, digest, order.placement_id, None)

    async def snapshot(self, driver: Driver, order: Order, digest: str, snapshot_id: str) -> None:
        """Have this moment as a snapshot that is kept here. *Errors*: as `saved`; Refused SNAPSHOT_UNAVAILABLE when it is given up meanwhile.

        *Idempotency*: one that is here already stays.
        """
        if snapshot_id in await driver.snapshots():
            return
        task = self._snapshots.get(snapshot_id)
        if task is None:
            task = self._snapshots[snapshot_id] = _begin(self._bring(driver, order, digest, snapshot_id, snapshot_id))
            task.add_done_callback(lambda _task: self._snapshots.pop(snapshot_id, None))
        try:
            # Who stops waiting does not stop the others.
            await asyncio.shield(task)
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if not task.cancelled() or (waiting is not None and waiting.cancelling()):
                raise
            raise Refused(Code.SNAPSHOT_UNAVAILABLE, f"{snapshot_id} was given up while it was fetched") from None

    async def give_up(self, snapshot_id: str) -> None:
        """Nothing of this snapshot is on its way here afterwards: it is here whole, or there is nothing of it."""
        if (task := self._snapshots.get(snapshot_id)) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """End what is under way; the next run begins it anew."""
        tasks = list(self._snapshots.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bring(self, driver: Driver, order: Order, digest: str, name: str, snapshot_id: str | None) -> None:
        if self._store is None or not driver.capabilities.portable:
            raise Refused(Code.NOT_SUPPORTED, f"{driver.capabilities.name} goes on from nothing that another host has saved")
        async with self._room:
            facts = await self._store.facts(digest)
            await driver.suits(facts)
            inbox = driver.inbox(name)
            try:
                await asyncio.to_thread(shutil.rmtree, inbox, ignore_errors=True)
                await self._store.fetch(digest, inbox)
                receiving = driver.receive(order, facts, inbox, snapshot_id=snapshot_id)
                await (receiving if snapshot_id is None else _to_its_end(receiving))
            finally:
                await asyncio.shield(asyncio.to_thread(shutil.rmtree, inbox, ignore_errors=True))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for it, also where nobody does any more: what a thread is at would go on all the same."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.ensure_future(work)
    # Nobody may be left who waits for it.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
