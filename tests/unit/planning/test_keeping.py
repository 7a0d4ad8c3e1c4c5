"""Snapshots by table: every word in every state, and what is held meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import Code, Refused
from atoll.base.ids import ClientId, HostId, PlacementId, SandboxId, TeamId
from atoll.domain import history
from atoll.domain.deployment import DEFAULT_CLASSES
from atoll.domain.moment import Moment
from atoll.domain.snapshot import TERMINAL, Copy, Purpose, Snapshot, State, held_disk_mib
from atoll.domain.spec import Isolation, Origin, SaveMode, Spec
from atoll.planning import beginning, keeping
from atoll.planning.claiming import pool_of
from atoll.planning.keeping import Absent, Kept, NotKept
from atoll.planning.resolve import CreateRequest, resolve
from tests.builders import NOW, sandbox

SPEC = replace(sandbox().spec, tmp_on_disk=True, manifest="sha256:m", regions=("far",), labels=(("disk", "fast"),))
WORDS = (Kept(SaveMode.FILES, 3 << 20), NotKept("HOST_DISK_FULL", "full"), Absent())


def snapshot(state: State = State.TAKING, **changes: object) -> Snapshot:
    one = Snapshot(
        id="snp_" + "a" * 20,
        revision=1,
        team_id=TeamId("tea_x"),
        client_id=ClientId("cli_x"),
        sandbox_id=SandboxId("i" + "a" * 20),
        placement_id=PlacementId("plc_x"),
        host_id=HostId("hst_x"),
        state=state,
        purpose=Purpose.KEPT,
        mode=SaveMode.FULL,
        spec=SPEC,
        created_at=NOW,
        deadline_at=NOW + 300,
        env=(("OF", "template"),),
    )
    return replace(one, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_a_word_counts_in_its_own_state_and_once(state: State, word: Kept | NotKept | Absent) -> None:
    done = keeping.heard(snapshot(state), word, now=NOW + 1)
    expected = {
        (State.TAKING, Kept): State.READY,
        (State.TAKING, NotKept): State.FAILED,
        (State.DELETING, Absent): State.DELETED,
    }.get((state, type(word)))
    if expected is None:
        assert done is None
        return
    assert done is not None
    assert done.snapshot.state is expected
    assert keeping.heard(done.snapshot, word, now=NOW + 2) is None, "said again, it changes nothing"


def test_what_is_kept_is_what_its_host_says() -> None:
    done = keeping.heard(snapshot(), Kept(SaveMode.FILES, (3 << 20) + 1), now=NOW + 1)
    assert done is not None
    assert (done.snapshot.mode, held_disk_mib(done.snapshot), done.snapshot.deadline_at) == (SaveMode.FILES, 4, None)
    assert done.note is not None
    assert done.note.type == history.SANDBOX_SNAPSHOT_TAKEN


def test_disk_is_held_until_it_is_seen_gone() -> None:
    assert held_disk_mib(snapshot()) == SPEC.memory_mib
    taken = keeping.heard(snapshot(), Kept(SaveMode.FULL, 0), now=NOW)
    assert taken is not None
    going = keeping.delete(taken.snapshot, now=NOW)
    assert going is not None
    assert held_disk_mib(going.snapshot) == 1
    gone = keeping.heard(going.snapshot, Absent(), now=NOW)
    assert gone is not None
    assert held_disk_mib(gone.snapshot) == 0
    assert [held_disk_mib(snapshot(state)) for state in TERMINAL] == [0, 0]


@pytest.mark.parametrize("state", list(State))
def test_deletion_deadline_and_loss(state: State) -> None:
    one = snapshot(state)
    deleted, lost = keeping.delete(one, now=NOW), keeping.lost(one, now=NOW)
    assert (deleted is None) is (state in TERMINAL | {State.DELETING})
    assert (lost is None) is (state in TERMINAL)
    assert lost is None or lost.snapshot.state in TERMINAL
    assert keeping.late(one, now=NOW + 299) is None
    late = keeping.late(one, now=NOW + 300)
    assert (late.snapshot.state if late is not None else None) is (State.DELETING if state in (State.TAKING, State.READY) else None)
    assert state is not State.TAKING or (late is not None and late.snapshot.code == Code.SAVE_TIMEOUT)


def test_a_fork_has_a_deadline_once_it_is_ready() -> None:
    done = keeping.heard(snapshot(purpose=Purpose.FORK), Kept(SaveMode.FULL, 1), now=NOW)
    assert done is not None
    assert done.snapshot.deadline_at == NOW + SPEC.create_patience_s + keeping.FORK_LEFT_S


# Where it is begun from.

STORED = Moment("sha256:" + "5" * 64, 7 << 20, "fake/gvisor/x86_64")


def test_what_is_in_the_store_is_fetched_by_any_host_that_fits() -> None:
    spec = replace(SPEC, origin=Origin("snp_x", SaveMode.FULL, pinned=True), require_host="hst_x")
    there = snapshot(State.READY, moment=STORED)
    assert keeping.sought(spec, snapshot(State.READY)) == (spec,), "one host has it"
    assert keeping.sought(spec, None) == (spec,)
    fetched = replace(Origin("snp_x", SaveMode.FULL, pinned=True), moment=STORED.digest, kind=STORED.kind)
    assert keeping.sought(spec, there) == (replace(spec, require_host=None, prefer_host="hst_x", origin=fetched),)
    assert keeping.sought(replace(SPEC, origin=None), there) == (replace(SPEC, origin=None),)


def test_a_head_start_in_the_store_is_fetched_where_it_fits_and_no_host_is_left_out() -> None:
    spec = replace(SPEC, origin=Origin("snp_x", SaveMode.FULL, or_boot=True), prefer_host="hst_x")
    there = snapshot(State.READY, moment=STORED, purpose=Purpose.TEMPLATE)
    assert keeping.sought(spec, replace(there, moment=None)) == (spec,), "it is taken where it is, and booted elsewhere"
    first, then = keeping.sought(spec, there)
    assert first.origin is not None
    assert (first.origin.moment, first.origin.kind, first.origin.or_boot) == (STORED.digest, STORED.kind, True)
    assert (first.prefer_host, first.require_host) == ("hst_x", None)
    assert then == spec
    free = keeping.sought(replace(spec, prefer_host=None), replace(there, copy=Copy.NONE))[0]
    assert free.prefer_host is None, "nobody has it; whoever fits may fetch it"
    assert keeping.sought(spec, replace(there, state=State.DELETING)) == (spec,)


def test_a_head_start_is_tried_once() -> None:
    spec = replace(SPEC, origin=Origin("snp_x", SaveMode.FULL, or_boot=True))
    there = snapshot(State.READY, moment=STORED, purpose=Purpose.TEMPLATE)
    without = replace(spec, origin=None)
    assert keeping.sought(spec, there, generation=2) == (without,)
    assert (keeping.begins_with(spec, generation=1), keeping.begins_with(spec, generation=2)) == (spec, without)
    kept = replace(SPEC, origin=Origin("snp_x", SaveMode.FULL))
    assert keeping.begins_with(kept, generation=2) == kept, "a snapshot is what was asked for"


# What begins from one.


def test_what_belongs_to_the_moment_is_its_own_and_the_rest_the_requests() -> None:
    taken = snapshot(State.READY)
    request = CreateRequest(template="warm", timeout_s=77, env={"A": "b"}, metadata={"x": "y"})
    begun = beginning.of_snapshot(taken, request)
    assert begun.template.env == (("OF", "template"),)
    made = resolve(begun.request, template=begun.template, policy=DEFAULT_CLASSES["default"])
    assert begun.shape is not None
    spec = begun.shape(made)
    assert spec.origin == Origin(taken.id, SaveMode.FULL, pinned=True)
    assert (spec.template_id, spec.image, spec.image_name, spec.manifest) == (taken.id, SPEC.image, SPEC.image_name, "sha256:m")
    assert (spec.cpu_millis, spec.memory_mib, spec.disk_mib, spec.tmp_on_disk) == (SPEC.cpu_millis, SPEC.memory_mib, SPEC.disk_mib, True)
    assert (spec.require_host, spec.regions, spec.labels) == (taken.host_id, (), ())
    assert (spec.timeout_s, begun.request.env, begun.request.metadata) == (77, {"A": "b"}, {"x": "y"})
    forked = beginning.of_snapshot(replace(taken, purpose=Purpose.FORK), request)
    assert forked.shape is not None
    assert forked.shape(made).template_id == SPEC.template_id, "a clone is of its parent's template"


def test_a_head_start_is_of_the_same_size_and_is_no_condition() -> None:
    kept = snapshot(State.READY, purpose=Purpose.TEMPLATE, spec=replace(SPEC, command=("serve",), tmp_on_disk=False))
    spec = replace(kept.spec, template_id="another", timeout_s=9, origin=None)
    made = beginning.head_start(spec, kept)
    assert made == replace(spec, origin=Origin(kept.id, SaveMode.FULL, or_boot=True), prefer_host=kept.host_id)
    assert made.require_host is None, "another host boots it"
    named = beginning.head_start(replace(spec, prefer_host="mine"), kept)
    assert isinstance(named, Spec)
    assert named.prefer_host == "mine"
    left = beginning.head_start(spec, replace(kept, copy=Copy.NONE))
    assert isinstance(left, Spec)
    assert left.prefer_host is None, "it is on no host any more"


@pytest.mark.parametrize(
    "other",
    [
        {"cpu_millis": 1}, {"memory_mib": 1}, {"disk_mib": 1}, {"isolation": Isolation.SHARED_KERNEL}, {"image": "sha256:b"},
        {"pids_max": 1}, {"tmp_on_disk": True}, {"command": ("other",)}, {"ready_command": ("other",)}, {"command_user": "root"},
        {"default_user": "root"}, {"default_workdir": "/srv"}, {"arch": "aarch64"},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_head_start_does_not_fit_is_said(other: dict[str, Any]) -> None:
    kept = snapshot(State.READY, purpose=Purpose.TEMPLATE, spec=replace(SPEC, command=("serve",), tmp_on_disk=False))
    said = beginning.head_start(replace(kept.spec, **other), kept)
    assert isinstance(said, str)
    assert said.startswith(next(iter(other)))


@pytest.mark.parametrize("asked", [{"memory_mib": 1}, {"cpu_millis": 1}, {"disk_mib": 1}, {"require_host": "elsewhere"}], ids=str)
def test_what_it_cannot_be_is_refused(asked: dict[str, object]) -> None:
    with pytest.raises(Refused) as refused:
        beginning.of_snapshot(snapshot(State.READY), CreateRequest(**asked), host_name="here")  # type: ignore[arg-type]
    assert refused.value.code is Code.INVALID_REQUEST


def test_its_host_may_be_named_and_its_size_repeated() -> None:
    for host in ("hst_x", "here"):
        request = CreateRequest(require_host=host, memory_mib=SPEC.memory_mib)
        assert beginning.of_snapshot(snapshot(State.READY), request, host_name="here").request.require_host == "hst_x"


def test_a_class_that_separates_in_another_way_is_refused() -> None:
    other = Isolation.SHARED_KERNEL if SPEC.isolation is not Isolation.SHARED_KERNEL else Isolation.GVISOR
    with pytest.raises(Refused) as refused:
        beginning.check_class(snapshot(State.READY), replace(DEFAULT_CLASSES["default"], isolation=other, or_stronger=False))
    assert refused.value.code is Code.CLASS_LIMIT


def test_a_class_takes_what_is_stronger_where_it_says_so() -> None:
    for isolation, fine in ((Isolation.SHARED_KERNEL, True), (Isolation.VM, False)):
        policy = replace(DEFAULT_CLASSES["default"], isolation=isolation, or_stronger=True)
        assert SPEC.isolation is Isolation.GVISOR
        if fine:
            beginning.check_class(snapshot(State.READY), policy)
        else:
            with pytest.raises(Refused):
                beginning.check_class(snapshot(State.READY), policy)


def test_a_head_start_leaves_a_create_in_its_pool_and_a_snapshot_does_not() -> None:
    spec = replace(SPEC, tmp_on_disk=False)
    started = replace(spec, origin=Origin("snp_x", SaveMode.FULL, or_boot=True), prefer_host="hst_x")
    assert pool_of(started) == pool_of(spec)
    assert pool_of(spec) is not None
    assert pool_of(replace(spec, origin=Origin("snp_x", SaveMode.FULL))) is None
