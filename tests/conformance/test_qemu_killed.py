"""The agent, or QEMU itself, is killed at any point of a machine's life: the next run goes on with it, or removes all of it.

What is tried at every step of a save, a snapshot or what begins from one is tried of Firecracker's machines, too. What happens to the machine's own
process, and what a removal in between leaves, is in `test_machine_killed.py`.
"""

import asyncio
import dataclasses
import logging
import os
import pickle
import signal
import subprocess
import sys

import pytest

from atoll.base.errors import Code, Refused
from atoll.base.ids import Prefix, new_id
from atoll.domain.spec import Origin, SaveMode
from atoll.drivers.machines.runtime import RUN, VM
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Power
from atoll.testing.conformance import firecracker_stand
from atoll.testing.conformance.firecracker_stand import FirecrackerStand
from atoll.testing.conformance.killed import BEGUN_FROM, KEPT, USED, Script
from atoll.testing.conformance.qemu_stand import QemuStand, kind, missing
from atoll.testing.conformance.stand import shell
from tests.conformance.removal import can_be_removed

LOG = logging.getLogger(__name__)
pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(1800)]

# Steps of one life, as in test_oci_killed; the test below fails when there are more.
STEPS = 10


class Scene:
    """A machine on which another process was killed."""

    def __init__(self, home, binaries, cache, *, by=QemuStand, runs=None):
        lack = firecracker_stand.missing(binaries, cache) if by is FirecrackerStand else missing(binaries, cache)
        if lack:
            pytest.skip(f"needs {lack}")
        self.places = {"binaries": binaries, "cache": cache}
        self.home, self._by, self._runs = home, by, runs or kind()
        first = by(self._runs, home, **self.places)
        self.identity, self.order, self._key = first.identity, first.order(), first.key

    def act(self, die_at, *, saving=False, clone=None):
        """Have another process live a machine's life; it dies before step `die_at`, or ends by itself. What it said."""
        key = self._key.private_bytes_raw() if saving else None
        known = {"identity": self.identity, "order": self.order, "clone": clone}
        script = Script(self._runs, self.home, die_at=die_at, saving=key, **known, **self.places)
        file = self.home / "script.pickle"
        file.write_bytes(pickle.dumps(script))
        done = subprocess.run(
            [sys.executable, "-m", "atoll.testing.conformance.killed", str(file)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout.split("\n")[:-1]

    async def next_run(self):
        stand = self._by(self._runs, self.home, identity=self.identity, **self.places)
        stand.key = self._key
        await stand.open()
        return stand

    async def boot(self):
        """Have a moment of a machine that has booted: every order begins from it, in a tenth of the time."""
        stand = await self.next_run()
        try:
            kept = new_id(Prefix.SNAPSHOT, os.urandom)
            await stand.guest(self.order, await stand.driver.start(self.order))
            saved = await stand.driver.snapshot(self.order, kept, SaveMode.FULL)
            await stand.driver.remove(self.order.placement_id)
        finally:
            await stand.close()
        self.base = kept
        self.order = dataclasses.replace(self.order, spec=dataclasses.replace(self.order.spec, origin=Origin(kept, saved.mode)))

    def another(self):
        self.order = another(self.order)


def another(order):
    return dataclasses.replace(
        order, placement_id=new_id(Prefix.PLACEMENT, os.urandom), sandbox_id=new_id(Prefix.SANDBOX, os.urandom), nonce=os.urandom(12).hex()
    )


@pytest.fixture
def scene(tmp_path, binaries, cache):
    return Scene(tmp_path, binaries, cache)


@pytest.fixture(params=["qemu", "firecracker"])
async def booted(request, tmp_path, binaries, cache):
    by = {"by": FirecrackerStand, "runs": RuntimeKind.FIRECRACKER} if request.param == "firecracker" else {}
    made = Scene(tmp_path, binaries, cache, **by)
    await made.boot()
    return made


async def test_killed_between_any_two_steps(scene):
    """The first life of a stand finds out what machines run on, with steps of its own: they are not counted."""
    await (await scene.next_run()).close()
    status, steps = scene.act(None)
    assert status == 0
    assert len(steps) == STEPS, steps
    for die_at in range(STEPS):
        scene.another()
        status, said = scene.act(die_at)
        assert status == -signal.SIGKILL, said
        stand = await scene.next_run()
        try:
            if die_at % 2:
                assert (await stand.driver.start(scene.order)).power is Power.RUNNING
            await can_be_removed(stand, scene.order)
        finally:
            await stand.close()


@pytest.mark.long
async def test_killed_between_two_steps_of_a_save_or_restore(booted):
    """Whoever comes next finds a guest that goes on, or what was saved, whole; and never an older moment than was used."""
    scene = booted
    for die_at in range(100):
        scene.another()
        status, said = scene.act(die_at, saving=True)
        stand = await scene.next_run()
        try:
            if status == 0:
                assert die_at > 15, f"only {die_at} steps: {said}"
                LOG.info("killed at each of %s steps: %s", die_at, ", ".join(said))
                return
            assert status == -signal.SIGKILL, said
            await goes_on(stand, scene.order, said)
            await can_be_removed(stand, scene.order)
        finally:
            await stand.close()
    pytest.fail("it never came to its end")


@pytest.mark.long
async def test_killed_between_two_steps_of_a_snapshot_or_of_what_begins_from_it(booted):
    """Its guest goes on, the moment is whole or not there, and what begins from it can be begun or removed."""
    scene = booted
    for die_at in range(100):
        scene.another()
        clone = another(scene.order)
        clone = dataclasses.replace(
            clone, spec=dataclasses.replace(clone.spec, origin=Origin(new_id(Prefix.SNAPSHOT, os.urandom), SaveMode.FULL))
        )
        status, said = scene.act(die_at, saving=True, clone=clone)
        stand = await scene.next_run()
        try:
            if status == 0:
                assert die_at > 15, f"only {die_at} steps: {said}"
                LOG.info("killed at each of %s steps: %s", die_at, ", ".join(said))
                return
            assert status == -signal.SIGKILL, said
            await is_whole_or_gone(stand, scene.order, clone, said)
            assert await stand.driver.snapshots() == [scene.base]
            await stand.driver.remove(clone.placement_id)
            assert not stand.traces(clone)
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


async def goes_on(stand, order, said):
    found = await stand.driver.adopt(order.placement_id)
    if found.power is Power.ABSENT or (found.power is Power.STOPPED and "killed" in said):
        assert USED in said, "its removal was under way"
        return
    assert found.power in (Power.RUNNING, Power.SAVED), f"{found} after {said[-3:]}"
    if found.power is Power.SAVED:
        found = await stand.driver.restore(order)
    await stand.driver.discard(order.placement_id)
    guest = await stand.guest(order, found)
    kept = (await shell(guest, "cat /kept")).out
    assert kept == ("used\n" if USED in said else "written\n"), f"{kept!r} after {said[-3:]}"


@pytest.mark.long
async def test_qemu_is_killed_while_it_saves_or_is_restored(scene):
    stand = await scene.next_run()
    try:
        seen = await stand.driver.start(scene.order)
        await shell(await stand.guest(scene.order, seen), "head -c 30000000 /dev/urandom >/dev/shm/kept; md5sum /dev/shm/kept >/sum; sync")
        saving = asyncio.create_task(stand.driver.save(scene.order, SaveMode.FULL))
        await asyncio.sleep(0.05)
        os.kill(seen.pid, signal.SIGKILL)
        outcome = (await asyncio.gather(saving, return_exceptions=True))[0]
        power = (await stand.driver.inspect(scene.order.placement_id)).power
        assert power is (Power.STOPPED if isinstance(outcome, Refused) else Power.SAVED), f"{power} after {outcome!r}"
        if power is Power.STOPPED:
            found = await stand.driver.start(scene.order)
            assert "kept" in (await shell(await stand.guest(scene.order, found), "cat /sum")).out, "its disk is as a crash leaves it"
        else:
            found = await stand.driver.restore(scene.order)
            await stand.driver.discard(scene.order.placement_id)
        await stand.driver.save(scene.order, SaveMode.FULL)
        found = await stand.driver.restore(scene.order)
        os.kill(found.pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
        assert (await stand.driver.inspect(scene.order.placement_id)).power is Power.SAVED, "nobody has used it"
        await stand.guest(scene.order, await stand.driver.restore(scene.order))
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()


@pytest.mark.long
async def test_a_save_that_fails_leaves_its_guest_as_it_was(scene):
    """No room, a guest that answers nobody, a moment of another machine: each is said, and nothing is lost."""
    stand = await scene.next_run()
    try:
        seen = await stand.driver.start(scene.order)
        guest = await stand.guest(scene.order, seen)
        await shell(guest, "echo kept >/kept; (while :; do echo x >>/count; sleep 0.1; done) >/dev/null 2>&1 &")
        space = os.statvfs(scene.home)
        usual = stand.driver._config
        stand.driver._config = dataclasses.replace(usual, disk_spare_mib=space.f_bavail * space.f_frsize >> 20)
        with pytest.raises(Refused) as refused:
            await stand.driver.save(scene.order, SaveMode.FULL)
        assert refused.value.code is Code.HOST_DISK_FULL
        stand.driver._config = usual
        # A directory in the way of what would be saved: QEMU cannot write it.
        blocked = usual.state_dir / scene.order.placement_id / VM / RUN / "devices"
        blocked.mkdir()
        with pytest.raises(Refused) as refused:
            await stand.driver.save(scene.order, SaveMode.FULL)
        assert refused.value.code is Code.SAVE_FAILED
        blocked.rmdir()
        assert (await stand.driver.inspect(scene.order.placement_id)).power is Power.RUNNING
        first = int((await shell(guest, "wc -l </count")).out)
        await asyncio.sleep(1.0)
        assert int((await shell(guest, "wc -l </count")).out) > first, "its users' processes go on"
        await stand.driver.save(scene.order, SaveMode.FULL)
        smaller = dataclasses.replace(scene.order, spec=dataclasses.replace(scene.order.spec, memory_mib=256))
        with pytest.raises(Refused) as refused:
            await stand.driver.restore(smaller)
        assert refused.value.code is Code.RESUME_FAILED
        found = await stand.driver.restore(scene.order)
        await stand.driver.discard(scene.order.placement_id)
        assert (await shell(await stand.guest(scene.order, found), "cat /kept")).out == "kept\n"
        await can_be_removed(stand, scene.order)
    finally:
        await stand.close()
