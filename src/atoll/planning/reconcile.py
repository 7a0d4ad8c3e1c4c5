"""Reconcile: the one place that decides how a sandbox changes state.

Theory of operation. A *stimulus* (an API call, an observation, an operator's word, a deadline) meets the *facts* (sandbox, its current
placement). `advance` gives what both look like afterwards, with the events to record, or None when nothing changes. The store commits
that `WHERE revision = read`. At most one move a call; `advance(facts, Tick())` gives the next one that follows by itself. Release wins
in every state. A clock frees nothing: capacity returns only with `GONE`, which only an absent observation or a fence brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from atoll.base.errors import Code
from atoll.base.records import replace
from atoll.domain import history as ev
from atoll.domain import placement as pl
from atoll.domain import sandbox as sb
from atoll.domain.command import Kind
from atoll.domain.placement import Grant, Holding, Observed, Placement, Report
from atoll.domain.sandbox import Condition, Event, Sandbox, State
from atoll.planning import claiming, pausing, replacing, restarting, restoring, storing
from atoll.planning.stimuli import (
    BootstrapExposed,
    Claimed,
    CopyUnwanted,
    EndMoved,
    Facts,
    Fenced,
    Heard,
    HostHeard,
    HostRefused,
    NoRoom,
    Note,
    Outcome,
    PauseRequested,
    Placed,
    ReleaseRequested,
    ReplacementAuthorized,
    ResumeRequested,
    Stimulus,
    SuspendRequested,
    Tick,
)

_ordered_away = storing.ordered_away
BACKOFF_S: Final = (0.25, 0.5, 1.0, 2.0, 5.0)
ENDS: Final[Mapping[str | None, Code]] = {
    "end_at": Code.END_REACHED,
    "lease": Code.LEASE_EXPIRED,
    "exit": Code.GUEST_EXITED,
    "fence": Code.CREDENTIAL_REVOKED,
}
"""Ends that an agent makes by itself, and why."""
END_GRACE_S: Final = 0.5
"""A start quicker than this keeps the end that was counted from its placing."""


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
        case PauseRequested() | SuspendRequested() | ResumeRequested():
            return pausing.asked(facts, stimulus, now)
        case Fenced():
            return _fenced(facts, stimulus, now)
        case Tick():
            return _tick(facts, now)
        case _:
            return _noted(facts, stimulus, now)


def wants_placing(sandbox: Sandbox, *, now: float) -> bool:
    """Whether a host should be looked for now."""
    if sandbox.state is State.RESERVING:
        return True
    if sandbox.state is not State.PENDING or Condition.REPLACEMENT_BLOCKED in sandbox.conditions:
        return False
    return sandbox.deadline_at is None or sandbox.deadline_at <= now


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
        deadline_at=now + spec.image_s + spec.ready_s + spec.bootstrap_s,
        end_at=now + spec.ready_s + spec.timeout_s,
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
    if not wants_placing(sandbox, now=now):
        # Somebody else has looked meanwhile, and has said when to look again.
        return None
    since = sandbox.since
    if now >= since + sandbox.spec.no_capacity_s:
        return _release(facts, ReleaseRequested(Code.NO_CAPACITY, failing=True, detail=stimulus.detail), now)
    # The pause grows with how long it has waited, so that it needs no counter of its own.
    pause_s = next((b for b in BACKOFF_S if now - since < 4 * b), BACKOFF_S[-1])
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.NO_ROOM),
        tried_hosts=(),
        deadline_at=min(now + pause_s, since + sandbox.spec.no_capacity_s),
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
        return _ended(sandbox, placement, (note,), now)
    return Outcome(sandbox, _ordered_away(placement, str(stimulus.reason)), (note,))


def _ended(sandbox: Sandbox, placement: Placement | None, notes: tuple[Note, ...], now: float) -> Outcome:
    """Nothing of its present generation is left: its end, unless something of an earlier one may be."""
    if sandbox.unseen == 0:
        return _confirmed(sandbox, placement, notes, now)
    waiting = replace(
        sandbox,
        conditions=sandbox.conditions - {Condition.UNREACHABLE, Condition.REPLACEMENT_BLOCKED} | {Condition.CLEANUP_PENDING},
        deadline_at=now + sandbox.spec.release_s,
    )
    return Outcome(waiting, placement, (*notes, Note(ev.SANDBOX_CLEANUP_PENDING, {"placements": sandbox.unseen})))


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


def _fenced(facts: Facts, stimulus: Fenced, now: float) -> Outcome | None:
    if stimulus.placement_id is None or _is(facts.placement, stimulus.placement_id):
        return _gone(facts, facts.placement, None, now)
    older = next((one for one in facts.older if one.id == stimulus.placement_id), None)
    return None if older is None else _older_gone(facts, _ordered_away(older, str(Code.PLACEMENT_LOST)), now)


def _is(placement: Placement | None, placement_id: str) -> bool:
    return placement is not None and placement.id == placement_id


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
        return _ended(sandbox, placement, (gone,), now)
    reason = str((heard.report.reason if heard else None) or Code.PLACEMENT_LOST)
    detail = heard.report.detail if heard else storing.why_lost(sandbox)
    ended = heard.ended_by if heard else None
    # A guest that went with its host has ended, too, but not by itself: that is a loss.
    by_itself = None if heard is not None and ended == "exit" and heard.report.reason == Code.PLACEMENT_LOST else ended
    rests = storing.gone(sandbox, placement, by_itself=by_itself) or restoring.rested_since(sandbox, placement, by_itself=by_itself)
    if rests is not None:
        left = Note(ev.SANDBOX_HOST_LEFT, {"host_id": placement.host_id, "placement_id": placement.id})
        return Outcome(rests, placement, (gone, left))
    replaced = replacing.after_loss(sandbox, ended=by_itself, fenced=heard is None, detail=detail, now=now)
    if replaced is not None:
        return Outcome(replaced, placement, (gone, *_replacement_notes(replaced, reason)))
    releasing = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.RELEASE),
        reason=reason,
        detail=detail,
        failing=_fails(sandbox, ended),
        release_requested_at=now,
    )
    return _ended(releasing, placement, (gone,), now)


def _replacement_notes(after: Sandbox, reason: str) -> tuple[Note, ...]:
    replaced = Note(ev.SANDBOX_REPLACED, {"reason": reason})
    blocked = Condition.REPLACEMENT_BLOCKED in after.conditions
    return (replaced, Note(ev.SANDBOX_REPLACEMENT_BLOCKED, {"reason": reason})) if blocked else (replaced,)


def _older_heard(facts: Facts, older: Placement, report: Report, now: float) -> Outcome | None:
    """Word of an earlier placement: it changes nothing of the sandbox but its end, which waits for it."""
    seen = pl.observe(older, report)
    if isinstance(seen, pl.Stale):
        return None
    if seen.observed is Observed.ABSENT:
        return _older_gone(facts, seen, now)
    return Outcome(facts.sandbox, facts.placement, (), (seen,))


def _older_gone(facts: Facts, older: Placement, now: float) -> Outcome:
    older = replace(pl.grant(older, Grant.GONE), observed=Observed.ABSENT, ready=False, gone_at=now)
    gone = Note(ev.PLACEMENT_GONE, {"placement_id": older.id, "host_id": older.host_id})
    sandbox = replace(facts.sandbox, unseen=max(0, facts.sandbox.unseen - 1))
    nowhere = facts.placement is None or facts.placement.holding is Holding.NONE
    if sandbox.state is State.RELEASING and nowhere and sandbox.unseen == 0:
        return replace(_confirmed(sandbox, facts.placement, (gone,), now), older=(older,))
    return Outcome(sandbox, facts.placement, (gone,), (older,))


def _heard(facts: Facts, heard: Heard, now: float) -> Outcome | None:
    sandbox, placement = facts.sandbox, facts.placement
    if heard.placement_id is not None and not _is(placement, heard.placement_id):
        older = next((one for one in facts.older if one.id == heard.placement_id), None)
        return None if older is None else _older_heard(facts, older, heard.report, now)
    if placement is None or placement.holding is Holding.NONE:
        return None
    seen = pl.observe(placement, heard.report)
    if isinstance(seen, pl.Stale):
        return None
    if seen.observed is Observed.ABSENT:
        return _gone(facts, seen, heard, now)
    if (moved := pausing.heard(facts, seen, heard.report, heard.ended_by, now)) is not None:
        return moved
    match seen.observed:
        case Observed.RUNNING if heard.report.ready:
            return _running(sandbox, seen, now)
        case Observed.ERROR:
            return _erred(facts, seen, heard.ended_by, now)
        case Observed.STOPPED if heard.ended_by is None and restarting.is_for(sandbox):
            return _stopped(facts, seen, now)
        case Observed.STARTING | Observed.RUNNING:
            return Outcome(_booting(sandbox, seen, now), seen, ())
        case _:
            return Outcome(sandbox, seen, ())


def _booting(sandbox: Sandbox, placement: Placement, now: float) -> Sandbox:
    """The image is there and the guest is coming: from now on it has only its own time. A deadline is never moved away."""
    if sandbox.state is not State.PROVISIONING or placement.desired is not Kind.ENSURE_RUNNING or sandbox.deadline_at is None:
        return sandbox
    spec = sandbox.spec
    nearer = min(sandbox.deadline_at, now + spec.ready_s + spec.bootstrap_s)
    return sandbox if nearer == sandbox.deadline_at else replace(sandbox, deadline_at=nearer)


def _running(sandbox: Sandbox, placement: Placement, now: float) -> Outcome:
    if placement.holding in (Holding.RESERVED, Holding.ACTIVE):
        placement = pl.grant(placement, Grant.STARTED)
    if placement.desired is not Kind.ENSURE_RUNNING or placement.applied_revision < placement.desired_revision:
        return Outcome(sandbox, placement, ())
    if sandbox.state is State.RESUMING:
        # Back where it was: with the end that it had.
        after = replace(sandbox, state=sb.step(sandbox.state, Event.GUEST_READY), deadline_at=None, detail=None)
        return Outcome(after, placement, (Note(ev.SANDBOX_READY, {"host_id": placement.host_id, "placement_id": placement.id}),))
    if sandbox.state is not State.PROVISIONING:
        return Outcome(sandbox, placement, ())
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.GUEST_READY),
        started_at=sandbox.started_at or now,
        deadline_at=None,
        end_at=now + sandbox.spec.timeout_s,
        end_revision=sandbox.end_revision + 1,
        conditions=sandbox.conditions - {Condition.DEADLINE_MISSED},
        detail=None,
    )
    said = {"host_id": placement.host_id, "placement_id": placement.id}
    if placement.reason is not None:
        # It is ready all the same: with something less than there was to begin with.
        said |= {"reason": placement.reason, "detail": placement.detail or ""}
    return Outcome(after, placement, (Note(ev.SANDBOX_READY, said),))


def _stopped(facts: Facts, placement: Placement, now: float) -> Outcome | None:
    """A guest that is to be begun again has ended by itself, and its agent has kept what is left of it."""
    if restarting.begins_again(facts.sandbox, placement):
        return _restarting(facts.sandbox, placement, now)
    if placement.desired is not Kind.ENSURE_RUNNING:
        return Outcome(facts.sandbox, placement, ())
    reason = str(placement.reason or Code.GUEST_EXITED)
    return _release(Facts(facts.sandbox, placement), ReleaseRequested(reason, failing=True, detail=placement.detail), now)


def _restarting(sandbox: Sandbox, placement: Placement, now: float) -> Outcome:
    after, again = restarting.ordered_again(sandbox, placement, now=now)
    note = Note(ev.SANDBOX_RESTARTING, {"placement_id": placement.id, "reason": again.desired_reason})
    return Outcome(after, again, (note,))


def _erred(facts: Facts, placement: Placement, ended_by: str | None, now: float) -> Outcome:
    sandbox = facts.sandbox
    reason = placement.reason or Code.START_FAILED
    note = Note(ev.PLACEMENT_ERROR, {"placement_id": placement.id, "reason": str(reason), "detail": placement.detail})
    if sandbox.state is State.RELEASING:
        waiting = replace(sandbox, conditions=sandbox.conditions | {Condition.CLEANUP_PENDING}, detail=placement.detail)
        return Outcome(waiting, placement, (note,) if Condition.CLEANUP_PENDING not in sandbox.conditions else ())
    if sandbox.state is State.RESUMING and restarting.begins_again(sandbox, placement):
        again = _restarting(sandbox, placement, now)
        return replace(again, notes=(note, *again.notes))
    if sandbox.state is State.PROVISIONING and replacing.begins_anew(sandbox, reason):
        return _away_first(sandbox, placement, str(reason), (note,), now)
    if ended_by in ENDS:
        # Its agent is ending it already and cannot clean up: that it does not go away is not why it ends.
        request = ReleaseRequested(ENDS[ended_by], failing=_fails(sandbox, ended_by), detail=placement.detail)
        sandbox = replace(sandbox, conditions=sandbox.conditions | {Condition.CLEANUP_PENDING})
    else:
        request = ReleaseRequested(str(reason), failing=True, detail=placement.detail)
    released = _release(Facts(sandbox, placement), request, now)
    assert released is not None
    return replace(released, notes=(note, *released.notes))


def _fails(sandbox: Sandbox, ended_by: str | None) -> bool:
    """Whether an end that nobody asked for counts as a failure.

    A guest that ends by itself before it ever answered was no success, whatever its exit says.
    """
    if ended_by == "command":
        # Ordered by a control that was taken back to a backup since.
        return False
    return ended_by != "end_at" and (ended_by != "exit" or sandbox.started_at is None)


def _away_first(sandbox: Sandbox, placement: Placement, reason: str, notes: tuple[Note, ...], now: float) -> Outcome:
    """Absence first: the next generation starts only when this one is seen gone."""
    away = _ordered_away(placement, reason)
    waiting = replacing.with_block(replace(sandbox, deadline_at=now + sandbox.spec.release_s), away)
    return Outcome(waiting, away, notes)


def _noted(
    facts: Facts, stimulus: Claimed | EndMoved | HostHeard | ReplacementAuthorized | BootstrapExposed | CopyUnwanted, now: float
) -> Outcome | None:
    """Words from outside that neither host nor guest has said."""
    match stimulus:
        case CopyUnwanted():
            return storing.left(facts)
        case Claimed():
            return claiming.claimed(facts, stimulus, now)
        case EndMoved():
            return _end_moved(facts, stimulus)
        case HostHeard():
            return _host_heard(facts, stimulus)
        case ReplacementAuthorized():
            return _authorized(facts, stimulus, now)
        case BootstrapExposed():
            return _exposed(facts, stimulus)


def _exposed(facts: Facts, stimulus: BootstrapExposed) -> Outcome | None:
    sandbox = facts.sandbox
    if sandbox.bootstrap_exposed or not _is(facts.placement, stimulus.placement_id):
        return None
    note = Note(ev.SANDBOX_BOOTSTRAP_EXPOSED, {"placement_id": stimulus.placement_id})
    return Outcome(replace(sandbox, bootstrap_exposed=True), facts.placement, (note,))


def _authorized(facts: Facts, stimulus: ReplacementAuthorized, now: float) -> Outcome | None:
    """Begin the next generation without having seen the old one gone. None where nothing is blocked, or another generation is meant."""
    sandbox, placement = facts.sandbox, facts.placement
    if Condition.REPLACEMENT_BLOCKED not in sandbox.conditions:
        return None
    word = Note(
        ev.SANDBOX_REPLACEMENT_AUTHORIZED, {"client_id": stimulus.by, "statement": stimulus.statement, "generation": stimulus.generation}
    )
    if sandbox.state is State.PENDING:
        if stimulus.generation != sandbox.generation - 1:
            return None
        conditions = sandbox.conditions - {Condition.REPLACEMENT_BLOCKED}
        return Outcome(replace(sandbox, conditions=conditions, waiting_since=now, deadline_at=now), placement, (word,))
    if placement is None or stimulus.generation != sandbox.generation:
        return None
    away = _ordered_away(placement, str(Code.PLACEMENT_LOST))
    after = replacing.next_generation(sandbox, now=now, detail=None)
    replaced = Note(ev.SANDBOX_REPLACED, {"reason": str(Code.PLACEMENT_LOST)})
    return Outcome(replace(after, unseen=after.unseen + 1), None, (word, replaced), (away,))


def _end_moved(facts: Facts, stimulus: EndMoved) -> Outcome | None:
    sandbox = facts.sandbox
    if sandbox.state is State.RELEASING or sandbox.end_at == stimulus.end_at or pausing.sets_end_aside(sandbox):
        return None
    after = replace(sandbox, end_at=stimulus.end_at, end_revision=sandbox.end_revision + 1)
    return Outcome(after, facts.placement, (Note(ev.SANDBOX_END_MOVED, {"end_at": stimulus.end_at}),))


def _host_heard(facts: Facts, stimulus: HostHeard) -> Outcome | None:
    sandbox, placement = facts.sandbox, facts.placement
    if placement is None or (Condition.UNREACHABLE in sandbox.conditions) is stimulus.lost:
        return None
    if stimulus.host_id not in (None, placement.host_id):
        return None  # of a host where an earlier placement is
    if stimulus.lost and (rests := storing.left(facts)) is not None:
        # It does not need that host.
        return rests
    conditions = sandbox.conditions | {Condition.UNREACHABLE} if stimulus.lost else sandbox.conditions - {Condition.UNREACHABLE}
    after = replacing.with_block(replace(sandbox, conditions=conditions), placement)
    notes = [Note(ev.SANDBOX_UNREACHABLE if stimulus.lost else ev.SANDBOX_REACHABLE, {"host_id": placement.host_id})]
    if Condition.REPLACEMENT_BLOCKED in after.conditions - sandbox.conditions:
        notes.append(Note(ev.SANDBOX_REPLACEMENT_BLOCKED, {"host_id": placement.host_id}))
    return Outcome(after, placement, tuple(notes))


def _tick(facts: Facts, now: float) -> Outcome | None:
    sandbox = facts.sandbox
    if sandbox.deadline_at is None or now < sandbox.deadline_at:
        return None
    match sandbox.state:
        case State.PROVISIONING | State.RESUMING | State.PAUSING | State.SUSPENDING | State.STOPPING:
            return _late(facts, now)
        case State.RELEASING:
            return _still_there(facts, now)
        case State.SUSPENDED:
            return storing.late(facts, now=now)
        case State.PENDING if Condition.REPLACEMENT_BLOCKED in sandbox.conditions:
            # No agent has it, so nobody else would end it.
            return _release(facts, ReleaseRequested(Code.END_REACHED), now)
        case _:
            return None


def _late(facts: Facts, now: float) -> Outcome | None:
    """The guest should have answered, or what was ordered away should be gone. Frees nothing."""
    sandbox, placement = facts.sandbox, facts.placement
    if placement is not None and placement.desired is Kind.ENSURE_ABSENT:
        return _still_there(facts, now)
    if (moved := pausing.late(facts, now)) is not None:
        return moved
    seen = placement.observed if placement is not None else Observed.UNKNOWN
    reason, detail = replacing.why_late(placement)
    missed = Note(ev.SANDBOX_DEADLINE_MISSED, {"state": sandbox.state.value, "observed": seen.value, "reason": reason})
    late = replace(sandbox, conditions=sandbox.conditions | {Condition.DEADLINE_MISSED})
    if placement is not None and sandbox.state is State.PROVISIONING and replacing.begins_anew(sandbox, reason):
        return _away_first(late, placement, reason, (missed,), now)
    released = _release(replace(facts, sandbox=late), ReleaseRequested(reason, failing=True, detail=detail), now)
    assert released is not None
    return replace(released, notes=(missed, *released.notes))


def _still_there(facts: Facts, now: float) -> Outcome:
    """Say aloud that the cleanup is late, and look again."""
    sandbox = facts.sandbox
    first = Condition.CLEANUP_PENDING not in sandbox.conditions
    after = replace(
        sandbox,
        conditions=sandbox.conditions | {Condition.CLEANUP_PENDING},
        deadline_at=now + sandbox.spec.release_s,
    )
    return Outcome(after, facts.placement, (Note(ev.SANDBOX_CLEANUP_PENDING),) if first else ())
