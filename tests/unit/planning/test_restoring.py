"""What control makes of a host's account: the newer end counts, and control's next word is newer than what the agent has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.domain.account import Account
from atoll.domain.command import Kind
from atoll.domain.moment import Moment
from atoll.domain.placement import Holding, Observed, Placement, Report
from atoll.domain.sandbox import Condition, Sandbox, State
from atoll.domain.spec import SaveMode
from atoll.planning.claiming import CLAIMED
from atoll.planning.reconcile import advance
from atoll.planning.restoring import caught_up, found
from atoll.planning.stimuli import Facts, Heard
from tests.builders import NOW, placement, sandbox


def running(**changes: Any) -> tuple[Sandbox, Placement]:
    of = sandbox(state=State.READY, end_at=NOW + 900.0, end_revision=3, started_at=NOW - 100.0, **changes)
    place = placement(of, holding=Holding.ACTIVE, observed=Observed.RUNNING, ready=True, desired_revision=2, applied_revision=2)
    return of, place


def account(of: Sandbox, place: Placement, **changes: Any) -> Account:
    values: dict[str, Any] = {
        "placement_id": place.id,
        "sandbox_id": of.id,
        "team_id": of.team_id,
        "generation": place.generation,
        "desired": Kind.ENSURE_RUNNING,
        "desired_revision": place.desired_revision,
        "spec": of.spec,
        "nonce": place.nonce,
        "ready": True,
        "end_revision": 3,
        "remaining_s": 200.0,
    }
    return Account(**{**values, **changes})


@pytest.mark.parametrize(
    ("end_at", "end_revision", "remaining_s", "expected_s"),
    [
        pytest.param(NOW + 900.0, 3, 200.0, 200.0, id="the agent has heard of the same end, or a later one"),
        pytest.param(NOW + 900.0, 5, 200.0, 200.0, id="the agent has heard of an end that the backup does not know"),
        pytest.param(NOW + 900.0, 2, 200.0, 900.0, id="the end on record had not reached the agent"),
        pytest.param(NOW - 50.0, 2, 200.0, 200.0, id="the end on record had not reached the agent, and is over"),
        pytest.param(NOW + 900.0, 0, None, 300.0, id="the agent knows of none"),
    ],
)
def test_the_newer_end_counts(end_at: float, end_revision: int, remaining_s: float | None, expected_s: float) -> None:
    of, place = running()
    known = Facts(Sandbox(**{**{name: getattr(of, name) for name in of.__dataclass_fields__}, "end_at": end_at}), place)
    outcome = caught_up(known, account(of, place, end_revision=end_revision, remaining_s=remaining_s), now=NOW)
    assert outcome is not None
    assert outcome.sandbox.end_at == NOW + expected_s
    assert outcome.sandbox.end_revision > max(3, end_revision)


@pytest.mark.parametrize(
    ("applied", "ready", "reason"),
    [
        pytest.param(2, False, None, id="it was handed over before the backup"),
        pytest.param(1, True, None, id="it was handed over since"),
        pytest.param(1, False, CLAIMED, id="it is being handed over"),
    ],
)
def test_what_was_handed_over_is_not_handed_over_anew(applied: int, ready: bool, reason: str | None) -> None:
    of, place = running()
    claimed = replace(place, desired_revision=2, applied_revision=applied, desired_reason=CLAIMED)
    outcome = caught_up(Facts(of, claimed), account(of, claimed, ready=ready), now=NOW)
    assert outcome is not None
    assert outcome.placement is not None
    assert (outcome.placement.desired_revision, outcome.placement.desired_reason) == (3, reason)
    assert outcome.sandbox.end_at == NOW + (900.0 if reason is CLAIMED else 200.0), "until then its agent enforces an end of nobody's"


@pytest.mark.parametrize(("end_at", "expected_s"), [(NOW + 900.0, 900.0), (NOW - 1.0, 300.0)])
def test_an_agent_that_has_not_heard_of_a_claim_says_nothing_of_its_end(end_at: float, expected_s: float) -> None:
    """Its guest is ready for nobody, for twelve hours."""
    of, place = running()
    of = replace(of, end_at=end_at)
    claimed = replace(place, desired_revision=2, applied_revision=1, desired_reason=CLAIMED)
    outcome = caught_up(Facts(of, claimed), account(of, claimed, desired_revision=1, remaining_s=43000.0), now=NOW)
    assert outcome is not None
    assert outcome.sandbox.end_at == NOW + expected_s
    assert outcome.placement is claimed


@pytest.mark.parametrize("ready", [True, False])
def test_the_first_word_about_what_is_on_record_again_is_a_new_one(ready: bool) -> None:
    """Of the agent's own revision there is another command already, with other content."""
    of, place = running()
    made = found(account(of, place, ready=ready, desired_revision=4), None, host_id="hst_one", restored_at=NOW - 1.0, now=NOW)
    assert made is not None
    assert made.placement.desired_revision == 5
    assert made.placement.applied_revision == (5 if ready else 0)


def test_what_is_paused_on_record_and_saved_since_is_suspended() -> None:
    """Frozen again it could only be by bringing it back, for which its host may have no room."""
    of = sandbox(state=State.PAUSED, started_at=NOW - 100.0)
    place = placement(
        of, holding=Holding.PAUSED, observed=Observed.FROZEN, desired=Kind.ENSURE_PAUSED, desired_revision=2, applied_revision=2
    )
    said = account(
        of, place, desired=Kind.ENSURE_SUSPENDED, desired_revision=3, ready=False, observed=Observed.SAVED, save_mode=SaveMode.FILES,
        remaining_s=None, end_revision=0,
    )  # fmt: skip
    outcome = caught_up(Facts(of, place), said, now=NOW)
    assert outcome is not None
    assert (outcome.sandbox.state, outcome.sandbox.save_mode) == (State.SUSPENDING, SaveMode.FILES)
    assert outcome.placement is not None
    assert (outcome.placement.holding, outcome.placement.desired, outcome.placement.desired_revision) == (
        Holding.PAUSED,
        Kind.ENSURE_SUSPENDED,
        4,
    )
    seen = Report(seq=9, observed=Observed.SAVED, generation=place.generation, applied_revision=4, save_mode=SaveMode.FILES)
    heard = advance(Facts(outcome.sandbox, outcome.placement), Heard(seen), now=NOW + 1.0)
    assert heard is not None
    assert heard.placement is not None
    assert (heard.sandbox.state, heard.placement.holding) == (State.SUSPENDED, Holding.SAVED)


STORED = Moment("sha256:" + "3" * 64, 1 << 20, "oci/gvisor/x86_64")


def test_the_store_has_what_its_host_says_now_and_not_what_a_backup_remembers() -> None:
    of, place = running()
    rests = replace(of, state=State.SUSPENDED, end_at=None, moment=Moment("sha256:" + "1" * 64))
    saved = replace(place, desired=Kind.ENSURE_SUSPENDED, holding=Holding.SAVED, observed=Observed.SAVED)
    for observed, moment in ((Observed.SAVED, STORED), (Observed.SAVED, None), (Observed.RUNNING, None)):
        said = account(rests, saved, desired=Kind.ENSURE_SUSPENDED, observed=observed, moment=moment, remaining_s=None, ready=False)
        outcome = caught_up(Facts(rests, saved), said, now=NOW)
        assert outcome is not None
        assert outcome.sandbox.moment == moment, "where it has run since, nothing that was saved before is its newest save"


def test_what_a_host_was_giving_up_rests_in_the_store() -> None:
    """It came back there after the backup, was suspended, and left: it was not released."""
    of, place = running()
    known = Facts(replace(of, state=State.SUSPENDED, end_at=None, moment=Moment("sha256:" + "1" * 64)), None)
    newer = replace(place, generation=2)
    going = account(of, newer, desired=Kind.ENSURE_ABSENT, observed=Observed.SAVED, moment=STORED, ready=False, save_mode=SaveMode.FULL)
    made = found(going, known, host_id="hst_one", restored_at=NOW - 1.0, now=NOW)
    assert made is not None
    assert (made.sandbox.state, made.sandbox.generation, made.sandbox.moment) == (State.SUSPENDED, 2, STORED)
    assert (made.sandbox.rests_in_store, made.sandbox.unseen, made.sandbox.conditions) == (True, 1, {Condition.HOSTS_UNSETTLED})
    assert (made.placement.holding, made.placement.desired) == (Holding.SAVED, Kind.ENSURE_ABSENT)
    released = found(replace(going, moment=None), known, host_id="hst_one", restored_at=NOW - 1.0, now=NOW)
    assert released is not None
    assert released.sandbox.state is State.RELEASING
