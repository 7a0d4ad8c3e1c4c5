"""Pausing, suspending, resuming: how a sandbox comes to rest in its placement, and back (docs/adr/). Pure.

Theory of operation. Each way has a wish that goes to the agent, a state while it is under way, and an end that only the agent's word
brings: capacity is given back when the guest is *seen* frozen, saved or stopped, and taken again before the wish to go on is written.
A way that fails leads back to where it began, with a reason: what was ready goes on, and what was at rest stays at rest, so that a
client always has something that can be acted upon. Its end does not count while it is at rest: it lives on for `life_s` from when it is
ready again. The placement, and so the generation, stay the same through all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code
from atoll.base.records import replace
from atoll.domain import command as cmd
from atoll.domain import history as ev
from atoll.domain import placement as pl
from atoll.domain import sandbox as sb
from atoll.domain.command import Kind, Wish
from atoll.domain.placement import Grant, Holding, Observed, Placement, Report
from atoll.domain.sandbox import Condition, Event, Sandbox, State
from atoll.domain.spec import SaveMode
from atoll.planning import storing
from atoll.planning.stimuli import Facts, Note, Outcome, PauseRequested, ResumeRequested, SuspendRequested

MOVING: Final = frozenset({State.PAUSING, State.SUSPENDING, State.STOPPING, State.RESUMING})
AT_REST: Final = frozenset({State.PAUSED, State.SUSPENDED, State.STOPPED})


@dataclass(frozen=True, slots=True)
class _Way:
    """How a sandbox comes to rest."""

    wanted: Kind
    seen: Observed
    grant: Grant
    done: Event
    failed: Event
    noted: str
    note_failed: str
    late: Code
    why: Code


_PAUSE: Final = _Way(
    Kind.ENSURE_PAUSED, Observed.FROZEN, Grant.FROZEN, Event.PAUSE_SEEN, Event.PAUSE_FAILED,
    ev.SANDBOX_PAUSED, ev.SANDBOX_PAUSE_FAILED, Code.PAUSE_TIMEOUT, Code.PAUSE_FAILED,
)  # fmt: skip
_SUSPEND: Final = _Way(
    Kind.ENSURE_SUSPENDED, Observed.SAVED, Grant.SAVED, Event.SUSPEND_SEEN, Event.SAVE_FAILED,
    ev.SANDBOX_SUSPENDED, ev.SANDBOX_SAVE_FAILED, Code.SAVE_TIMEOUT, Code.SAVE_FAILED,
)  # fmt: skip
_STOP: Final = _Way(
    Kind.ENSURE_STOPPED, Observed.STOPPED, Grant.STOPPED, Event.STOP_SEEN, Event.STOP_FAILED,
    ev.SANDBOX_STOPPED, ev.SANDBOX_PAUSE_FAILED, Code.PAUSE_TIMEOUT, Code.PAUSE_FAILED,
)  # fmt: skip
_WAYS: Final[Mapping[State, _Way]] = {
    State.PAUSING: _PAUSE,
    State.PAUSED: _PAUSE,
    State.SUSPENDING: _SUSPEND,
    State.SUSPENDED: _SUSPEND,
    State.STOPPING: _STOP,
    State.STOPPED: _STOP,
}
_BY_ITSELF: Final[Mapping[Observed, _Way]] = {Observed.FROZEN: _PAUSE, Observed.SAVED: _SUSPEND}
_STILL: Final[Mapping[State, tuple[Event, Wish]]] = {
    State.PAUSED: (Event.FROZEN_STILL, Wish.PAUSE),
    State.SUSPENDED: (Event.SAVED_STILL, Wish.SUSPEND),
    State.STOPPED: (Event.STOPPED_STILL, Wish.STOP),
}
_NOT_HERE: Final = frozenset({Code.MOMENT_UNSUITABLE, Code.HOST_DISK_FULL, Code.IMAGE_UNAVAILABLE})
"""Why one that was to go on from the artifact store is not tried on the same host next."""
_OWN: Final = frozenset({Code.END_REACHED, Code.LEASE_EXPIRED})
"""Why an agent saves a sandbox without having been told to."""
_AGAIN: Final[Mapping[Holding, Grant]] = {
    Holding.PAUSED: Grant.THAWED,
    Holding.SAVED: Grant.RESTORED,
    Holding.STOPPED: Grant.RESTARTED,
}


def wakes_by_traffic(sandbox: Sandbox) -> bool:
    """Whether a request for one of its ports resumes it: where that was asked for, and its memory is there to go on from."""
    return sandbox.spec.auto_resume and sandbox.save_mode is not SaveMode.FILES


def sets_end_aside(sandbox: Sandbox) -> bool:
    """Whether its end does not count: it has one again when it is ready."""
    return sandbox.state in AT_REST or (sandbox.state is State.RESUMING and sandbox.rested is not None)


def asked(facts: Facts, stimulus: PauseRequested | SuspendRequested | ResumeRequested, now: float) -> Outcome | None:
    """Somebody wants it at rest, or back. None where it is so already, or cannot be from the state that it is in.

    For what goes on from rest its host must have room again: whoever asks has looked, in the same transaction.
    """
    match stimulus:
        case PauseRequested():
            return _to_rest(facts, Event.PAUSE, Wish.PAUSE, ev.SANDBOX_PAUSING, now, mode=None)
        case SuspendRequested():
            return _to_rest(facts, Event.SUSPEND, Wish.SUSPEND, ev.SANDBOX_SUSPENDING, now, mode=stimulus.mode, strict=stimulus.strict)
        case ResumeRequested():
            return _resumed(facts, stimulus, now)


def _wanted(placement: Placement, wish: Wish, reason: str) -> Placement:
    return replace(
        placement,
        desired=cmd.step(placement.desired, wish),
        desired_revision=placement.desired_revision + 1,
        desired_reason=reason,
    )


def _to_rest(
    facts: Facts, event: Event, wish: Wish, note: str, now: float, *, mode: SaveMode | None, strict: bool = False
) -> Outcome | None:
    sandbox, placement = facts.sandbox, facts.placement
    if placement is None or (sandbox.state, event) not in sb.MOVES or sandbox.state is State.RELEASING:
        return None
    limit_s = sandbox.spec.pause_s if mode is None else sandbox.spec.save_s
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, event),
        deadline_at=now + limit_s,
        reason=None,
        detail=None,
        save_mode=mode,
        unresponsive=False,
        moment=None,
    )
    if placement.holding is Holding.PAUSED:
        # It is thawed to be saved, and goes on where that fails.
        placement = pl.grant(placement, Grant.THAWED)
    reason = "asked" if mode is None else f"{mode}{' strict' if strict else ''}"
    said = {"mode": mode.value} if mode is not None else {}
    return Outcome(after, _wanted(placement, wish, reason), (Note(note, said),))


def _resumed(facts: Facts, stimulus: ResumeRequested, now: float) -> Outcome | None:
    sandbox, placement = facts.sandbox, facts.placement
    if sandbox.rests_in_store:
        return storing.resumed(facts, stimulus, now)
    if placement is None or sandbox.state not in AT_REST or placement.desired is Kind.ENSURE_ABSENT:
        return None
    spec = sandbox.spec
    if placement.holding in _AGAIN:
        placement = pl.grant(placement, _AGAIN[placement.holding])
    boot_s = 0.0 if sandbox.state is State.PAUSED else spec.image_s + spec.ready_s
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.RESUME),
        rested=sandbox.state,
        life_s=stimulus.life_s,
        save_mode=SaveMode.FILES if stimulus.reboot else sandbox.save_mode,
        deadline_at=now + spec.resume_s + boot_s,
        reason=None,
        detail=None,
    )
    wish = Wish.RESTART if sandbox.state is State.STOPPED else Wish.RESUME
    return Outcome(after, _wanted(placement, wish, storing.RESUMED), (Note(ev.SANDBOX_RESUMING, {"from": sandbox.state.value}),))


def heard(facts: Facts, placement: Placement, report: Report, ended_by: str | None, now: float) -> Outcome | None:
    """What the agent's word means for one that is on its way to rest, at rest or on its way back; None: nothing of that kind.

    `placement`: after the word.
    """
    sandbox = facts.sandbox
    if ended_by is None and placement.observed is Observed.STOPPED and sandbox.state in (State.PAUSING, State.PAUSED):
        return _stopped(sandbox, placement)
    own = _BY_ITSELF.get(placement.observed) if report.reason in _OWN else None
    if own is not None and sandbox.state is State.READY and placement.desired is Kind.ENSURE_RUNNING:
        return _rests_by_itself(sandbox, placement, report, own, now)
    if own is _SUSPEND and _has_run_unheard(sandbox, placement):
        return _rests_by_itself(sandbox, placement, report, own, now)
    if ended_by is None and sandbox.state in MOVING and _is_of_before(placement, report):
        return Outcome(sandbox, placement, ())
    if sandbox.state is State.RESUMING and sandbox.rested is not None and placement.desired is Kind.ENSURE_RUNNING:
        return _coming_back(sandbox, placement, report, ended_by, now)
    way = _WAYS.get(sandbox.state)
    if way is None or placement.desired is not way.wanted:
        return None
    if placement.observed is way.seen and placement.applied_revision >= placement.desired_revision:
        return _at_rest(sandbox, placement, way, report, now)
    if storing.has_nothing(facts, placement, report):
        return Outcome(sandbox, storing.ordered_away(placement, str(sandbox.reason or Code.RESUME_FAILED)), ())
    if ended_by is None and sandbox.state in MOVING and report.failed_revision >= placement.desired_revision:
        return _goes_on(sandbox, placement, way, str(report.reason or way.why), report.detail, now)
    return None


def _is_of_before(placement: Placement, report: Report) -> bool:
    """Whether this tells how an earlier wish failed: its agent goes on to the newer one, and tells of that."""
    return report.observed is Observed.ERROR and 0 < report.failed_revision < placement.desired_revision


def _has_run_unheard(sandbox: Sandbox, placement: Placement) -> bool:
    """Whether it was on its way back from a save, and so has been ready, and was saved anew, before anybody was told."""
    return sandbox.state is State.RESUMING and sandbox.rested is State.SUSPENDED and placement.desired is Kind.ENSURE_RUNNING


def _at_rest(sandbox: Sandbox, placement: Placement, way: _Way, report: Report, now: float) -> Outcome:
    if placement.holding is not pl.HOLDING_MOVES.get((Holding.ACTIVE, way.grant)):
        placement = pl.grant(placement, way.grant)
    notes: tuple[Note, ...] = ()
    if sandbox.state in MOVING:
        sandbox, notes = _resting(sandbox, way.done, report), (Note(way.noted, _said(report)),)
    if way is not _SUSPEND:
        return Outcome(sandbox, placement, notes)
    sandbox, more = storing.stored(sandbox, report, now=now)
    return Outcome(sandbox, placement, (*notes, *more))


def _resting(sandbox: Sandbox, event: Event, report: Report) -> Sandbox:
    return replace(
        sandbox,
        state=sb.step(sandbox.state, event),
        deadline_at=None,
        end_at=None,
        save_mode=SaveMode(report.save_mode) if report.save_mode is not None else sandbox.save_mode,
        unresponsive=report.unresponsive,
        moment=None,
        conditions=sandbox.conditions - {Condition.DEADLINE_MISSED},
        reason=None,
        detail=None,
    )


def _said(report: Report) -> dict[str, str | int | float | None]:
    return {"mode": report.save_mode} if report.save_mode is not None else {}


def _goes_on(sandbox: Sandbox, placement: Placement, way: _Way, reason: str, detail: str | None, now: float) -> Outcome:
    """It could not be brought to rest: it goes on, and nothing of it is lost."""
    wish = Wish.RESTART if way is _STOP else Wish.RESUME
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, way.failed),
        deadline_at=None,
        # Of one that came to rest after all, and too late, the agent has set the end aside.
        life_s=max(0.0, sandbox.end_at - now) if sandbox.end_at is not None else None,
        reason=reason,
        detail=detail,
    )
    return Outcome(after, _wanted(placement, wish, storing.RESUMED), (Note(way.note_failed, {"reason": reason, "detail": detail}),))


def _rests_by_itself(sandbox: Sandbox, placement: Placement, report: Report, way: _Way, now: float) -> Outcome:
    """At its end, or when its host's lease had run out, its agent has saved it, or frozen it where that failed, whether or not control
    could be asked.
    """
    placement = pl.grant(placement, way.grant) if placement.holding in (Holding.ACTIVE, Holding.RESERVED) else placement
    reason = str(report.reason or Code.END_REACHED)
    done = Event.SAVED_STILL if sandbox.state is State.RESUMING else way.done
    after = replace(_resting(sandbox, done, report), detail=report.detail)
    wish, notes = (Wish.SUSPEND if way is _SUSPEND else Wish.PAUSE), [Note(way.noted, {"reason": reason, **_said(report)})]
    if way is _SUSPEND:
        after, more = storing.stored(after, report, now=now)
        notes += more
    return Outcome(after, _wanted(placement, wish, reason), tuple(notes))


def _stopped(sandbox: Sandbox, placement: Placement) -> Outcome:
    """Its guest has ended while it was frozen, and what is left of its files is kept: it can be begun again, and is not by itself."""
    placement = pl.grant(placement, Grant.STOPPED)
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.GUEST_STOPPED),
        deadline_at=None,
        end_at=None,
        reason=placement.reason,
        detail=placement.detail,
    )
    wanted = _wanted(placement, Wish.STOP, str(placement.reason or Code.GUEST_EXITED))
    return Outcome(after, wanted, (Note(ev.SANDBOX_STOPPED, {"reason": placement.reason}),))


def _coming_back(sandbox: Sandbox, placement: Placement, report: Report, ended_by: str | None, now: float) -> Outcome | None:
    applied = placement.applied_revision >= placement.desired_revision
    if placement.observed is Observed.RUNNING and placement.holding is Holding.RESERVED:
        placement = pl.grant(placement, Grant.STARTED)
    if placement.observed is Observed.RUNNING and report.ready and applied:
        life_s = sandbox.life_s if sandbox.life_s is not None else float(sandbox.spec.timeout_s)
        after = replace(
            sandbox,
            state=sb.step(sandbox.state, Event.GUEST_READY),
            deadline_at=None,
            end_at=now + life_s,
            end_revision=sandbox.end_revision + 1,
            moment=None,
            saved_on=None,
            conditions=sandbox.conditions - {Condition.DEADLINE_MISSED, Condition.HOSTS_UNSETTLED},
            tried_hosts=(),
            reason=None,
            detail=None,
        )
        where = {"host_id": placement.host_id, "placement_id": placement.id}
        return Outcome(after, placement, (Note(ev.SANDBOX_RESUMED, where),))
    if ended_by is None and report.failed_revision >= placement.desired_revision:
        return stays(sandbox, placement, str(report.reason or Code.RESUME_FAILED), report.detail)
    return None


def stays(sandbox: Sandbox, placement: Placement, reason: str, detail: str | None) -> Outcome:
    """A resume has failed: it stays as it was. What it was given for that it holds until it is seen at rest again."""
    assert sandbox.rested is not None
    event, wish = _STILL[sandbox.rested]
    after = replace(sandbox, state=sb.step(sandbox.state, event), deadline_at=None, end_at=None, reason=reason, detail=detail)
    if placement.moment is not None and reason in _NOT_HERE:
        after = replace(after, tried_hosts=(*after.tried_hosts, placement.host_id))
    return Outcome(after, _wanted(placement, wish, reason), (Note(ev.SANDBOX_RESUME_FAILED, {"reason": reason, "detail": detail}),))


def late(facts: Facts, now: float) -> Outcome | None:
    """Its deadline has passed on the way. None: it is on none of these ways."""
    sandbox, placement = facts.sandbox, facts.placement
    if placement is None or placement.desired is Kind.ENSURE_ABSENT:
        return None
    missed = replace(sandbox, conditions=sandbox.conditions | {Condition.DEADLINE_MISSED})
    if sandbox.state is State.RESUMING and sandbox.rested is not None:
        return stays(missed, placement, str(Code.RESUME_TIMEOUT), f"it was seen {placement.observed} last")
    way = _WAYS.get(sandbox.state)
    if way is None or sandbox.state not in MOVING:
        return None
    return _goes_on(missed, placement, way, str(way.late), f"it was seen {placement.observed} last", now)
