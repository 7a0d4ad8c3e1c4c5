"""The agent, or Firecracker itself, is killed in the middle of what is told by the API: nobody takes what is half told for a guest."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from atoll.base.errors import Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.machines.runtime import STARTING
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Power
from atoll.testing.conformance.firecracker_stand import FirecrackerStand, missing
from atoll.testing.conformance.killed import Script
from atoll.testing.conformance.stand import shell
from tests.conformance.removal import can_be_removed

pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(1800)]
AFTER_S = (0.0, 0.05, 0.2, 0.5, 1.0)
"""After the first note of a process: jail, API, start."""


@pytest.fixture
async def stand(tmp_path, binaries, cache):
    if lack := missing(binaries, cache):
        pytest.skip(f"needs {lack}")
    made = FirecrackerStand(RuntimeKind.FIRECRACKER, tmp_path, binaries=binaries, cache=cache)
    await made.open()
    yield made
    await made.close()


async def next_run(stand, tmp_path, binaries, cache):
    made = FirecrackerStand(RuntimeKind.FIRECRACKER, tmp_path, binaries=binaries, cache=cache, identity=stand.identity)
    made.key = stand.key
    await made.open()
    return made


def killed_in_a_start(stand, order, after_s, places):
    script = Script(RuntimeKind.FIRECRACKER, places["home"], places["binaries"], places["cache"], stand.identity, order, None)
    file = places["home"] / "script.pickle"
    file.write_bytes(pickle.dumps(script))
    process = subprocess.Popen([sys.executable, "-m", "atoll.testing.conformance.killed", str(file)], stdout=subprocess.DEVNULL)
    note = stand.config.state_dir / order.placement_id / STARTING
    deadline = time.monotonic() + 60.0
    while not note.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return note.exists()


async def test_an_agent_that_is_killed_in_a_start_leaves_no_guest_that_is_none(tmp_path, binaries, cache):
    """Its process may be there, told half of what it is: the next start is a new one, and removal finds all of it."""
    if lack := missing(binaries, cache):
        pytest.skip(f"needs {lack}")
    first = FirecrackerStand(RuntimeKind.FIRECRACKER, tmp_path, binaries=binaries, cache=cache)
    await first.open()
    await first.driver.probe()
    await first.close()
    places = {"home": tmp_path, "binaries": binaries, "cache": cache}
    half = 0
    for number, after_s in enumerate(AFTER_S):
        order = first.order()
        was_half = await asyncio.to_thread(killed_in_a_start, first, order, after_s, places)
        half += was_half
        stand = await next_run(first, tmp_path, binaries, cache)
        try:
            found = await stand.driver.adopt(order.placement_id)
            if was_half:
                assert not found.lives, f"{found} after {after_s} s"
            if number % 2 == 0 and found.power is not Power.ABSENT:
                await stand.guest(order, await stand.driver.start(order))
            await can_be_removed(stand, order)
        finally:
            await stand.close()
    assert half, "none was killed in the middle of a start"


async def test_a_process_that_is_killed_while_it_saves_loses_nothing_that_was_saved(stand):
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, "echo kept >/dev/shm/kept")
    await stand.driver.save(order, SaveMode.FULL)
    seen = await stand.driver.restore(order)
    os.kill(seen.pid, signal.SIGKILL)
    await asyncio.sleep(0.3)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.SAVED, "nobody has used it"
    seen = await stand.driver.restore(order)
    await stand.driver.discard(order.placement_id)
    guest = await stand.guest(order, seen)
    assert (await shell(guest, "cat /dev/shm/kept")).out == "kept\n"
    saving = asyncio.create_task(stand.driver.save(order, SaveMode.FULL))
    await asyncio.sleep(0.02)
    os.kill(seen.pid, signal.SIGKILL)
    outcome = (await asyncio.gather(saving, return_exceptions=True))[0]
    power = (await stand.driver.inspect(order.placement_id)).power
    assert power is (Power.STOPPED if isinstance(outcome, Refused) else Power.SAVED), f"{power} after {outcome!r}"
    await can_be_removed(stand, order)
