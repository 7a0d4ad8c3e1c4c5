"""Control is cut off in the middle of everything and starts again on the same database: whatever was under way goes on."""

from __future__ import annotations

import asyncio

import pytest

from atoll.base.errors import Bug
from atoll.base.units import ZERO
from atoll.domain.placement import Observed
from tests.sim.test_release import Reach, erred, pending, placed, ready, replaced, starting, taken
from tests.sim.world import Agent, Refusal, World


@pytest.mark.parametrize("reach", [placed, taken, starting, erred, replaced, ready], ids=lambda reach: reach.__name__)
async def test_after_a_restart_a_sandbox_becomes_ready(world: World, agent: Agent, reach: Reach) -> None:
    sandbox_id = await reach(world, agent)
    before = (await world.facts(sandbox_id)).sandbox
    await world.restart()
    async with agent.at_work():
        shown = await world.until(sandbox_id, "ready")
    assert shown["generation"] >= before.generation
    assert await world.held(agent.host_id) == 1
    assert (await world.history(sandbox_id)).count("sandbox.ready") == 1


async def test_a_waiting_sandbox_goes_on_waiting(world: World, agent: Agent) -> None:
    sandbox_id = await pending(world, agent)
    await world.restart()
    await asyncio.sleep(0.2)
    assert (await world.facts(sandbox_id)).sandbox.state == "pending"
    world.clock.pass_s(301)
    world.look_at_deadlines()
    assert (await world.until(sandbox_id, "failed"))["reason"] == "NO_CAPACITY"


@pytest.mark.parametrize("reach", [placed, taken, starting, erred, ready], ids=lambda reach: reach.__name__)
async def test_a_release_goes_on(world: World, agent: Agent, reach: Reach) -> None:
    sandbox_id = await reach(world, agent)
    await world.release(sandbox_id)
    await world.restart()
    assert (await world.call("GET", f"/sandboxes/{sandbox_id}")).status_code == 404
    async with agent.at_work():
        await world.until(sandbox_id, "released", "failed")
    assert await world.used(agent.host_id) == ZERO


async def test_an_ended_one_stays_ended(world: World, agent: Agent) -> None:
    sandbox_id = await ready(world, agent)
    await world.release(sandbox_id)
    await agent.obey(await agent.wanted())
    await world.restart()
    assert (await world.show(sandbox_id))["state"] == "released"
    assert (await agent.poll()).commands == []


async def test_an_absence_seen_while_control_was_away_is_heard_afterwards(world: World, agent: Agent) -> None:
    sandbox_id = await ready(world, agent)
    await world.stop()
    agent.see(agent.commands[0].placement_id, observed=Observed.ABSENT, ended_by="end_at", reason="END_REACHED")
    await world.start()
    answer = await agent.poll()
    shown = await world.show(sandbox_id)
    assert (shown["state"], shown["reason"]) == ("released", "END_REACHED")
    assert answer.forget == [agent.commands[0].placement_id]


async def test_deadlines_go_on_over_a_restart(world: World, agent: Agent) -> None:
    sandbox_id = await taken(world, agent)
    await world.stop()
    world.clock.pass_s(700)
    await world.start()
    removal = await agent.wanted()
    assert (removal.kind, removal.reason) == ("ensure_absent", "START_TIMEOUT")
    assert "sandbox.deadline_missed" in await world.history(sandbox_id)


async def test_used_capacity_is_known_at_once(world: World, agent: Agent) -> None:
    """The directory starts from rows: a full host is full in the first moment too."""
    async with agent.at_work():
        for _ in range(8):
            await world.create()
    await world.restart()
    with pytest.raises(Refusal) as refused:
        await world.create(**{"class": "impatient"})
    assert "INSUFFICIENT_" in refused.value.body["message"]


async def test_the_same_agent_run_goes_on_after_a_restart_of_control(world: World, agent: Agent) -> None:
    await world.restart()
    await agent.poll()
    await agent.poll()


async def test_control_and_agent_both_die(world: World, agent: Agent) -> None:
    sandbox_id = await ready(world, agent)
    await world.restart()
    successor = agent.next_run()
    assert (await successor.poll()).commands == []
    assert (await world.facts(sandbox_id)).sandbox.state == "ready"
    await world.release(sandbox_id)
    await successor.obey(await successor.wanted())
    assert (await world.show(sandbox_id))["state"] == "released"


async def test_an_idempotent_create_is_found_again(world: World, agent: Agent) -> None:
    async with agent.at_work():
        first = await world.create(clientRequestId="r1")
    await world.restart()
    assert (await world.create(clientRequestId="r1"))["id"] == first["id"]


async def test_a_create_that_was_cut_off_is_not_lost(world: World, agent: Agent) -> None:
    """Its client's connection broke with control; the sandbox is there under its request id."""
    creating = world.spawn(world.create(clientRequestId="r1"))
    command = await agent.wanted()
    await world.restart()
    assert creating.cancelled() or creating.done()
    with pytest.raises(Refusal) as refused:
        await world.create(clientRequestId="r1")
    assert refused.value.code == "REQUEST_IN_PROGRESS"
    await agent.obey(command)
    again = await world.create(clientRequestId="r1")
    assert (again["id"], again["state"]) == (command.sandbox_id, "ready")


async def test_a_database_of_another_install_is_refused(world: World) -> None:
    await world.stop()
    mine, world.install_id = world.install_id, "ins_" + "z" * 20
    with pytest.raises(Bug, match=mine):
        await world.start()
    world.control = None
    world.install_id = mine
    await world.start()


async def test_restarts_under_load_lose_nothing(world: World, agent: Agent) -> None:
    """Clients come and go, control dies five times: every accepted sandbox ends with its capacity given back."""

    async def client(number: int) -> None:
        while True:
            try:
                created = await world.create(wait=number % 2 == 0, size={"cpuMillis": 100, "memoryMib": 64, "diskMib": 128})
                await world.release(created["id"])
            except Exception:
                await asyncio.sleep(0.01)

    async def work() -> None:
        while True:
            try:
                await agent.run()
            except Exception:
                await asyncio.sleep(0.01)

    working = asyncio.create_task(work())
    clients = [asyncio.create_task(client(n)) for n in range(4)]
    for _ in range(5):
        await asyncio.sleep(0.3)
        await world.restart()
    for task in (*clients, working):
        task.cancel()
    await asyncio.gather(*clients, working, return_exceptions=True)
    ids = await all_of(world)
    assert len(ids) > 5
    for sandbox_id in ids:
        await world.call("DELETE", f"/v1/sandboxes/{sandbox_id}")
    async with agent.at_work():
        for sandbox_id in ids:
            await world.until(sandbox_id, "released", "failed")
    assert await world.used(agent.host_id) == ZERO
    assert agent.holds == {}


async def all_of(world: World) -> list[str]:
    ids: list[str] = []
    cursor = ""
    while True:
        page = (await world.call("GET", f"/v1/sandboxes?scope=all&limit=100{cursor}")).json()
        ids += [item["id"] for item in page["items"]]
        if page["nextCursor"] is None:
            return ids
        cursor = f"&cursor={page['nextCursor']}"
