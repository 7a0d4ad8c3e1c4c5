"""Steps: what is done to reach a goal, in terms of the driver port and the guest's handshake.

Theory of operation. A step reads nothing but its record, the driver and the vault, and may be run again after a crash at any point. It
ends with one durable change that says what is now seen. A failed start leaves what it made: control hears the reason and sends
`ensure_absent`. Absence is said only after the driver has looked and found nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

from atoll.agent.backoff import Backoff
from atoll.agent.handshake import Guests, Meeting, init_of
from atoll.agent.lastwords import worth_keeping
from atoll.agent.ledger import Ledger
from atoll.agent.origins import Booted, Origins, instead
from atoll.agent.record import (
    EndedBy,
    EndRule,
    Goal,
    Record,
    at_rest,
    exited,
    forgotten,
    is_claimed,
    order_of,
    restart_pause_s,
    seen,
    with_own_end,
)
from atoll.agent.resting import SLOW_S, Resting, explain
from atoll.agent.vault import Vault
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import Dice
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation, OnEnd, OnExit, OnLeaseExpiry, SaveMode
from atoll.drivers.port import Driver, Order, Power, Seen
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire.guest import Hello

log = get_logger()

VERSION_MAX: Final = 64
"""Of what a guest says of its version: it goes into every observation."""
_UNDER_WAY: Final = frozenset({Observed.ACCEPTED, Observed.PREPARING, Observed.STARTING})
_MET: Final = frozenset({Observed.RUNNING, Observed.SAVING, Observed.ERROR})
"""As what a guest is on record that was ready once, and is neither at rest nor to be begun again."""
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class GuestEnded(Exception):
    """The guest was started by an earlier run and is not running any more."""


class Steps(Resting):
    """Carries out goals. `inherited`: placements of an earlier run, whose driver has to take them over first."""

    def __init__(
        self,
        ledger: Ledger,
        drivers: Mapping[Isolation, Driver],
        guests: Guests,
        vault: Vault,
        *,
        clock: Clock,
        dice: Dice,
        parallel: int,
    ) -> None:
        self._ledger = ledger
        self._drivers = drivers
        self._guests = guests
        self._vault = vault
        self._clock = clock
        self._dice = dice
        self._starts = asyncio.Semaphore(parallel)
        self._removals = asyncio.Semaphore(parallel)
        self.inherited: set[str] = set()
        self.spawn: Spawn | None = None
        self.on_failure: Callable[[Code], None] = lambda _code: None
        self.on_last_words: Callable[[str, bytes], None] = lambda _placement_id, _console: None
        self.may_start: Callable[[Record], bool] = lambda _record: True
        """Whether the lease allows a guest to be begun now."""
        self.on_end: Callable[[str, EndRule], None] = lambda _placement_id, _end: None
        """An end that this run has set by itself, and that is in the journal."""
        self.on_gone: Callable[[str], None] = lambda _placement_id: None
        self.on_touch: Callable[[str], None] = lambda _placement_id: None
        """What is saved of a placement is about to be used, or to go."""
        self.on_saved: Callable[[str], None] = lambda _placement_id: None
        """A placement is saved, and that is in the journal."""
        self.on_forget: Callable[[str], Awaitable[None]] = _nothing
        """Nothing will be saved of a placement any more."""
        self.origins = Origins(clock)

    async def carry_out(self, wanted: Goal, record: Record) -> None:
        """One step towards the goal. *Errors*: Unavailable when the journal refuses; what drivers raise becomes an observation."""
        began = self._clock.boot()
        self.on_touch(record.placement_id)
        match wanted:
            case Goal.RUNNING:
                await self._bring_up(record)
            case Goal.PREPARED:
                await self._lay_ready(record)
            case Goal.PAUSED:
                await self._pause(record)
            case Goal.SUSPENDED:
                await self._suspend(record)
            case Goal.STOPPED:
                await self._stop(record)
            case Goal.ABSENT:
                await self._take_down(record)
            case Goal.REST:
                return
        elapsed_ms = round((self._clock.boot() - began) * 1000, 1)
        log.info(
            events.COMMAND_DONE,
            placement_id=record.placement_id,
            sandbox_id=record.sandbox_id,
            kind=wanted.name.lower(),
            elapsed_ms=elapsed_ms,
        )

    def restarts(self, record: Record) -> bool:
        """Whether a guest that ends by itself is begun again where it is: by its spec, and only with the disk that it had."""
        return restarts(record, self._drivers)

    # up
    async def _bring_up(self, record: Record) -> None:
        revision = record.desired_revision
        placement_id = record.placement_id
        if record.ready and not is_claimed(record):
            await self._ledger.change(placement_id, lambda r: seen(r, r.observed, applied_revision=revision, ready=r.ready))
            return
        await asyncio.sleep(restart_pause_s(record))
        try:
            address, booted = await self._start(record)
            with self._slow(placement_id, Observed.RUNNING):
                version = await self._meet(record, address)
        except GuestEnded as error:
            detail = str(error)
            await self._ledger.change(placement_id, lambda r: exited(r, reason=Code.GUEST_EXITED, detail=detail, restart=self.restarts(r)))
            return
        except Exception as error:  # noqa: BLE001 - a task boundary: whatever it is, control has to hear of it
            await self._failed(record, error)
            return

        def ready(now: Record) -> Record | None:
            if now.ended_by is not None or now.desired is not Kind.ENSURE_RUNNING:
                return None
            why = {"reason": booted.code, "detail": booted.detail} if booted is not None else {}
            fresh = forgotten(now)
            after = seen(fresh, Observed.RUNNING, applied_revision=revision, ready=True, address=address, guest_version=version, **why)
            # In the same commit: whoever hears that it is ready can rely on its end, though control were never heard of again.
            return with_own_end(after, ready_boot=self._clock.boot(), anew=at_rest(now) or is_claimed(record))

        self._watch(await self._ledger.change(placement_id, ready))
        if may_rest_by_itself(record):
            self._vault.settle(placement_id)
        else:
            self._vault.drop(placement_id)

    async def _meet(self, record: Record, address: str) -> str | None:
        """The guest's version, once it has proved itself and is initialised."""
        if not self._driver(record).capabilities.guest_handshake:
            return None
        meeting = Meeting(
            token=lambda: self._vault.token(record.placement_id),
            init=lambda hello: self._init(record, hello),
            waiting=lambda words: self._say_waiting(record.placement_id, words),
        )
        hello = await self._guests.meet(record, address, meeting)
        return hello.guest_version[:VERSION_MAX] or None

    async def _init(self, record: Record, hello: Hello) -> Any:
        assert record.blueprint is not None
        if record.observed is Observed.SAVED or record.blueprint.moment is not None:
            # From here on somebody may use it, and what it was restored from is the past.
            await self._driver(record).discard(record.placement_id)
        # A claimed guest has no other begun in its place: what an earlier run was given for it, and it has not, nobody has had.
        missing = is_claimed(record) and hello.initialised and hello.init_revision is not None
        payload = await self._vault.payload(record.placement_id, record.blueprint.payload_ref, missing=missing)
        return init_of(record, payload, clock=self._clock, dice=self._dice)

    async def _start(self, record: Record) -> tuple[str, Booted | None]:
        """Where the guest of this placement listens, started if it is not running; and why it was booted in place of its head start."""
        driver = self._driver(record)
        placement_id = record.placement_id
        found, booted = await self._found(record, driver), None
        if found is None or not found.lives:
            found = await self._from_store(record, driver) or found
        if found is None or not found.lives:
            with self._slow(placement_id, Observed.PREPARING):
                order, booted = await self.origins.at_hand(order_of(record), driver)
                await self._starts.acquire()
            try:
                found, failed = await self._begin(record, driver, order)
                booted = booted or failed
            finally:
                self._starts.release()
        self.inherited.discard(placement_id)
        if found.address is None:
            raise Refused(Code.START_FAILED, "the driver does not say where the guest listens")
        return found.address, booted

    async def _begin(self, record: Record, driver: Driver, order: Order) -> tuple[Seen, Booted | None]:
        """Its guest, begun from its spec's origin where there is one; where that is a head start that cannot be had, booted, and why."""
        try:
            return await self._begun(record, driver, order), None
        except Refused as error:
            order, why = instead(order, error)
        return await self._begun(record, driver, order), why

    async def _begun(self, record: Record, driver: Driver, order: Order) -> Seen:
        with self._slow(record.placement_id, Observed.PREPARING):
            await driver.prepare(order)
        if not self.may_start(record):
            raise Refused(Code.LEASE_EXPIRED, "the host's lease has run out before this guest was started")
        with self._slow(record.placement_id, Observed.STARTING):
            return await driver.start(order)

    async def _found(self, record: Record, driver: Driver) -> Seen | None:
        """The guest that there is, brought back from rest where it was; None: there may be none yet. *Errors*: GuestEnded."""
        placement_id = record.placement_id
        found: Seen | None = None
        if is_claimed(record) and record.ready and record.address is not None and placement_id not in self.inherited:
            # This run has seen it ready, and is told when it ends: to look once more would only keep its create waiting.
            return Seen(Power.RUNNING, address=record.address)
        if placement_id in self.inherited:
            found = await driver.adopt(placement_id)
            if _is_over(record, found.power):
                raise GuestEnded(found.reason or f"ended while no agent ran: it was found {found.power}")
            if found.power is Power.RUNNING:
                # It may have been ready before the last run could write that down, and this one cannot tell without control's token.
                self._watch(await self._ledger.change(placement_id, lambda r: with_own_end(r, ready_boot=self._clock.boot()), urgent=False))
        if record.observed is Observed.FROZEN or (found is not None and found.power is Power.FROZEN):
            return await driver.resume(placement_id)
        if record.observed is Observed.SAVED or (found is not None and found.power is Power.SAVED):
            return await self._restore(record, driver)
        if found is None and record.applied_revision > 0 and record.observed in _MET:
            # It has been ready: whatever has become of its guest, no other is begun in its place. One whose start with
            # the disk that it had failed may be started so again.
            found = await driver.inspect(placement_id)
            again = record.observed is Observed.ERROR and found.power is Power.STOPPED and driver.capabilities.stop_keeps_disk
            if not found.lives and not again:
                raise GuestEnded(found.reason or f"it was found {found.power}")
        return found

    async def _from_store(self, record: Record, driver: Driver) -> Seen | None:
        """The guest of a moment that is fetched, as long as nothing newer of it is here; None: it has none to begin from."""
        blueprint = record.blueprint
        assert blueprint is not None
        if blueprint.moment is None or blueprint.begun or record.applied_revision > 0:
            return None
        with self._slow(record.placement_id, Observed.PREPARING):
            if (await driver.inspect(record.placement_id)).power in (Power.ABSENT, Power.PREPARED):
                await self.origins.arrivals.saved(driver, order_of(record), blueprint.moment)
        with self._slow(record.placement_id, Observed.STARTING):
            return await self._restore(record, driver)

    async def _restore(self, record: Record, driver: Driver) -> Seen:
        """The guest of what was saved, or the one that was restored from it and is in use already."""
        assert record.blueprint is not None
        found = await driver.inspect(record.placement_id)
        if found.lives and (found := await driver.adopt(record.placement_id)).lives:
            # It was told apart from one that nobody has used: its last run ended before it could write down that it is ready.
            return found
        reboot = record.blueprint.save_mode is SaveMode.FILES and record.save_mode is not SaveMode.FILES
        async with self._starts:
            if not self.may_start(record):
                raise Refused(Code.LEASE_EXPIRED, "the host's lease has run out before this guest was restored")
            return await driver.restore(order_of(record), reboot=reboot)

    async def _lay_ready(self, record: Record) -> None:
        revision = record.desired_revision
        try:
            async with self._starts:
                with self._slow(record.placement_id, Observed.PREPARING):
                    await self._driver(record).prepare(order_of(record))
        except Exception as error:  # noqa: BLE001 - a task boundary
            await self._failed(record, error)
            return
        await self._ledger.change(record.placement_id, lambda r: seen(r, Observed.PREPARED, applied_revision=revision))

    async def _failed(self, record: Record, error: Exception) -> None:
        code, detail = explain(error)
        if not isinstance(error, AtollError):
            log.error(events.COMMAND_FAILED, placement_id=record.placement_id, code=code, exc_info=error)
        else:
            log.warning(events.COMMAND_FAILED, placement_id=record.placement_id, sandbox_id=record.sandbox_id, code=code, message=detail)
        self.on_failure(code)
        self._vault.drop(record.placement_id)
        await self._ledger.change(
            record.placement_id,
            lambda r: seen(r, Observed.ERROR, reason=code, detail=detail, failed_revision=record.desired_revision, ready=False),
        )

    # down
    async def _take_down(self, record: Record) -> None:
        placement_id = record.placement_id
        self._vault.drop(placement_id)
        if worth_keeping(record):
            await self._keep_last_words(record)
        backoff = Backoff(self._dice, first_s=0.1, most_s=30.0)
        while True:
            async with self._removals:
                left = await self._remove(record)
            if not left:
                break
            detail = f"cleanup: {'; '.join(left)}"
            log.warning(
                events.CLEANUP_FAILED, placement_id=placement_id, code=Code.CLEANUP_FAILED, detail=detail, attempt=backoff.failures + 1
            )
            await self._ledger.change(placement_id, _stuck(detail))
            await asyncio.sleep(backoff.next_s())
        await self.on_forget(placement_id)
        await self._ledger.change(placement_id, gone)
        self.inherited.discard(placement_id)
        self.on_gone(placement_id)

    async def _keep_last_words(self, record: Record) -> None:
        driver = self._drivers.get(record.blueprint.spec.isolation) if record.blueprint else None
        if driver is not None:
            with contextlib.suppress(AtollError, OSError):
                self.on_last_words(record.placement_id, await driver.console(record.placement_id))

    async def _remove(self, record: Record) -> list[str]:
        """Remove what there is of it, and name what is left. Every driver is asked when it is not known whose it was."""
        left: list[str] = []
        mine = self._drivers.get(record.blueprint.spec.isolation) if record.blueprint else None
        if record.blueprint is not None and mine is None and (record.ready or record.address is not None):
            left.append(f"there is no driver for {record.blueprint.spec.isolation} any more")
        drivers: Sequence[Driver] = [mine] if mine is not None and not record.quarantined else _distinct(self._drivers)
        for driver in drivers:
            failures: list[str] = []
            # A guest that cannot be stopped is no reason to leave its files, and its files none to leave its processes.
            for step in (driver.stop, driver.remove):
                try:
                    await step(record.placement_id)
                except Exception as error:  # noqa: BLE001 - a task boundary: whether anything is left is looked at below
                    code, detail = explain(error, otherwise=Code.CLEANUP_FAILED)
                    failures.append(detail if code is Code.CLEANUP_FAILED else f"{code}: {detail}")
            # Only what is seen counts: a step that failed may have left nothing, and one that did not, something.
            left.extend(_both(failures, await _look(driver, record.placement_id)))
        return left

    # shared
    @contextlib.contextmanager
    def _slow(self, placement_id: str, phase: Observed) -> Iterator[None]:
        """Say what is being done when it takes long."""
        timer = asyncio.get_running_loop().call_later(SLOW_S, self._say_phase, placement_id, phase)
        try:
            yield
        finally:
            timer.cancel()

    def _say_phase(self, placement_id: str, phase: Observed) -> None:
        if self.spawn is not None:
            self.spawn(self._say(placement_id, phase))

    async def _say(self, placement_id: str, phase: Observed) -> None:
        def make(now: Record) -> Record | None:
            return seen(now, phase) if now.observed in _UNDER_WAY and now.ended_by is None else None

        with contextlib.suppress(AtollError):
            await self._ledger.change(placement_id, make)

    async def _say_waiting(self, placement_id: str, words: str) -> None:
        """Whoever gives up on a start command that is not ready can say what it said."""

        def make(now: Record) -> Record | None:
            if now.observed not in (*_UNDER_WAY, Observed.RUNNING) or now.ended_by is not None or now.ready:
                return None
            return seen(now, Observed.RUNNING, reason=Code.START_COMMAND_FAILED, detail=words)

        with contextlib.suppress(AtollError):
            await self._ledger.change(placement_id, make)


async def _nothing(_placement_id: str) -> None:
    """Where nobody wants to know."""


def may_rest_by_itself(record: Record) -> bool:
    """Whether its agent may have to save it while control is away."""
    spec = record.blueprint.spec if record.blueprint is not None else None
    return spec is not None and (spec.on_end is OnEnd.SUSPEND or spec.on_lease_expiry is OnLeaseExpiry.SUSPEND)


def restarts(record: Record, drivers: Mapping[Isolation, Driver]) -> bool:
    """As Steps.restarts."""
    if record.blueprint is None or record.blueprint.spec.on_exit is not OnExit.RESTART:
        return False
    driver = drivers.get(record.blueprint.spec.isolation)
    return driver is not None and driver.capabilities.stop_keeps_disk


def _is_over(record: Record, power: Power) -> bool:
    """Whether what an earlier run left of this placement is no guest to go on with, and none to begin anew in its place."""
    assert record.blueprint is not None
    if power is Power.SAVED:
        return False
    if record.observed is Observed.FROZEN:
        return power not in (Power.FROZEN, Power.RUNNING)
    if record.observed is Observed.STOPPED:
        # Begun again where it is: with what is left of it, or not at all.
        return power is Power.ABSENT
    return power is Power.STOPPED or (record.blueprint.begun and power not in (Power.RUNNING, Power.FROZEN))


def gone(record: Record) -> Record | None:
    """The record once nothing is left of it."""
    if record.absent:
        return None
    by_command = record.desired is Kind.ENSURE_ABSENT
    return seen(
        record,
        Observed.ABSENT,
        reason=record.ended_reason,
        detail=record.ended_detail,
        applied_revision=record.desired_revision if by_command else record.applied_revision,
        ended_by=record.ended_by or EndedBy.COMMAND,
        ready=False,
        address=None,
    )


def _stuck(detail: str) -> Callable[[Record], Record | None]:
    def make(record: Record) -> Record | None:
        if record.observed is Observed.ERROR and record.reason == Code.CLEANUP_FAILED and record.detail == detail[:2000]:
            return None
        return seen(record, Observed.ERROR, reason=Code.CLEANUP_FAILED, detail=detail, ready=False)

    return make


async def _look(driver: Driver, placement_id: str) -> list[str]:
    try:
        found = await driver.inspect(placement_id)
    except Exception as error:  # noqa: BLE001 - a look that fails is no absence
        return [explain(error, otherwise=Code.CLEANUP_FAILED)[1]]
    if found.power is Power.ABSENT:
        return []
    return list(found.leftovers) or [f"it is still {found.power}"]


def _both(failures: list[str], seen: list[str]) -> list[str]:
    """What is left, by why it is where that is known; nothing when nothing is seen."""
    return (failures or seen) if seen else []


def _distinct(drivers: Mapping[Isolation, Driver]) -> list[Driver]:
    return list({id(driver): driver for driver in drivers.values()}.values())
