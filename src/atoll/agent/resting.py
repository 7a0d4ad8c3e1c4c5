"""Steps to rest: a guest is frozen, saved or stopped; part of `Steps`.

Theory of operation. What cannot be brought to rest goes on, and says why. A guest that is to be saved is told first that it serves nobody any
more, and that is in the journal before: whoever goes on from there meets it again. What this run has seen ready, and has not been told of
since, is not looked for once more: the driver says if it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from atoll.agent.backoff import Backoff
from atoll.agent.handshake import Guests
from atoll.agent.ledger import Ledger
from atoll.agent.record import EndRule, Record, exited, order_of, resting, seen
from atoll.agent.vault import Vault
from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import Dice
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation, SaveMode
from atoll.drivers.port import Driver, Power, Seen
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

log = get_logger()

SLOW_S: Final = 2.0
"""A step that lasts longer than this is reported while it lasts; shorter ones are not worth a commit and a message."""
STOP_GRACE_S: Final = 10.0
"""How long a guest that is to stop may take to do so by itself."""


class Resting:
    """The ways to rest."""

    _ledger: Ledger
    _drivers: Mapping[Isolation, Driver]
    _guests: Guests
    _vault: Vault
    _dice: Dice
    inherited: set[str]
    on_end: Callable[[str, EndRule], None]
    on_saved: Callable[[str], None]

    async def _pause(self, record: Record) -> None:
        """Freeze its guest where it is. What cannot be frozen goes on."""
        try:
            driver = self._driver(record)
            _require(driver.capabilities.pauses, f"{driver.capabilities.name} cannot freeze a guest on this host")
            await driver.pause(record.placement_id)
        except Exception as error:  # noqa: BLE001 - a task boundary: whatever it is, control has to hear of it
            await self._not_at_rest(record, error, Code.PAUSE_FAILED)
            return
        self.inherited.discard(record.placement_id)
        await self._came_to_rest(record, Observed.FROZEN)

    async def _suspend(self, record: Record) -> None:
        """Save its guest and end it. What cannot be saved goes on; what should rest by itself, and cannot be saved, is frozen."""
        assert record.blueprint is not None
        asked = record.blueprint.spec.end_mode if record.own_rest is not None else record.blueprint.save_mode
        answered = True
        try:
            driver = self._driver(record)
            _require(driver.capabilities.saves is not None, f"{driver.capabilities.name} cannot save a guest")
            found = await self._as_it_is(record, driver)
            with self._told_when_it_lasts(record.placement_id):
                if found.lives:
                    answered = await self._lulled(record, found, driver)
                saved = await driver.save(order_of(record), asked or SaveMode.FULL)
        except Exception as error:  # noqa: BLE001 - a task boundary
            await self._awake(record)
            if record.own_rest is not None:
                await self._freeze_instead(record, error)
            else:
                await self._not_at_rest(record, error, Code.SAVE_FAILED, met=False)
            return
        self.inherited.discard(record.placement_id)
        self._vault.drop(record.placement_id)
        await self._came_to_rest(record, Observed.SAVED, save_mode=saved.mode, unresponsive=not answered, reason=record.own_rest)

    @contextlib.contextmanager
    def _told_when_it_lasts(self, placement_id: str) -> Iterator[None]:
        """Most are saved before control could have heard that it is being done, and the commit of that would be in their way."""
        timer = asyncio.get_running_loop().call_later(SLOW_S, self._ledger.tell, placement_id)
        try:
            yield
        finally:
            timer.cancel()

    async def _as_it_is(self, record: Record, driver: Driver) -> Seen:
        if (
            record.observed is Observed.RUNNING
            and record.ready
            and record.address is not None
            and record.placement_id not in self.inherited
        ):
            return Seen(Power.RUNNING, address=record.address)
        return await driver.inspect(record.placement_id)

    async def _lulled(self, record: Record, found: Seen, driver: Driver) -> bool:
        """Whether its guest has said that it serves nobody any more. *Errors*: Refused GUEST_UNRESPONSIVE where that is insisted on."""
        assert record.blueprint is not None
        if record.observed is not Observed.SAVING:
            # Whoever goes on from here does not take the guest for one that serves.
            await self._ledger.change(record.placement_id, lambda r: seen(r, Observed.SAVING, ready=False), told=False)
        if found.power is Power.FROZEN:
            found = await driver.resume(record.placement_id)
        if not driver.capabilities.guest_handshake or found.address is None:
            return True
        token = self._vault.at_hand(record.placement_id)
        answered = await self._guests.lull(record.placement_id, found.address, token, awake=False)
        if record.blueprint.strict and not answered:
            raise Refused(Code.GUEST_UNRESPONSIVE, "the guest does not answer, so that nobody can tell what would be saved")
        return answered

    async def _awake(self, record: Record) -> None:
        """A guest that was to be saved serves as before, if it can be told so; its next start initialises it in any case."""
        if record.address is not None:
            await self._guests.lull(record.placement_id, record.address, self._vault.at_hand(record.placement_id), awake=True)

    async def _freeze_instead(self, record: Record, error: Exception) -> None:
        code, detail = explain(error, otherwise=Code.SAVE_FAILED)
        log.warning(events.COMMAND_FAILED, placement_id=record.placement_id, sandbox_id=record.sandbox_id, code=code, message=detail)
        backoff = Backoff(self._dice, first_s=0.5, most_s=30.0)
        while True:
            try:
                await self._driver(record).pause(record.placement_id)
                break
            except Exception as failure:  # noqa: BLE001 - it must not run on: tried again until it does not, or is gone
                why = explain(failure, otherwise=Code.PAUSE_FAILED)[0]
                log.warning(events.COMMAND_FAILED, placement_id=record.placement_id, code=why)
                if why is Code.PLACEMENT_LOST:
                    await self._ledger.change(record.placement_id, lambda r: exited(r, reason=Code.GUEST_EXITED, detail=detail))
                    return
                await asyncio.sleep(backoff.next_s())
        await self._came_to_rest(record, Observed.FROZEN, reason=record.own_rest, detail=f"{code}: {detail}")

    async def _stop(self, record: Record) -> None:
        """End its guest and keep its files, where they outlast it."""
        try:
            driver = self._driver(record)
            _require(driver.capabilities.stop_keeps_disk, f"{driver.capabilities.name} keeps nothing of a guest that has ended")
            await driver.stop(record.placement_id, grace_s=STOP_GRACE_S)
        except Exception as error:  # noqa: BLE001 - a task boundary
            await self._not_at_rest(record, error, Code.PAUSE_FAILED)
            return
        await self._came_to_rest(record, Observed.STOPPED)

    async def _came_to_rest(self, record: Record, observed: Observed, **changes: Any) -> None:
        revision = record.desired_revision if record.own_rest is None else record.applied_revision
        after = await self._ledger.change(record.placement_id, lambda r: resting(r, observed, applied_revision=revision, **changes))
        self._watch(after)
        if after is not None and after.observed is Observed.SAVED:
            self.on_saved(record.placement_id)

    async def _not_at_rest(self, record: Record, error: Exception, otherwise: Code, *, met: bool = True) -> None:
        """It is what it was before: control hears why, and says what is to become of it. Not `met`: its guest has to be looked at first."""
        observed = None if met else Observed.RUNNING
        code, detail = explain(error, otherwise=otherwise)
        log.warning(events.COMMAND_FAILED, placement_id=record.placement_id, sandbox_id=record.sandbox_id, code=code, message=detail)
        await self._ledger.change(
            record.placement_id,
            lambda r: seen(
                r, observed or r.observed, reason=code, detail=detail, failed_revision=record.desired_revision, ready=r.ready and met
            ),
        )

    # shared
    def _watch(self, record: Record | None) -> None:
        if record is not None and record.end is not None and not record.absent:
            self.on_end(record.placement_id, record.end)

    def _driver(self, record: Record) -> Driver:
        assert record.blueprint is not None
        driver = self._drivers.get(record.blueprint.spec.isolation)
        if driver is None:
            raise Refused(Code.RUNTIME_MISSING, f"this host has no driver for isolation {record.blueprint.spec.isolation}")
        return driver


def _require(able: bool, otherwise: str) -> None:  # noqa: FBT001 - an assertion's form
    """*Errors*: Refused NOT_SUPPORTED."""
    if not able:
        raise Refused(Code.NOT_SUPPORTED, otherwise)


def explain(error: Exception, *, otherwise: Code = Code.START_FAILED) -> tuple[Code, str]:
    """A stable code and a sentence for what a driver or the machine raised."""
    if isinstance(error, AtollError):
        extra = "; ".join(f"{key}: {value}" for key, value in error.detail.items() if value is not None)
        return error.code, f"{error.message} ({extra})" if extra else error.message
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Code.HOST_DISK_FULL, f"no space left: {error.filename or error.strerror}"
    return otherwise, f"{type(error).__name__}: {error}"
