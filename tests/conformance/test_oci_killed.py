"""The agent is killed between any two steps, or in the middle of one: the next run can start the placement, or remove all of it."""

import asyncio
import pickle
import random
import signal
import subprocess
import sys
import time

import pytest

from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Power
from atoll.testing.conformance.killed import Script
from atoll.testing.conformance.oci_stand import OciStand, missing

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
        self._key = first._key

    def act(self, die_at):
        """Start the other process; it dies before step `die_at`, or ends by itself."""
        script = Script(self.kind, self.home, identity=self.identity, order=self.order, die_at=die_at, **self.places)
        file = self.home / "script.pickle"
        file.write_bytes(pickle.dumps(script))
        return subprocess.Popen([sys.executable, "-m", "atoll.testing.conformance.killed", str(file)], stdout=subprocess.PIPE, text=True)

    async def next_run(self):
        stand = OciStand(self.kind, self.home, identity=self.identity, **self.places)
        stand._key = self._key
        await stand.open()
        return stand


@pytest.fixture(params=list(RuntimeKind), ids=str)
def scene(request, tmp_path, binaries, cache):
    return Scene(request.param, tmp_path, binaries, cache)


async def can_be_removed(stand, order):
    await stand.driver.remove(order.placement_id)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.ABSENT
    assert not await stand.driver.held()
    # A killed run's namespaces are taken away by the kernel in its own time.
    for _ in range(100):
        if not (left := stand.traces(order)):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(left)


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
