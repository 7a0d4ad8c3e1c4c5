"""The way out: from every state, over every lost message, until a host has looked and seen nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from atoll.base.units import ZERO, Vector
from atoll.domain.command import Kind
from atoll.domain.placement import Holding, Observed
from tests.sim.world import OPERATOR_KEY, Agent, Refusal, World

Reach = Callable[[World, Agent], Awaitable[str]]


async def pending(world: World, agent: Agent) -> str:
    """No host suits."""
    sandbox_id = await world.accept(requireHost="hst_" + "z" * 20)
    assert (await world.facts(sandbox_id)).sandbox.state == "pending"
    return sandbox_id


async def placed(world: World, agent: Agent) -> str:
    """A host was granted and has not heard of it."""
    return await world.accept()


async def taken(world: World, agent: Agent) -> str:
    """The agent has the command and has said nothing."""
    return (await start(world, agent)).sandbox_id


async def starting(world: World, agent: Agent) -> str:
    command = await start(world, agent)
    agent.see(command.placement_id, observed=Observed.STARTING)
    await agent.observe()
    return command.sandbox_id


async def erred(world: World, agent: Agent) -> str:
    """A start has failed and its removal is ordered."""
    command = await start(world, agent)
    agent.see(command.placement_id, observed=Observed.ERROR, reason="START_FAILED")
    await agent.observe()
    return command.sandbox_id


async def replaced(world: World, agent: Agent) -> str:
    """The first generation is gone, the second not placed yet."""
    sandbox_id = await erred(world, agent)
    removal = await agent.wanted()
    agent.see(removal.placement_id, observed=Observed.ABSENT, ended_by="command")
    await agent.observe()
    return sandbox_id


async def ready(world: World, agent: Agent) -> str:
    command = await start(world, agent)
    agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    await agent.observe()
    return command.sandbox_id


async def start(world: World, agent: Agent):  # type: ignore[no-untyped-def]
    await world.accept()
    return await agent.wanted()


@pytest.mark.parametrize("reach", [pending, placed, taken, starting, erred, replaced, ready], ids=lambda reach: reach.__name__)
async def test_release_works_from_every_state(world: World, agent: Agent, reach: Reach) -> None:
    sandbox_id = await reach(world, agent)
    answer = await world.call("DELETE", f"/sandboxes/{sandbox_id}")
    assert answer.status_code == 204, answer.text
    for path in (f"/sandboxes/{sandbox_id}", f"/v2/sandboxes/{sandbox_id}"):
        assert (await world.call("GET", path)).status_code == 404, "E2B's clients see it gone at once"
    assert (await world.call("DELETE", f"/sandboxes/{sandbox_id}")).status_code == 404
    async with agent.at_work():
        shown = await world.until(sandbox_id, "released", "failed")
    assert shown["reason"] == "RELEASE_REQUESTED"
    assert await world.used(agent.host_id) == ZERO
    await asyncio.sleep(0.4)
    assert await world.held(agent.host_id) == 0, "a replacement was placed after the release"


async def test_a_released_sandbox_is_kept_on_record_with_its_reason(world: World, agent: Agent) -> None:
    sandbox_id = await ready(world, agent)
    await world.release(sandbox_id)
    await agent.obey(await agent.wanted())
    shown = await world.show(sandbox_id)
    assert (shown["state"], shown["reason"]) == ("released", "RELEASE_REQUESTED")
    assert await world.history(sandbox_id) == [
        "sandbox.accepted",
        "sandbox.placed",
        "sandbox.ready",
        "sandbox.releasing",
        "placement.gone",
        "sandbox.released",
    ]


async def test_capacity_stays_held_until_absence_is_seen(world: World, agent: Agent) -> None:
    sandbox_id = await ready(world, agent)
    await world.release(sandbox_id)
    removal = await agent.wanted()
    for observed in (Observed.RUNNING, Observed.STOPPED, Observed.ERROR):
        agent.see(removal.placement_id, observed=observed, reason="CLEANUP_FAILED", detail="mount busy")
        await agent.observe()
        assert await world.used(agent.host_id) == Vector(1000, 512, 2048, 1)
    world.clock.pass_s(1e5)
    world.look_at_deadlines()
    await asyncio.sleep(0.1)
    await agent.poll()
    assert (await world.show(sandbox_id))["state"] == "releasing"
    assert "CLEANUP_PENDING" in (await world.show(sandbox_id))["conditions"]
    assert await world.used(agent.host_id) == Vector(1000, 512, 2048, 1)
    agent.see(removal.placement_id, observed=Observed.ABSENT, ended_by="command")
    await agent.observe()
    assert await world.used(agent.host_id) == ZERO


async def test_an_empty_inventory_is_not_absence(world: World, agent: Agent) -> None:
    """An agent that forgot everything holds nothing and says nothing: it is told again, and nothing is freed."""
    sandbox_id = await ready(world, agent)
    amnesiac = agent.next_run()
    amnesiac.holds.clear()
    command = await amnesiac.wanted()
    assert (command.sandbox_id, command.kind) == (sandbox_id, Kind.ENSURE_RUNNING)
    assert (await world.facts(sandbox_id)).sandbox.state == "ready"
    assert await world.held(agent.host_id) == 1


async def test_a_tombstone_is_kept_until_control_has_confirmed_it(world: World, agent: Agent) -> None:
    sandbox_id = await ready(world, agent)
    await world.release(sandbox_id)
    removal = await agent.wanted()
    agent.see(removal.placement_id, observed=Observed.ABSENT, ended_by="command")
    assert agent.tombstones == [removal.placement_id]
    early = await agent.poll(observations=[])
    assert early.forget == [], "control has not heard of the absence yet"
    assert (await agent.observe()).forget == [removal.placement_id]
    assert agent.tombstones == []
    agent.tombstones.append(removal.placement_id)  # as if that answer had been lost
    assert (await agent.poll()).forget == [removal.placement_id]
    assert agent.tombstones == []
    assert (await agent.poll()).forget == []


async def test_a_tombstone_that_control_has_pruned_is_forgotten(world: World, agent: Agent) -> None:
    agent.tombstones.append("plc_" + "x" * 20)
    assert (await agent.poll()).forget == ["plc_" + "x" * 20]


async def test_a_placement_that_control_never_made_is_reported(world: World, agent: Agent) -> None:
    stray = "plc_" + "s" * 20
    agent.holds[stray] = 1
    answer = await agent.poll()
    assert answer.unknown == [stray]
    assert answer.commands == [], "control orders nothing for what it does not know"


async def test_an_unknown_placement_does_not_make_polls_spin(world: World, agent: Agent) -> None:
    agent.holds["plc_" + "s" * 20] = 1
    await agent.poll()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await agent.poll(park_s=0.5)
    assert loop.time() - began >= 0.4, "answered at once although there is no news"


async def test_another_host_s_placement_is_unknown_here(world: World, agent: Agent) -> None:
    other = await world.agent("other", token=await world.token("other"))
    sandbox_id = await world.accept(requireHost="local")
    command = await agent.wanted()
    other.holds[command.placement_id] = 1
    assert (await other.poll()).unknown == [command.placement_id]
    other.generations[command.placement_id] = (sandbox_id, 1)
    other.see(command.placement_id, observed=Observed.ABSENT, ended_by="command")
    await other.observe()
    assert (await world.facts(sandbox_id)).sandbox.state == "provisioning", "another host's word freed it"


async def test_a_lost_acknowledgement_is_given_again(world: World, agent: Agent) -> None:
    command = await start(world, agent)
    seen = agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    first = await agent.observe(seen)
    again = await agent.observe(seen)
    assert first.acknowledged == again.acknowledged == {command.placement_id: seen.seq}
    poll = await agent.poll(observations=[seen])
    assert poll.acknowledged == {command.placement_id: seen.seq}
    assert (await world.history(command.sandbox_id)).count("sandbox.ready") == 1


async def test_observations_that_overtake_each_other(world: World, agent: Agent) -> None:
    command = await start(world, agent)
    early = agent.see(command.placement_id, observed=Observed.STARTING)
    late = agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    await agent.observe(late)
    answer = await agent.observe(early)
    assert answer.acknowledged == {command.placement_id: early.seq}, "a stale one is acknowledged, or it would be sent for ever"
    assert (await world.facts(command.sandbox_id)).sandbox.state == "ready"
    loaded = await world.facts(command.sandbox_id)
    assert loaded.placement is not None
    assert loaded.placement.observed is Observed.RUNNING


async def test_a_late_word_of_an_earlier_generation_changes_nothing(world: World, agent: Agent) -> None:
    sandbox_id = await replaced(world, agent)
    first = agent.commands[0]
    second = await agent.wanted()
    assert second.generation == 2
    for observed, is_ready in ((Observed.RUNNING, True), (Observed.ABSENT, False)):
        agent.see(first.placement_id, observed=observed, ready=is_ready, address="10.64.0.9")
        await agent.observe()
    loaded = await world.facts(sandbox_id)
    assert loaded.sandbox.state == "provisioning"
    assert loaded.placement is not None
    assert (loaded.placement.id, loaded.placement.holding) == (second.placement_id, Holding.RESERVED)


async def test_a_generation_that_does_not_match_its_placement_is_stale(world: World, agent: Agent) -> None:
    command = await start(world, agent)
    agent.generations[command.placement_id] = (command.sandbox_id, 2)
    agent.see(command.placement_id, observed=Observed.ABSENT)
    await agent.observe()
    assert (await world.facts(command.sandbox_id)).sandbox.state == "provisioning"


@pytest.mark.parametrize(
    ("ended_by", "reason", "state"),
    [
        ("end_at", "END_REACHED", "released"),
        ("exit", "GUEST_EXITED", "released"),
        ("lease", "LEASE_EXPIRED", "failed"),
    ],
)
async def test_an_end_that_the_agent_made_by_itself(world: World, agent: Agent, ended_by: str, reason: str, state: str) -> None:
    sandbox_id = await ready(world, agent)
    agent.see(agent.commands[0].placement_id, observed=Observed.ABSENT, ended_by=ended_by, reason=reason)
    await agent.observe()
    shown = await world.show(sandbox_id)
    assert (shown["state"], shown["reason"]) == (state, reason)
    assert await world.used(agent.host_id) == ZERO
    assert (await agent.poll()).commands == []


async def test_ended_records_are_forgotten_after_their_time(world: World, agent: Agent) -> None:
    sandbox_id = await ready(world, agent)
    await world.release(sandbox_id)
    await agent.obey(await agent.wanted())
    world.clock.pass_s(25 * 3600)
    await world.restart()
    async with asyncio.timeout(10):
        while True:
            try:
                await world.show(sandbox_id, key=OPERATOR_KEY)
            except Refusal as refused:
                if refused.code == "SANDBOX_NOT_FOUND":
                    break
            await asyncio.sleep(0.02)


async def test_many_releases_at_once_end_it_once(world: World, agent: Agent) -> None:
    sandbox_id = await ready(world, agent)
    answers = await asyncio.gather(*(world.call("DELETE", f"/sandboxes/{sandbox_id}") for _ in range(10)))
    assert sorted(a.status_code for a in answers) == [204] + [404] * 9
    await agent.obey(await agent.wanted())
    assert (await world.history(sandbox_id)).count("sandbox.released") == 1
