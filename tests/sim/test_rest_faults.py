"""What goes wrong on the way to rest and back, and what a user is left with: a state that can be acted on, each time."""

from __future__ import annotations

import asyncio

import pytest

from atoll.base.errors import Code
from atoll.base.units import ZERO
from atoll.domain.command import Kind
from tests.sim.test_pausing import post, resting
from tests.sim.world import Agent, World

ENDS = {"pause": "paused", "suspend": "suspended", "resume": "ready"}
WHEN = ["before its agent hears of it", "before its agent has done it", "before its client is answered"]


async def begun(world: World, agent: Agent, verb: str) -> str:
    """A sandbox from which this is a way."""
    agent.script = resting
    async with agent.at_work():
        sandbox_id = str((await world.create(timeoutSeconds=600))["id"])
        if verb == "resume":
            assert (await post(world, sandbox_id, "suspend")).status_code == 200
    return sandbox_id


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("verb", list(ENDS))
async def test_control_is_killed_on_the_way(world: World, agent: Agent, verb: str, when: str) -> None:
    sandbox_id = await begun(world, agent, verb)
    asked = world.spawn(post(world, sandbox_id, verb))
    if when == WHEN[0]:
        await asyncio.sleep(0.1)
    else:
        command = await agent.wanted()
        if when == WHEN[2]:
            await agent.obey(command)
    await world.restart()
    assert asked.done(), "whoever has asked has lost the way to control"
    async with agent.at_work():
        await world.until(sandbox_id, ENDS[verb])
        # And it can be acted on.
        back = "suspend" if verb == "resume" else "resume"
        answer = await post(world, sandbox_id, back)
        assert (answer.status_code, answer.json()["state"]) == (200, ENDS[back]), answer.text
        await world.release(sandbox_id)
        await world.until(sandbox_id, "released")
    assert await world.used(agent.host_id) == ZERO


async def at_rest(world: World, agent: Agent, verb: str) -> str:
    """A sandbox that rests by this verb, on a host whose agent says nothing more."""
    agent.script = resting
    async with agent.at_work():
        sandbox_id = str((await world.create(timeoutSeconds=600))["id"])
        assert (await post(world, sandbox_id, verb)).status_code == 200
    return sandbox_id


@pytest.mark.parametrize("verb", ["pause", "suspend"])
async def test_a_delete_does_not_wait_for_a_way_back(world: World, agent: Agent, verb: str) -> None:
    sandbox_id = await at_rest(world, agent, verb)
    waiting = world.spawn(post(world, sandbox_id, "resume"))
    assert (await agent.wanted()).kind is Kind.ENSURE_RUNNING
    assert (await world.call("DELETE", f"/sandboxes/{sandbox_id}")).status_code == 204
    assert (await waiting).status_code == 404
    removal = await agent.wanted()
    assert removal.kind is Kind.ENSURE_ABSENT
    await agent.obey(removal)
    await world.until(sandbox_id, "released")
    assert await world.used(agent.host_id) == ZERO


@pytest.mark.parametrize("verb", ["pause", "suspend"])
async def test_a_host_that_is_lost_with_what_rests_on_it(world: World, agent: Agent, verb: str) -> None:
    sandbox_id = await at_rest(world, agent, verb)
    assert (await world.call("POST", f"/v1/hosts/{agent.host_id}/disable", json={"off": True})).status_code == 200
    ended = await world.until(sandbox_id, "failed")
    assert ended["reason"] == Code.PLACEMENT_LOST
    answer = await post(world, sandbox_id, "resume")
    assert answer.status_code == 404, "nobody waits for what will not come"
