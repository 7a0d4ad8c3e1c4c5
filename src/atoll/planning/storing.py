"""Storing: how a suspended sandbox comes to rest in the artifact store, on no host, and back on whichever fits (docs/adr/0034). Pure.

Theory of operation. A host says that what it has saved is in the store; from then on the sandbox needs it no more. For a while its copy stays, so
that a resume is quick; then it is ordered away, and the sandbox has no placement: what was its placement is an earlier one that holds its disk until it
is *seen* gone, and never runs again, since nothing is wanted of it but that. A resume takes capacity of a host as a create does, and is the next
generation, which goes on from the moment. The moment is the past once a guest of it has been seen ready: no way leads back to it from there.
Until then a resume that fails leads back to it, but for two things that a host may have made of it meanwhile: a guest that ran to its end, and a
newer save. So a host whose resume was late is first asked to save what it has, and what it has not is only then ordered away.
"""

from __future__ import annotations

from typing import Final

from atoll.base.errors import Code
from atoll.base.records import replace
from atoll.domain import command as cmd
from atoll.domain import history as ev
from atoll.domain import placement as pl
from atoll.domain import sandbox as sb
from atoll.domain.command import Kind, Wish
from atoll.domain.placement import Grant, Holding, Placement, Report
from atoll.domain.sandbox import Condition, Event, Sandbox, State
from atoll.domain.spec import Origin, SaveMode, Spec
from atoll.planning.stimuli import Facts, Note, Outcome, ResumeRequested

RESUMED: Final = "resumed"
"""Why a placement is wanted running whose command says how long its guest lives from then on."""
_OF_ITS_HOST: Final = frozenset({Condition.UNREACHABLE, Condition.REPLACEMENT_BLOCKED, Condition.DEADLINE_MISSED})


def ordered_away(placement: Placement, reason: str) -> Placement:
    """The placement once nothing is wanted of it but that it goes. *Idempotency*: as it is where that is so already."""
    if placement.desired is Kind.ENSURE_ABSENT:
        return placement
    return replace(
        pl.grant(placement, Grant.ENDING),
        desired=cmd.step(placement.desired, Wish.REMOVE),
        desired_revision=placement.desired_revision + 1,
        desired_reason=reason,
    )


def stored(sandbox: Sandbox, report: Report, *, now: float) -> tuple[Sandbox, tuple[Note, ...]]:
    """A suspended sandbox once its host has said what is saved of it, and whether that is in the store.

    What is said is about the save that there is now: a newer one than the store has makes the moment on record the past.
    """
    moment = report.moment
    if moment == sandbox.moment:
        # One whose resume has failed rests again, and its copy may go again.
        counts = moment is not None and sandbox.deadline_at is None
        return (replace(sandbox, deadline_at=now + sandbox.spec.local_s) if counts else sandbox), ()
    if moment is None:
        return replace(sandbox, moment=None, deadline_at=None), ()
    after = replace(sandbox, moment=moment, deadline_at=now + sandbox.spec.local_s)
    return after, (Note(ev.SANDBOX_UPLOADED, {"moment": moment.digest, "bytes": moment.size}),)


def sought(sandbox: Sandbox) -> Spec:
    """What a host is looked for with: for one that rests in the store alone, that it can go on from there, and preferably where it was saved."""
    spec, moment = sandbox.spec, sandbox.moment
    if not sandbox.rests_in_store or moment is None:
        return spec
    pinned = spec.origin is not None and spec.origin.pinned
    return replace(
        spec,
        require_host=None if pinned else spec.require_host,
        prefer_host=sandbox.saved_on or spec.prefer_host,
        origin=Origin("", sandbox.save_mode or SaveMode.FULL, moment=moment.digest, kind=moment.kind),
    )


def may_leave(facts: Facts) -> bool:
    """Whether its host's copy is one that it does not need: its newest save, in the store, and seen at rest under the newest wish."""
    sandbox, placement = facts.sandbox, facts.placement
    if sandbox.state is not State.SUSPENDED or sandbox.moment is None or placement is None:
        return False
    if Condition.HOSTS_UNSETTLED in sandbox.conditions:
        # It may run there since the backup that says that it rests.
        return False
    at_rest = placement.desired is Kind.ENSURE_SUSPENDED and placement.applied_revision >= placement.desired_revision
    return at_rest and placement.holding is Holding.SAVED


def left(facts: Facts) -> Outcome | None:
    """It rests in the store alone from now on. None where it needs its host's copy, or has none."""
    sandbox, placement = facts.sandbox, facts.placement
    if placement is None or not may_leave(facts):
        return None
    after = replace(_nowhere(sandbox, placement), unseen=sandbox.unseen + 1)
    note = Note(ev.SANDBOX_HOST_LEFT, {"host_id": placement.host_id, "placement_id": placement.id})
    return Outcome(after, None, (note,), (ordered_away(placement, str(Code.RELEASE_REQUESTED)),))


def late(facts: Facts, *, now: float) -> Outcome | None:
    """Its host has had its copy for as long as it should. None: that says nothing about this one."""
    if facts.sandbox.state is not State.SUSPENDED:
        return None
    if facts.sandbox.moment is None or facts.placement is None:
        return Outcome(replace(facts.sandbox, deadline_at=None), facts.placement, ())
    # Where its host has not yet heard of the newest wish it is looked at again: a clock orders nothing away that may still run.
    return left(facts) or Outcome(replace(facts.sandbox, deadline_at=now + facts.sandbox.spec.local_s), facts.placement, ())


def gone(sandbox: Sandbox, placement: Placement, *, by_itself: str | None) -> Sandbox | None:
    """The sandbox whose placement is gone, where it goes on resting in the store; None where it does not.

    `by_itself`: which end its guest has come to that nobody ordered. One that was on its way back and came to such an end has run.
    """
    if sandbox.moment is None:
        return None
    if sandbox.state is State.SUSPENDED:
        return _nowhere(sandbox, placement)
    if sandbox.state is not State.RESUMING or sandbox.rested is not State.SUSPENDED or by_itself not in (None, "command"):
        return None
    back = replace(sandbox, state=sb.step(sandbox.state, Event.SAVED_STILL), end_at=None)
    return replace(_nowhere(back, placement), reason=str(Code.RESUME_FAILED), detail="the host that it was coming back on is gone")


def why_lost(sandbox: Sandbox) -> str | None:
    """What to say of one that goes with its host; None where that is nothing out of the way."""
    if sandbox.state is not State.SUSPENDED or sandbox.moment is not None:
        return None
    return "what was saved of it was on its host alone: it was not in the artifact store yet when the host was given up"


def _nowhere(sandbox: Sandbox, placement: Placement) -> Sandbox:
    return replace(
        sandbox,
        placement_id=None,
        host_id=None,
        # Where it failed to come back it is not preferred.
        saved_on=sandbox.saved_on if placement.moment is not None and sandbox.saved_on is not None else placement.host_id,
        deadline_at=None,
        conditions=sandbox.conditions - _OF_ITS_HOST,
    )


def resumed(facts: Facts, stimulus: ResumeRequested, now: float) -> Outcome | None:
    """One that rests in the store alone comes back, where a host's record has granted it capacity."""
    sandbox, granted = facts.sandbox, stimulus.placement
    if granted is None or not sandbox.rests_in_store or Condition.HOSTS_UNSETTLED in sandbox.conditions:
        return None
    assert sandbox.moment is not None
    spec, generation = sandbox.spec, sandbox.generation + 1
    placement = replace(granted, generation=generation, moment=sandbox.moment.digest, desired_reason=RESUMED)
    after = replace(
        sandbox,
        state=sb.step(sandbox.state, Event.RESUME),
        rested=sandbox.state,
        generation=generation,
        host_id=placement.host_id,
        placement_id=placement.id,
        tried_hosts=(),
        life_s=stimulus.life_s,
        save_mode=SaveMode.FILES if stimulus.reboot else sandbox.save_mode,
        deadline_at=now + spec.resume_s + spec.image_s + spec.ready_s,
        reason=None,
        detail=None,
    )
    where = {"from": sandbox.state.value, "host_id": placement.host_id, "placement_id": placement.id}
    return Outcome(after, placement, (Note(ev.SANDBOX_RESUMING, where),))


def has_nothing(facts: Facts, placement: Placement, report: Report) -> bool:
    """Whether a host that could not bring it back says that it has nothing of it that could be saved."""
    if facts.sandbox.state is not State.SUSPENDED or facts.sandbox.moment is None or placement.holding is Holding.SAVED:
        return False
    failed = report.failed_revision >= placement.desired_revision and placement.desired is Kind.ENSURE_SUSPENDED
    return failed and report.reason == Code.PLACEMENT_LOST
