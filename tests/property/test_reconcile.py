"""Reconcile under chance: whatever comes in whatever order, the rules hold.

Steps are drawn as intentions ("the guest is ready") and made exact against what is current, so that deep states are reached; a part of
the reports is stale on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.domain import sandbox as sb
from atoll.domain.command import Kind
from atoll.domain.placement import Holding, Observed, Report
from atoll.domain.sandbox import State
from atoll.planning.pausing import AT_REST, MOVING
from atoll.planning.reconcile import advance, wants_placing
from atoll.planning.stimuli import (
    EndMoved,
    Facts,
    Fenced,
    Heard,
    HostRefused,
    NoRoom,
    Outcome,
    PauseRequested,
    Placed,
    ReleaseRequested,
    ResumeRequested,
    Stimulus,
    SuspendRequested,
    Tick,
)
from tests.builders import NOW, placement, sandbox

TRANSIENT = {State.PENDING, State.RESERVING, State.PROVISIONING, State.RELEASING, *MOVING}
TOLD = {
    Kind.ENSURE_RUNNING: Observed.RUNNING,
    Kind.ENSURE_PAUSED: Observed.FROZEN,
    Kind.ENSURE_SUSPENDED: Observed.SAVED,
    Kind.ENSURE_STOPPED: Observed.STOPPED,
    Kind.ENSURE_ABSENT: Observed.ABSENT,
}
"""What an honest host says when it has done what it was told."""


@dataclass(frozen=True)
class Step:
    """What happens next; `seq` and `generation` are relative to what is current."""

    what: str
    observed: Observed = Observed.UNKNOWN
    ready: bool = False
    reason: str | None = None
    ended_by: str | None = None
    seq: int = 1
    generation: int = 0
    end_at: float = 0.0
    failing: bool = False
    pause_s: float = 0.0
    applied: int = 0
    """Relative to what is desired."""
    failed: int = -1

    def against(self, facts: Facts) -> Stimulus:
        match self.what:
            case "place":
                return Placed(placement(facts.sandbox))
            case "refuse":
                return HostRefused("hst_two", "INSUFFICIENT_CPU")
            case "no_room":
                return NoRoom("1 host(s): INSUFFICIENT_CPU x1")
            case "release":
                return ReleaseRequested(failing=self.failing)
            case "end":
                return EndMoved(NOW + self.end_at)
            case "fence":
                return Fenced()
            case "pause":
                return PauseRequested()
            case "suspend":
                return SuspendRequested()
            case "resume":
                return ResumeRequested(life_s=self.end_at)
            case "report":
                known = facts.placement
                seq, generation = (known.seq, known.generation) if known else (0, 1)
                desired = known.desired_revision if known else 1
                report = Report(
                    seq + self.seq,
                    self.observed,
                    generation + self.generation,
                    applied_revision=desired + self.applied,
                    failed_revision=desired + self.failed,
                    reason=self.reason,
                    ready=self.ready,
                )
                return Heard(report, ended_by=self.ended_by)
            case _:
                return Tick()


REST = ("pause", "pause", "suspend", "suspend", "resume", "resume", "resume")
pauses = st.sampled_from([0.0, 0.1, 0.3, 5.0, 61.0, 700.0])
reports = st.builds(
    Step,
    st.just("report"),
    observed=st.sampled_from([*Observed, Observed.RUNNING, Observed.RUNNING, Observed.ABSENT]),
    ready=st.booleans(),
    reason=st.sampled_from([None, "START_FAILED", "GUEST_EXITED"]),
    ended_by=st.sampled_from([None, "end_at", "exit", "lease", "command"]),
    seq=st.sampled_from([1, 1, 1, 1, 2, 0, -1]),
    generation=st.sampled_from([0, 0, 0, 0, 0, 1, -1]),
    pause_s=pauses,
    applied=st.sampled_from([0, 0, 0, -1]),
    failed=st.sampled_from([-1, -1, -1, 0]),
)
others = st.builds(
    Step,
    st.sampled_from(["place", "place", "place", "refuse", "no_room", "release", "end", "fence", "tick", "tick", *REST]),
    end_at=st.floats(0, 1000),
    failing=st.booleans(),
    pause_s=pauses,
)
PLACE, READY = Step("place"), Step("report", Observed.RUNNING, ready=True)
FROZEN, SAVED = Step("report", Observed.FROZEN), Step("report", Observed.SAVED)
ERROR, ABSENT = Step("report", Observed.ERROR, reason="START_FAILED"), Step("report", Observed.ABSENT, ended_by="command")
STUCK = [PLACE, ERROR, ABSENT] * 2
RESTED = [
    [PLACE, READY, Step("pause"), FROZEN],
    [PLACE, READY, Step("suspend"), SAVED],
    [PLACE, READY, Step("pause"), FROZEN, Step("resume")],
    [PLACE, READY, Step("suspend"), SAVED, Step("resume", end_at=5.0)],
]
steps_of = st.builds(
    lambda begun, more: [*begun, *more],
    st.sampled_from([[], [PLACE], [PLACE, READY], [PLACE, READY], [PLACE, READY, Step("release")], STUCK, *RESTED]),
    st.lists(st.one_of(reports, others), max_size=20),
)


def walk(steps: list[Step]) -> Iterator[tuple[Facts, Stimulus, Outcome | None, float]]:
    """Each step with what was before and what came of it, as the store would keep it."""
    facts, now = Facts(sandbox(deadline_at=NOW), None), NOW
    for step in steps:
        now += step.pause_s
        stimulus = step.against(facts)
        outcome = advance(facts, stimulus, now=now)
        yield facts, stimulus, outcome, now
        if outcome is not None:
            facts = kept(outcome)


def kept(outcome: Outcome) -> Facts:
    return Facts(outcome.sandbox, outcome.placement if outcome.sandbox.placement_id is not None else None)


def last(steps: list[Step]) -> tuple[Facts, float]:
    facts, now = Facts(sandbox(deadline_at=NOW), None), NOW
    for before, _, outcome, at in walk(steps):
        facts, now = before if outcome is None else kept(outcome), at
    return facts, now


@settings(max_examples=500)
@given(steps_of)
def test_safety(steps: list[Step]) -> None:
    """Capacity returns only on absence or fence; terminal states absorb; one placement holds at a time; release is never undone."""
    for before, stimulus, outcome, _ in walk(steps):
        if outcome is None:
            continue
        after = Facts(outcome.sandbox, outcome.placement)
        assert before.sandbox.state not in sb.TERMINAL, "a terminal state took an event"
        if before.placement is not None and before.placement.holding is not Holding.NONE:
            assert after.placement is not None
            assert after.placement.id == before.placement.id, "another placement while the first still holds"
            if after.placement.holding is Holding.NONE:
                absent = isinstance(stimulus, Heard) and stimulus.report.observed is Observed.ABSENT
                assert absent or isinstance(stimulus, Fenced), f"{stimulus} freed capacity"
        if before.sandbox.state is State.RELEASING:
            assert after.sandbox.state in {State.RELEASING, *sb.TERMINAL}
            assert after.placement is None or after.placement.desired is Kind.ENSURE_ABSENT or after.placement.holding is Holding.NONE
        if after.sandbox.state in sb.TERMINAL:
            assert after.placement is None or after.placement.holding is Holding.NONE
        if after.sandbox.state is State.READY:
            assert after.placement is not None
            assert after.placement.holding is not Holding.NONE
            assert after.placement.desired is Kind.ENSURE_RUNNING, "ready, and ordered away"


@settings(max_examples=300)
@given(steps_of)
def test_what_only_grows(steps: list[Step]) -> None:
    """Generations rise by one and only after the last one is gone; revisions and sequence numbers never fall; absence stays ordered."""
    for before, _, outcome, _ in walk(steps):
        if outcome is None:
            continue
        after = outcome.sandbox
        assert after.generation in (before.sandbox.generation, before.sandbox.generation + 1)
        if after.generation > before.sandbox.generation:
            assert outcome.placement is not None
            assert outcome.placement.holding is Holding.NONE
            assert before.sandbox.started_at is None, "a guest that was ready once is never replaced by itself"
        assert after.end_revision >= before.sandbox.end_revision
        assert after.attempts >= before.sandbox.attempts
        if before.placement is not None and outcome.placement is not None:
            assert outcome.placement.desired_revision >= before.placement.desired_revision
            assert outcome.placement.seq >= before.placement.seq
            if before.placement.desired is Kind.ENSURE_ABSENT:
                assert outcome.placement.desired is Kind.ENSURE_ABSENT
            changed = outcome.placement.desired is not before.placement.desired
            assert changed == (outcome.placement.desired_revision > before.placement.desired_revision), "one revision, one intent"


@settings(max_examples=300)
@given(steps_of)
def test_whoever_waits_has_a_deadline(steps: list[Step]) -> None:
    """Every transient state has one, no settled or ended state has, and a deadline that was looked at is behind or moved on."""
    facts, now = last(steps)
    state = facts.sandbox.state
    assert (facts.sandbox.deadline_at is not None) == (state in TRANSIENT), state
    if state in (State.PROVISIONING, State.RELEASING, *MOVING):
        assert facts.sandbox.deadline_at is not None
        outcome = advance(facts, Tick(), now=facts.sandbox.deadline_at)
        assert outcome is not None, "a deadline that comes and says nothing"
        assert outcome.sandbox.deadline_at is None or outcome.sandbox.deadline_at > facts.sandbox.deadline_at
    if state in (State.PENDING, State.RESERVING):
        assert wants_placing(facts.sandbox, now=max(now, facts.sandbox.deadline_at or 0))


@settings(max_examples=300)
@given(steps_of)
def test_each_end_and_each_start_is_recorded_once(steps: list[Step]) -> None:
    """The event of a change is in its commit: what a client reads afterwards is what happened."""
    seen: list[str] = []
    for before, _, outcome, _ in walk(steps):
        if outcome is None:
            continue
        kinds = [note.type for note in outcome.notes]
        seen += kinds
        if outcome.sandbox.state is not before.sandbox.state and outcome.sandbox.state is not State.PENDING:
            assert kinds, f"{before.sandbox.state} became {outcome.sandbox.state} in silence"
        ended = outcome.sandbox.state in sb.TERMINAL
        assert ended == any(kind in ("sandbox.released", "sandbox.failed") for kind in kinds)
    assert seen.count("sandbox.ready") <= 1
    assert seen.count("sandbox.placed") - seen.count("sandbox.replaced") <= 1


@settings(max_examples=300)
@given(steps_of)
def test_liveness(steps: list[Step]) -> None:
    """From wherever it is, a release followed by an honest absence ends it."""
    facts, now = last(steps)
    outcome = advance(facts, ReleaseRequested(), now=now)
    if outcome is not None:
        facts = Facts(outcome.sandbox, outcome.placement)
    if facts.sandbox.state in sb.TERMINAL:
        return
    assert facts.sandbox.state is State.RELEASING
    assert facts.placement is not None
    absent = Report(seq=facts.placement.seq + 1, observed=Observed.ABSENT, generation=facts.placement.generation)
    outcome = advance(facts, Heard(absent), now=now)
    assert outcome is not None
    assert outcome.sandbox.state in sb.TERMINAL


@settings(max_examples=300)
@given(steps_of, st.one_of(reports, others))
def test_what_comes_twice_changes_nothing_the_second_time(steps: list[Step], step: Step) -> None:
    facts, now = last(steps)
    stimulus = step.against(facts)
    first = advance(facts, stimulus, now=now)
    if first is None or isinstance(stimulus, HostRefused | NoRoom):
        return  # each of these is an answer to a question of its own
    assert advance(kept(first), stimulus, now=now) is None


@settings(max_examples=200)
@given(steps_of, st.integers(1, 4))
def test_a_host_that_answers_honestly_brings_it_to_ready_or_an_end(steps: list[Step], lost: int) -> None:
    """However it was treated before, honest hosts and enough time settle it: nothing stays in between for ever."""
    facts, now = last(steps)
    for round_ in range(60):
        state = facts.sandbox.state
        if state in sb.TERMINAL or state is State.READY or state in AT_REST:
            return
        now = max(now, facts.sandbox.deadline_at or now)
        stimulus: Stimulus = Tick()
        if wants_placing(facts.sandbox, now=now):
            stimulus = Placed(placement(facts.sandbox))
        elif facts.placement is not None and round_ % lost == 0:
            gone = facts.placement.desired is Kind.ENSURE_ABSENT
            seen = TOLD[facts.placement.desired]
            ready, applied = seen is Observed.RUNNING, facts.placement.desired_revision
            report = Report(facts.placement.seq + 1, seen, facts.placement.generation, ready=ready, applied_revision=applied)
            stimulus = Heard(report, ended_by="command" if gone else None)
        outcome = advance(facts, stimulus, now=now)
        if outcome is not None:
            facts = kept(outcome)
    raise AssertionError(f"still {facts.sandbox.state}")


@settings(max_examples=300)
@given(steps_of)
def test_what_is_at_rest_can_be_had_back(steps: list[Step]) -> None:
    """From rest, a resume and an honest host bring it to ready, with an end that counts from then; and it held less meanwhile."""
    facts, now = last(steps)
    if facts.sandbox.state not in AT_REST or facts.placement is None or facts.placement.holding is Holding.NONE:
        return
    assert facts.sandbox.end_at is None, "nothing ends that is at rest"
    first = advance(facts, ResumeRequested(life_s=50.0), now=now)
    assert first is not None
    assert first.placement is not None
    assert first.placement.holding is Holding.ACTIVE, "its host must have room before it is wanted back"
    told = Report(
        first.placement.seq + 1,
        Observed.RUNNING,
        first.placement.generation,
        ready=True,
        applied_revision=first.placement.desired_revision,
    )
    second = advance(kept(first), Heard(told), now=now + 1.0)
    assert second is not None
    assert second.sandbox.state is State.READY
    assert second.sandbox.end_at == now + 51.0


@settings(max_examples=300)
@given(steps_of)
def test_what_holds_little_is_at_rest(steps: list[Step]) -> None:
    """Capacity is given back when it is seen at rest, and never while it may run."""
    for before, stimulus, outcome, _ in walk(steps):
        if outcome is None or outcome.placement is None or before.placement is None or before.placement.id != outcome.placement.id:
            continue
        little = outcome.placement.holding in (Holding.PAUSED, Holding.SAVED, Holding.STOPPED)
        if little and outcome.placement.holding is not before.placement.holding:
            assert isinstance(stimulus, Heard)
            assert stimulus.report.observed in (Observed.FROZEN, Observed.SAVED, Observed.STOPPED)


def test_the_facts_are_not_touched() -> None:
    facts = Facts(sandbox(), None)
    copy = replace(facts)
    advance(facts, ReleaseRequested(), now=NOW)
    assert facts == copy


def test_what_was_fenced_is_ordered_away() -> None:
    """A fenced placement grants nothing, and its command is to go, with a revision that its host has not heard of."""
    ready = replace(sandbox(), state=State.READY, started_at=NOW)
    held = replace(placement(ready), desired_revision=3)
    outcome = advance(Facts(replace(ready, placement_id=held.id), held), Fenced(), now=NOW)
    assert outcome is not None
    assert outcome.placement is not None
    assert outcome.placement.holding is Holding.NONE
    assert outcome.placement.desired is Kind.ENSURE_ABSENT
    assert outcome.placement.desired_revision == 4
