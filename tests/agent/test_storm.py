"""Everything at once, by seed: orders, ends, exits, lost messages, crashes at any boundary; then quiet, and a look at what is left.

Safety, after every message: what is said absent is gone; what is said ready was initialised; a tombstone stays one; one sequence number
has one content. Liveness, in the end: each placement runs, or is gone, as its newest order and its end say.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.drivers.port import Power

SEEDS = range(30)
STEPS = 40


class Watch:
    """Checks each observation when control hears it."""

    def __init__(self, world):
        self.world = world
        self.contents = {}
        self.tombs = set()
        listen = world.control._listen

        def checked(observations):
            for observation in observations:
                self.check(observation)
            return listen(observations)

        world.control._listen = checked

    def check(self, seen):
        placement_id = seen.placement_id
        content = seen.model_copy(update={"end_revision": 0})
        assert self.contents.setdefault((placement_id, seen.seq), content) == content, "one number, two contents"
        thing = self.world.machine.things.get(placement_id)
        if seen.observed is Observed.ABSENT:
            assert thing is None, "said absent, and it is there"
            self.tombs.add(placement_id)
        else:
            newest = max(seq for i, seq in self.contents if i == placement_id)
            assert placement_id not in self.tombs or seen.seq < newest, "a tombstone came back"
        if seen.ready and seen.seq == max(seq for i, seq in self.contents if i == placement_id):
            assert thing is None or thing.initialised or thing.power is Power.STOPPED, "said ready without init"


def move(world, dice, ids):
    """One thing that can happen."""
    control, machine = world.control, world.machine
    placement_id = dice.choice(ids)
    match dice.randrange(10):
        case 0 | 1 | 2:
            if placement_id not in control.wants:
                control.want(placement_id, env={"K": placement_id})
                control.end(placement_id, 5000.0, revision=1)
        case 3:
            if placement_id in control.wants and control.wants[placement_id].kind is not Kind.ENSURE_ABSENT:
                control.want(placement_id, Kind.ENSURE_ABSENT)
        case 4:
            if (end := control.ends.get(placement_id)) is not None:
                control.end(placement_id, dice.choice((50.0, 5000.0)), revision=end.revision + 1)
        case 5:
            world.skip(dice.choice((1.0, 60.0)))
        case 6:
            thing = machine.things.get(placement_id)
            if thing is not None and thing.power is Power.RUNNING:
                thing.power = Power.STOPPED
                # A run that is not up yet finds it so when it adopts.
                return world.driver.on_exit(placement_id, "signal 9") if world.driver.on_exit is not None else None
        case 7:
            control.lose_answers += 1
            control.news.set()
        case 8:
            world.driver.fail.setdefault(dice.choice(("prepare", "start", "stop", "remove")), []).append(Refused(Code.START_FAILED, "dice"))
        case 9:
            control.down = not control.down
            control.news.set()
    return None


async def restart_if_gone(world, dice, *, for_good=False):
    if world.task.done() or for_good:
        await world.kill()
        world.boot(crash_at=None if for_good else dice.choice((None, 5, 12, 30, 60)))


@pytest.mark.parametrize("seed", SEEDS)
async def test_storm(world, seed):
    dice = random.Random(seed)
    world.control.lease_s = 100_000.0
    Watch(world)
    ids = [f"plc_{n:020d}" for n in range(6)]
    world.boot(crash_at=dice.randrange(4, 40))
    for _ in range(STEPS):
        happens = move(world, dice, ids)
        if happens is not None:
            await happens
        for _ in range(dice.randrange(30)):
            await asyncio.sleep(0)
        await restart_if_gone(world, dice)
    world.control.down, world.control.lose_answers = False, 0
    await restart_if_gone(world, dice, for_good=True)
    await world.control.until(lambda: not unsettled(world), within_s=20)
    assert unsettled(world) == []
    assert all(count == 1 for count in world.machine.started.values())


def unsettled(world):
    """Placements that are not where they should be, and why."""
    wrong = []
    for placement_id, want in world.control.wants.items():
        seen, thing = want.observed, world.machine.things.get(placement_id)
        if seen is None:
            wrong.append((placement_id, "never heard of"))
        elif seen.observed is Observed.ABSENT:
            if thing is not None:
                wrong.append((placement_id, "said absent, and it is there"))
        elif want.kind is Kind.ENSURE_ABSENT:
            wrong.append((placement_id, "should be gone"))
        elif seen.observed is Observed.ERROR:
            if seen.reason != Code.START_FAILED:
                wrong.append((placement_id, f"error {seen.reason}"))
        elif not (seen.ready and thing is not None and thing.power is Power.RUNNING and thing.initialised):
            wrong.append((placement_id, f"{seen.observed}, ready {seen.ready}"))
    return wrong
