"""Each move of reconcile by its name; what holds for all of them is in tests/property."""

from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import Code
from atoll.domain.command import Kind
from atoll.domain.placement import Holding, Observed, Report
from atoll.domain.sandbox import Condition, State
from atoll.planning.reconcile import (
    ATTEMPTS_MAX,
    EndMoved,
    Facts,
    Fenced,
    Heard,
    HostRefused,
    NoRoom,
    Outcome,
    Placed,
    ReleaseRequested,
    Stimulus,
    Tick,
    advance,
    may_replace,
    wants_placing,
)
from tests.builders import NOW, placement, sandbox, spec

PENDING = sandbox(deadline_at=NOW)


def after(facts: Facts, stimulus: Stimulus, now: float = NOW) -> Facts:
    outcome = advance(facts, stimulus, now=now)
    assert outcome is not None, f"{stimulus} changes nothing"
    return Facts(outcome.sandbox, outcome.placement)


def moved(facts: Facts, stimulus: Stimulus, now: float = NOW) -> Outcome:
    outcome = advance(facts, stimulus, now=now)
    assert outcome is not None
    return outcome


def placed(**changes: Any) -> Facts:
    made = replace(PENDING, **changes)
    return after(Facts(made, None), Placed(placement(made)))


def report(facts: Facts, observed: Observed, **changes: Any) -> Report:
    assert facts.placement is not None
    return Report(seq=facts.placement.seq + 1, observed=observed, generation=facts.placement.generation, **changes)


def ready() -> Facts:
    facts = placed()
    return after(facts, Heard(report(facts, Observed.RUNNING, ready=True, applied_revision=1, address="10.64.0.2")), now=NOW + 1)


def kinds(outcome: Outcome) -> list[str]:
    return [note.type for note in outcome.notes]


def test_a_placed_sandbox_is_provisioning_and_holds_its_whole_vector() -> None:
    outcome = moved(Facts(PENDING, None), Placed(placement(PENDING)))
    assert outcome.sandbox.state is State.PROVISIONING
    assert outcome.sandbox.attempts == 1
    assert outcome.sandbox.deadline_at == NOW + 600 + 60
    assert outcome.placement is not None
    assert outcome.placement.holding is Holding.RESERVED
    assert outcome.sandbox.end_at is not None, "an agent that loses control before ready still ends it"
    assert kinds(outcome) == ["sandbox.placed"]


def test_ready_counts_the_end_from_now_and_leaves_no_deadline() -> None:
    facts = ready()
    assert facts.sandbox.state is State.READY
    assert facts.sandbox.started_at == NOW + 1
    assert facts.sandbox.end_at == NOW + 1 + 300
    assert facts.sandbox.deadline_at is None
    assert facts.placement is not None
    assert facts.placement.holding is Holding.ACTIVE


def test_running_without_the_guest_s_answer_is_not_ready() -> None:
    facts = placed()
    seen = after(facts, Heard(report(facts, Observed.RUNNING)))
    assert seen.sandbox.state is State.PROVISIONING


@pytest.mark.parametrize("state", [State.PENDING, State.RESERVING])
def test_a_refusal_is_remembered_and_the_next_host_asked(state: State) -> None:
    outcome = moved(Facts(replace(PENDING, state=state, tried_hosts=("hst_0",)), None), HostRefused("hst_1", Code.INSUFFICIENT_CPU))
    assert outcome.sandbox.state is State.RESERVING
    assert outcome.sandbox.tried_hosts == ("hst_0", "hst_1")
    assert wants_placing(outcome.sandbox, now=NOW)
    assert kinds(outcome) == ["sandbox.host_refused"]


def test_without_room_it_waits_longer_the_older_it_is_and_says_so_once() -> None:
    facts = Facts(replace(PENDING, state=State.RESERVING, tried_hosts=("hst_1",)), None)
    pauses = []
    for age in (0.0, 1.0, 3.0, 5.0, 10.0, 100.0):
        outcome = moved(facts, NoRoom("1 host(s): INSUFFICIENT_CPU x1"), now=NOW + age)
        assert outcome.sandbox.state is State.PENDING
        assert outcome.sandbox.tried_hosts == ()
        assert Condition.NO_ELIGIBLE_HOST in outcome.sandbox.conditions
        assert kinds(outcome) == (["sandbox.no_eligible_host"] if age == 0 else [])
        assert outcome.sandbox.deadline_at is not None
        assert not wants_placing(outcome.sandbox, now=NOW + age)
        assert wants_placing(outcome.sandbox, now=outcome.sandbox.deadline_at)
        pauses.append(outcome.sandbox.deadline_at - NOW - age)
        facts = Facts(outcome.sandbox, None)
    assert pauses == pytest.approx([0.25, 0.5, 1.0, 2.0, 5.0, 5.0])


def test_room_found_takes_the_condition_away() -> None:
    waiting = after(Facts(PENDING, None), NoRoom("none"))
    assert after(waiting, Placed(placement(PENDING))).sandbox.conditions == frozenset()


def test_no_room_until_the_deadline_fails_with_the_reason() -> None:
    outcome = moved(Facts(PENDING, None), NoRoom("1 host(s): INSUFFICIENT_CPU x1"), now=NOW + 300)
    assert outcome.sandbox.state is State.FAILED
    assert outcome.sandbox.reason == Code.NO_CAPACITY
    assert outcome.sandbox.detail == "1 host(s): INSUFFICIENT_CPU x1"
    assert kinds(outcome) == ["sandbox.releasing", "sandbox.failed"]


def test_an_unplaced_sandbox_is_released_at_once() -> None:
    outcome = moved(Facts(PENDING, None), ReleaseRequested())
    assert outcome.sandbox.state is State.RELEASED
    assert outcome.sandbox.released_at == NOW


def test_a_release_orders_absence_and_waits_for_it() -> None:
    facts = after(ready(), ReleaseRequested(), now=NOW + 5)
    assert facts.sandbox.state is State.RELEASING
    assert facts.placement is not None
    assert facts.placement.desired is Kind.ENSURE_ABSENT
    assert facts.placement.desired_revision == 2
    assert facts.placement.holding is Holding.CLEANUP_PENDING
    assert advance(facts, ReleaseRequested(), now=NOW + 6) is None, "a second release changes nothing"
    gone = moved(facts, Heard(report(facts, Observed.ABSENT, applied_revision=2), ended_by="command"), now=NOW + 7)
    assert gone.sandbox.state is State.RELEASED
    assert gone.sandbox.reason == Code.RELEASE_REQUESTED
    assert gone.placement is not None
    assert gone.placement.holding is Holding.NONE
    assert kinds(gone) == ["placement.gone", "sandbox.released"]


def test_a_late_ready_does_not_undo_a_release() -> None:
    facts = placed()
    ending = after(facts, ReleaseRequested())
    seen = after(ending, Heard(report(ending, Observed.RUNNING, ready=True)))
    assert seen.sandbox.state is State.RELEASING
    assert seen.placement is not None
    assert seen.placement.holding is Holding.CLEANUP_PENDING


def test_a_late_cleanup_is_said_aloud_and_frees_nothing() -> None:
    facts = after(ready(), ReleaseRequested())
    assert facts.sandbox.deadline_at == NOW + 60
    late = moved(facts, Tick(), now=NOW + 60)
    assert Condition.CLEANUP_PENDING in late.sandbox.conditions
    assert late.placement is not None
    assert late.placement.holding is Holding.CLEANUP_PENDING
    assert kinds(late) == ["sandbox.cleanup_pending"]
    again = moved(Facts(late.sandbox, late.placement), Tick(), now=NOW + 120)
    assert kinds(again) == []
    assert again.sandbox.deadline_at == NOW + 180


def test_a_failed_removal_keeps_releasing() -> None:
    facts = after(ready(), ReleaseRequested())
    stuck = after(facts, Heard(report(facts, Observed.ERROR, reason=Code.CLEANUP_FAILED, detail="mount busy")))
    assert stuck.sandbox.state is State.RELEASING
    assert Condition.CLEANUP_PENDING in stuck.sandbox.conditions
    assert stuck.sandbox.detail == "mount busy"
    assert stuck.placement is not None
    assert stuck.placement.holding is Holding.CLEANUP_PENDING
    gone = after(stuck, Heard(report(stuck, Observed.ABSENT)))
    assert gone.sandbox.state is State.RELEASED
    assert gone.sandbox.conditions == frozenset()


def test_a_start_that_failed_is_removed_before_the_next_generation() -> None:
    facts = placed()
    erred = after(facts, Heard(report(facts, Observed.ERROR, reason=Code.START_FAILED, detail="no such runtime")))
    assert erred.sandbox.state is State.PROVISIONING
    assert erred.sandbox.generation == 1
    assert erred.placement is not None
    assert erred.placement.desired is Kind.ENSURE_ABSENT
    assert erred.placement.holding is Holding.CLEANUP_PENDING
    gone = moved(erred, Heard(report(erred, Observed.ABSENT), ended_by="command"), now=NOW + 1)
    assert gone.sandbox.state is State.PENDING
    assert gone.sandbox.generation == 2
    assert gone.sandbox.placement_id is None
    assert gone.sandbox.host_id is None
    assert gone.placement is not None
    assert gone.placement.holding is Holding.NONE
    assert kinds(gone) == ["placement.gone", "sandbox.replaced"]
    assert not wants_placing(gone.sandbox, now=NOW + 1)
    assert wants_placing(gone.sandbox, now=NOW + 1.25)


def test_a_guest_that_answers_after_its_removal_was_ordered_is_not_ready() -> None:
    facts = placed()
    erred = after(facts, Heard(report(facts, Observed.ERROR, reason=Code.START_FAILED)))
    late = after(erred, Heard(report(erred, Observed.RUNNING, ready=True, applied_revision=1)))
    assert late.sandbox.state is State.PROVISIONING
    assert late.placement is not None
    assert late.placement.desired is Kind.ENSURE_ABSENT
    assert late.placement.holding is Holding.CLEANUP_PENDING


def test_the_last_attempt_fails_with_its_own_reason() -> None:
    facts = placed(attempts=ATTEMPTS_MAX - 1, generation=ATTEMPTS_MAX)
    erred = after(facts, Heard(report(facts, Observed.ERROR, reason=Code.IMAGE_CORRUPT, detail="digest differs")))
    assert erred.sandbox.state is State.RELEASING
    assert erred.sandbox.failing
    gone = after(erred, Heard(report(erred, Observed.ABSENT)))
    assert gone.sandbox.state is State.FAILED
    assert gone.sandbox.reason == Code.IMAGE_CORRUPT
    assert gone.sandbox.detail == "digest differs"


@pytest.mark.parametrize("changes", [{"started_at": NOW}, {"bootstrap_exposed": True}, {"attempts": ATTEMPTS_MAX}])
def test_what_forbids_an_automatic_replacement(changes: dict[str, Any]) -> None:
    assert may_replace(PENDING)
    assert not may_replace(replace(PENDING, **changes))


def test_a_guest_that_does_not_answer_in_time_is_released_as_failed() -> None:
    facts = placed()
    assert advance(facts, Tick(), now=NOW + 659) is None
    late = after(facts, Tick(), now=NOW + 660)
    assert late.sandbox.state is State.RELEASING
    assert late.sandbox.reason == Code.GUEST_BOOT_TIMEOUT
    assert late.placement is not None
    assert late.placement.desired is Kind.ENSURE_ABSENT
    assert late.placement.holding is Holding.CLEANUP_PENDING, "a clock frees nothing"


@pytest.mark.parametrize(
    ("ended_by", "state", "reason"),
    [
        ("end_at", State.RELEASED, Code.END_REACHED),
        ("exit", State.RELEASED, Code.GUEST_EXITED),
        ("lease", State.FAILED, Code.LEASE_EXPIRED),
        (None, State.FAILED, Code.PLACEMENT_LOST),
    ],
)
def test_how_a_ready_sandbox_ends_by_itself(ended_by: str | None, state: State, reason: Code) -> None:
    facts = ready()
    gone = after(facts, Heard(report(facts, Observed.ABSENT, reason=reason if ended_by else None), ended_by=ended_by))
    assert gone.sandbox.state is state
    assert gone.sandbox.reason == reason
    assert gone.placement is not None
    assert gone.placement.holding is Holding.NONE


def test_a_guest_that_never_answered_and_ended_by_itself_has_failed() -> None:
    facts = placed(attempts=ATTEMPTS_MAX - 1)
    gone = after(facts, Heard(report(facts, Observed.ABSENT, reason=Code.GUEST_EXITED), ended_by="exit"))
    assert gone.sandbox.state is State.FAILED
    assert gone.sandbox.reason == Code.GUEST_EXITED


@pytest.mark.parametrize("ended_by", ["end_at", "lease"])
def test_an_end_that_comes_before_ready_is_an_end_not_a_replacement(ended_by: str) -> None:
    facts = placed()
    gone = after(facts, Heard(report(facts, Observed.ABSENT, reason=Code.END_REACHED), ended_by=ended_by))
    assert gone.sandbox.state in (State.RELEASED, State.FAILED)


def test_a_fence_counts_as_gone() -> None:
    gone = after(ready(), Fenced())
    assert gone.sandbox.state is State.FAILED
    assert gone.sandbox.reason == Code.PLACEMENT_LOST
    assert gone.placement is not None
    assert gone.placement.holding is Holding.NONE


def test_an_error_of_a_ready_sandbox_ends_it() -> None:
    facts = ready()
    erred = after(facts, Heard(report(facts, Observed.ERROR, reason=Code.GUEST_EXITED)))
    assert erred.sandbox.state is State.RELEASING
    assert erred.sandbox.failing


def test_a_moved_end_has_a_new_revision() -> None:
    facts = ready()
    revision = facts.sandbox.end_revision
    outcome = moved(facts, EndMoved(NOW + 999))
    assert (outcome.sandbox.end_at, outcome.sandbox.end_revision) == (NOW + 999, revision + 1)
    assert kinds(outcome) == ["sandbox.end_moved"]
    assert advance(Facts(outcome.sandbox, outcome.placement), EndMoved(NOW + 999), now=NOW) is None


def test_the_end_of_an_ending_sandbox_does_not_move() -> None:
    assert advance(after(ready(), ReleaseRequested()), EndMoved(NOW + 999), now=NOW) is None


def test_a_second_host_s_grant_is_not_taken() -> None:
    assert advance(placed(), Placed(placement(PENDING, host_id="hst_two")), now=NOW) is None


@pytest.mark.parametrize("state", [State.RELEASED, State.FAILED])
def test_an_ended_sandbox_hears_nothing(state: State) -> None:
    ended = replace(PENDING, state=state)
    gone = placement(ended, holding=Holding.NONE, observed=Observed.ABSENT)
    for stimulus in (Tick(), ReleaseRequested(), EndMoved(1.0), Fenced(), NoRoom("x"), HostRefused("h", "c"), Placed(placement(ended))):
        assert advance(Facts(ended, gone), stimulus, now=NOW + 1e6) is None


def test_deadlines_follow_the_spec() -> None:
    own = spec(image_s=5.0, guest_ready_s=2.0, release_s=3.0, no_capacity_s=4.0, reserve_s=1.0)
    assert placed(spec=own).sandbox.deadline_at == NOW + 7
    assert after(Facts(replace(PENDING, spec=own), None), HostRefused("h", "c")).sandbox.deadline_at == NOW + 1
    assert after(placed(spec=own), ReleaseRequested()).sandbox.deadline_at == NOW + 3
    assert after(Facts(replace(PENDING, spec=own), None), NoRoom("x"), now=NOW + 4).sandbox.state is State.FAILED
