"""To rest and back, one step at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.base.errors import Code
from atoll.base.units import Vector
from atoll.domain.command import Kind
from atoll.domain.placement import Holding, Observed, Placement, Report, held
from atoll.domain.sandbox import Condition, Sandbox, State
from atoll.domain.spec import SaveMode
from atoll.planning.reconcile import advance
from atoll.planning.stimuli import (
    EndMoved,
    Facts,
    Fenced,
    Heard,
    Outcome,
    PauseRequested,
    ReleaseRequested,
    ResumeRequested,
    SuspendRequested,
    Tick,
)
from tests.builders import NOW, placement, sandbox

WAYS = [
    (PauseRequested(), State.PAUSING, State.PAUSED, Observed.FROZEN, Code.PAUSE_TIMEOUT, Vector(0, 512, 2048, 1)),
    (SuspendRequested(), State.SUSPENDING, State.SUSPENDED, Observed.SAVED, Code.SAVE_TIMEOUT, Vector(0, 0, 2048, 0)),
]


def ready() -> Facts:
    one = sandbox(state=State.READY, started_at=NOW, end_at=NOW + 300, end_revision=2, attempts=1)
    place = placement(one, holding=Holding.ACTIVE, observed=Observed.RUNNING, ready=True, seq=3, applied_revision=1, address="10.64.0.2")
    return Facts(replace(one, placement_id=place.id, host_id=place.host_id), place)


def kept(outcome: Outcome | None) -> Facts:
    assert outcome is not None
    return Facts(outcome.sandbox, outcome.placement)


def place_of(facts: Facts) -> Placement:
    assert facts.placement is not None
    return facts.placement


def told(facts: Facts, observed: Observed, **more: object) -> Heard:
    place = place_of(facts)
    return Heard(Report(place.seq + 1, observed, place.generation, **{"applied_revision": place.desired_revision, **more}))  # type: ignore[arg-type]


def at_rest(wish: PauseRequested | SuspendRequested, seen: Observed) -> Facts:
    facts = kept(advance(ready(), wish, now=NOW))
    return kept(advance(facts, told(facts, seen, save_mode="full" if seen is Observed.SAVED else None), now=NOW + 1))


@pytest.mark.parametrize(("wish", "moving", "rest", "seen", "late", "holds"), WAYS, ids=["pause", "suspend"])
def test_capacity_comes_back_when_it_is_seen_at_rest(wish, moving, rest, seen, late, holds) -> None:
    facts = kept(advance(ready(), wish, now=NOW))
    assert facts.sandbox.state is moving
    assert held(place_of(facts)) == facts.sandbox.spec.vector(), "asked for is not done"
    early = kept(advance(facts, told(facts, seen, applied_revision=1), now=NOW))
    assert early.sandbox.state is moving, "a word about what was wanted before"
    facts = kept(advance(facts, told(facts, seen), now=NOW + 1))
    assert facts.sandbox.state is rest
    assert held(place_of(facts)) == holds
    assert (facts.sandbox.end_at, facts.sandbox.deadline_at) == (None, None)
    assert advance(facts, wish, now=NOW + 2) is None
    assert advance(facts, EndMoved(NOW + 5), now=NOW + 2) is None
    assert advance(facts, Tick(), now=NOW + 1e6) is None, "what is at rest stays"


@pytest.mark.parametrize(("wish", "moving", "rest", "seen", "late", "holds"), WAYS, ids=["pause", "suspend"])
def test_what_does_not_come_to_rest_in_time_goes_on(wish, moving, rest, seen, late, holds) -> None:
    facts = kept(advance(ready(), wish, now=NOW))
    assert facts.sandbox.deadline_at is not None
    assert advance(facts, Tick(), now=facts.sandbox.deadline_at - 1) is None
    after = kept(advance(facts, Tick(), now=facts.sandbox.deadline_at))
    assert late in (Code.PAUSE_TIMEOUT, Code.SAVE_TIMEOUT)
    assert (after.sandbox.state, after.sandbox.reason) == (State.READY, late)
    assert Condition.DEADLINE_MISSED in after.sandbox.conditions
    assert after.sandbox.end_at == NOW + 300, "its end is what it was"
    assert (place_of(after).desired, place_of(after).desired_revision) == (Kind.ENSURE_RUNNING, 3)
    assert after.sandbox.life_s == NOW + 300 - facts.sandbox.deadline_at
    stale = kept(advance(after, told(facts, seen, applied_revision=2), now=NOW + 500))
    assert stale.sandbox.state is State.READY, "it has come to rest too late, and is wanted back"
    assert held(place_of(stale)) == stale.sandbox.spec.vector()


@pytest.mark.parametrize(("wish", "moving", "rest", "seen", "late", "holds"), WAYS, ids=["pause", "suspend"])
def test_a_resume_that_is_late_leaves_it_at_rest(wish, moving, rest, seen, late, holds) -> None:
    facts = kept(advance(at_rest(wish, seen), ResumeRequested(life_s=50.0), now=NOW + 10))
    assert held(place_of(facts)) == facts.sandbox.spec.vector(), "it has its room before it is wanted"
    assert facts.sandbox.deadline_at is not None
    after = kept(advance(facts, Tick(), now=facts.sandbox.deadline_at))
    assert (after.sandbox.state, after.sandbox.reason) == (rest, Code.RESUME_TIMEOUT)
    assert held(place_of(after)) == after.sandbox.spec.vector(), "until it is seen at rest again"
    seen_again = kept(advance(after, told(after, seen), now=NOW + 1000))
    assert (seen_again.sandbox.state, held(place_of(seen_again))) == (rest, holds)


@pytest.mark.parametrize(("wish", "moving", "rest", "seen", "late", "holds"), WAYS, ids=["pause", "suspend"])
def test_back_from_rest_it_lives_from_then(wish, moving, rest, seen, late, holds) -> None:
    facts = kept(advance(at_rest(wish, seen), ResumeRequested(life_s=50.0), now=NOW + 10))
    assert (facts.sandbox.state, facts.sandbox.generation) == (State.RESUMING, 1)
    facts = kept(advance(facts, told(facts, Observed.RUNNING, ready=True), now=NOW + 20))
    assert (facts.sandbox.state, facts.sandbox.end_at, facts.sandbox.end_revision) == (State.READY, NOW + 70, 3)
    assert facts.sandbox.started_at == NOW


@pytest.mark.parametrize("wish", [PauseRequested(), SuspendRequested()])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_delete_works_from_rest_and_on_every_way(wish, steps) -> None:
    seen = Observed.FROZEN if isinstance(wish, PauseRequested) else Observed.SAVED
    facts = kept(advance(ready(), wish, now=NOW))
    if steps > 1:
        facts = kept(advance(facts, told(facts, seen), now=NOW))
    if steps > 2:
        facts = kept(advance(facts, ResumeRequested(), now=NOW))
    before = held(place_of(facts))
    facts = kept(advance(facts, ReleaseRequested(), now=NOW))
    assert (facts.sandbox.state, place_of(facts).desired) == (State.RELEASING, Kind.ENSURE_ABSENT)
    assert held(place_of(facts)) == before, "an end takes no room that was given to others meanwhile"
    facts = kept(advance(facts, told(facts, Observed.ABSENT), now=NOW + 1))
    assert (facts.sandbox.state, held(place_of(facts))) == (State.RELEASED, Vector())


def test_what_its_agent_has_saved_by_itself_is_suspended() -> None:
    facts = ready()
    report = Report(4, Observed.SAVED, 1, applied_revision=1, reason=str(Code.END_REACHED), save_mode="filesystem")
    facts = kept(advance(facts, Heard(report), now=NOW + 300))
    assert (facts.sandbox.state, facts.sandbox.save_mode, facts.sandbox.end_at) == (State.SUSPENDED, SaveMode.FILES, None)
    assert held(place_of(facts)) == Vector(0, 0, 2048, 0)
    assert (place_of(facts).desired, place_of(facts).desired_revision) == (Kind.ENSURE_SUSPENDED, 2)


def test_a_frozen_guest_that_ends_and_is_kept_is_stopped() -> None:
    facts = at_rest(PauseRequested(), Observed.FROZEN)
    facts = kept(advance(facts, told(facts, Observed.STOPPED, reason=str(Code.PLACEMENT_LOST)), now=NOW + 5))
    assert (facts.sandbox.state, facts.sandbox.reason) == (State.STOPPED, Code.PLACEMENT_LOST)
    assert held(place_of(facts)) == Vector(0, 0, 2048, 0)
    assert place_of(facts).desired is Kind.ENSURE_STOPPED
    back = kept(advance(facts, ResumeRequested(), now=NOW + 10))
    assert (back.sandbox.state, place_of(back).desired) == (State.RESUMING, Kind.ENSURE_RUNNING)


def test_what_was_paused_is_thawed_to_be_saved() -> None:
    """A save that fails goes on, and needs its CPU for that."""
    facts = kept(advance(at_rest(PauseRequested(), Observed.FROZEN), SuspendRequested(SaveMode.FILES, strict=True), now=NOW + 5))
    assert (facts.sandbox.state, place_of(facts).desired_reason) == (State.SUSPENDING, "filesystem strict")
    assert held(place_of(facts)) == facts.sandbox.spec.vector()


def test_a_fence_ends_what_was_paused() -> None:
    facts = kept(advance(at_rest(PauseRequested(), Observed.FROZEN), Fenced(), now=NOW + 5))
    assert (facts.sandbox.state, held(place_of(facts))) == (State.FAILED, Vector())


def test_only_what_runs_is_brought_to_rest() -> None:
    wishes = (PauseRequested(), SuspendRequested())
    for state in (State.PENDING, State.PROVISIONING, State.RESUMING, State.RELEASING, State.STOPPED):
        facts = ready()
        for wish in wishes:
            assert advance(replace(facts, sandbox=replace(facts.sandbox, state=state)), wish, now=NOW) is None
    for state in (State.READY, State.PAUSING, State.SUSPENDING, State.RELEASING):
        one: Sandbox = replace(ready().sandbox, state=state)
        assert advance(replace(ready(), sandbox=one), ResumeRequested(), now=NOW) is None


@pytest.mark.parametrize("wish", [PauseRequested(), SuspendRequested()])
def test_how_an_earlier_wish_failed_ends_nothing(wish) -> None:
    """Its guest could not be woken from a save that failed, and is wanted at rest again: what its agent makes of that wish counts."""
    facts = kept(advance(ready(), wish, now=NOW))
    before = place_of(facts).desired_revision - 1
    error = told(facts, Observed.ERROR, applied_revision=before - 1, failed_revision=before, reason=Code.GUEST_BOOT_TIMEOUT)
    after = kept(advance(facts, error, now=NOW + 1))
    assert (after.sandbox.state, place_of(after).desired) == (facts.sandbox.state, place_of(facts).desired)
    failed = told(after, Observed.ERROR, applied_revision=before, failed_revision=before + 1, reason=Code.SAVE_FAILED)
    assert kept(advance(after, failed, now=NOW + 2)).sandbox.state is State.READY
