"""The agent is killed between any two steps, or in the middle of one: the next run can start the placement, or remove all of it."""

import asyncio
import contextlib
import dataclasses
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import pytest

from atoll.base.errors import Code, Refused
from atoll.base.ids import Prefix, new_id
from atoll.domain.spec import Origin, SaveMode
from atoll.drivers.oci import runsc
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Power
from atoll.hostops import processes
from atoll.testing.conformance.killed import BEGUN_FROM, KEPT, USED, Script
from atoll.testing.conformance.oci_stand import OciStand, missing
from atoll.testing.conformance.stand import shell
from tests.conformance.removal import can_be_removed

pytestmark = [pytest.mark.root, pytest.mark.runtime]

# Steps of one life; the test below fails when there are more, so that no boundary is forgotten.
STEPS = 10


class Scene:
    """A machine on which another process was killed."""

    def __init__(self, kind, home, binaries, cache):
        if lack := missing(kind, binaries, cache):
            pytest.skip(f"needs {lack}")
        self.places = {"binaries": binaries, "cache": cache}
        self.kind, self.home = kind, home
        first = OciStand(kind, home, **self.places)
        self.identity, self.order = first.identity, first.order()
        self._key = first.key

    def act(self, die_at, *, saving=False, clone=None):
        """Start the other process; it dies before step `die_at`, or ends by itself."""
        key = self._key.private_bytes_raw() if saving else None
        known = {"identity": self.identity, "order": self.order, "clone": clone}
        script = Script(self.kind, self.home, die_at=die_at, saving=key, **known, **self.places)
        file = self.home / "script.pickle"
        file.write_bytes(pickle.dumps(script))
        return subprocess.Popen([sys.executable, "-m", "atoll.testing.conformance.killed", str(file)], stdout=subprocess.PIPE, text=True)

    async def next_run(self):
        stand = OciStand(self.kind, self.home, identity=self.identity, **self.places)
        stand.key = self._key
        await stand.open()
        return stand


@pytest.fixture(params=[RuntimeKind.RUNSC, RuntimeKind.CRUN], ids=str)
def scene(request, tmp_path, binaries, cache):
    return Scene(request.param, tmp_path, binaries, cache)


def test_every_boundary_is_counted(scene):
    process = scene.act(None)
    steps = process.communicate(timeout=60)[0].split("\n")[:-1]
    assert process.returncode == 0
    assert len(steps) == STEPS, steps


@pytest.mark.parametrize("die_at", range(STEPS))
async def test_killed_between_two_steps(scene, die_at):
    process = scene.act(die_at)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    stand = await scene.next_run()
    try:
        if die_at % 2:
            await stand.driver.prepare(scene.order)
            seen = await stand.driver.start(scene.order)
            await stand.guest(scene.order, seen)
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()


@pytest.mark.parametrize("attempt", range(4))
async def test_killed_while_the_runtime_starts(scene, attempt):
    """The runtime is a process of its own and goes on: what it makes after its parent's end must not stay."""
    process = scene.act(None)
    for line in process.stdout:
        if line.strip() == "bundle":
            break
    time.sleep(random.uniform(0.0, 0.12))
    process.kill()
    process.communicate(timeout=60)
    stand = await scene.next_run()
    try:
        if attempt % 2:
            seen = await stand.driver.start(scene.order)
            await stand.guest(scene.order, seen)
        await can_be_removed(stand, scene.order)
        await asyncio.sleep(0.5)
        assert not stand.traces(scene.order)
    finally:
        await stand.close()


@pytest.mark.timeout(300)
async def test_killed_between_two_steps_of_a_save_or_restore(scene):
    """Whoever comes next finds a guest that goes on, or what was saved, whole; and never an older moment than was used."""
    for die_at in range(100):
        scene.order = dataclasses.replace(scene.order, placement_id=new_id(Prefix.PLACEMENT, os.urandom))
        process = scene.act(die_at, saving=True)
        said = process.communicate(timeout=120)[0].split("\n")
        stand = await scene.next_run()
        try:
            if process.returncode == 0:
                assert die_at > 15, f"only {die_at} steps: {said}"
                return
            assert process.returncode == -signal.SIGKILL
            await goes_on(stand, scene.order, said)
            await can_be_removed(stand, scene.order)
        finally:
            await stand.close()
    pytest.fail("it never came to its end")


def another(order):
    return dataclasses.replace(
        order, placement_id=new_id(Prefix.PLACEMENT, os.urandom), sandbox_id=new_id(Prefix.SANDBOX, os.urandom), nonce=os.urandom(12).hex()
    )


def begun_from(order):
    origin = Origin(new_id(Prefix.SNAPSHOT, os.urandom), SaveMode.FULL)
    return dataclasses.replace(another(order), spec=dataclasses.replace(order.spec, origin=origin))


async def test_killed_between_two_steps_of_a_snapshot_or_of_what_begins_from_it(scene):
    """Its guest goes on, the moment is whole or not there, and what begins from it can be begun or removed."""
    every = 1 if os.environ.get("ATOLL_TEST_MATRICES") == "full" else 3
    for die_at in range(random.randrange(every), 100, every):
        scene.order = another(scene.order)
        clone = begun_from(scene.order)
        process = scene.act(die_at, saving=True, clone=clone)
        said = process.communicate(timeout=120)[0].split("\n")
        stand = await scene.next_run()
        try:
            if process.returncode == 0:
                assert die_at > 15, f"only {die_at} steps: {said}"
                return
            assert process.returncode == -signal.SIGKILL
            await is_whole_or_gone(stand, scene.order, clone, said)
            for order in (clone, scene.order):
                await stand.driver.remove(order.placement_id)
                assert (await stand.driver.inspect(order.placement_id)).power is Power.ABSENT
            await can_be_removed(stand, scene.order)
        finally:
            await stand.close()
    pytest.fail("it never came to its end")


async def is_whole_or_gone(stand, order, clone, said):
    kept = clone.spec.origin.snapshot_id
    found = await stand.driver.adopt(order.placement_id)
    if BEGUN_FROM not in said:
        assert found.power is Power.RUNNING, f"{found} after {said[-3:]}"
        guest = await stand.guest(order, found)
        assert (await shell(guest, "cat /kept")).out == "written\n", "its guest goes on"
        assert KEPT not in said or kept in await stand.driver.snapshots()
        # Asked again, as control does: there is one, and it is whole.
        await stand.driver.snapshot(order, kept, SaveMode.FULL)
        await stand.driver.adopt(clone.placement_id)
        other = await stand.guest(clone, await stand.driver.start(clone))
        assert (await shell(other, "cat /kept")).out == "written\n"
    await stand.driver.drop(kept)
    assert kept not in await stand.driver.snapshots()


@pytest.mark.parametrize("who", ["sentry", "guest"])
async def test_the_runtime_or_the_guest_is_killed_while_a_moment_is_kept(tmp_path, binaries, cache, who, monkeypatch):
    scene = Scene(RuntimeKind.RUNSC, tmp_path, binaries, cache)
    stand = await scene.next_run()
    try:
        seen = await stand.driver.start(scene.order)
        guest = await stand.guest(scene.order, seen)
        await shell(guest, "head -c 100000000 /dev/urandom >/kept; md5sum </kept >/sum")
        clone = begun_from(scene.order)
        kept = clone.spec.origin.snapshot_id
        if who == "sentry":
            # It is told, and not waited for: still at it, as after an agent that was killed.
            monkeypatch.setattr(runsc, "SAVE_S", 0.02)
        keeping = asyncio.create_task(stand.driver.snapshot(scene.order, kept, SaveMode.FULL))
        if who == "guest":
            await asyncio.sleep(0.03)
            os.kill(seen.pid, signal.SIGKILL)
        outcome = (await asyncio.gather(keeping, return_exceptions=True))[0]
        monkeypatch.undo()
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, Refused), repr(outcome)
            assert await stand.driver.snapshots() == [], "nothing half done is seen"
        if who == "sentry":
            for _ in range(50):  # the sentry may still be at what nobody waits for any more
                with contextlib.suppress(Refused):
                    await stand.driver.snapshot(scene.order, kept, SaveMode.FULL)
                    break
                await asyncio.sleep(0.2)
            assert (await shell(guest, "md5sum </kept | cmp - /sum && echo same")).out == "same\n", "it goes on"
            other = await stand.guest(clone, await stand.driver.start(clone))
            assert (await shell(other, "md5sum </kept | cmp - /sum && echo same")).out == "same\n"
        await stand.driver.drop(kept)
        await stand.driver.remove(clone.placement_id)
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()


async def test_a_moment_that_finds_no_room_leaves_its_guest_as_it_was(tmp_path, binaries, cache):
    scene = Scene(RuntimeKind.RUNSC, tmp_path, binaries, cache)
    stand = await scene.next_run()
    try:
        seen = await stand.driver.start(scene.order)
        guest = await stand.guest(scene.order, seen)
        space = os.statvfs(tmp_path)
        stand.driver._config = dataclasses.replace(stand.driver._config, disk_spare_mib=space.f_bavail * space.f_frsize >> 20)
        with pytest.raises(Refused) as refused:
            await stand.driver.snapshot(scene.order, "snp_" + "a" * 20, SaveMode.FULL)
        assert refused.value.code is Code.HOST_DISK_FULL
        assert await stand.driver.snapshots() == []
        assert (await shell(guest, "echo on")).out == "on\n"
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()


async def test_the_disk_fills_while_a_moment_is_kept(tmp_path, binaries, cache):
    """On a small file system of its own: the guest goes on, and nothing half kept is listed."""
    small, image = tmp_path / "small", tmp_path / "small.img"
    small.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 700 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(small)], check=True)
    try:
        await keep_on_a_disk_that_fills(Scene(RuntimeKind.RUNSC, small, binaries, cache), small)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


async def keep_on_a_disk_that_fills(scene, small):
    stand = await scene.next_run()
    try:
        stand.driver._config = dataclasses.replace(stand.driver._config, disk_spare_mib=1)
        seen = await stand.driver.start(scene.order)
        guest = await stand.guest(scene.order, seen)
        await shell(guest, "head -c 60000000 /dev/urandom >/dev/shm/kept; md5sum </dev/shm/kept >/sum")
        stand.driver._require_room = lambda _placement_id: None
        free = os.statvfs(small)
        (small / "filler").write_bytes(b"x" * (free.f_bavail * free.f_frsize - (20 << 20)))
        with pytest.raises(Refused) as refused:
            await stand.driver.snapshot(scene.order, "snp_" + "a" * 20, SaveMode.FULL)
        assert refused.value.code in (Code.HOST_DISK_FULL, Code.SAVE_FAILED)
        assert await stand.driver.snapshots() == []
        assert not list((small / "sandboxes").rglob("*.img")), "what was half written is gone"
        assert (await shell(guest, "md5sum </dev/shm/kept | cmp - /sum && echo same")).out == "same\n", "it goes on"
        (small / "filler").unlink()
        await stand.driver.snapshot(scene.order, "snp_" + "b" * 20, SaveMode.FULL)
        await stand.driver.drop("snp_" + "b" * 20)
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()


async def goes_on(stand, order, said):
    found = await stand.driver.adopt(order.placement_id)
    if found.power is Power.ABSENT or (found.power is Power.STOPPED and "killed" in said):
        # Its removal was under way.
        assert USED in said
        return
    assert found.power in (Power.RUNNING, Power.SAVED), f"{found} after {said[-3:]}"
    if found.power is Power.SAVED:
        found = await stand.driver.restore(order)
    await stand.driver.discard(order.placement_id)
    guest = await stand.guest(order, found)
    kept = (await shell(guest, "cat /kept")).out
    assert kept == ("used\n" if USED in said else "written\n"), f"{kept!r} after {said[-3:]}"


@pytest.mark.parametrize("verb", ["checkpoint", "pause"])
async def test_the_runtime_is_killed_while_it_saves(tmp_path, binaries, cache, verb, monkeypatch):
    """A save that its runtime did not finish is none: the guest goes on, or is saved by the next try, and nothing half done is seen."""
    scene = Scene(RuntimeKind.RUNSC, tmp_path, binaries, cache)
    stand = await scene.next_run()
    try:
        seen = await stand.driver.start(scene.order)
        guest = await stand.guest(scene.order, seen)
        await shell(guest, "head -c 100000000 /dev/urandom >/kept; md5sum </kept >/sum")
        if verb == "checkpoint":
            # No program is there to be killed: the sentry is told, and not waited for.
            monkeypatch.setattr(runsc, "SAVE_S", 0.02)
        saving = asyncio.create_task(stand.driver.save(scene.order, SaveMode.FULL))
        killed = verb == "checkpoint" or await asyncio.to_thread(kill_runtime, scene.order.placement_id, verb)
        outcome = (await asyncio.gather(saving, return_exceptions=True))[0]
        monkeypatch.undo()
        if not killed:
            pytest.skip("it was too quick to be caught")
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, Refused), repr(outcome)
            assert (await stand.driver.inspect(scene.order.placement_id)).power is Power.RUNNING
            if verb == "checkpoint":
                assert (await shell(guest, "md5sum </kept | cmp - /sum && echo same")).out == "same\n", "it goes on"
            await saved_at_last(stand, scene.order)
        found = await stand.driver.restore(scene.order)
        guest = await stand.guest(scene.order, found)
        assert (await shell(guest, "md5sum </kept | cmp - /sum && echo same")).out == "same\n"
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()


async def test_a_slot_that_goes_keeps_no_resume_waiting(tmp_path, binaries, cache, monkeypatch):
    scene = Scene(RuntimeKind.RUNSC, tmp_path, binaries, cache)
    stand = await scene.next_run()
    try:
        pool, may_go = stand.driver._pool, asyncio.Event()
        give_back = pool.give_back

        async def in_a_while(number, address):
            await may_go.wait()
            await give_back(number, address)

        before = await stand.driver.start(scene.order)
        guest = await stand.guest(scene.order, before)
        await shell(guest, "echo written >/kept")
        monkeypatch.setattr(pool, "give_back", in_a_while)
        await stand.driver.save(scene.order, SaveMode.FULL)
        assert (await stand.driver.inspect(scene.order.placement_id)).power is Power.SAVED
        async with asyncio.timeout(30):
            found = await stand.driver.restore(scene.order)
        guest = await stand.guest(scene.order, found)
        assert found.address != before.address
        assert (await shell(guest, "cat /kept")).out == "written\n"
        owners = list(pool.existing().values())
        assert owners.count(scene.order.placement_id) in (1, 2), "the kernel may have taken the old one with its last process"
        may_go.set()
        async with asyncio.timeout(10):
            while list(pool.existing().values()).count(scene.order.placement_id) > 1:
                await asyncio.sleep(0.02)
        assert (await shell(guest, "cat /kept")).out == "written\n", "it is the old one that went"
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()


async def saved_at_last(stand, order):
    """The sentry may still be at what nobody waits for any more."""
    for _ in range(50):
        with contextlib.suppress(Refused):
            return await stand.driver.save(order, SaveMode.FULL)
        await asyncio.sleep(0.2)
    raise AssertionError("it cannot be saved any more")


def kill_runtime(placement_id, verb):
    """Kill the runtime's command about this container as soon as there is one; whether there was."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for pid in processes.mentioning(placement_id):
            if verb in processes.arguments(pid):
                processes.send_signal(pid)
                return True
    return False


@pytest.mark.parametrize("verb", ["save", "restore"])
async def test_the_guest_is_killed_while_it_is_saved_or_restored(tmp_path, binaries, cache, verb):
    scene = Scene(RuntimeKind.RUNSC, tmp_path, binaries, cache)
    stand = await scene.next_run()
    try:
        seen = await stand.driver.start(scene.order)
        guest = await stand.guest(scene.order, seen)
        await shell(guest, "head -c 50000000 /dev/urandom >/kept")
        if verb == "save":
            saving = asyncio.create_task(stand.driver.save(scene.order, SaveMode.FULL))
            await asyncio.sleep(0.03)
            os.kill(seen.pid, signal.SIGKILL)
            outcome = (await asyncio.gather(saving, return_exceptions=True))[0]
            power = (await stand.driver.inspect(scene.order.placement_id)).power
            assert power is (Power.STOPPED if isinstance(outcome, Refused) else Power.SAVED), f"{power} after {outcome!r}"
        else:
            await stand.driver.save(scene.order, SaveMode.FULL)
            found = await stand.driver.restore(scene.order)
            os.kill(found.pid, signal.SIGKILL)
            await asyncio.sleep(0.3)
            assert (await stand.driver.inspect(scene.order.placement_id)).power is Power.SAVED, "nobody has used it"
            await stand.guest(scene.order, await stand.driver.restore(scene.order))
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()


async def test_the_runtime_is_killed_while_it_restores(tmp_path, binaries, cache):
    """What was saved is still there, and the next try brings it back."""
    scene = Scene(RuntimeKind.RUNSC, tmp_path, binaries, cache)
    stand = await scene.next_run()
    try:
        guest = await stand.guest(scene.order, await stand.driver.start(scene.order))
        await shell(guest, "head -c 100000000 /dev/urandom >/kept; md5sum </kept >/sum")
        await stand.driver.save(scene.order, SaveMode.FULL)
        restoring = asyncio.create_task(stand.driver.restore(scene.order))
        killed = await asyncio.to_thread(kill_runtime, scene.order.placement_id, "restore")
        outcome = (await asyncio.gather(restoring, return_exceptions=True))[0]
        if not killed:
            pytest.skip("it was too quick to be caught")
        assert isinstance(outcome, Refused), repr(outcome)
        assert outcome.code is Code.RESUME_FAILED
        assert (await stand.driver.inspect(scene.order.placement_id)).power is Power.SAVED
        guest = await stand.guest(scene.order, await stand.driver.restore(scene.order))
        assert (await shell(guest, "md5sum </kept | cmp - /sum && echo same")).out == "same\n"
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()


async def test_a_save_that_finds_no_room_leaves_its_guest_as_it_was(tmp_path, binaries, cache):
    scene = Scene(RuntimeKind.RUNSC, tmp_path, binaries, cache)
    stand = await scene.next_run()
    try:
        seen = await stand.driver.start(scene.order)
        guest = await stand.guest(scene.order, seen)
        space = os.statvfs(tmp_path)
        stand.driver._config = dataclasses.replace(stand.driver._config, disk_spare_mib=space.f_bavail * space.f_frsize >> 20)
        with pytest.raises(Refused) as refused:
            await stand.driver.save(scene.order, SaveMode.FULL)
        assert refused.value.code is Code.HOST_DISK_FULL
        assert (await shell(guest, "echo on")).out == "on\n"
        assert (await stand.driver.inspect(scene.order.placement_id)).power is Power.RUNNING
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()
