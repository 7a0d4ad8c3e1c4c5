"""Uploads: what is saved or kept here is sent to the artifact store, behind everything else that this host does.

Theory of operation. There is one task for each name (a placement, or a snapshot), and few of them work at a time. Nothing of it is in the
journal but its end: a run that begins looks at what is saved and kept, and an upload that was cut off goes on where it was. Whoever is about
to touch what is saved says `halt` first, which ends the task and its program at once. An end that came too late for a save that is gone is
dropped (`record.stored`). A store that is away, or a control that does not know of the save yet, is asked again; only what cannot be sent
at all is given up, and what is saved stays where it is then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.agent.backoff import Backoff
from atoll.agent.ledger import Ledger
from atoll.agent.moments import MomentStore, Stored
from atoll.agent.record import Goal, Record, goal, stored
from atoll.agent.resting import explain
from atoll.base.errors import Code, Refused
from atoll.base.ids import Dice
from atoll.domain.moment import Moment
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation
from atoll.drivers.port import Driver, PackList
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire.agent import SnapshotSeen, SnapshotState

log = get_logger()

PARALLEL: Final = 2
AGAIN_S_MAX: Final = 60.0
_FINAL: Final = frozenset({Code.PLACEMENT_LOST, Code.ILLEGAL_STATE, Code.NOT_SUPPORTED, Code.RESUME_FAILED})
"""Of what is asked of the driver: there is nothing to send, and there will be nothing."""

Tell = Callable[[SnapshotSeen], Awaitable[None]]


@dataclass(slots=True)
class _Work:
    task: asyncio.Task[None] | None = None
    halted: bool = field(default=False)


class Uploads:
    """Works inside `run`; what is asked before is remembered."""

    def __init__(
        self, ledger: Ledger, drivers: Mapping[Isolation, Driver], store: MomentStore, dice: Dice, tell: Tell, *, after_s: float
    ) -> None:
        """`after_s`: how long something has to be saved before it is sent."""
        self._after_s = after_s
        self._ledger = ledger
        self._drivers = drivers
        self._store = store
        self._dice = dice
        self._tell = tell
        self._allowed = asyncio.Event()
        self._bytes_max = 0
        self._room = asyncio.Semaphore(PARALLEL)
        self._work: dict[str, _Work] = {}
        self._early: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Work until cancelled: then what is under way ends, and the next run goes on with it."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name, begin in self._early.items():
                self._begin(name, begin)
            self._early.clear()
            for record in self._ledger:
                if record.observed is Observed.SAVED and record.moment is None:
                    self.saved(record.placement_id)
            await asyncio.Event().wait()

    def allow(self, *, allowed: bool, bytes_max: int = 0) -> None:
        """Whether control has a place for moments, as its newest answer says, and for how large ones; 0: for any."""
        self._bytes_max = bytes_max
        if allowed:
            self._allowed.set()
        else:
            self._allowed.clear()

    def saved(self, placement_id: str) -> None:
        """A placement is saved. *Idempotency*: one whose upload is under way is left alone."""
        self._begin(placement_id, lambda: self._send_placement(placement_id))

    def kept(self, snapshot_id: str) -> None:
        """A snapshot is kept here. *Idempotency*: as `saved`."""
        self._begin(snapshot_id, lambda: self._send_snapshot(snapshot_id))

    def halt(self, name: str) -> None:
        """What is saved or kept under this name is about to be used, or to go: its upload ends now."""
        self._early.pop(name, None)
        work = self._work.pop(name, None)
        if work is not None:
            work.halted = True
            if work.task is not None:
                work.task.cancel()

    async def forget(self, name: str) -> None:
        """Nothing will be sent under this name any more. Never raises: what stays is a small file."""
        self.halt(name)
        try:
            await self._store.forget(name)
        except Exception as error:  # noqa: BLE001 - a task boundary: nobody waits for it
            code, detail = explain(error, otherwise=Code.INTERNAL)
            log.info(events.COMMAND_FAILED, operation="upload", code=code, message=detail)

    def _begin(self, name: str, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._group is None:
            self._early[name] = begin
        elif name not in self._work:
            work = self._work[name] = _Work()
            work.task = self._group.create_task(self._carry_out(name, work, begin()))

    async def _carry_out(self, name: str, work: _Work, sending: Coroutine[Any, Any, None]) -> None:
        try:
            await sending
        except asyncio.CancelledError:
            # Halted, which is no end of the run.
            if not work.halted:
                raise
        finally:
            if self._work.get(name) is work:
                del self._work[name]

    async def _send_placement(self, placement_id: str) -> None:
        record = self._ledger.get(placement_id)
        driver = _driver_of(record, self._drivers)
        if (
            record is None
            or driver is None
            or record.observed is not Observed.SAVED
            or record.moment is not None
            or goal(record) is not Goal.REST
        ):
            return
        sent = await self._send(placement_id, [driver], bases_of(record))
        if sent is None:
            return
        revision, (what, got) = record.applied_revision, sent
        moment = Moment(got.digest, got.size, what.facts.kind)
        await self._until_done(lambda: self._ledger.change(placement_id, lambda now: stored(now, moment, revision)))
        log.info(events.MOMENT_STORED, placement_id=placement_id, sandbox_id=record.sandbox_id, size_bytes=got.size)

    async def _send_snapshot(self, snapshot_id: str) -> None:
        sent = await self._send(snapshot_id, list({id(driver): driver for driver in self._drivers.values()}.values()), ())
        if sent is None:
            return
        what, got = sent
        seen = SnapshotSeen(
            id=snapshot_id,
            state=SnapshotState.KEPT,
            save_mode=what.facts.mode,
            size_bytes=what.size_bytes,
            moment=got.digest,
            moment_size=got.size,
            moment_kind=what.facts.kind,
        )
        await self._until_done(lambda: self._tell(seen))
        log.info(events.MOMENT_STORED, snapshot_id=snapshot_id, size_bytes=got.size)

    async def _send(self, name: str, drivers: Sequence[Driver], bases: Sequence[str]) -> tuple[PackList, Stored] | None:
        """What is in the store now; None when there is nothing to send. Goes on until one of the two."""
        backoff = Backoff(self._dice, first_s=0.5, most_s=AGAIN_S_MAX)
        await asyncio.sleep(self._after_s)
        while True:
            try:
                await self._allowed.wait()
                async with self._room:
                    what = await _pack_list(drivers, name)
                    if what is None or self._is_too_large(name, what):
                        return None
                    return what, await self._store.upload(name, what, bases=bases)
            except Exception as error:  # noqa: BLE001 - a task boundary: whatever it is, what is saved is safe where it is
                code, detail = explain(error, otherwise=Code.INTERNAL)
                log.info(events.COMMAND_FAILED, operation="upload", code=code, message=detail, attempt=backoff.failures + 1)
            await asyncio.sleep(backoff.next_s())

    def _is_too_large(self, name: str, what: PackList) -> bool:
        """It stays here then, with nothing of it sent, until it is gone on from or goes; a run that begins asks again."""
        if not self._bytes_max or what.size_bytes <= self._bytes_max:
            return False
        message = f"{name} takes {what.size_bytes >> 20} MiB, and at most {self._bytes_max >> 20} are sent"
        log.warning(events.COMMAND_FAILED, operation="upload", code=Code.MOMENT_TOO_LARGE, message=message)
        return True

    async def _until_done(self, work: Callable[[], Awaitable[object]]) -> None:
        backoff = Backoff(self._dice, first_s=0.1, most_s=5.0)
        while True:
            try:
                await work()
                return
            except Exception as error:  # noqa: BLE001 - a task boundary: said again until it is heard
                code, detail = explain(error, otherwise=Code.INTERNAL)
                log.info(events.COMMAND_FAILED, operation="upload", code=code, message=detail)
            await asyncio.sleep(backoff.next_s())


def bases_of(record: Record) -> list[str]:
    """Moments that what is saved of a placement may share something with, those that are most like it first."""
    spec = record.blueprint.spec if record.blueprint is not None else None
    origin = spec.origin.moment if spec is not None and spec.origin is not None else None
    begun_from = record.blueprint.moment if record.blueprint is not None else None
    return list(dict.fromkeys(one for one in (record.base, begun_from, origin) if one is not None))


def _driver_of(record: Record | None, drivers: Mapping[Isolation, Driver]) -> Driver | None:
    driver = drivers.get(record.blueprint.spec.isolation) if record is not None and record.blueprint is not None else None
    return driver if driver is not None and driver.capabilities.portable else None


async def _pack_list(drivers: Sequence[Driver], name: str) -> PackList | None:
    """Of the driver that has it. *Errors*: what it says, where that may pass."""
    for driver in drivers:
        if driver.capabilities.portable:
            try:
                return await driver.pack_list(name)
            except Refused as error:
                if error.code not in _FINAL:
                    raise
                log.info(events.COMMAND_FAILED, operation="upload", code=error.code, message=error.message)
    return None
