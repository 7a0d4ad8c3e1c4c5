"""A machine is killed, or removed, at each step and between the steps of each verb; its disk is full. What is left is something to go on from.

Machines here begin from one moment of one that has booted: that takes a second, where a boot without hardware virtualization takes ten.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import signal
import subprocess
import time

import pytest

from atoll.base.errors import AtollError, Code
from atoll.base.ids import Prefix, new_id
from atoll.domain.spec import Origin, SaveMode
from atoll.drivers.machines.runtime import STARTING
from atoll.drivers.oci import saves
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.oci.runtime import PID_FILE
from atoll.drivers.port import Power, Saved
from atoll.testing.conformance import firecracker_stand, qemu_stand
from atoll.testing.conformance.stand import refusal, shell

LOG = logging.getLogger(__name__)
pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.long, pytest.mark.timeout(3000)]
VERBS = ("pause", "resume", "save", "restore", "snapshot", "fork")
STEPS_MAX = 40
WAITS_S = (0.0, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4, 0.7, 1.1)
"""Between the steps: after a verb has begun."""
GONE_S_MAX = 10.0
"""In which a machine is removed whatever is done with it."""
FULL = os.environ.get("ATOLL_TEST_MATRICES") == "full"


class Room:
    """A stand whose machines begin from one moment, and something that happens at one step of a verb."""

    def __init__(self, kind, home, binaries, cache):
        made = firecracker_stand.FirecrackerStand if kind is RuntimeKind.FIRECRACKER else qemu_stand.QemuStand
        self.stand = made(kind, home, binaries=binaries, cache=cache, on_step=self._on_step)
        self.base = new_id(Prefix.SNAPSHOT, os.urandom)
        self.passed = []
        self._at, self._what = None, None

    def _on_step(self, name):
        self.passed.append(name)
        if self._at == len(self.passed) - 1:
            self._what()

    @property
    def driver(self):
        return self.stand.driver

    async def open(self):
        await self.stand.open()
        order = self.stand.order()
        guest = await self.stand.guest(order, await self.driver.start(order))
        await shell(guest, "echo disk >/kept; sync; echo memory >/dev/shm/kept")
        self.saved = await self.driver.snapshot(order, self.base, SaveMode.FULL)
        self._origin = dataclasses.replace(order.spec, origin=Origin(self.base, self.saved.mode))
        await self.driver.remove(order.placement_id)

    def order(self):
        return dataclasses.replace(self.stand.order(), spec=self._origin)

    async def ready(self, verb):
        """An order to do this to, and how."""
        order, kept = self.order(), new_id(Prefix.SNAPSHOT, os.urandom)
        if verb != "fork":
            await self.stand.guest(order, await self.driver.start(order))
        if verb == "resume":
            await self.driver.pause(order.placement_id)
        if verb == "restore":
            await self.driver.save(order, SaveMode.FULL)
        works = {
            "pause": lambda: self.driver.pause(order.placement_id),
            "resume": lambda: self.driver.resume(order.placement_id),
            "save": lambda: self.driver.save(order, SaveMode.FULL),
            "restore": lambda: self.driver.restore(order),
            "snapshot": lambda: self.driver.snapshot(order, kept, SaveMode.FULL),
            "fork": lambda: self.driver.start(order),
        }
        return order, works[verb]

    async def disturb(self, work, point, what):
        """Do it, and let something happen at one point; whether that was reached, and how it ended."""
        self.passed, self._what = [], what
        loop, self._at = asyncio.get_running_loop(), point if isinstance(point, int) else None
        timer = loop.call_later(point, what) if isinstance(point, float) else None
        task = asyncio.create_task(work())
        self.task = task
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        reached = len(self.passed) > point if timer is None else timer.when() <= loop.time()
        if timer is not None:
            timer.cancel()
        self._at = None
        return reached, outcome

    def kill(self, order):
        """The process that is its machine, or is about to be."""
        directory = self.driver._view.directory(order.placement_id)
        for name in (PID_FILE, STARTING):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((directory / name).read_text()), signal.SIGKILL)

    async def gone(self, order):
        await self.driver.remove(order.placement_id)
        assert (await self.driver.inspect(order.placement_id)).power is Power.ABSENT
        for _ in range(100):
            if not (left := self.stand.traces(order)):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(left)


@pytest.fixture(params=["qemu", "firecracker"])
async def room(request, tmp_path, binaries, cache):
    stand, kind = (qemu_stand, qemu_stand.kind()) if request.param == "qemu" else (firecracker_stand, RuntimeKind.FIRECRACKER)
    if lack := stand.missing(binaries, cache):
        pytest.skip(f"needs {lack}")
    made = Room(kind, tmp_path, binaries, cache)
    try:
        await made.open()
        yield made
    finally:
        for name in await made.driver.snapshots():
            await made.driver.drop(name)
        await made.stand.close()


def points():
    """Every step, until there are no more, then moments between them."""
    every = 1 if FULL else 3
    yield from range(random.randrange(every), STEPS_MAX, every)
    yield from random.sample(WAITS_S, len(WAITS_S) // every)


async def matrix(room, verb, of):
    """`of(point)` for each point of a verb: whether it was reached, and in a word how it ended."""
    ended, counted = False, []
    for point in points():
        if ended and isinstance(point, int):
            continue
        reached, word = await of(point)
        if isinstance(point, int) and not reached:
            ended = True
            continue
        counted.append((point, word))
        LOG.info(
            "%s %s at %s: %s", verb, room.driver.capabilities.name, f"{point} s" if isinstance(point, float) else room.passed[point], word
        )
    assert len(counted) >= (10 if FULL else 3), counted


@pytest.mark.parametrize("verb", VERBS)
async def test_it_is_killed_at_each_step(room, verb) -> None:
    """Whoever comes next finds what can be gone on from or removed: never half of something, nor something else than there was."""
    booted = False

    async def one(point):
        nonlocal booted
        order, work = await room.ready(verb)
        reached, outcome = await room.disturb(work, point, lambda: room.kill(order))
        assert not isinstance(outcome, BaseException) or isinstance(outcome, AtollError), repr(outcome)
        await room.stand.reopen()
        found = await room.driver.adopt(order.placement_id)
        word = f"{'refused' if isinstance(outcome, AtollError) else 'done'}, then {found.power}"
        booted |= await goes_on(room, verb, order, found, boots=not booted)
        for name in await room.driver.snapshots():
            if name != room.base:
                assert isinstance(outcome, Saved), "what was not kept is not listed"
                await begins(room, name)
                await room.driver.drop(name)
        await room.gone(order)
        assert await room.driver.snapshots() == [room.base]
        return reached, word

    await matrix(room, verb, one)


async def goes_on(room, verb, order, found, *, boots):
    """It can be gone on from what was found; whether it took a boot."""
    if found.power is Power.FROZEN:
        found = await room.driver.resume(order.placement_id)
    if found.power is Power.SAVED:
        assert verb in ("save", "restore"), found
        found = await room.driver.restore(order)
        await room.driver.discard(order.placement_id)
    elif found.power in (Power.STOPPED, Power.PREPARED, Power.ABSENT):
        assert found.power is not Power.ABSENT or verb == "fork", found
        assert verb != "restore", "what was saved is there until it is used"
        if verb != "fork" and not boots:
            return False
        found = await room.driver.start(order)
        guest = await room.stand.guest(order, found)
        assert (await shell(guest, "cat /kept")).out == "disk\n"
        return True
    assert found.power is Power.RUNNING, found
    guest = await room.stand.guest(order, found)
    assert (await shell(guest, "cat /kept /dev/shm/kept")).out == "disk\nmemory\n"
    return False


async def begins(room, name):
    order = room.order()
    order = dataclasses.replace(order, spec=dataclasses.replace(order.spec, origin=Origin(name, room.saved.mode)))
    guest = await room.stand.guest(order, await room.driver.start(order))
    assert (await shell(guest, "cat /kept /dev/shm/kept")).out == "disk\nmemory\n"
    await room.gone(order)


@pytest.mark.parametrize("verb", VERBS)
async def test_it_is_removed_at_each_step(room, verb) -> None:
    """Nobody waits for what was under way, and nothing of it comes back."""
    slowest = 0.0

    async def one(point):
        nonlocal slowest
        order, work = await room.ready(verb)
        loop = asyncio.get_running_loop()
        reached, outcome = await room.disturb(work, point, lambda: loop.call_soon_threadsafe(room.task.cancel))
        assert not isinstance(outcome, BaseException) or isinstance(outcome, (AtollError, asyncio.CancelledError)), repr(outcome)
        began = time.monotonic()
        await room.gone(order)
        took_s = time.monotonic() - began
        slowest = max(slowest, took_s)
        assert took_s < GONE_S_MAX, f"{took_s:.1f} s at {point}"
        await asyncio.sleep(0.2)
        assert not room.stand.traces(order), "nothing comes back"
        assert not await room.driver.held()
        for name in await room.driver.snapshots():
            if name != room.base:
                await begins(room, name)
                await room.driver.drop(name)
        return reached, f"{type(outcome).__name__}, gone in {took_s:.2f} s"

    await matrix(room, verb, one)
    LOG.info("%s removed in %.2f s at most", verb, slowest)
    assert room.stand.exits == [], "an end that was asked for is no news"


@pytest.fixture
def small(tmp_path):
    """A small file system of its own."""
    place, image = tmp_path / "small", tmp_path / "small.img"
    place.mkdir()
    image.touch()
    os.truncate(image, 1200 << 20)
    # Nothing is kept for root, which is whoever saves here.
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
    image.unlink()


@pytest.mark.parametrize("program", ["qemu", "firecracker"])
async def test_the_disk_fills_while_it_is_saved_or_kept(small, binaries, cache, program) -> None:
    """It goes on, nothing half saved is listed or left, and once there is room it is saved."""
    module, kind = (qemu_stand, qemu_stand.kind()) if program == "qemu" else (firecracker_stand, RuntimeKind.FIRECRACKER)
    if lack := module.missing(binaries, cache):
        pytest.skip(f"needs {lack}")
    made = firecracker_stand.FirecrackerStand if program == "firecracker" else qemu_stand.QemuStand
    stand = made(kind, small, binaries=binaries, cache=cache)
    await stand.open()
    try:
        driver = stand.driver
        driver._config = dataclasses.replace(driver._config, disk_spare_mib=1)
        order = stand.order()
        guest = await stand.guest(order, await driver.start(order))
        await shell(guest, "head -c 60000000 /dev/urandom >/dev/shm/kept; md5sum </dev/shm/kept >/dev/shm/sum")
        driver._require_room = lambda _placement_id: None
        for verb in ("save", "snapshot"):
            for spare_mib in (40, 2):
                fill(small, spare_mib)
                work = driver.save(order, SaveMode.FULL) if verb == "save" else driver.snapshot(order, "snp_" + "a" * 20, SaveMode.FULL)
                refused = await refusal(work)
                assert refused.code is Code.HOST_DISK_FULL, refused
                assert (await driver.inspect(order.placement_id)).power is Power.RUNNING
                assert await driver.snapshots() == []
                place = driver._view.directory(order.placement_id)
                assert not (place / saves.DRAFT).exists(), "what was half written is gone"
                assert not (place / saves.SAVED).exists()
                (small / "filler").unlink()
                same = "cd /dev/shm && md5sum <kept | cmp - sum && echo same"
                assert (await shell(guest, same)).out == "same\n", f"it goes on after {verb} with {spare_mib} MiB"
                LOG.info("%s of %s with %s MiB of room: %s, it goes on", verb, program, spare_mib, refused.code)
        # What comes back has a disk of its own again.
        await shell(guest, "head -c 30000000 /dev/urandom >/filled; sync")
        await driver.save(order, SaveMode.FULL)
        fill(small, 2)
        refused = await refusal(driver.restore(order))
        assert refused.code is Code.HOST_DISK_FULL, refused
        assert (await driver.inspect(order.placement_id)).power is Power.SAVED, "what was saved is as it was"
        (small / "filler").unlink()
        guest = await stand.guest(order, await driver.restore(order))
        assert (await shell(guest, same)).out == "same\n"
        await driver.discard(order.placement_id)
        await driver.remove(order.placement_id)
        assert not stand.traces(order)
    finally:
        await stand.close()


def fill(place, spare_mib):
    free = os.statvfs(place)
    with (place / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - (spare_mib << 20)))
