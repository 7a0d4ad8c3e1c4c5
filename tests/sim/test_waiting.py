"""Room that is freed goes at once to who waits for it, the oldest first, and costs nobody else anything."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from atoll.base.units import Vector
from atoll.domain.host import SUSPECT_AFTER_S
from atoll.domain.sandbox import Condition
from tests.sim.world import Agent, World

SMALL = {"cpuMillis": 1000, "memoryMib": 512, "diskMib": 2048}
BIG = {"cpuMillis": 1000, "memoryMib": 2048, "diskMib": 2048}
AT_ONCE_S = 0.2
"""A pause before another look is at least 0.25 s, and is 5 s for who has waited long."""


@pytest.fixture
async def full(world: World) -> tuple[World, Agent, list[str]]:
    """A host with room for four, which has four."""
    agent = await world.agent(capacity=Vector(4000, 2048, 65_536, 64))
    return world, agent, [await world.accept(size=SMALL) for _ in range(4)]


async def queue(world: World, count: int, *, size: dict[str, int] = SMALL, waits_s: float = 60.0) -> list[str]:
    """Sandboxes that wait, the oldest first, and whose next own look is seconds away."""
    made = []
    for _ in range(count):
        made.append(await world.accept(size=size, timeoutSeconds=3600))
        world.clock.pass_s(0.5)
    world.clock.pass_s(waits_s)
    for one in made:
        await world.running.reconciler.settle(one)
    for one in made:
        sandbox = (await world.facts(one)).sandbox
        assert Condition.NO_ELIGIBLE_HOST in sandbox.conditions
        assert sandbox.deadline_at is not None
        assert sandbox.deadline_at - world.clock.now() > 4
    return made


async def free(world: World, agent: Agent, sandbox_id: str) -> None:
    await world.release(sandbox_id)
    while True:
        for command in (await agent.poll()).commands:
            await agent.obey(command)
        if (await world.show(sandbox_id))["state"] == "released":
            return


async def placed(world: World, ids: list[str]) -> list[bool]:
    return [(await world.facts(one)).placement is not None for one in ids]


async def test_the_oldest_gets_it_at_once(full: tuple[World, Agent, list[str]]) -> None:
    world, agent, held = full
    waiting = await queue(world, 3)
    for number, one in enumerate(held[:3]):
        await free(world, agent, one)
        await asyncio.sleep(AT_ONCE_S)
        assert await placed(world, waiting) == [at <= number for at in range(3)]


async def test_a_crowd_costs_no_commits(full: tuple[World, Agent, list[str]]) -> None:
    world, agent, held = full
    waiting = await queue(world, 30)
    before = {one: (await world.facts(one)).sandbox.revision for one in waiting}
    await free(world, agent, held[0])
    await asyncio.sleep(AT_ONCE_S)
    assert await placed(world, waiting) == [True] + [False] * 29
    for one in waiting[1:]:
        assert (await world.facts(one)).sandbox.revision == before[one]
    assert "sandbox.host_refused" not in await world.history(waiting[0])


async def test_who_is_too_large_keeps_nobody_waiting(full: tuple[World, Agent, list[str]]) -> None:
    world, agent, held = full
    (large,) = await queue(world, 1, size=BIG)
    small = await queue(world, 1)
    await free(world, agent, held[0])
    await asyncio.sleep(AT_ONCE_S)
    assert await placed(world, [large, *small]) == [False, True]


async def test_a_new_host_is_room(full: tuple[World, Agent, list[str]]) -> None:
    world, _, _ = full
    waiting = await queue(world, 6)
    other = await world.agent("second", token=await world.token("second"), capacity=Vector(4000, 2048, 65_536, 64))
    await asyncio.sleep(AT_ONCE_S)
    assert await placed(world, waiting) == [True] * 4 + [False] * 2
    assert (await world.facts(waiting[0])).sandbox.host_id == other.host_id


async def test_so_is_one_that_is_activated_and_one_that_is_heard_of_again(full: tuple[World, Agent, list[str]]) -> None:
    world, _, _ = full
    second = await world.agent("second", token=await world.token("second"), capacity=Vector(4000, 2048, 65_536, 64))
    await world.call("POST", f"/v1/hosts/{second.host_id}/drain")
    (first,) = await queue(world, 1)
    await second.poll()
    await world.call("POST", f"/v1/hosts/{second.host_id}/activate")
    await asyncio.sleep(AT_ONCE_S)
    assert await placed(world, [first]) == [True]
    world.clock.pass_s(SUSPECT_AFTER_S + 1)
    (next_one,) = await queue(world, 1)
    await second.poll()
    await asyncio.sleep(AT_ONCE_S)
    assert await placed(world, [next_one]) == [True]


async def test_room_that_is_freed_between_a_look_and_its_commit_is_found(full: tuple[World, Agent, list[str]]) -> None:
    world, agent, held = full
    reconciler = world.running.reconciler
    waiting = await world.accept(size=SMALL)
    known = (await world.facts(waiting)).sandbox
    await world.release(held[0])
    await world.release(waiting)
    reconciler.waiting.clear()
    for command in (await agent.poll()).commands:
        await agent.obey(command)
    late = await world.accept(size=SMALL, requireHost="nobody")
    reconciler.waiting.clear()
    told = []
    reconciler.directory.on_room = told.append
    sandbox = (await world.facts(late)).sandbox
    reconciler.note_waiting(replace(sandbox, spec=known.spec))
    assert told == [False]


async def test_who_waits_for_a_word_is_not_woken_by_room(full: tuple[World, Agent, list[str]]) -> None:
    world, _, _ = full
    (one,) = await queue(world, 1)
    reconciler = world.running.reconciler
    sandbox = (await world.facts(one)).sandbox
    blocked = replace(sandbox, conditions=sandbox.conditions | {Condition.REPLACEMENT_BLOCKED})
    reconciler.note_waiting(blocked)
    assert one not in reconciler.waiting


async def test_after_a_restart_those_that_wait_are_known(full: tuple[World, Agent, list[str]]) -> None:
    world, agent, held = full
    (one,) = await queue(world, 1)
    await world.stop()
    await world.start()
    await agent.poll()
    world.clock.pass_s(0)
    await free(world, agent, held[0])
    await asyncio.sleep(AT_ONCE_S)
    assert await placed(world, [one]) == [True]
