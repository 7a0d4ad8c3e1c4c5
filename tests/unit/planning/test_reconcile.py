"""Each move of reconcile by its name; what holds for all of them is in tests/property."""

from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import Code
from atoll.domain.command import Kind
from atoll.domain.placement import Holding, Observed, Report
from atoll.domain.sandbox import DEADLINES, TIMEOUTS, Condition, State
from atoll.domain.spec import OnLoss
from atoll.planning.reconcile import advance, wants_placing
from atoll.planning.replacing import may_replace
from atoll.planning.stimuli import (
    EndMoved,
    Facts,
    Fenced,
    Heard,
    HostHeard,
    HostRefused,
    NoRoom,
    Outcome,
    Placed,
    ReleaseRequested,
    ReplacementAuthorized,
    Stimulus,
    Tick,
)
from tests.builders import NOW, placement, sandbox, spec

PENDING = sandbox(deadline_at=NOW)
ATTEMPTS_MAX = PENDING.spec.attempts_max


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
    assert outcome.sandbox.deadline_at == NOW + 600 + 60 + 30
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


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (Observed.UNKNOWN, Code.START_TIMEOUT),
        (Observed.ACCEPTED, Code.START_TIMEOUT),
        (Observed.PREPARING, Code.IMAGE_TIMEOUT),
        (Observed.PREPARED, Code.START_TIMEOUT),
        (Observed.STARTING, Code.GUEST_BOOT_TIMEOUT),
        (Observed.RUNNING, Code.GUEST_BOOT_TIMEOUT),
    ],
)
def test_a_guest_that_does_not_answer_in_time_is_removed_and_tried_again(seen: Observed, reason: Code) -> None:
    facts = placed()
    if seen is not Observed.UNKNOWN:
        facts = after(facts, Heard(report(facts, seen)))
    deadline = facts.sandbox.deadline_at
    assert deadline is not None
    assert advance(facts, Tick(), now=deadline - 1) is None
    late = moved(facts, Tick(), now=deadline)
    assert late.sandbox.state is State.PROVISIONING
    assert Condition.DEADLINE_MISSED in late.sandbox.conditions
    assert late.sandbox.deadline_at == deadline + 60
    assert late.placement is not None
    assert (late.placement.desired, late.placement.desired_reason) == (Kind.ENSURE_ABSENT, reason)
    assert late.placement.holding is Holding.CLEANUP_PENDING, "a clock frees nothing"
    assert kinds(late) == ["sandbox.deadline_missed"]
    away = Facts(late.sandbox, late.placement)
    still = moved(away, Tick(), now=deadline + 60)
    assert still.sandbox.state is State.PROVISIONING
    assert Condition.CLEANUP_PENDING in still.sandbox.conditions
    gone = after(away, Heard(report(away, Observed.ABSENT), ended_by="command"))
    assert (gone.sandbox.state, gone.sandbox.generation) == (State.PENDING, 2)
    assert Condition.DEADLINE_MISSED not in gone.sandbox.conditions


def test_the_last_attempt_that_is_late_fails_with_its_reason() -> None:
    facts = placed(attempts=ATTEMPTS_MAX - 1)
    late = moved(facts, Tick(), now=NOW + 690)
    assert late.sandbox.state is State.RELEASING
    assert late.sandbox.reason == Code.START_TIMEOUT
    assert late.placement is not None
    assert late.placement.holding is Holding.CLEANUP_PENDING, "a clock frees nothing"
    assert kinds(late) == ["sandbox.deadline_missed", "sandbox.releasing"]


def test_a_guest_that_boots_has_its_own_time_only() -> None:
    facts = placed()
    booting = after(facts, Heard(report(facts, Observed.STARTING)), now=NOW + 5)
    assert booting.sandbox.deadline_at == NOW + 5 + 60 + 30
    later = after(booting, Heard(report(booting, Observed.RUNNING)), now=NOW + 50)
    assert later.sandbox.deadline_at == NOW + 5 + 60 + 30, "a deadline is never moved away"
    preparing = after(facts, Heard(report(facts, Observed.PREPARING)), now=NOW + 5)
    assert preparing.sandbox.deadline_at == NOW + 690


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
    own = spec(image_s=5.0, guest_ready_s=2.0, bootstrap_s=1.0, release_s=3.0, no_capacity_s=4.0, reserve_s=1.0)
    assert placed(spec=own).sandbox.deadline_at == NOW + 8
    assert after(Facts(replace(PENDING, spec=own), None), HostRefused("h", "c")).sandbox.deadline_at == NOW + 1
    assert after(placed(spec=own), ReleaseRequested()).sandbox.deadline_at == NOW + 3
    assert after(Facts(replace(PENDING, spec=own), None), NoRoom("x"), now=NOW + 4).sandbox.state is State.FAILED


@pytest.mark.parametrize("state", sorted(State))
def test_release_wins_in_every_state(state: State) -> None:
    """Whatever it was doing and whether it has a placement: it is on its way out, and no later word turns it back."""
    for placed_too in (False, True):
        made = replace(PENDING, state=state, started_at=NOW if state is State.READY else None)
        place = placement(made, holding=Holding.ACTIVE) if placed_too else None
        made = replace(made, placement_id=place.id if place else None)
        outcome = advance(Facts(made, place), ReleaseRequested(), now=NOW)
        if state in (State.RELEASING, State.RELEASED, State.FAILED):
            assert outcome is None, "it ends already"
            continue
        assert outcome is not None
        assert outcome.sandbox.reason == Code.RELEASE_REQUESTED
        if place is None:
            assert outcome.sandbox.state is State.RELEASED
            continue
        assert outcome.sandbox.state is State.RELEASING
        assert outcome.placement is not None
        assert outcome.placement.desired is Kind.ENSURE_ABSENT
        ending = Facts(outcome.sandbox, outcome.placement)
        for word in (
            Heard(report(ending, Observed.RUNNING, ready=True)),
            Heard(report(ending, Observed.FROZEN)),
            Heard(report(ending, Observed.ERROR, reason="START_FAILED")),
            HostHeard(lost=True),
            HostHeard(lost=False),
            EndMoved(NOW + 9),
            NoRoom("x"),
            HostRefused("h", "c"),
            ReplacementAuthorized(made.generation, "cli_x"),
            Tick(),
        ):
            later = advance(ending, word, now=NOW + 1e6)
            assert later is None or later.sandbox.state is State.RELEASING, word


# Loss and replacement.


def lost(**changes: Any) -> Facts:
    """Ready, and its host is not heard of."""
    facts = ready()
    return after(Facts(replace(facts.sandbox, spec=spec(**changes)), facts.placement), HostHeard(lost=True))


REPLACE: dict[str, Any] = {"on_loss": OnLoss.REPLACE}


def test_an_unheard_host_blocks_a_replacement_that_is_wanted() -> None:
    assert lost().sandbox.conditions == {Condition.UNREACHABLE}, "nobody wants one"
    blocked = lost(**REPLACE)
    assert blocked.sandbox.conditions == {Condition.UNREACHABLE, Condition.REPLACEMENT_BLOCKED}
    assert blocked.sandbox.state is State.READY
    heard = after(blocked, HostHeard(lost=False))
    assert heard.sandbox.conditions == frozenset()


def test_word_of_another_host_is_none_of_this_sandbox() -> None:
    assert advance(ready(), HostHeard(lost=True, host_id="hst_elsewhere"), now=NOW) is None


def test_a_start_on_an_unheard_host_is_blocked_once_it_is_late() -> None:
    facts = after(placed(), HostHeard(lost=True))
    assert facts.sandbox.conditions == {Condition.UNREACHABLE}
    late = after(facts, Tick(), now=NOW + 690)
    assert Condition.REPLACEMENT_BLOCKED in late.sandbox.conditions
    fenced = after(late, Fenced())
    assert (fenced.sandbox.state, fenced.sandbox.generation) == (State.PENDING, 2)
    assert fenced.sandbox.conditions == frozenset()
    assert wants_placing(fenced.sandbox, now=NOW + 1)
    lost_later = after(lost(**REPLACE), Fenced())
    assert wants_placing(lost_later.sandbox, now=NOW), "it has not failed to start: nothing is gained by waiting"


def test_a_fence_is_enough_for_a_replacement_after_readiness() -> None:
    fenced = moved(lost(**REPLACE), Fenced())
    assert (fenced.sandbox.state, fenced.sandbox.generation, fenced.sandbox.attempts) == (State.PENDING, 2, 0)
    assert (fenced.sandbox.started_at, fenced.sandbox.placement_id) == (None, None)
    assert fenced.sandbox.conditions == frozenset()
    assert fenced.placement is not None
    assert fenced.placement.holding is Holding.NONE
    assert kinds(fenced) == ["placement.gone", "sandbox.replaced"]


@pytest.mark.parametrize(
    ("reason", "state"), [(Code.PLACEMENT_LOST, State.PENDING), (Code.GUEST_EXITED, State.RELEASED), (None, State.RELEASED)]
)
def test_a_guest_that_went_with_its_host_is_lost_and_one_that_ended_is_not(reason: Code | None, state: State) -> None:
    """An agent says of both that they have ended."""
    facts = lost(**REPLACE)
    gone = moved(facts, Heard(report(facts, Observed.ABSENT, reason=reason), ended_by="exit"))
    assert gone.sandbox.state is state
    assert (Condition.REPLACEMENT_BLOCKED in gone.sandbox.conditions) is (state is State.PENDING)


def test_absence_after_readiness_waits_for_somebody_s_word() -> None:
    facts = lost(**REPLACE)
    gone = moved(facts, Heard(report(facts, Observed.ABSENT, reason=Code.PLACEMENT_LOST)))
    assert gone.sandbox.state is State.PENDING
    assert gone.sandbox.conditions == {Condition.REPLACEMENT_BLOCKED}
    assert not wants_placing(gone.sandbox, now=NOW + 1e6)
    assert kinds(gone) == ["placement.gone", "sandbox.replaced", "sandbox.replacement_blocked"]
    waiting = Facts(gone.sandbox, None)
    assert advance(waiting, ReplacementAuthorized(2, "cli_x"), now=NOW + 1) is None, "another generation"
    word = moved(waiting, ReplacementAuthorized(1, "cli_x", "keys revoked"), now=NOW + 1)
    assert word.sandbox.conditions == frozenset()
    assert wants_placing(word.sandbox, now=NOW + 1)
    assert kinds(word) == ["sandbox.replacement_authorized"]
    assert dict(word.notes[0].data) == {"client_id": "cli_x", "statement": "keys revoked", "generation": 1}


def test_nobody_s_word_until_its_end_is_its_end() -> None:
    facts = lost(**REPLACE)
    waiting = after(facts, Heard(report(facts, Observed.ABSENT)))
    assert waiting.sandbox.end_at is not None
    over = moved(Facts(waiting.sandbox, None), Tick(), now=waiting.sandbox.end_at)
    assert (over.sandbox.state, over.sandbox.reason) == (State.RELEASED, Code.END_REACHED)


@pytest.mark.parametrize("ended_by", ["end_at", "exit"])
def test_an_end_of_its_own_is_no_loss(ended_by: str) -> None:
    facts = lost(**REPLACE)
    gone = after(facts, Heard(report(facts, Observed.ABSENT), ended_by=ended_by))
    assert gone.sandbox.state is State.RELEASED


def authorized() -> tuple[Facts, Outcome]:
    """Replaced by the client's word, its old placement unseen."""
    facts = lost(**REPLACE)
    outcome = moved(facts, ReplacementAuthorized(1, "cli_x"), now=NOW + 1)
    return Facts(outcome.sandbox, None, outcome.older), outcome


def test_a_certificate_begins_the_next_generation_and_frees_nothing() -> None:
    facts, outcome = authorized()
    assert (outcome.sandbox.state, outcome.sandbox.generation, outcome.sandbox.unseen) == (State.PENDING, 2, 1)
    (old,) = outcome.older
    assert (old.holding, old.desired) == (Holding.CLEANUP_PENDING, Kind.ENSURE_ABSENT)
    assert kinds(outcome) == ["sandbox.replacement_authorized", "sandbox.replaced"]
    assert advance(facts, ReplacementAuthorized(1, "cli_x"), now=NOW + 2) is None, "said twice, done once"


def test_the_old_placement_changes_nothing_of_the_new_one() -> None:
    facts, _ = authorized()
    (old,) = facts.older
    new = after(facts, Placed(placement(facts.sandbox, id="plc_new")), now=NOW + 2)
    both = Facts(new.sandbox, new.placement, (old,))
    late = Report(old.seq + 1, Observed.RUNNING, old.generation, ready=True)
    seen = moved(both, Heard(late, placement_id=old.id))
    assert (seen.sandbox, seen.placement) == (both.sandbox, both.placement)
    assert [one.observed for one in seen.older] == [Observed.RUNNING]
    absent = Report(old.seq + 2, Observed.ABSENT, old.generation)
    gone = moved(both, Heard(absent, placement_id=old.id))
    assert (gone.sandbox.state, gone.sandbox.unseen) == (State.PROVISIONING, 0)
    assert [one.holding for one in gone.older] == [Holding.NONE]
    fenced = moved(both, Fenced(old.id))
    assert [one.holding for one in fenced.older] == [Holding.NONE]
    assert advance(both, Heard(absent, placement_id="plc_nobody"), now=NOW) is None
    assert advance(both, Fenced("plc_nobody"), now=NOW) is None


def test_its_end_waits_for_the_old_placement_too() -> None:
    facts, _ = authorized()
    (old,) = facts.older
    ending = moved(facts, ReleaseRequested(), now=NOW + 2)
    assert ending.sandbox.state is State.RELEASING
    assert Condition.CLEANUP_PENDING in ending.sandbox.conditions
    waiting = Facts(ending.sandbox, None, (old,))
    assert after(waiting, Tick(), now=NOW + 1000).sandbox.state is State.RELEASING
    gone = moved(waiting, Heard(Report(old.seq + 1, Observed.ABSENT, old.generation), placement_id=old.id))
    assert gone.sandbox.state is State.RELEASED
    assert kinds(gone) == ["placement.gone", "sandbox.released"]


def test_a_certificate_for_what_is_not_blocked_does_nothing() -> None:
    assert advance(ready(), ReplacementAuthorized(1, "cli_x"), now=NOW) is None
    assert advance(lost(), ReplacementAuthorized(1, "cli_x"), now=NOW) is None
    assert advance(lost(**REPLACE), ReplacementAuthorized(2, "cli_x"), now=NOW) is None


def test_a_replaced_sandbox_waits_for_room_from_its_replacement_on() -> None:
    fenced = after(lost(**REPLACE), Fenced(), now=NOW + 10_000)
    still = after(Facts(fenced.sandbox, None), NoRoom("none"), now=NOW + 10_100)
    assert still.sandbox.state is State.PENDING
    assert after(Facts(still.sandbox, None), NoRoom("none"), now=NOW + 10_300).sandbox.state is State.FAILED


@pytest.mark.parametrize(
    ("ended_by", "reason", "failing"),
    [
        ("end_at", Code.END_REACHED, False),
        ("lease", Code.LEASE_EXPIRED, True),
        ("exit", Code.GUEST_EXITED, False),
        ("command", Code.CLEANUP_FAILED, True),
    ],
)
def test_an_end_that_cannot_clean_up_keeps_its_reason(ended_by: str, reason: Code, failing: bool) -> None:
    """That it does not go away is not why it ends."""
    facts = ready()
    seen = report(facts, Observed.ERROR, reason=Code.CLEANUP_FAILED, detail="mount busy")
    outcome = moved(facts, Heard(seen, ended_by=ended_by))
    assert (outcome.sandbox.state, outcome.sandbox.reason, outcome.sandbox.failing) == (State.RELEASING, reason, failing)
    assert (Condition.CLEANUP_PENDING in outcome.sandbox.conditions) is (ended_by != "command")
    assert outcome.placement is not None
    assert outcome.placement.holding is Holding.CLEANUP_PENDING


def test_the_table_of_deadlines_names_every_timeout() -> None:
    assert {name for row in DEADLINES for name in row.timeouts} == set(TIMEOUTS)
    assert set(TIMEOUTS.values()) <= set(spec().__slots__)
