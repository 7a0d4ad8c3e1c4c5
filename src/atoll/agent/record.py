"""Record: all that the agent knows of one placement, and what the placement should become.

Theory of operation. Control writes `desired` (by commands) and `end` (by ends); the agent writes everything else. A record is a value:
each change gives a new one, which the journal makes durable before anybody acts on it or hears of it. `goal` is the only place that
turns a record into what to do; it looks at nothing else, so a run that starts from the journal does what the last one would have done.
ABSENT absorbs. What is not here: secrets (`vault.py`), and whether a step is under way (`executor.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from pydantic import TypeAdapter

from atoll.base.records import replace
from atoll.domain.command import Kind
from atoll.domain.moment import Moment
from atoll.domain.placement import Observed
from atoll.domain.spec import OnEnd, OnLeaseExpiry, SaveMode, Spec
from atoll.drivers.port import Order
from atoll.wire.agent import Observation

DETAIL_MAX: Final = 2000
RESTART_PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a command says about the guest to run; holds no secret. *Units*: seconds."""

    spec: Spec
    nonce: str
    guest_public_key: str
    hostname: str
    ready_s: float = 60.0
    timeout_s: float | None = None
    """How long it lives from when it is ready; None: control alone says when it ends."""
    payload_ref: str | None = None
    save_mode: SaveMode | None = None
    """What to save, where it is to be suspended; what to go on from, where something is saved and it is to run."""
    strict: bool = False
    """To be saved only if its guest answers."""
    moment: str | None = None
    """What to begin from, fetched from the store, where nothing of it is here."""
    claimed: bool = False
    """Its guest was made ahead, and is to be initialised once more, for whom it is from now on."""
    begun: bool = False
    """Control had seen this guest run before this agent knew of it: it is taken over, or lost, and never begun anew."""


BLUEPRINT: Final = TypeAdapter(Blueprint)


@dataclass(frozen=True, slots=True)
class EndRule:
    """When the agent ends the placement by itself. `at_boot` is CLOCK_BOOTTIME of this boot of the kernel, in seconds; inf: it is at rest."""

    revision: int
    at_boot: float
    action: OnEnd = OnEnd.KILL
    on_lease_expiry: OnLeaseExpiry = OnLeaseExpiry.END


class EndedBy:
    """Who makes a placement end (`Observation.ended_by`)."""

    END_AT: Final = "end_at"
    LEASE: Final = "lease"
    EXIT: Final = "exit"
    COMMAND: Final = "command"
    FENCE: Final = "fence"


@dataclass(frozen=True, slots=True)
class Record:
    """One placement. `seq` grows with every change that control should hear of."""

    placement_id: str
    sandbox_id: str
    team_id: str
    generation: int
    desired: Kind
    desired_revision: int
    command_id: str
    digest: str
    boot_id: str
    """The kernel's boot in which it was accepted: a guest cannot outlive it."""
    blueprint: Blueprint | None = None
    """None for something that control wants absent and the agent never knew."""
    observed: Observed = Observed.ACCEPTED
    seq: int = 1
    applied_revision: int = 0
    failed_revision: int = 0
    """The desired revision that was tried and failed: not tried again, control decides."""
    ready: bool = False
    address: str | None = None
    reason: str | None = None
    detail: str | None = None
    guest_version: str | None = None
    end: EndRule | None = None
    ended_by: str | None = None
    """Set when its end is decided, before the first effect of it; the next two say why."""
    ended_reason: str | None = None
    ended_detail: str | None = None
    quarantined: bool = False
    save_mode: SaveMode | None = None
    """Of what is saved."""
    unresponsive: bool = False
    """Its guest did not answer when it was saved."""
    moment: Moment | None = None
    """What is saved now, once it is in the store."""
    base: str | None = None
    """Digest of an earlier moment of it that was in the store: what both have is not sent again."""
    own_rest: str | None = None
    """Why it is to be saved though control has not said so; decided before the first effect of it, and over once it is at rest."""

    @property
    def absent(self) -> bool:
        return self.observed is Observed.ABSENT


class Goal(Enum):
    """What the executor should bring about."""

    REST = auto()
    PREPARED = auto()
    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()
    STOPPED = auto()
    ABSENT = auto()


def goal(record: Record) -> Goal:
    """What this placement should become. An end that was decided, and ENSURE_ABSENT, win over everything."""
    if record.absent:
        return Goal.REST
    if record.ended_by is not None or record.desired is Kind.ENSURE_ABSENT:
        return Goal.ABSENT
    if record.own_rest is not None and not record.quarantined:
        return Goal.SUSPENDED
    if record.quarantined or max(record.applied_revision, record.failed_revision) >= record.desired_revision:
        return Goal.REST
    match record.desired:
        case Kind.ENSURE_RUNNING:
            return Goal.RUNNING
        case Kind.ENSURE_PRESENT:
            return Goal.PREPARED
        case Kind.ENSURE_PAUSED:
            return Goal.PAUSED
        case Kind.ENSURE_SUSPENDED:
            return Goal.SUSPENDED
        case Kind.ENSURE_STOPPED:
            return Goal.STOPPED


def seen(record: Record, observed: Observed, **changes: Any) -> Record:
    """The record after the agent saw something that control should hear of: the next sequence number, `reason` and `detail` anew."""
    detail = changes.pop("detail", None)
    return replace(
        record,
        observed=observed,
        seq=record.seq + 1,
        reason=changes.pop("reason", None),
        detail=detail[:DETAIL_MAX] if detail else None,
        **changes,
    )


def with_end(record: Record, end: EndRule) -> Record | None:
    """The record with this end; None when its revision is not newer than the known one, or there is nothing to end."""
    if record.absent or record.ended_by is not None or (record.end is not None and record.end.revision >= end.revision):
        return None
    return replace(record, end=end)


def with_own_end(record: Record, *, ready_boot: float, anew: bool = False) -> Record:
    """The record with the end that its command carries, counted from `ready_boot` (CLOCK_BOOTTIME), where that is sooner than a known one.

    The revision stays that of the known end, so that whatever control says next replaces it. A guest that control has seen running before
    has its end from control. `anew`: it comes back from rest, and the end that it had before means nothing any more.
    """
    blueprint, known = record.blueprint, record.end
    if blueprint is None or blueprint.timeout_s is None or blueprint.begun or record.ended_by is not None:
        return record
    at_boot = ready_boot + blueprint.timeout_s
    if known is None:
        return replace(record, end=EndRule(0, at_boot, blueprint.spec.on_end, blueprint.spec.on_lease_expiry))
    return replace(record, end=replace(known, at_boot=at_boot)) if anew or at_boot < known.at_boot else record


def ending(record: Record, by: str, *, reason: str, detail: str | None = None) -> Record | None:
    """The record once its end is decided; None when that is so already, or control's own removal is under way."""
    if record.absent or record.ended_by is not None or record.desired is Kind.ENSURE_ABSENT:
        return None
    return replace(record, ended_by=by, ended_reason=reason, ended_detail=detail[:DETAIL_MAX] if detail else None)


def at_rest(record: Record) -> bool:
    """Whether its end does not count now: nothing of it runs until somebody wants it back."""
    return record.observed in (Observed.FROZEN, Observed.SAVED, Observed.STOPPED)


def rests_by_itself(record: Record, reason: str, by: str) -> Record | None:
    """The record once it is decided that it is saved without a word of control; None when it is at rest, or ends.

    One whose guest has never been ready has nothing to keep: it ends, `by` whom is said.
    """
    if record.applied_revision == 0:
        return ending(record, by, reason=reason)
    if record.absent or record.ended_by is not None or record.own_rest is not None or record.desired is Kind.ENSURE_ABSENT:
        return None
    return None if at_rest(record) else replace(record, own_rest=reason)


def resting(record: Record, observed: Observed, **changes: Any) -> Record | None:
    """The record of a placement that has come to rest: its end is set aside, whatever it was. None when its end is under way."""
    if record.absent or record.ended_by is not None:
        return None
    end = replace(record.end, at_boot=math.inf) if record.end is not None else None
    return seen(forgotten(record), observed, ready=False, end=end, own_rest=None, **changes)


def forgotten(record: Record) -> Record:
    """The record whose moment in the store is of the past: another guest is about to be used, or something newer is saved."""
    begun_from = record.blueprint.moment if record.blueprint is not None else None
    return replace(record, moment=None, base=record.moment.digest if record.moment is not None else record.base or begun_from)


def stored(record: Record, moment: Moment, applied_revision: int) -> Record | None:
    """The record once what is saved of it is in the store; None when something else is saved by now, or nothing."""
    if record.observed is not Observed.SAVED or record.applied_revision != applied_revision or record.moment == moment:
        return None
    return seen(record, Observed.SAVED, reason=record.reason, detail=record.detail, moment=moment)


def exited(record: Record, *, reason: str, detail: str | None, restart: bool = False) -> Record | None:
    """The record of a placement whose guest has ended without being asked to; None when its end is under way already.

    `restart`: what is left is kept, and control, which hears that it is stopped, orders the next start.
    """
    after = ending(record, EndedBy.EXIT, reason=reason, detail=detail)
    if after is None:
        return None
    if restart and record.applied_revision > 0:
        # Not tried again by itself: what was desired has been, and the next start is another revision.
        after = replace(record, failed_revision=record.desired_revision)
    return seen(after, Observed.STOPPED, reason=reason, detail=detail, ready=False)


def is_claimed(record: Record) -> bool:
    """Whether its guest, which is ready for nobody, has yet to get what a create has brought for it."""
    blueprint = record.blueprint
    # What control has seen carried out is somebody's and in use, though this agent has lost its memory of that.
    return blueprint is not None and blueprint.claimed and not blueprint.begun and record.applied_revision < record.desired_revision


def restart_pause_s(record: Record) -> float:
    """How long to wait before a guest that has ended by itself is begun again: longer with each time. *Units*: seconds."""
    if record.observed is not Observed.STOPPED or record.applied_revision == 0:
        return 0.0
    return RESTART_PAUSES_S[min(record.desired_revision, len(RESTART_PAUSES_S) + 1) - 2]


def order_of(record: Record) -> Order:
    """What a driver needs for it. The record must have a blueprint."""
    assert record.blueprint is not None
    blueprint = record.blueprint
    return Order(
        placement_id=record.placement_id,
        sandbox_id=record.sandbox_id,
        generation=record.generation,
        spec=blueprint.spec,
        nonce=blueprint.nonce,
        guest_public_key=blueprint.guest_public_key,
        hostname=blueprint.hostname,
    )


def observation_of(record: Record) -> Observation:
    """The record as control hears of it: whole, so that a lost message is harmless."""
    moment = record.moment if record.observed is Observed.SAVED else None
    return Observation(
        placement_id=record.placement_id,
        sandbox_id=record.sandbox_id,
        generation=record.generation,
        seq=record.seq,
        observed=record.observed,
        applied_revision=record.applied_revision,
        ready=record.ready,
        address=record.address,
        failed_revision=record.failed_revision,
        reason=record.reason,
        detail=record.detail,
        guest_version=record.guest_version,
        save_mode=record.save_mode if record.observed is Observed.SAVED else None,
        unresponsive=record.unresponsive,
        moment=moment.digest if moment is not None else None,
        moment_size=moment.size if moment is not None else 0,
        moment_kind=moment.kind if moment is not None else "",
        end_revision=record.end.revision if record.end else 0,
        ended_by=record.ended_by,
    )
