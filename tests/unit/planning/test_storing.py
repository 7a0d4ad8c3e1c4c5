"""Rest in the artifact store, on no host, and back: one step at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import Code
from atoll.base.ids import HostId
from atoll.base.units import Vector
from atoll.domain import history as ev
from atoll.domain.command import Kind
from atoll.domain.moment import Moment, kind
from atoll.domain.placement import Holding, Observed, Placement, Report, held
from atoll.domain.sandbox import Condition, State
from atoll.domain.spec import LOCAL_S, Origin, SaveMode
from atoll.planning import storing
from atoll.planning.reconcile import advance
from atoll.planning.stimuli import (
    CopyUnwanted,
    Facts,
    Fenced,
    Heard,
    HostHeard,
    Outcome,
    ReleaseRequested,
    ResumeRequested,
    SuspendRequested,
    Tick,
)
from tests.builders import NOW, placement, sandbox, spec

SAVED = Moment("sha256:" + "1" * 64, 1 << 20, "oci/gvisor/x86_64")
NEWER = replace(SAVED, digest="sha256:" + "2" * 64)


def kept(outcome: Outcome | None) -> Facts:
    assert outcome is not None
    return Facts(outcome.sandbox, outcome.placement, outcome.older)


def place_of(facts: Facts) -> Placement:
    assert facts.placement is not None
    return facts.placement


def told(facts: Facts, observed: Observed, **more: Any) -> Heard:
    place = place_of(facts)
    return Heard(Report(place.seq + 1, observed, place.generation, **{"applied_revision": place.desired_revision, **more}))


def suspended(moment: Moment | None = None) -> Facts:
    one = sandbox(state=State.READY, started_at=NOW, end_at=NOW + 300, end_revision=2, attempts=1, bootstrap_exposed=True)
    place = placement(one, holding=Holding.ACTIVE, observed=Observed.RUNNING, ready=True, seq=3, applied_revision=1, address="10.64.0.2")
    facts = Facts(replace(one, placement_id=place.id, host_id=place.host_id), place)
    facts = kept(advance(facts, SuspendRequested(), now=NOW))
    return kept(advance(facts, told(facts, Observed.SAVED, save_mode="full", moment=moment), now=NOW + 1))


def stored() -> Facts:
    """On no host."""
    return kept(advance(suspended(SAVED), CopyUnwanted(), now=NOW + 2))


def away(facts: Facts) -> Facts:
    """Its copy is seen gone."""
    old = facts.older[0]
    gone = Heard(Report(old.seq + 1, Observed.ABSENT, old.generation), placement_id=old.id)
    after = kept(advance(facts, gone, now=NOW + 3))
    return replace(after, older=())


def granted(facts: Facts) -> Placement:
    return placement(facts.sandbox, host_id=HostId("hst_two"))


def resuming() -> Facts:
    facts = away(stored())
    return kept(advance(facts, ResumeRequested(100.0, placement=granted(facts)), now=NOW + 10))


def test_what_is_saved_is_in_the_store_once_its_host_says_so() -> None:
    facts = suspended()
    assert facts.sandbox.moment is None
    outcome = advance(facts, told(facts, Observed.SAVED, save_mode="full", moment=SAVED), now=NOW + 5)
    assert outcome is not None
    assert (outcome.sandbox.moment, outcome.sandbox.deadline_at) == (SAVED, NOW + 5 + LOCAL_S)
    assert [note.type for note in outcome.notes] == [ev.SANDBOX_UPLOADED]
    again = kept(outcome)
    assert kept(advance(again, told(again, Observed.SAVED, save_mode="full", moment=SAVED), now=NOW + 9)).sandbox == again.sandbox


def test_its_copy_stays_for_a_while_and_then_it_rests_on_no_host() -> None:
    facts = suspended(SAVED)
    assert advance(facts, Tick(), now=NOW + 1 + LOCAL_S - 1) is None
    outcome = advance(facts, Tick(), now=NOW + 1 + LOCAL_S)
    assert outcome is not None
    after, old = outcome.sandbox, outcome.older[0]
    assert (after.state, after.placement_id, after.host_id, after.saved_on) == (State.SUSPENDED, None, None, facts.sandbox.host_id)
    assert (after.rests_in_store, after.unseen, after.deadline_at) == (True, 1, None)
    assert (old.desired, old.holding) == (Kind.ENSURE_ABSENT, Holding.SAVED)
    assert held(old) == Vector(disk_mib=old.vector.disk_mib), "its disk, until it is seen gone"
    gone = away(kept(outcome))
    assert (gone.sandbox.unseen, gone.sandbox.state) == (0, State.SUSPENDED)


def test_a_resume_while_its_copy_is_there_goes_on_in_place() -> None:
    facts = suspended(SAVED)
    back = kept(advance(facts, ResumeRequested(), now=NOW + 5))
    assert (back.sandbox.state, back.sandbox.generation, place_of(back).holding) == (State.RESUMING, 1, Holding.ACTIVE)
    assert back.sandbox.moment == SAVED, "until it is ready again"
    ready = kept(advance(back, told(back, Observed.RUNNING, ready=True), now=NOW + 6))
    assert (ready.sandbox.state, ready.sandbox.moment) == (State.READY, None)


def test_one_that_only_its_host_has_stays_there() -> None:
    assert advance(suspended(), CopyUnwanted(), now=NOW + 5) is None
    lost = kept(advance(suspended(), HostHeard(lost=True), now=NOW + 5))
    assert (lost.sandbox.conditions, lost.sandbox.placement_id is None) == ({Condition.UNREACHABLE}, False)


def test_what_a_backup_remembers_is_not_left_before_every_host_has_settled() -> None:
    """It may have come back in place since, and run there."""
    facts = suspended(SAVED)
    unsettled = replace(facts, sandbox=replace(facts.sandbox, conditions=frozenset({Condition.HOSTS_UNSETTLED})))
    assert advance(unsettled, CopyUnwanted(), now=NOW + 5) is None
    again = advance(unsettled, Tick(), now=NOW + 1 + LOCAL_S)
    assert again is not None
    assert (again.sandbox.deadline_at, again.older) == (NOW + 1 + 2 * LOCAL_S, ()), "it is looked at again"
    lost = advance(unsettled, HostHeard(lost=True), now=NOW + 5)
    assert lost is not None
    assert lost.sandbox.conditions == {Condition.HOSTS_UNSETTLED, Condition.UNREACHABLE}


def test_what_may_still_run_is_not_left() -> None:
    """Its host has not yet heard that a resume has failed."""
    facts = suspended(SAVED)
    facts = kept(advance(facts, ResumeRequested(), now=NOW + 5))
    facts = kept(advance(facts, told(facts, Observed.SAVED, applied_revision=2, failed_revision=3, reason=Code.RESUME_FAILED), now=NOW + 6))
    assert (facts.sandbox.state, place_of(facts).holding) == (State.SUSPENDED, Holding.ACTIVE)
    assert advance(facts, CopyUnwanted(), now=NOW + 7) is None
    facts = kept(advance(facts, told(facts, Observed.SAVED, save_mode="full", moment=SAVED), now=NOW + 8))
    assert (place_of(facts).holding, facts.sandbox.deadline_at) == (Holding.SAVED, NOW + 8 + LOCAL_S)
    assert advance(facts, CopyUnwanted(), now=NOW + 9) is not None


def test_it_comes_back_on_another_host_as_the_next_generation() -> None:
    facts = resuming()
    place = place_of(facts)
    assert (facts.sandbox.state, facts.sandbox.generation, facts.sandbox.host_id) == (State.RESUMING, 2, HostId("hst_two"))
    assert (place.generation, place.moment, place.desired_reason, place.holding) == (2, SAVED.digest, storing.RESUMED, Holding.RESERVED)
    outcome = advance(facts, told(facts, Observed.RUNNING, ready=True, address="10.64.0.9"), now=NOW + 12)
    assert outcome is not None
    assert (outcome.sandbox.state, outcome.sandbox.moment, outcome.sandbox.saved_on) == (State.READY, None, None)
    assert outcome.sandbox.end_at == NOW + 112
    assert place_of(kept(outcome)).holding is Holding.ACTIVE


def test_the_second_of_two_resumes_finds_it_on_its_way() -> None:
    facts = resuming()
    assert advance(facts, ResumeRequested(placement=granted(facts)), now=NOW + 11) is None


def test_without_a_grant_nothing_changes() -> None:
    assert advance(away(stored()), ResumeRequested(), now=NOW + 10) is None


def test_nobody_resumes_it_before_every_host_has_said_what_it_has() -> None:
    facts = away(stored())
    unsettled = replace(facts, sandbox=replace(facts.sandbox, conditions=frozenset({Condition.HOSTS_UNSETTLED})))
    assert advance(unsettled, ResumeRequested(placement=granted(facts)), now=NOW + 10) is None


def test_a_moment_that_cannot_be_had_leaves_it_resting_where_it_was() -> None:
    facts = resuming()
    failed = told(facts, Observed.ERROR, applied_revision=0, failed_revision=1, reason=Code.MOMENT_UNAVAILABLE, detail="away")
    facts = kept(advance(facts, failed, now=NOW + 12))
    assert (facts.sandbox.state, facts.sandbox.reason, facts.sandbox.moment) == (State.SUSPENDED, Code.MOMENT_UNAVAILABLE, SAVED)
    assert place_of(facts).desired is Kind.ENSURE_SUSPENDED, "what its host may have made of it is saved first"
    nothing = told(facts, Observed.ERROR, applied_revision=0, failed_revision=2, reason=Code.PLACEMENT_LOST)
    facts = kept(advance(facts, nothing, now=NOW + 13))
    assert place_of(facts).desired is Kind.ENSURE_ABSENT
    assert advance(facts, ResumeRequested(placement=granted(facts)), now=NOW + 14) is None, "not beside what may be there"
    facts = kept(advance(facts, told(facts, Observed.ABSENT), now=NOW + 15))
    assert facts.sandbox.rests_in_store
    assert facts.sandbox.saved_on == HostId("hst_one"), "where it failed is not preferred"


def test_a_host_that_does_not_suit_is_not_asked_next() -> None:
    facts = resuming()
    failed = told(facts, Observed.ERROR, applied_revision=0, failed_revision=1, reason=Code.MOMENT_UNSUITABLE)
    assert kept(advance(facts, failed, now=NOW + 12)).sandbox.tried_hosts == ("hst_two",)


def test_a_newer_save_that_nobody_was_told_of_counts() -> None:
    """It was ready, and saved by its own agent at its end, while control heard nothing."""
    facts = resuming()
    own = told(facts, Observed.SAVED, applied_revision=1, reason=Code.END_REACHED, save_mode="full")
    facts = kept(advance(facts, own, now=NOW + 200))
    assert (facts.sandbox.state, facts.sandbox.moment, place_of(facts).holding) == (State.SUSPENDED, None, Holding.SAVED)
    facts = kept(advance(facts, told(facts, Observed.SAVED, save_mode="full", moment=NEWER), now=NOW + 201))
    assert facts.sandbox.moment == NEWER


def test_a_resume_that_was_late_is_saved_before_it_counts_as_nothing() -> None:
    facts = resuming()
    assert facts.sandbox.deadline_at is not None
    facts = kept(advance(facts, Tick(), now=facts.sandbox.deadline_at))
    assert (facts.sandbox.state, facts.sandbox.reason, place_of(facts).desired) == (
        State.SUSPENDED, Code.RESUME_TIMEOUT, Kind.ENSURE_SUSPENDED,
    )  # fmt: skip
    facts = kept(advance(facts, told(facts, Observed.SAVED, save_mode="full"), now=NOW + 2000))
    assert (facts.sandbox.moment, place_of(facts).holding) == (None, Holding.SAVED), "it may have lived: the older save is the past"


@pytest.mark.parametrize("lost", [HostHeard(lost=True), Fenced()], ids=["unheard", "fenced"])
def test_the_loss_of_its_host_does_not_touch_what_is_in_the_store(lost: HostHeard | Fenced) -> None:
    outcome = advance(suspended(SAVED), lost, now=NOW + 50)
    assert outcome is not None
    assert outcome.sandbox.rests_in_store
    assert outcome.sandbox.conditions == frozenset()


def test_the_loss_of_its_host_ends_what_only_that_had() -> None:
    outcome = advance(suspended(), Fenced(), now=NOW + 50)
    assert outcome is not None
    assert (outcome.sandbox.state, outcome.sandbox.reason) == (State.FAILED, Code.PLACEMENT_LOST)
    assert outcome.sandbox.detail is not None
    assert "artifact store" in outcome.sandbox.detail


def test_a_host_that_is_fenced_while_it_comes_back_leaves_it_resting() -> None:
    outcome = advance(resuming(), Fenced(), now=NOW + 50)
    assert outcome is not None
    assert (outcome.sandbox.rests_in_store, outcome.sandbox.moment) == (True, SAVED)


def test_a_guest_that_came_to_its_end_unheard_is_not_brought_back() -> None:
    facts = resuming()
    place = place_of(facts)
    ended = Heard(Report(place.seq + 1, Observed.ABSENT, 2, applied_revision=1, reason=Code.END_REACHED), ended_by="end_at")
    assert kept(advance(facts, ended, now=NOW + 200)).sandbox.state is State.RELEASED


@pytest.mark.parametrize("facts", [suspended(SAVED), stored(), away(stored()), resuming()], ids=["copied", "leaving", "stored", "resuming"])
def test_it_is_deleted_from_each_of_these(facts: Facts) -> None:
    going = kept(advance(facts, ReleaseRequested(), now=NOW + 20))
    assert going.sandbox.state in (State.RELEASING, State.RELEASED)
    if facts.placement is None and not facts.older:
        assert going.sandbox.state is State.RELEASED, "nothing of it is anywhere"


def test_what_leaves_and_is_deleted_ends_when_it_is_seen_gone() -> None:
    facts = stored()
    going = replace(kept(advance(facts, ReleaseRequested(), now=NOW + 3)), older=facts.older)
    assert going.sandbox.state is State.RELEASING
    assert away(going).sandbox.state is State.RELEASED


def test_where_it_is_looked_for() -> None:
    facts = away(stored())
    sought = storing.sought(facts.sandbox)
    assert (sought.prefer_host, sought.require_host) == ("hst_one", None)
    assert sought.origin == Origin("", SaveMode.FULL, moment=SAVED.digest, kind=SAVED.kind)
    pinned = replace(facts.sandbox, spec=spec(require_host="hst_one"))
    assert storing.sought(pinned).require_host == "hst_one", "as its client has asked"
    cloned = replace(facts.sandbox, spec=spec(require_host="hst_one", origin=Origin("snp_x", SaveMode.FULL, pinned=True)))
    assert storing.sought(cloned).require_host is None, "nobody has asked for it"
    ready = replace(facts.sandbox, state=State.READY)
    assert storing.sought(ready) == ready.spec


def test_a_kind_says_what_hosts_must_share() -> None:
    assert kind("oci", "gvisor", "x86_64", "runsc 1") == "oci/gvisor/x86_64/runsc 1"
    assert kind("oci", "shared-kernel", "x86_64") == "oci/shared-kernel/x86_64"
