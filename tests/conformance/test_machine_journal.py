"""A machine's disk that nobody has closed: its journal brings it back, and what was synced is there, each time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal

import pytest

from atoll.domain.spec import SaveMode
from atoll.drivers.machines.runtime import MOMENT
from atoll.drivers.oci import saves
from atoll.drivers.oci.config import RuntimeKind
from atoll.testing.conformance import firecracker_stand, qemu_stand
from atoll.testing.conformance.guest import GuestGone
from atoll.testing.conformance.stand import shell

LOG = logging.getLogger(__name__)
pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.long, pytest.mark.timeout(1200)]
ROUNDS = 3
# A file has its name once its content is on the disk, and the name is then synced, too. What else is dirty is for the journal.
WRITER = """mkdir -p /kept
while :; do
  new=/kept/new; head -c 60000 /dev/urandom >$new; sync $new; sum=$(md5sum <$new | cut -c1-32); mv $new /kept/$sum; sync /kept
  echo $sum >>/dev/shm/promised
  head -c 200000 /dev/urandom >/kept.dirty
done"""
PROMISED = "cat /dev/shm/promised"
THERE = "cd /kept && ls | grep -vx new"
WRONG = "cd /kept && for f in $(ls | grep -vx new); do [ $(md5sum <$f | cut -c1-32) = $f ] || echo $f; done"
SAID = "dmesg | grep -E 'EXT4-fs'"


@pytest.fixture(params=["qemu", "firecracker"])
async def stand(request, tmp_path, binaries, cache):
    module, kind = (qemu_stand, qemu_stand.kind()) if request.param == "qemu" else (firecracker_stand, RuntimeKind.FIRECRACKER)
    if lack := module.missing(binaries, cache):
        pytest.skip(f"needs {lack}")
    made = (qemu_stand.QemuStand if request.param == "qemu" else firecracker_stand.FirecrackerStand)(
        kind, tmp_path, binaries=binaries, cache=cache
    )
    await made.open()
    yield made
    await made.close()


async def writing(guest) -> tuple[asyncio.Task[None], set[str]]:
    """Somebody who writes without an end, and what was promised to last by the time this returns."""

    async def write() -> None:
        with contextlib.suppress(GuestGone, TimeoutError, OSError):
            await guest.run(["/bin/sh", "-c", WRITER], user="root", timeout_s=1000)

    task = asyncio.create_task(write())
    async with asyncio.timeout(120):
        while len(found := set((await shell(guest, PROMISED)).out.split())) < 5:
            await asyncio.sleep(0.2)
    return task, found


async def ended(task: asyncio.Task[None]) -> None:
    """Nobody tells it that its guest is gone: there is nobody left at that address."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def is_whole(guest, promised: set[str]) -> None:
    said = (await shell(guest, SAID)).out
    assert "recovery complete" in said, said
    assert "error" not in said.lower(), said
    there = set((await shell(guest, THERE)).out.split())
    assert promised <= there, f"{len(promised - there)} of {len(promised)} are gone"
    assert (await shell(guest, WRONG, timeout_s=120)).out == ""
    assert (await shell(guest, "echo goes on >/after && sync /after && cat /after")).out == "goes on\n"
    LOG.info("%s files promised, %s there and whole; %s", len(promised), len(there), said.strip().splitlines()[-1])


async def test_what_was_synced_outlasts_the_end_of_its_program_each_time(stand) -> None:
    order = stand.order()
    promised: set[str] = set()
    guest = await stand.guest(order, seen := await stand.driver.start(order))
    for _ in range(ROUNDS):
        task, found = await writing(guest)
        promised |= found
        os.kill(seen.pid, signal.SIGKILL)
        await ended(task)
        await stand.driver.stop(order.placement_id)
        guest = await stand.guest(order, seen := await stand.driver.start(order))
        await is_whole(guest, promised)
    await stand.driver.remove(order.placement_id)


async def test_what_was_saved_whole_and_fits_nowhere_is_had_from_its_journal(stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    task, promised = await writing(guest)
    await stand.driver.save(order, SaveMode.FULL)
    await ended(task)
    place = stand.config.state_dir / order.placement_id / saves.SAVED
    moment = json.loads((place / MOMENT).read_text())
    text = json.dumps({**moment, "machine": [*moment["machine"][:-1], "of another release"]})
    (place / MOMENT).write_text(text)
    said = json.loads((place / saves.LIST).read_text())
    said["files"][MOMENT] = len(text)
    (place / saves.LIST).write_text(json.dumps(said))
    guest = await stand.guest(order, await stand.driver.restore(order, reboot=True))
    await stand.driver.discard(order.placement_id)
    await is_whole(guest, promised)
    await stand.driver.remove(order.placement_id)
