"""Reconcile: the one place that decides how a sandbox changes state.

Theory of operation. A *stimulus* (an API call, an observation, an operator's word, a deadline) meets the *facts* (sandbox, its current
placement). `advance` gives what both look like afterwards, with the events to record, or None when nothing changes. The store commits
that `WHERE revision = read`. At most one move a call; `advance(facts, Tick())` gives the next one that follows by itself. Release wins
in every state. A clock frees nothing: capacity returns only with `GONE`, which only an absent observation or a fence brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from atoll.base.errors import Code
from atoll.domain import history as ev
from atoll.domain import placement as pl
from atoll.domain import sandbox as sb
from atoll.domain.command import Kind
from atoll.domain.placement import Grant, Holding, Observed, Placement, Report
from atoll.domain.sandbox import Condition, Event, Sandbox, State

ATTEMPTS_MAX: Final = 3
"""Placements of one sandbox that may fail before it does."""
BACKOFF_S: Final = (0.25, 0.5, 1.0, 2.0, 5.0)
END_GRACE_S: Final = 0.5
"""A start quicker than this keeps the end that was counted from its placing."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known, read in the transaction that commits the answer."""

    sandbox: Sandbox
    placement: Placement | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing new but time: look whether a deadline has passed."""


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """Somebody wants it gone. `failing`: its end counts as a failure."""

    reason: str = Code.RELEASE_REQUESTED
    failing: bool = False
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A host's record has granted this placement."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class HostRefused:
    """A host's record has refused."""

    host_id: str
    code: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Every candidate has refused, or there was none."""

    detail: str


@dataclass(frozen=True, slots=True)
class Heard:
    """The agent has said something about the current placement."""

    report: Report
    ended_by: str | None = None


@dataclass(frozen=True, slots=True)
class EndMoved:
    """Its end is another. *Units*: wall seconds."""

    end_at: float


@dataclass(frozen=True, slots=True)
class Fenced:
    """Its host is fenced and the last lease has run out: what it held is gone."""


@dataclass(frozen=True, slots=True)
class HostHeard:
    """Whether its host is heard of. A word about the host, not about the sandbox: it frees nothing and ends nothing."""

    lost: bool


Stimulus = Tick | ReleaseRequested | Placed | HostRefused | NoRoom | Heard | EndMoved | Fenced | HostHeard


@dataclass(frozen=True, slots=True)
class Note:
    """An event to record in the same commit."""

    type: str
    data: Mapping[str, str | int | float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What sandbox and placement are afterwards. A `placement` that is new is one that `Placed` brought."""

    sandbox: Sandbox
    placement: Placement | None
    notes: tuple[Note, ...]


def advance(facts: Facts, stimulus: Stimulus, *, now: float) -> Outcome | None:
    """One move, or None when nothing changes.

    *Idempotency*: a stimulus that was applied before gives None. *Errors*: domain.machine.IllegalMove for a fault of the caller.
    """
    if facts.sandbox.state in sb.TERMINAL:
        return None
    match stimulus:
        case Heard():
            return _heard(facts, stimulus, now)
        case ReleaseRequested():
            return _release(facts, stimulus, now)
        case Placed():
            return _placed(facts, stimulus, now)
        case HostRefused():
            return _refused(facts, stimulus, now)
        case NoRoom():
            return _no_room(facts, stimulus, now)
        case EndMoved() | HostHeard():
            return _noted(facts, stimulus)
        case Fenced():
            return _gone(facts, facts.placement, None, now)
        case Tick():
            return _tick(facts, now)


def wants_placing(sandbox: Sandbox, *, now: float) -> bool:
    """Whether a host should be looked for now."""
    if sandbox.state is State.RESERVING:
        return True
    return sandbox.state is State.PENDING and (sandbox.deadline_at is None or sandbox.deadline_at <= now)


def may_replace(sandbox: Sandbox) -> bool:
    """Automatic replacement: only while the guest never reported ready, no bootstrap payload was exposed, and attempts are left."""
    return sandbox.started_at is None and not sandbox.bootstrap_exposed and sandbox.attempts < ATTEMPTS_MAX


def _placed(facts: Facts, stimulus: Placed, now: float) -> Outcome | None:
    sandbox = facts.sandbox
    if sandbox.state not in (State.PENDING, State.RESERVING):
        return None
    spec = sandbox.spec
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.PLACED),
        host_id=stimulus.placement.host_id,
        placement_id=stimulus.placement.id,
        attempts=sandbox.attempts + 1,
        deadline_at=now + spec.image_s + spec.guest_ready_s,
        end_at=now + spec.guest_ready_s + spec.timeout_s,
        end_revision=sandbox.end_revision + 1,
        conditions=sandbox.conditions - {Condition.NO_ELIGIBLE_HOST},
    )
    note = Note(ev.SANDBOX_PLACED, {"host_id": stimulus.placement.host_id, "placement_id": stimulus.placement.id})
    return Outcome(after, stimulus.placement, (note,))


def _refused(facts: Facts, stimulus: HostRefused, now: float) -> Outcome | None:
    sandbox = facts.sandbox
    if sandbox.state not in (State.PENDING, State.RESERVING):
        return None
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.HOST_REFUSED),
        tried_hosts=(*sandbox.tried_hosts, stimulus.host_id),
        deadline_at=now + sandbox.spec.reserve_s,
    )
    return Outcome(after, facts.placement, (Note(ev.SANDBOX_HOST_REFUSED, {"host_id": stimulus.host_id, "code": stimulus.code}),))


def _no_room(facts: Facts, stimulus: NoRoom, now: float) -> Outcome | None:
    sandbox = facts.sandbox
    if sandbox.state not in (State.PENDING, State.RESERVING):
        return None
    if now >= sandbox.created_at + sandbox.spec.no_capacity_s:
        return _release(facts, ReleaseRequested(Code.NO_CAPACITY, failing=True, detail=stimulus.detail), now)
    # The pause grows with the sandbox's age, so that it needs no counter of its own.
    pause_s = next((b for b in BACKOFF_S if now - sandbox.created_at < 4 * b), BACKOFF_S[-1])
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.NO_ROOM),
        tried_hosts=(),
        deadline_at=min(now + pause_s, sandbox.created_at + sandbox.spec.no_capacity_s),
        conditions=sandbox.conditions | {Condition.NO_ELIGIBLE_HOST},
        detail=stimulus.detail,
    )
    first = Condition.NO_ELIGIBLE_HOST not in sandbox.conditions
    return Outcome(after, facts.placement, (Note(ev.SANDBOX_NO_ELIGIBLE_HOST, {"detail": stimulus.detail}),) if first else ())


def _release(facts: Facts, stimulus: ReleaseRequested, now: float) -> Outcome | None:
    sandbox, placement = facts.sandbox, facts.placement
    if sandbox.state is State.RELEASING:
        return None
    sandbox = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.RELEASE),
        reason=str(stimulus.reason),
        detail=stimulus.detail,
        failing=stimulus.failing,
        release_requested_at=now,
        deadline_at=now + sandbox.spec.release_s,
    )
    note = Note(ev.SANDBOX_RELEASING, {"reason": str(stimulus.reason), "detail": stimulus.detail})
    if placement is None or placement.holding is Holding.NONE:
        return _confirmed(sandbox, placement, (note,), now)
    return Outcome(sandbox, _ordered_away(placement, str(stimulus.reason)), (note,))


def _ordered_away(placement: Placement, reason: str) -> Placement:
    if placement.desired is Kind.ENSURE_ABSENT:
        return placement
    return replace(
        pl.grant(placement, Grant.ENDING),
        desired=Kind.ENSURE_ABSENT,
        desired_revision=placement.desired_revision + 1,
        desired_reason=reason,
    )


def _confirmed(sandbox: Sandbox, placement: Placement | None, notes: tuple[Note, ...], now: float) -> Outcome:
    event = Event.FAILURE_CONFIRMED if sandbox.failing else Event.ABSENCE_CONFIRMED
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, event),
        released_at=now,
        deadline_at=None,
        conditions=frozenset(),
    )
    kind = ev.SANDBOX_FAILED if sandbox.failing else ev.SANDBOX_RELEASED
    return Outcome(after, placement, (*notes, Note(kind, {"reason": sandbox.reason})))


def _gone(facts: Facts, placement: Placement | None, heard: Heard | None, now: float) -> Outcome | None:
    """The placement is seen absent, or fenced: give its capacity back, and decide what that means for the sandbox."""
    if placement is None or placement.holding is Holding.NONE:
        return None
    sandbox = facts.sandbox
    if heard is None:
        # Fenced, not seen: should its host come back, whatever it still has must go.
        placement = _ordered_away(placement, str(Code.PLACEMENT_LOST))
    placement = replace(pl.grant(placement, Grant.GONE), observed=Observed.ABSENT, ready=False, gone_at=now)
    gone = Note(ev.PLACEMENT_GONE, {"placement_id": placement.id, "host_id": placement.host_id})
    if sandbox.state is State.RELEASING:
        return _confirmed(sandbox, placement, (gone,), now)
    reason = (heard.report.reason if heard else None) or Code.PLACEMENT_LOST
    if sandbox.state is State.PROVISIONING and may_replace(sandbox) and not (heard and heard.ended_by in ("end_at", "lease")):
        after = replace(
            sandbox,
            state=sb.step(sandbox.state, Event.REPLACED),
            generation=sandbox.generation + 1,
            placement_id=None,
            host_id=None,
            tried_hosts=(),
            deadline_at=now + BACKOFF_S[0],
            detail=heard.report.detail if heard else None,
        )
        return Outcome(after, placement, (gone, Note(ev.SANDBOX_REPLACED, {"reason": str(reason)})))
    ended = heard.ended_by if heard else None
    releasing = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.RELEASE),
        reason=str(reason),
        detail=heard.report.detail if heard else None,
        # A guest that ends by itself before it ever answered was no success, whatever its exit says.
        failing=ended != "end_at" and (ended != "exit" or sandbox.started_at is None),
        release_requested_at=now,
    )
    return _confirmed(releasing, placement, (gone,), now)


def _heard(facts: Facts, heard: Heard, now: float) -> Outcome | None:
    sandbox, placement = facts.sandbox, facts.placement
    if placement is None or placement.holding is Holding.NONE:
        return None
    seen = pl.observe(placement, heard.report)
    if isinstance(seen, pl.Stale):
        return None
    match seen.observed:
        case Observed.ABSENT:
            return _gone(facts, seen, heard, now)
        case Observed.RUNNING if heard.report.ready:
            return _running(sandbox, seen, now)
        case Observed.ERROR:
            return _erred(facts, seen, now)
        case _:
            return Outcome(sandbox, seen, ())


def _running(sandbox: Sandbox, placement: Placement, now: float) -> Outcome:
    if placement.holding in (Holding.RESERVED, Holding.ACTIVE):
        placement = pl.grant(placement, Grant.STARTED)
    if sandbox.state is not State.PROVISIONING or placement.desired is not Kind.ENSURE_RUNNING:
        return Outcome(sandbox, placement, ())
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.GUEST_READY),
        started_at=sandbox.started_at or now,
        deadline_at=None,
        end_at=now + sandbox.spec.timeout_s,
        end_revision=sandbox.end_revision + 1,
        detail=None,
    )
    return Outcome(after, placement, (Note(ev.SANDBOX_READY, {"host_id": placement.host_id, "placement_id": placement.id}),))


def _erred(facts: Facts, placement: Placement, now: float) -> Outcome:
    sandbox = facts.sandbox
    reason = placement.reason or Code.START_FAILED
    note = Note(ev.PLACEMENT_ERROR, {"placement_id": placement.id, "reason": str(reason), "detail": placement.detail})
    if sandbox.state is State.RELEASING:
        waiting = replace(sandbox, conditions=sandbox.conditions | {Condition.CLEANUP_PENDING}, detail=placement.detail)
        return Outcome(waiting, placement, (note,) if Condition.CLEANUP_PENDING not in sandbox.conditions else ())
    if sandbox.state is State.PROVISIONING and may_replace(sandbox):
        # Absence first: the next generation starts only when this one is seen gone.
        return Outcome(sandbox, _ordered_away(placement, str(reason)), (note,))
    released = _release(Facts(sandbox, placement), ReleaseRequested(str(reason), failing=True, detail=placement.detail), now)
    assert released is not None
    return replace(released, notes=(note, *released.notes))


def _noted(facts: Facts, stimulus: EndMoved | HostHeard) -> Outcome | None:
    """What changes no state."""
    return _end_moved(facts, stimulus) if isinstance(stimulus, EndMoved) else _host_heard(facts, stimulus)


def _end_moved(facts: Facts, stimulus: EndMoved) -> Outcome | None:
    sandbox = facts.sandbox
    if sandbox.state is State.RELEASING or sandbox.end_at == stimulus.end_at:
        return None
    after = replace(sandbox, end_at=stimulus.end_at, end_revision=sandbox.end_revision + 1)
    return Outcome(after, facts.placement, (Note(ev.SANDBOX_END_MOVED, {"end_at": stimulus.end_at}),))


def _host_heard(facts: Facts, stimulus: HostHeard) -> Outcome | None:
    sandbox = facts.sandbox
    if facts.placement is None or (Condition.UNREACHABLE in sandbox.conditions) is stimulus.lost:
        return None
    conditions = sandbox.conditions | {Condition.UNREACHABLE} if stimulus.lost else sandbox.conditions - {Condition.UNREACHABLE}
    note = Note(ev.SANDBOX_UNREACHABLE if stimulus.lost else ev.SANDBOX_REACHABLE, {"host_id": facts.placement.host_id})
    return Outcome(replace(sandbox, conditions=conditions), facts.placement, (note,))


def _tick(facts: Facts, now: float) -> Outcome | None:
    sandbox = facts.sandbox
    if sandbox.deadline_at is None or now < sandbox.deadline_at:
        return None
    match sandbox.state:
        case State.PROVISIONING:
            return _release(facts, ReleaseRequested(Code.GUEST_BOOT_TIMEOUT, failing=True), now)
        case State.RELEASING:
            # Frees nothing: it says aloud that the cleanup is late, and looks again.
            first = Condition.CLEANUP_PENDING not in sandbox.conditions
            after = replace(
                sandbox,
                conditions=sandbox.conditions | {Condition.CLEANUP_PENDING},
                deadline_at=now + sandbox.spec.release_s,
            )
            return Outcome(after, facts.placement, (Note(ev.SANDBOX_CLEANUP_PENDING),) if first else ())
        case _:
            return None
