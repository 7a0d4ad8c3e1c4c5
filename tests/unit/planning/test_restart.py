"""A guest that has ended by itself is begun again in its placement, where its spec says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import Code
from atoll.domain import history as ev
from atoll.domain.command import Kind
from atoll.domain.placement import Holding, Observed, Report
from atoll.domain.sandbox import State
from atoll.domain.spec import OnExit
from atoll.planning.reconcile import advance
from atoll.planning.stimuli import Facts, Heard, Outcome, Placed, ReleaseRequested, Tick
from tests.builders import NOW, placement, sandbox, spec


def heard(facts: Facts, observed: Observed, **changes: Any) -> Outcome | None:
    assert facts.placement is not None
    values = {"applied_revision": facts.placement.applied_revision, **changes}
    report = Report(seq=facts.placement.seq + 1, observed=observed, generation=facts.placement.generation, **values)
    return advance(facts, Heard(report), now=NOW + 10)


def after(outcome: Outcome | None) -> Facts:
    assert outcome is not None
    return Facts(outcome.sandbox, outcome.placement)


def running(on_exit: OnExit = OnExit.RESTART) -> Facts:
    made = sandbox(deadline_at=NOW, spec=spec(on_exit=on_exit))
    placed = after(advance(Facts(made, None), Placed(placement(made)), now=NOW))
    return after(heard(placed, Observed.RUNNING, ready=True, applied_revision=1, address="10.64.0.2"))


def stopped(facts: Facts) -> Outcome | None:
    return heard(facts, Observed.STOPPED, reason=Code.GUEST_EXITED, detail="exit 1")


def test_it_is_ordered_again_in_the_same_placement() -> None:
    facts = running()
    outcome = stopped(facts)
    again = after(outcome)
    assert outcome is not None
    assert [note.type for note in outcome.notes] == [ev.SANDBOX_RESTARTING]
    assert again.sandbox.state is State.RESUMING
    assert again.sandbox.deadline_at is not None
    assert (again.sandbox.generation, again.sandbox.end_at, again.sandbox.placement_id) == (
        facts.sandbox.generation,
        facts.sandbox.end_at,
        facts.sandbox.placement_id,
    )
    assert again.placement is not None
    assert (again.placement.desired, again.placement.desired_revision) == (Kind.ENSURE_RUNNING, 2)
    assert again.placement.holding is Holding.ACTIVE, "what it holds it goes on holding"
    back = after(heard(again, Observed.RUNNING, ready=True, applied_revision=2, address="10.64.0.9"))
    assert (back.sandbox.state, back.sandbox.deadline_at, back.sandbox.end_at) == (State.READY, None, facts.sandbox.end_at)
    assert back.placement is not None
    assert back.placement.address == "10.64.0.9"


def test_a_late_word_of_the_start_before_is_no_readiness() -> None:
    again = after(stopped(running()))
    late = after(heard(again, Observed.RUNNING, ready=True, applied_revision=1))
    assert late.sandbox.state is State.RESUMING


def test_three_starts_that_fail_are_enough() -> None:
    facts = after(stopped(running()))
    for revision in (2, 3):
        facts = after(heard(facts, Observed.ERROR, reason=Code.START_FAILED))
        assert facts.sandbox.state is State.RESUMING
        assert facts.placement is not None
        assert facts.placement.desired_revision == revision + 1
    facts = after(heard(facts, Observed.ERROR, reason=Code.START_FAILED))
    assert (facts.sandbox.state, facts.sandbox.reason, facts.sandbox.failing) == (State.RELEASING, Code.START_FAILED, True)


def test_three_that_stop_before_they_are_ready_are_enough() -> None:
    facts = after(stopped(running()))
    for _ in range(2):
        facts = after(stopped(facts))
        assert facts.sandbox.state is State.RESUMING
    facts = after(stopped(facts))
    assert (facts.sandbox.state, facts.sandbox.reason) == (State.RELEASING, Code.GUEST_EXITED)


def test_each_time_it_was_ready_counts_anew() -> None:
    facts = running()
    for revision in range(2, 12):
        facts = after(stopped(facts))
        facts = after(heard(facts, Observed.RUNNING, ready=True, applied_revision=revision))
        assert facts.sandbox.state is State.READY


def test_one_that_does_not_come_back_in_time_is_released() -> None:
    facts = after(stopped(running()))
    assert facts.sandbox.deadline_at is not None
    outcome = advance(facts, Tick(), now=facts.sandbox.deadline_at)
    assert after(outcome).sandbox.state is State.RELEASING
    assert after(outcome).sandbox.failing


def test_release_wins() -> None:
    facts = after(advance(after(stopped(running())), ReleaseRequested(), now=NOW + 20))
    assert facts.sandbox.state is State.RELEASING
    assert facts.placement is not None
    assert facts.placement.desired is Kind.ENSURE_ABSENT
    late = after(stopped(facts))
    assert late.sandbox.state is State.RELEASING


@pytest.mark.parametrize("observed", [Observed.STOPPED, Observed.RUNNING])
def test_without_the_word_nothing_is_begun_again(observed: Observed) -> None:
    facts = running(OnExit.RELEASE)
    outcome = heard(facts, observed, reason=Code.GUEST_EXITED, ready=observed is Observed.RUNNING)
    assert outcome is not None
    assert outcome.sandbox is facts.sandbox
    assert outcome.placement is not None
    assert outcome.placement.desired_revision == 1


def test_what_its_agent_is_ending_is_not_begun_again() -> None:
    """Nothing is left of it to begin again with: the next word is its absence, and an order now would come after its tombstone."""
    facts = running()
    assert facts.placement is not None
    report = Report(seq=facts.placement.seq + 1, observed=Observed.STOPPED, generation=1, reason=Code.PLACEMENT_LOST, applied_revision=1)
    ending = after(advance(facts, Heard(report, ended_by="exit"), now=NOW))
    assert ending.sandbox.state is State.READY
    assert ending.placement is not None
    assert ending.placement.desired_revision == 1


def test_what_comes_twice_is_ordered_once() -> None:
    facts = running()
    assert facts.placement is not None
    report = Report(seq=facts.placement.seq + 1, observed=Observed.STOPPED, generation=1, reason=Code.GUEST_EXITED, applied_revision=1)
    once = after(advance(facts, Heard(report), now=NOW))
    assert advance(once, Heard(report), now=NOW) is None
    assert replace(once.sandbox) == once.sandbox
