"""Inventory: at start-up, what the machine holds against what the journal says.

Theory of operation. A placement in the journal whose machine part matches is adopted, resumed or removed, as its record wants. What
the journal does not explain is quarantined: reported, never deleted on its own, and while there is any the host takes nothing new;
`ensure_absent` is served all the same, and so is a command that explains exactly what is held:
that is how a host whose database was lost gets its guests back. A guest cannot outlive its kernel, so another boot id means that every guest is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from atoll.agent.ledger import Ledger
from atoll.agent.record import Goal, Record, exited, forgotten, goal, seen
from atoll.agent.steps import restarts
from atoll.base.errors import AtollError, Code
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation
from atoll.drivers.port import Driver, Held, Power, Seen
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

log = get_logger()


UNRECORDED: Final = ("control has no row for it",)
"""What is said of a placement that control does not know."""


class Fate(Enum):
    """What start-up does with a placement of the journal."""

    ADOPT = auto()
    """It was ready: take the guest over and go on."""
    RESUME = auto()
    """Work on it was under way: go on with it."""
    LOST = auto()
    """Its guest cannot be there any more."""
    REST = auto()
    """Nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Stock:
    """What to do with what is known, and what is not known."""

    fates: Mapping[str, Fate]
    strangers: Mapping[str, tuple[str, ...]]
    """placement id → what is there of it, for people."""
    mismatched: frozenset[str] = frozenset()
    """Placements of the journal whose machine part says that it is something else."""
    named: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Strangers that say whose they are, all their parts alike: sandbox and generation."""


@dataclass(slots=True)
class Quarantine:
    """What this host holds and cannot explain."""

    things: dict[str, tuple[str, ...]] = field(default_factory=dict)
    named: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Of those that say so: sandbox and generation."""

    def holds(self, placement_id: str, sandbox_id: str, generation: int) -> bool:
        """Whether something is held that says that it is exactly this."""
        return self.named.get(placement_id) == (sandbox_id, generation)

    def add(self, placement_id: str, what: Sequence[str]) -> None:
        """Something unexplained."""
        if placement_id not in self.things:
            log.warning(events.PLACEMENT_QUARANTINED, placement_id=placement_id, what=list(what)[:20])
        self.things[placement_id] = tuple(what)

    def clear(self, placement_id: str) -> None:
        """It is gone."""
        self.things.pop(placement_id, None)
        self.named.pop(placement_id, None)

    def names(self) -> list[str]:
        """The placement ids."""
        return sorted(self.things)

    def __bool__(self) -> bool:
        return bool(self.things)


def take_stock(records: Iterable[Record], held: Sequence[Held], *, boot_id: str) -> Stock:
    """Match the journal with the machine. Pure."""
    known = {record.placement_id: record for record in records}
    fates: dict[str, Fate] = {}
    strangers: dict[str, tuple[str, ...]] = {}
    mismatched: set[str] = set()
    named: dict[str, set[tuple[str | None, int | None]]] = {}
    for thing in held:
        record = known.get(thing.placement_id)
        if record is None or record.absent or not _matches(record, thing):
            strangers[thing.placement_id] = (*strangers.get(thing.placement_id, ()), *thing.what)
            if record is None:
                named.setdefault(thing.placement_id, set()).add((thing.sandbox_id, thing.generation))
            if record is not None and not record.absent:
                mismatched.add(thing.placement_id)
    for placement_id, record in known.items():
        if placement_id not in mismatched:
            fates[placement_id] = _fate(record, boot_id=boot_id)
    return Stock(fates, strangers, frozenset(mismatched), {p: one for p, said in named.items() if (one := _one_name(said)) is not None})


def _one_name(said: set[tuple[str | None, int | None]]) -> tuple[str, int] | None:
    if len(said) != 1:
        return None
    sandbox_id, generation = next(iter(said))
    return (sandbox_id, generation) if sandbox_id is not None and generation is not None else None


def _matches(record: Record, thing: Held) -> bool:
    return thing.sandbox_id in (None, record.sandbox_id) and thing.generation in (None, record.generation)


def _fate(record: Record, *, boot_id: str) -> Fate:
    if record.absent:
        return Fate.REST
    if record.boot_id != boot_id:
        return Fate.LOST
    if goal(record) is not Goal.REST:
        # A ready guest with a newer order is adopted as well: the order is carried out on the living guest.
        return Fate.ADOPT if _has_guest(record) and goal(record) is not Goal.ABSENT else Fate.RESUME
    return Fate.ADOPT if _has_guest(record) else Fate.REST


def _has_guest(record: Record) -> bool:
    return record.ready or record.observed in (Observed.FROZEN, Observed.SAVING, Observed.SAVED)


async def settle(
    ledger: Ledger, drivers: Mapping[Isolation, Driver], quarantine: Quarantine, *, inherited: set[str], parallel: int
) -> None:
    """Take everything over that an earlier run left. After this the executor may begin.

    *Errors*: whatever `held` of a driver raises: a host that cannot say what it holds must not act.
    """
    held: list[Held] = []
    for driver in {id(d): d for d in drivers.values()}.values():
        held.extend(await driver.held())
    stock = take_stock(ledger, held, boot_id=ledger.boot_id)
    for placement_id, what in stock.strangers.items():
        quarantine.add(placement_id, what)
    quarantine.named.update(stock.named)
    for placement_id in stock.mismatched:
        await ledger.change(placement_id, lambda record: replace(record, quarantined=True))
    for record in ledger:
        if record.quarantined and not record.absent and record.placement_id not in stock.strangers:
            quarantine.add(record.placement_id, UNRECORDED)
    gate = asyncio.Semaphore(parallel)

    async def settle_one(placement_id: str, fate: Fate) -> None:
        async with gate:
            await _settle(ledger, drivers, placement_id, fate, inherited)

    await asyncio.gather(*(settle_one(placement_id, fate) for placement_id, fate in stock.fates.items() if fate is not Fate.REST))


async def _settle(ledger: Ledger, drivers: Mapping[Isolation, Driver], placement_id: str, fate: Fate, inherited: set[str]) -> None:
    record = ledger.get(placement_id)
    assert record is not None
    inherited.add(placement_id)
    if fate is Fate.LOST and await _is_saved(drivers, record):
        # What is saved is on disk, and outlives the kernel.
        await ledger.change(placement_id, lambda r: seen(replace(r, boot_id=ledger.boot_id, end=None), Observed.SAVED, ready=False))
        inherited.discard(placement_id)
        return
    if fate is Fate.LOST:
        kept = restarts(record, drivers) and await _is_kept(drivers, record)
        detail = "the host was started anew"
        # Its end was counted on the clock of a boot that is over; control gives it anew with the next start.
        await ledger.change(placement_id, lambda r: exited(replace(r, end=None), reason=Code.PLACEMENT_LOST, detail=detail, restart=kept))
    if fate is not Fate.ADOPT or record.blueprint is None:
        return
    found = await _adopt(drivers.get(record.blueprint.spec.isolation), placement_id)
    if found is None:
        return
    if found.power is Power.SAVED:
        # Saved, whether or not the last run came to write that down; or restored, and not used before that run ended.
        if record.observed is not Observed.SAVED:
            await ledger.change(placement_id, lambda r: seen(forgotten(r), Observed.SAVED, ready=False))
        inherited.discard(placement_id)
        return
    if not found.lives:
        code = Code.GUEST_EXITED if found.power is Power.STOPPED else Code.PLACEMENT_LOST
        detail = found.reason or f"it was found {found.power} after a restart of the agent"
        kept = restarts(record, drivers) and found.power is not Power.ABSENT
        await ledger.change(placement_id, lambda r: exited(r, reason=code, detail=detail, restart=kept))
        return
    inherited.discard(placement_id)
    if found.power is Power.FROZEN and record.observed is not Observed.FROZEN:
        # The last run was killed between the freezer and its journal.
        await ledger.change(placement_id, lambda r: seen(r, Observed.FROZEN, ready=False))
    if found.address is not None and found.address != record.address:
        await ledger.change(placement_id, lambda r: seen(r, r.observed, reason=r.reason, detail=r.detail, address=found.address))
    log.info(events.PLACEMENT_ADOPTED, placement_id=placement_id, sandbox_id=record.sandbox_id, pid=found.pid)


async def _is_saved(drivers: Mapping[Isolation, Driver], record: Record) -> bool:
    driver = drivers.get(record.blueprint.spec.isolation) if record.blueprint is not None else None
    if driver is None or driver.capabilities.saves is None:
        return False
    try:
        return (await driver.inspect(record.placement_id)).power is Power.SAVED
    except (AtollError, OSError):
        return False


async def _is_kept(drivers: Mapping[Isolation, Driver], record: Record) -> bool:
    """Whether anything of a guest's files is left to begin it again with."""
    assert record.blueprint is not None
    try:
        return (await drivers[record.blueprint.spec.isolation].inspect(record.placement_id)).power is not Power.ABSENT
    except (AtollError, OSError):
        return False


async def _adopt(driver: Driver | None, placement_id: str) -> Seen | None:
    """What the driver found; None when it cannot say: then the record stays as it is, and its ends are enforced all the same."""
    if driver is None:
        log.error(events.COMMAND_FAILED, placement_id=placement_id, code=Code.RUNTIME_MISSING, operation="adopt")
        return None
    try:
        return await driver.adopt(placement_id)
    except (AtollError, OSError) as error:
        log.warning(events.COMMAND_FAILED, placement_id=placement_id, operation="adopt", message=str(error))
        return None
