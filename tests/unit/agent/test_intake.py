"""What a command means for what is known already."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.agent.intake import Verdict, judge
from atoll.agent.record import EndedBy, Goal, Record, ending, exited, goal, restart_pause_s, seen
from atoll.base.errors import Code
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation, Spec
from atoll.wire.agent import Command

PLACEMENT = "plc_aaaaaaaaaaaaaaaaaaaa"
SPEC = Spec("default", "tpl_x", "sha256:aa", "base", Isolation.GVISOR, 1000, 128, 256, 64, 300)


def command(revision=1, kind=Kind.ENSURE_RUNNING, **more) -> Command:
    content = {
        "id": f"{PLACEMENT}:1:{revision}",
        "kind": kind,
        "placement_id": PLACEMENT,
        "sandbox_id": "i1",
        "team_id": "tea_1",
        "generation": 1,
        "desired_revision": revision,
        "digest": f"digest {revision}",
        "epoch": "epo_1",
        "spec": SPEC if kind is not Kind.ENSURE_ABSENT else None,
        "nonce": "n",
        "guest_public_key": "k",
        "guest_token": "t",
        **more,
    }
    return Command.model_validate(content)


def decide(known, asked, *, quarantine=False, held=False, boot_id="boot"):
    return judge(known, asked, epoch="epo_1", boot_id=boot_id, quarantine=quarantine, held=held)


def record(**more) -> Record:
    made = decide(None, command(2)).record
    assert made is not None
    return replace(made, **more)


def test_a_new_command_is_accepted_with_everything_but_secrets():
    judged = decide(None, command())
    assert judged.verdict is Verdict.NEW
    made = judged.record
    assert (made.desired, made.desired_revision, made.digest, made.observed, made.seq) == (
        Kind.ENSURE_RUNNING,
        1,
        "digest 1",
        Observed.ACCEPTED,
        1,
    )
    assert made.blueprint.spec == SPEC
    assert "token" not in repr(made)
    assert goal(made) is Goal.RUNNING


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        (command(2), Verdict.DUPLICATE),
        (command(1), Verdict.STALE),
        (command(3), Verdict.NEWER),
        (command(2, digest="other"), Verdict.CONFLICT),
        (command(3, generation=2), Verdict.CONFLICT),
        (command(3, sandbox_id="i2"), Verdict.CONFLICT),
        (command(3, generation=0), Verdict.STALE),
        (command(3, epoch="epo_0"), Verdict.FOREIGN),
    ],
)
def test_verdicts(asked, verdict):
    assert decide(record(), asked).verdict is verdict


def test_a_conflict_changes_what_is_said_and_nothing_else():
    known = record(observed=Observed.RUNNING, ready=True, applied_revision=2)
    after = decide(known, command(2, digest="other")).record
    assert after == replace(known, seq=known.seq + 1, reason=Code.COMMAND_CONFLICT, detail=after.detail)
    assert decide(after, command(2, digest="other")).record is None


def test_newest_wins():
    after = decide(record(), command(3, Kind.ENSURE_ABSENT)).record
    assert (after.desired, goal(after)) == (Kind.ENSURE_ABSENT, Goal.ABSENT)
    assert after.blueprint is not None
    assert decide(after, command(2)).verdict is Verdict.STALE


def test_absence_absorbs():
    tomb = record(observed=Observed.ABSENT, ended_by="end_at", applied_revision=2)
    revived = decide(tomb, command(3)).record
    assert (revived.observed, revived.applied_revision, goal(revived)) == (Observed.ABSENT, 2, Goal.REST)
    buried = decide(tomb, command(3, Kind.ENSURE_ABSENT)).record
    assert (buried.observed, buried.applied_revision, buried.seq) == (Observed.ABSENT, 3, tomb.seq + 1)


def test_in_quarantine_only_removal_is_served():
    refused = decide(None, command(), quarantine=True).record
    assert (refused.observed, refused.reason, goal(refused)) == (Observed.ERROR, Code.HOST_QUARANTINED, Goal.REST)
    removal = decide(None, command(1, Kind.ENSURE_ABSENT), quarantine=True).record
    assert goal(removal) is Goal.ABSENT


def test_a_command_that_lacks_its_order_is_refused():
    refused = decide(None, command(1, nonce=None)).record
    assert (refused.observed, refused.reason, goal(refused)) == (Observed.ERROR, Code.INVALID_REQUEST, Goal.REST)


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        (record(), Goal.RUNNING),
        (record(desired=Kind.ENSURE_PRESENT), Goal.PREPARED),
        (record(applied_revision=2, ready=True), Goal.REST),
        (record(failed_revision=2, observed=Observed.ERROR), Goal.REST),
        (record(failed_revision=1), Goal.RUNNING),
        (record(ended_by="lease"), Goal.ABSENT),
        (record(ended_by="lease", observed=Observed.ABSENT), Goal.REST),
        (record(desired=Kind.ENSURE_ABSENT, failed_revision=2), Goal.ABSENT),
        (record(quarantined=True), Goal.REST),
        (record(quarantined=True, desired=Kind.ENSURE_ABSENT), Goal.ABSENT),
        (record(quarantined=True, ended_by="end_at"), Goal.ABSENT),
        (record(desired=Kind.ENSURE_SUSPENDED), Goal.SUSPENDED),
        (record(desired=Kind.ENSURE_SUSPENDED, failed_revision=2), Goal.REST),
    ],
)
def test_goals(known, wanted):
    assert goal(known) is wanted


def test_the_first_decision_to_end_stands():
    first = ending(record(), EndedBy.LEASE, reason="LEASE_EXPIRED")
    assert ending(first, EndedBy.END_AT, reason="END_REACHED") is None
    assert exited(first, reason="GUEST_EXITED", detail="exit 1") is None
    assert ending(record(desired=Kind.ENSURE_ABSENT), EndedBy.LEASE, reason="x") is None
    assert ending(record(observed=Observed.ABSENT), EndedBy.LEASE, reason="x") is None


def test_details_are_bounded():
    assert len(seen(record(), Observed.ERROR, detail="x" * 5000).detail) == 2000
    assert len(exited(record(), reason="R", detail="y" * 5000).ended_detail) == 2000


@pytest.mark.parametrize("quarantine", [False, True])
def test_what_was_carried_out_and_is_new_here_is_lost_unless_the_machine_has_it(quarantine):
    lost = decide(None, command(carried_out=True), quarantine=quarantine).record
    assert (lost.observed, lost.reason, lost.ended_by, goal(lost)) == (Observed.STOPPED, Code.PLACEMENT_LOST, EndedBy.EXIT, Goal.ABSENT)
    kept = decide(None, command(carried_out=True), quarantine=quarantine, held=True).record
    assert (kept.observed, kept.reason, goal(kept), kept.blueprint.begun) == (Observed.ACCEPTED, None, Goal.RUNNING, True)


def test_what_explains_what_is_held_is_served_in_quarantine():
    assert goal(decide(None, command(), quarantine=True, held=True).record) is Goal.RUNNING
    assert decide(None, command(), quarantine=True).record.reason == Code.HOST_QUARANTINED


def test_whether_it_was_carried_out_makes_no_other_command():
    assert decide(record(), command(2, carried_out=True)).verdict is Verdict.DUPLICATE


def test_a_start_in_its_place_is_of_the_boot_in_which_it_is_ordered():
    stopped = record(observed=Observed.STOPPED, applied_revision=2, failed_revision=2)
    assert decide(stopped, command(3), boot_id="boot-2").record.boot_id == "boot-2"
    running = record(observed=Observed.RUNNING, ready=True, applied_revision=2)
    assert decide(running, command(3), boot_id="boot-2").record.boot_id == "boot"


@pytest.mark.parametrize(("restart", "applied", "ended_by"), [(True, 2, None), (True, 0, "exit"), (False, 2, "exit")])
def test_a_guest_that_has_ended_is_kept_only_to_be_begun_again(restart, applied, ended_by):
    known = record(observed=Observed.RUNNING, ready=True, applied_revision=applied)
    after = exited(known, reason="GUEST_EXITED", detail="exit 1", restart=restart)
    assert (after.observed, after.ready, after.ended_by) == (Observed.STOPPED, False, ended_by)
    assert goal(after) is (Goal.REST if ended_by is None else Goal.ABSENT)


def test_pauses_grow_with_each_restart_and_end():
    stopped = [record(observed=Observed.STOPPED, applied_revision=1, desired_revision=n) for n in range(2, 12)]
    pauses = [restart_pause_s(one) for one in stopped]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert restart_pause_s(record()) == 0.0
