"""Something goes wrong while a clone begins, or while what was saved comes back: who it is of goes on, and there is always a next try or an end."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Power
from atoll.testing.conformance.stand import shell
from tests.conformance.removal import can_be_removed
from tests.conformance.test_oci_killed import Scene, begun_from, kill_runtime

pytestmark = [pytest.mark.root, pytest.mark.runtime]
SAME = "md5sum </kept | cmp - /sum && echo same"
WAITS_S = (0.0, 0.02, 0.05, 0.1, 0.2)


class Fork:
    """A parent that runs, and a moment of it."""

    def __init__(self, scene, stand, guest):
        self.scene, self.stand, self.guest = scene, stand, guest
        self.first = begun_from(scene.order)
        self.kept = self.first.spec.origin.snapshot_id

    def clone(self):
        made = begun_from(self.scene.order)
        return dataclasses.replace(made, spec=self.first.spec)

    async def begins(self, clone):
        guest = await self.stand.guest(clone, await self.stand.driver.start(clone))
        assert (await shell(guest, SAME)).out == "same\n"
        return guest

    async def parent_goes_on(self):
        assert (await shell(self.guest, SAME)).out == "same\n"

    async def gone(self, clone):
        await self.stand.driver.remove(clone.placement_id)
        assert (await self.stand.driver.inspect(clone.placement_id)).power is Power.ABSENT


@pytest.fixture
async def fork(tmp_path, binaries, cache):
    scene = Scene(RuntimeKind.RUNSC, tmp_path, binaries, cache)
    stand = await scene.next_run()
    try:
        guest = await stand.guest(scene.order, await stand.driver.start(scene.order))
        await shell(guest, "head -c 60000000 /dev/urandom >/kept; md5sum </kept >/sum")
        made = Fork(scene, stand, guest)
        await stand.driver.snapshot(scene.order, made.kept, SaveMode.FULL)
        yield made
        await stand.driver.drop(made.kept)
        await can_be_removed(stand, scene.order)
        assert stand.exits == [] or {placement for placement, _ in stand.exits} <= made.ended
    finally:
        await stand.close()


@pytest.fixture(autouse=True)
def ended(request):
    """Placements whose guests are known to end by themselves."""
    if "fork" in request.fixturenames:
        request.getfixturevalue("fork").ended = set()


async def test_the_runtime_is_killed_while_a_clone_begins(fork):
    """The clone is refused, its parent goes on, and from the same moment the next try begins."""
    clone = fork.clone()
    starting = asyncio.create_task(fork.stand.driver.start(clone))
    killed = await asyncio.to_thread(kill_runtime, clone.placement_id, "restore")
    (outcome,) = await asyncio.gather(starting, return_exceptions=True)
    if not killed:
        pytest.skip("it was too quick to be caught")
    assert isinstance(outcome, Refused), repr(outcome)
    assert outcome.code is Code.START_FAILED
    await fork.parent_goes_on()
    await fork.begins(clone)
    await fork.gone(clone)


async def test_a_clone_s_guest_is_killed_as_it_begins(fork):
    """Its end is told, and is nobody else's."""
    clone, other = fork.clone(), fork.clone()
    seen, _ = await asyncio.gather(fork.stand.driver.start(clone), fork.begins(other))
    fork.ended.add(clone.placement_id)
    os.kill(seen.pid, signal.SIGKILL)
    async with asyncio.timeout(5.0):
        while clone.placement_id not in {placement for placement, _ in fork.stand.exits}:
            await asyncio.sleep(0.02)
    assert (await fork.stand.driver.inspect(clone.placement_id)).power is Power.STOPPED
    await fork.parent_goes_on()
    await fork.gone(clone)
    await fork.gone(other)


@pytest.mark.parametrize("after_s", WAITS_S)
async def test_a_clone_is_deleted_while_it_begins(fork, after_s):
    clone = fork.clone()
    starting = asyncio.create_task(fork.stand.driver.start(clone))
    await asyncio.sleep(after_s)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    async with asyncio.timeout(10.0):
        await fork.gone(clone)
    await asyncio.sleep(0.2)
    assert not fork.stand.traces(clone), "nothing comes back"
    await fork.parent_goes_on()


@pytest.mark.parametrize("after_s", WAITS_S)
async def test_the_moment_is_deleted_while_a_clone_begins(fork, after_s):
    """The clone is whole or refused; whoever comes later is told that there is no such moment."""
    clone = fork.clone()
    starting = asyncio.create_task(fork.stand.driver.start(clone))
    await asyncio.sleep(after_s)
    await fork.stand.driver.drop(fork.kept)
    assert await fork.stand.driver.snapshots() == []
    (outcome,) = await asyncio.gather(starting, return_exceptions=True)
    if isinstance(outcome, BaseException):
        assert isinstance(outcome, Refused), repr(outcome)
        assert outcome.code in (Code.SNAPSHOT_UNAVAILABLE, Code.START_FAILED)
    else:
        guest = await fork.stand.guest(clone, outcome)
        assert (await shell(guest, SAME)).out == "same\n", "it has all of it"
    late = fork.clone()
    with pytest.raises(Refused) as refused:
        await fork.stand.driver.start(late)
    assert refused.value.code is Code.SNAPSHOT_UNAVAILABLE
    await fork.parent_goes_on()
    await fork.gone(clone)
    await fork.gone(late)


@contextlib.contextmanager
def small_disk(place, image, size_mib):
    """A file system of its own, of which nothing is kept for root."""
    place.mkdir()
    image.touch()
    os.truncate(image, size_mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place, spare_mib):
    """What a file of its own takes is taken first, then all that is left of it, and then some is given back."""
    free = os.statvfs(place)
    with (place / "filler").open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - (4 << 20))
        file.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(file.tell() - (spare_mib << 20))


@pytest.mark.parametrize("spare_mib", [0, 1, 20])
async def test_the_disk_is_full_while_what_was_saved_comes_back(tmp_path, binaries, cache, spare_mib):
    """It is refused with its reason; what was saved is there as before, and comes back once there is room."""
    with small_disk(tmp_path / "small", tmp_path / "small.img", 700) as small:
        scene = Scene(RuntimeKind.RUNSC, small, binaries, cache)
        stand = await scene.next_run()
        try:
            stand.driver._config = dataclasses.replace(stand.driver._config, disk_spare_mib=1)
            guest = await stand.guest(scene.order, await stand.driver.start(scene.order))
            await shell(guest, "head -c 60000000 /dev/urandom >/kept; md5sum </kept >/sum")
            stand.driver._require_room = lambda _order: None
            await stand.driver.save(scene.order, SaveMode.FULL)
            for _ in range(2):
                fill(small, spare_mib)
                (outcome,) = await asyncio.gather(stand.driver.restore(scene.order), return_exceptions=True)
                (small / "filler").unlink()
                assert isinstance(outcome, Refused), repr(outcome)
                assert outcome.code is Code.HOST_DISK_FULL, outcome
                assert (await stand.driver.inspect(scene.order.placement_id)).power is Power.SAVED
            guest = await stand.guest(scene.order, await stand.driver.restore(scene.order))
            await stand.driver.discard(scene.order.placement_id)
            assert (await shell(guest, SAME)).out == "same\n"
            await can_be_removed(stand, scene.order)
        finally:
            await stand.close()
