"""Guests that end by themselves: released, or begun again where they are, as their spec says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from atoll.agent.record import RESTART_PAUSES_S
from atoll.base.errors import Code, Refused
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.spec import OnExit
from atoll.drivers.port import Power

A = "plc_aaaaaaaaaaaaaaaaaaaa"


@pytest.fixture
def again(world):
    """A world whose class says restart, and whose driver keeps the disk of what has stopped."""
    world.control.spec = replace(world.control.spec, on_exit=OnExit.RESTART)
    world.keeps_disk = True
    return world


async def dies(world, reason="exit 1"):
    world.machine.things[A].power = Power.STOPPED
    world.machine.things[A].initialised = False
    await world.driver.on_exit(A, reason)


async def stopped(world):
    await world.control.until(lambda: world.control.seen(A).observed is Observed.STOPPED)


async def test_it_is_kept_and_said_to_be_stopped(again):
    again.boot()
    again.control.want(A)
    await again.control.until_ready(A)
    await dies(again)
    await stopped(again)
    seen = again.control.seen(A)
    assert (seen.ready, seen.reason, seen.detail, seen.ended_by) == (False, Code.GUEST_EXITED, "exit 1", None)
    await asyncio.sleep(0.05)
    assert A in again.machine.things, "it was removed"
    assert again.machine.started == {A: 1}, "it was begun again before control said so"


async def test_the_next_revision_begins_it_again_in_its_place(again):
    again.boot()
    again.control.want(A, env={"K": "v"})
    await again.control.until_ready(A)
    order = again.machine.things[A].order
    for count in (2, 3):
        await dies(again)
        await stopped(again)
        again.control.want(A)
        await again.control.until(lambda count=count: again.control.seen(A).ready and again.control.seen(A).applied_revision == count)
        assert again.machine.started == {A: count}
    assert again.machine.things[A].order == order
    assert "remove" not in again.verbs(A)
    assert [p.env for p in again.machine.things[A].inits] == [{"K": "v"}] * 3


async def test_each_time_it_waits_longer(again):
    again.boot()
    again.control.want(A)
    await again.control.until_ready(A)
    loop = asyncio.get_running_loop()
    took = []
    for _ in range(3):
        await dies(again)
        await stopped(again)
        began = loop.time()
        again.control.want(A)
        await again.control.until(lambda: again.control.seen(A).ready)
        took.append(loop.time() - began)
    assert took[0] < 0.4
    assert took[1] >= RESTART_PAUSES_S[1]
    assert took[2] >= RESTART_PAUSES_S[2]


async def test_a_removal_does_not_wait_for_the_pause(again):
    again.boot()
    again.control.want(A)
    await again.control.until_ready(A)
    for _ in range(2):
        await dies(again)
        await stopped(again)
        again.control.want(A)
        await asyncio.sleep(0.05)
    again.control.want(A, Kind.ENSURE_ABSENT)
    await again.control.until_absent(A)


async def test_a_restart_that_fails_is_said_and_not_tried_again_by_itself(again):
    again.boot()
    again.control.want(A)
    await again.control.until_ready(A)
    await dies(again)
    await stopped(again)
    again.driver.fail["start"] = [Refused(Code.START_FAILED, "no")]
    again.control.want(A)
    await again.control.until(lambda: again.control.seen(A).observed is Observed.ERROR)
    again.control.want(A)
    await again.control.until(lambda: again.control.seen(A).ready)
    assert again.machine.started == {A: 2}


async def test_it_dies_again_before_it_answers(again):
    again.boot()
    again.control.want(A)
    await again.control.until_ready(A)
    await dies(again)
    await stopped(again)
    again.guests.gate = asyncio.Event()
    again.control.want(A)
    await again.control.until(lambda: again.machine.started == {A: 2})
    await dies(again, "exit 2")
    await again.control.until(lambda: again.control.seen(A).detail == "exit 2")
    assert again.control.seen(A).observed is Observed.STOPPED


@pytest.mark.parametrize("power", [Power.STOPPED, None])
async def test_it_ended_while_no_agent_ran(again, power):
    again.boot()
    again.control.want(A)
    await again.control.until_ready(A)
    await again.kill()
    if power is None:
        del again.machine.things[A]
    else:
        again.machine.things[A].power = power
    again.boot()
    if power is None:
        await again.control.until_absent(A)
        assert again.control.seen(A).reason == Code.PLACEMENT_LOST
    else:
        await stopped(again)
        again.control.want(A)
        await again.control.until(lambda: again.control.seen(A).ready)


async def test_after_a_reboot_it_is_begun_again_with_what_is_left(again):
    again.boot()
    again.control.want(A)
    await again.control.until_ready(A)
    await again.kill()
    again.machine.things[A].power = Power.STOPPED
    again.facts = again.facts.model_copy(update={"boot_id": "boot-2"})
    again.boot()
    await stopped(again)
    again.control.want(A)
    await again.control.until(lambda: again.control.seen(A).ready)
    await again.kill()
    again.boot()
    await again.control.until(lambda: again.control.polls[-1].holds == {A: 2})
    await asyncio.sleep(0.05)
    assert again.machine.things[A].power is Power.RUNNING, "it was taken for one of the boot before"


@pytest.mark.parametrize("keeps", [False, True])
async def test_without_the_disk_or_the_word_it_is_released(world, keeps):
    """A class that says restart on a driver that keeps no disk, and one that says release."""
    world.control.spec = replace(world.control.spec, on_exit=OnExit.RELEASE if keeps else OnExit.RESTART)
    world.keeps_disk = keeps
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    await dies(world)
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "exit"


async def test_one_that_never_ran_is_not_begun_again_in_place(again):
    again.boot()
    again.guests.gate = asyncio.Event()
    again.control.want(A)
    await again.control.until(lambda: again.machine.started == {A: 1})
    await dies(again)
    await again.control.until_absent(A)
    assert again.control.seen(A).ended_by == "exit"


async def test_killed_at_every_boundary_of_a_restart(tmp_path, world_factory):
    for n in range(1, 80):
        world = world_factory(tmp_path / str(n))
        world.control.spec = replace(world.control.spec, on_exit=OnExit.RESTART)
        world.keeps_disk = True
        world.boot(crash_at=n)
        world.control.want(A, env={"K": "v"})
        crashed = await until_ready_or_crashed(world, 1)
        if not crashed:
            await dies(world)
            await world.control.until(lambda world=world: world.task.done() or world.control.seen(A).observed is Observed.STOPPED)
            world.control.want(A)
            crashed = await until_ready_or_crashed(world, 2)
        name = world.fuse.name
        await world.kill()
        world.boot()
        await world.control.until(lambda world=world: world.control.current_epoch == world.agent.epoch)
        async with asyncio.timeout(10):
            while not (world.control.seen(A) is not None and world.control.seen(A).ready):
                if world.control.seen(A) is not None and world.control.seen(A).observed is Observed.STOPPED:
                    world.control.want(A)
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.002)
        thing = world.machine.things[A]
        assert thing.power is Power.RUNNING, name
        assert thing.initialised, name
        await world.kill()
        if not crashed:
            return
    raise AssertionError("the run never got through")


async def until_ready_or_crashed(world, revision):
    async with asyncio.timeout(10):
        while not world.task.done():
            seen = world.control.seen(A)
            if seen is not None and seen.ready and seen.applied_revision == revision:
                return False
            await asyncio.sleep(0)
    return True
