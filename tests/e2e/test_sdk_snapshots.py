"""Unmodified E2B SDK: snapshots and forks."""

from __future__ import annotations

import time

import pytest
from e2b import NotFoundException, Sandbox, SandboxException, SandboxNotFoundException

COUNTER = "i=0; while true; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
FACTS = "head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/boot_id; hostname; echo $E2B_SANDBOX_ID; date +%s; echo $GIVEN"


def count(sandbox: Sandbox) -> int:
    """What the counter wrote last; between its truncation and its write there is nothing."""
    while not (said := sandbox.files.read("/tmp/count")):
        time.sleep(0.01)
    return int(said)


def facts(sandbox: Sandbox) -> list[str]:
    return sandbox.commands.run(FACTS).stdout.splitlines()


def test_a_snapshot_is_begun_from_and_its_sandbox_goes_on(make) -> None:
    parent = make(timeout=120, envs={"GIVEN": "once"})
    parent.commands.run(COUNTER, background=True)
    parent.files.write("/home/user/kept", "kept")
    time.sleep(0.3)
    taken = parent.create_snapshot(name="warm-one")
    try:
        assert taken.names == ["default/warm-one:default"]
        at = count(parent)
        time.sleep(0.3)
        assert count(parent) > at, "it goes on"
        listed = [one.snapshot_id for one in Sandbox.list_snapshots(sandbox_id=parent.sandbox_id).next_items()]
        assert listed == [taken.snapshot_id]
        for reference in (taken.snapshot_id, "warm-one", taken.names[0]):
            clone = make(template=reference, timeout=60)
            assert clone.sandbox_id != parent.sandbox_id
            assert clone.files.read("/home/user/kept") == "kept"
            first = count(clone)
            time.sleep(0.3)
            assert count(clone) > first, "what counted goes on there"
            mine, theirs = facts(clone), facts(parent)
            assert mine[0] != theirs[0], "its chance is its own"
            assert mine[1] == theirs[1], "it is of the same boot"
            assert (mine[2], mine[3]) == (clone.sandbox_id, clone.sandbox_id)
            assert abs(int(mine[4]) - time.time()) < 5
            assert mine[5:] in ([], [""]), "what was given to one is not given to another"
            with pytest.raises(SandboxException):
                Sandbox.delete_snapshot(taken.snapshot_id)
            assert clone.kill()
        parent.kill()
        again = make(template=taken.snapshot_id, timeout=60)
        assert again.files.read("/home/user/kept") == "kept", "it outlives its sandbox"
        again.kill()
    finally:
        assert Sandbox.delete_snapshot(taken.snapshot_id) is True
    assert Sandbox.delete_snapshot(taken.snapshot_id) is False
    with pytest.raises((NotFoundException, SandboxException)):
        Sandbox.create(taken.snapshot_id)


def test_forks_are_of_one_moment(make) -> None:
    parent = make(timeout=120, envs={"GIVEN": "once"}, metadata={"case": "fork"})
    parent.commands.run(COUNTER, background=True)
    time.sleep(0.3)
    clones = parent.fork(timeout=60, count=3)
    try:
        assert all(isinstance(one, Sandbox) for one in clones), clones
        assert len({one.sandbox_id for one in clones} | {parent.sandbox_id}) == 4
        found = [facts(one) for one in clones]
        assert len({one[0] for one in found}) == 3, "two drew the same"
        assert {one[1] for one in found} == {facts(parent)[1]}
        assert [one[3] for one in found] == [one.sandbox_id for one in clones]
        assert {one[5] for one in found} == {"once"}
        assert {one.get_info().metadata["case"] for one in clones} == {"fork"}
        assert len({one._envd_access_token for one in clones} | {parent._envd_access_token}) == 4
        first = [count(one) for one in clones]
        time.sleep(0.3)
        assert all(count(one) > before for one, before in zip(clones, first, strict=True))
        assert all(40 < one.get_info().end_at.timestamp() - time.time() < 65 for one in clones)
        assert clones[2].pause()
        back = Sandbox.connect(clones[2].sandbox_id, timeout=60)
        assert facts(back)[3] == back.sandbox_id, "a clone rests and comes back, its moment gone"
        clones[0].files.write("/home/user/mine", "mine")
        assert not clones[1].files.exists("/home/user/mine")
        assert not parent.files.exists("/home/user/mine")
    finally:
        for one in clones:
            if isinstance(one, Sandbox):
                one.kill()
    parent.pause()
    with pytest.raises(SandboxException):
        parent.fork()
    parent.kill()
    with pytest.raises(SandboxNotFoundException):
        parent.fork()


def test_files_alone_boot_anew(make) -> None:
    parent = make(timeout=120)
    parent.files.write("/home/user/kept", "kept")
    taken = parent.create_snapshot(mode="filesystem")
    try:
        assert taken.names == []
        clone = make(template=taken.snapshot_id, timeout=60)
        assert clone.files.read("/home/user/kept") == "kept"
        assert facts(clone)[1] != facts(parent)[1]
        clone.kill()
    finally:
        Sandbox.delete_snapshot(taken.snapshot_id)
