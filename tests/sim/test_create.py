"""From a request to an answer: accepted, placed, ready; and every way in which that goes wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from atoll.base.units import ZERO, Vector
from atoll.domain.host import Admin
from atoll.domain.placement import Observed
from atoll.store import hosts
from atoll.wire.agent import Check
from tests.sim.world import Agent, Refusal, World, failing, obedient, silent, waiting


async def test_a_create_is_answered_when_the_guest_is_ready(world: World, agent: Agent) -> None:
    creating = world.spawn(world.create(metadata={"a": "b"}))
    command = await agent.wanted()
    assert command.kind == "ensure_running"
    assert not creating.done(), "nobody has seen a guest yet"
    agent.see(command.placement_id, observed=Observed.STARTING)
    await agent.observe()
    assert (await world.show(command.sandbox_id))["state"] == "provisioning"
    agent.see(command.placement_id, observed=Observed.RUNNING, address="10.64.0.2")
    await agent.observe()
    assert not creating.done(), "running is not ready"
    agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    answered = await agent.observe()
    created = await creating
    assert (created["id"], created["state"], created["metadata"]) == (command.sandbox_id, "ready", {"a": "b"})
    assert await world.history(created["id"]) == ["sandbox.accepted", "sandbox.placed", "sandbox.ready"]
    assert await world.used(agent.host_id) == Vector(1000, 512, 2048, 1)
    (end,) = answered.ends
    assert end.placement_id == command.placement_id
    assert 299 < end.remaining_s <= 300, "the end is counted from ready, and travels with the answer that made it so"


async def test_the_first_command_carries_an_end_already(world: World, agent: Agent) -> None:
    """An agent that loses control between start and ready must not keep a guest for ever."""
    await world.accept(timeoutSeconds=100)
    answer = await agent.poll()
    (end,) = answer.ends
    assert end.placement_id == answer.commands[0].placement_id
    assert 155 < end.remaining_s <= 160


async def test_a_start_that_fails_is_tried_on_a_new_generation_three_times(world: World, agent: Agent) -> None:
    agent.script = failing("START_FAILED", "exec format error")
    async with agent.at_work():
        with pytest.raises(Refusal) as refused:
            await world.create()
        started = [c for c in agent.commands if c.kind == "ensure_running"]
        shown = await world.until(started[0].sandbox_id, "failed")
    assert (refused.value.status, refused.value.code) == (503, "START_FAILED")
    assert "exec format error" in refused.value.body["message"]
    assert [c.generation for c in started] == [1, 2, 3]
    assert len({c.placement_id for c in started}) == 3
    assert len({c.nonce for c in started}) == 3, "a nonce is for one placement"
    assert (shown["reason"], shown["generation"]) == ("START_FAILED", 3)
    assert await world.used(agent.host_id) == ZERO
    assert (await world.history(shown["id"])).count("sandbox.replaced") == 2


async def test_a_second_attempt_that_works_is_the_answer(world: World, agent: Agent) -> None:
    def flaky(command):  # type: ignore[no-untyped-def]
        return failing("START_FAILED")(command) if command.generation == 1 else obedient(command)

    agent.script = flaky
    async with agent.at_work():
        created = await world.create()
    assert (created["state"], created["generation"]) == ("ready", 2)
    assert await world.used(agent.host_id) == Vector(1000, 512, 2048, 1)


async def test_the_next_generation_waits_until_the_last_is_seen_gone(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept()
    command = await agent.wanted()
    agent.see(command.placement_id, observed=Observed.ERROR, reason="START_FAILED")
    await agent.observe()
    removal = await agent.wanted()
    assert (removal.kind, removal.placement_id, removal.desired_revision) == ("ensure_absent", command.placement_id, 2)
    world.clock.pass_s(60)
    world.look_at_deadlines()
    await asyncio.sleep(0.1)
    assert (await world.facts(sandbox_id)).sandbox.generation == 1, "time alone made a second one"
    assert await world.held(agent.host_id) == 1
    agent.see(command.placement_id, observed=Observed.ABSENT, ended_by="command")
    await agent.observe()
    again = await agent.wanted()
    assert (again.kind, again.generation) == ("ensure_running", 2)


async def test_a_guest_that_never_answers_is_given_up_and_removed(world: World, agent: Agent) -> None:
    agent.script = silent
    sandbox_id = await world.accept(**{"class": "slow-guest"})
    await agent.wanted()
    world.clock.pass_s(600 + 1 + 30)
    world.look_at_deadlines()
    shown = await world.until(sandbox_id, "releasing")
    assert shown["reason"] == "START_TIMEOUT"
    removal = await agent.wanted()
    assert removal.kind == "ensure_absent"
    assert removal.reason == "START_TIMEOUT"
    agent.see(removal.placement_id, observed=Observed.ABSENT, ended_by="command")
    await agent.observe()
    assert (await world.show(sandbox_id))["state"] == "failed"


async def test_without_any_host_patience_ends_with_no_capacity(world: World) -> None:
    with pytest.raises(Refusal) as refused:
        await world.create(**{"class": "impatient"})
    assert (refused.value.status, refused.value.code) == (503, "NO_CAPACITY")
    assert "no host is registered" in refused.value.body["message"]


async def test_the_answer_says_who_refused_and_why(world: World, agent: Agent) -> None:
    with pytest.raises(Refusal) as refused:
        await world.create(**{"class": "impatient", "size": {"memoryMib": 16_000}})
    assert refused.value.code == "NO_CAPACITY"
    assert "1 host(s): INSUFFICIENT_MEMORY x1" in refused.value.body["message"]


async def test_nothing_is_left_of_a_create_that_was_given_up(world: World, agent: Agent) -> None:
    agent.script = silent
    async with agent.at_work():
        with pytest.raises(Refusal) as refused:
            await world.create(**{"class": "brisk"})
    assert refused.value.code == "CREATE_TIMEOUT"
    (command, removal) = [*agent.commands, await agent.wanted()] if len(agent.commands) == 1 else agent.commands
    assert (command.kind, removal.kind) == ("ensure_running", "ensure_absent")
    agent.see(command.placement_id, observed=Observed.ABSENT, ended_by="command")
    await agent.observe()
    assert (await world.show(command.sandbox_id))["state"] == "failed"
    assert await world.used(agent.host_id) == ZERO


async def test_a_create_that_waits_for_a_start_command_in_vain_says_what_that_said(world: World, agent: Agent) -> None:
    """Whichever is over first, the caller's patience or the host's: the answer is the start command's failure."""
    agent.script = waiting
    async with agent.at_work():
        with pytest.raises(Refusal) as refused:
            await world.create(**{"class": "brisk"})
    assert (refused.value.status, refused.value.code) == (503, "START_COMMAND_FAILED")
    assert "the start command is not ready yet: no port yet" in refused.value.body["message"]
    assert [command.kind for command in agent.commands][:1] == ["ensure_running"]
    assert len([command for command in agent.commands if command.kind == "ensure_running"]) == 1


async def test_a_start_command_that_fails_ends_its_create_at_once(world: World, agent: Agent) -> None:
    agent.script = failing("START_COMMAND_FAILED", "exit status 4")
    async with agent.at_work():
        with pytest.raises(Refusal) as refused:
            await world.create()
        shown = await world.until(agent.commands[0].sandbox_id, "failed")
    assert (refused.value.code, shown["reason"], shown["generation"]) == ("START_COMMAND_FAILED", "START_COMMAND_FAILED", 1)
    assert await world.used(agent.host_id) == ZERO


async def test_a_class_s_own_deadline_fails_what_never_finds_room(world: World) -> None:
    with pytest.raises(Refusal) as refused:
        await world.create(**{"class": "hopeless"})
    assert refused.value.code == "NO_CAPACITY"


async def test_who_waits_gets_the_room_that_is_given_back(world: World, agent: Agent) -> None:
    async with agent.at_work():
        first = [await world.create() for _ in range(8)]
        late = world.spawn(world.create())
        await asyncio.sleep(0.1)
        assert not late.done()
        await world.release(first[0]["id"])
        assert (await asyncio.wait_for(late, timeout=30))["state"] == "ready"
    assert await world.held(agent.host_id) == 8


async def test_a_host_that_comes_later_gets_what_waits(world: World) -> None:
    late = world.spawn(world.create())
    await asyncio.sleep(0.1)
    agent = await world.agent()
    async with agent.at_work():
        assert (await asyncio.wait_for(late, timeout=30))["state"] == "ready"


async def test_a_burst_fills_a_host_exactly(world: World, agent: Agent) -> None:
    """Racing creates never overfill: eight find room, the rest are told so."""
    async with agent.at_work():
        results = await asyncio.gather(*(world.create(**{"class": "brisk"}) for _ in range(12)), return_exceptions=True)
        refused = [r for r in results if isinstance(r, Refusal)]
        assert len(results) - len(refused) == 8
        assert {r.code for r in refused} == {"NO_CAPACITY"}
    assert await world.used(agent.host_id) == Vector(8000, 4096, 16_384, 8)


async def failed_checks(world: World) -> str:
    """As operators are told."""
    told = (await world.call("POST", "/v1/placement/explain", json={})).json()
    return str(told["verdicts"][0]["objections"][0]["detail"])


async def test_a_host_that_fails_a_check_gets_nothing(world: World, agent: Agent) -> None:
    agent.checks = [Check(id="runtime.start", ok=False, fatal=True), Check(id="disk.speed", ok=False)]
    await agent.poll()
    with pytest.raises(Refusal) as refused:
        await world.create(**{"class": "impatient"})
    assert "HOST_CHECK_FAILED x1" in refused.value.body["message"]
    assert await failed_checks(world) == "runtime.start"
    agent.checks, agent.quarantined = [], ["plc_left_behind"]
    await agent.poll()
    with pytest.raises(Refusal) as refused:
        await world.create(**{"class": "impatient"})
    assert "HOST_CHECK_FAILED x1" in refused.value.body["message"]
    assert await failed_checks(world) == "inventory.quarantine"
    agent.quarantined = []
    await agent.poll()
    async with agent.at_work():
        assert (await world.create())["state"] == "ready"


async def test_an_isolation_that_no_host_has_is_not_given_another(world: World, agent: Agent) -> None:
    agent.isolations = ("shared-kernel",)
    await agent.poll()
    with pytest.raises(Refusal) as refused:
        await world.create(**{"class": "impatient"})
    assert "ISOLATION_UNAVAILABLE" in refused.value.body["message"]


async def test_a_host_that_is_silent_gets_nothing_new(world: World, agent: Agent) -> None:
    world.clock.pass_s(31)
    with pytest.raises(Refusal) as refused:
        await world.create(**{"class": "impatient"})
    assert "HOST_NOT_HEALTHY" in refused.value.body["message"]


async def test_a_host_can_be_required(world: World, agent: Agent) -> None:
    other = await world.agent("other", token=await world.token("other"))
    await world.accept(requireHost=other.host_id)
    await world.accept(requireHost="local")
    assert (await other.wanted()).kind == "ensure_running"
    assert (await agent.wanted()).kind == "ensure_running"


async def test_who_refuses_at_reservation_is_not_asked_again(world: World, agent: Agent) -> None:
    """The directory is a hint: a host whose record has changed since says no, and the next one is asked at once."""
    other = await world.agent("other", token=await world.token("other"))
    for one in (agent, other):
        await world.accept(requireHost=one.host_id)
    record = await world.store.read(lambda conn: hosts.by_id(conn, agent.host_id))
    await world.store.write(lambda conn: hosts.save(conn, replace(record, admin=Admin.DRAINING), read=record))
    for _ in range(4):
        sandbox_id = await world.accept()
        loaded = await world.facts(sandbox_id)
        assert (loaded.sandbox.state, loaded.sandbox.host_id) == ("provisioning", other.host_id)
        assert (await world.history(sandbox_id)).count("sandbox.host_refused") <= 1


async def test_sixteen_commands_at_most_in_one_answer(world: World) -> None:
    agent = await world.agent(capacity=Vector(1_000_000, 1_000_000, 10_000_000, 100))
    ids = {await world.accept() for _ in range(20)}
    first = await agent.poll()
    second = await agent.poll()
    assert (len(first.commands), len(second.commands)) == (16, 4)
    assert {c.sandbox_id for c in (*first.commands, *second.commands)} == ids
