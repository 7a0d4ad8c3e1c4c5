"""A whole control and a scripted agent: pause, suspend and resume as clients ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from atoll.base.errors import Code
from atoll.base.units import ZERO, Vector
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.wire.agent import Command
from tests.sim.world import Agent, World, obedient

FULL = Vector(1000, 512, 2048, 1)
PAUSED = Vector(0, 512, 2048, 1)
SAVED = Vector(0, 0, 2048, 0)
RESTS = {
    Kind.ENSURE_PAUSED: {"observed": Observed.FROZEN},
    Kind.ENSURE_SUSPENDED: {"observed": Observed.SAVED, "save_mode": "full"},
}


def resting(command: Command) -> Mapping[str, Any] | None:
    """Everything works."""
    return RESTS.get(command.kind) or obedient(command)


def refusing(kind: Kind, code: Code, **more: Any):
    """As `resting`, but for one thing, which fails and is not tried again."""

    def script(command: Command) -> Mapping[str, Any] | None:
        if command.kind is not kind or (command.desired_revision == 1):
            return resting(command)
        return {"applied_revision": 0, "failed_revision": command.desired_revision, "reason": code, "detail": "no", **more}

    return script


async def post(world: World, sandbox_id: str, verb: str, **body: Any) -> Any:
    return await world.call("POST", f"/v1/sandboxes/{sandbox_id}/{verb}", json=body)


async def test_pause_and_resume(world: World, agent: Agent) -> None:
    agent.script = resting
    async with agent.at_work():
        sandbox_id = (await world.create(timeoutSeconds=600))["id"]
        paused = await post(world, sandbox_id, "pause")
        assert (paused.status_code, paused.json()["state"], paused.json()["endAt"]) == (200, "paused", None), paused.text
        assert await world.used(agent.host_id) == PAUSED
        assert world.running.service is not None
        assert world.running._routes.get(sandbox_id) is None, "no traffic reaches it"
        assert (await world.call("POST", f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 50})).status_code == 409
        back = await post(world, sandbox_id, "resume", timeoutSeconds=100)
        assert (back.status_code, back.json()["state"], back.json()["generation"]) == (200, "ready", 1), back.text
        assert await world.used(agent.host_id) == FULL
        found = await world.facts(sandbox_id)
        assert found.sandbox.end_at == pytest.approx(world.clock.now() + 100, abs=5)
        assert world.running._routes.get(sandbox_id) is not None
    command = next(c for c in reversed(agent.commands) if c.kind is Kind.ENSURE_RUNNING)
    assert command.timeout_s == 100, "its agent has the new end from the command"
    assert await world.history(sandbox_id) == [
        "sandbox.accepted", "sandbox.placed", "sandbox.ready", "sandbox.pausing", "sandbox.paused", "sandbox.resuming", "sandbox.resumed",
    ]  # fmt: skip


async def test_one_of_many_resumes_brings_it_back_and_all_are_answered(world: World, agent: Agent) -> None:
    agent.script = resting
    async with agent.at_work():
        sandbox_id = (await world.create())["id"]
        await post(world, sandbox_id, "pause")
        answers = await asyncio.gather(*(post(world, sandbox_id, "resume") for _ in range(20)))
        assert {(answer.status_code, answer.json()["state"]) for answer in answers} == {(200, "ready")}
    assert (await world.history(sandbox_id)).count("sandbox.resuming") == 1


async def test_a_resume_without_room_leaves_it_paused(world: World, agent: Agent) -> None:
    agent.script = resting
    async with agent.at_work():
        sandbox_id = (await world.create())["id"]
        await post(world, sandbox_id, "pause")
        big = {"cpuMillis": 8000, "memoryMib": 512, "diskMib": 1024}
        others = [(await world.create(size=big))["id"] for _ in range(2)]
        refused = await post(world, sandbox_id, "resume")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "INSUFFICIENT_CPU"), refused.text
        assert (await world.show(sandbox_id))["state"] == "paused"
        assert await world.used(agent.host_id) == PAUSED + Vector(16000, 1024, 2048, 2)
        await world.release(others[0])
        await world.until(others[0], "released")
        assert (await post(world, sandbox_id, "resume")).json()["state"] == "ready"


async def test_what_cannot_be_frozen_goes_on(world: World, agent: Agent) -> None:
    agent.script = refusing(Kind.ENSURE_PAUSED, Code.PAUSE_FAILED, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    async with agent.at_work():
        sandbox_id = (await world.create(timeoutSeconds=600))["id"]
        end_at = (await world.facts(sandbox_id)).sandbox.end_at
        failed = await post(world, sandbox_id, "pause")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "PAUSE_FAILED"), failed.text
        shown = await world.show(sandbox_id)
        assert (shown["state"], shown["reason"]) == ("ready", "PAUSE_FAILED")
        assert (await world.facts(sandbox_id)).sandbox.end_at == end_at
        assert await world.used(agent.host_id) == FULL


@pytest.mark.parametrize("code", [Code.SAVE_FAILED, Code.HOST_DISK_FULL])
async def test_what_cannot_be_saved_goes_on(world: World, agent: Agent, code: Code) -> None:
    assert Code.SAVE_FAILED
    agent.script = refusing(Kind.ENSURE_SUSPENDED, code, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    async with agent.at_work():
        sandbox_id = (await world.create())["id"]
        failed = await post(world, sandbox_id, "suspend")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, code), failed.text
        assert (await world.show(sandbox_id))["state"] == "ready"


async def test_a_guest_that_does_not_answer(world: World, agent: Agent) -> None:
    code = Code.GUEST_UNRESPONSIVE
    agent.script = refusing(Kind.ENSURE_SUSPENDED, code, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    async with agent.at_work():
        sandbox_id = (await world.create())["id"]
        failed = await post(world, sandbox_id, "suspend", requireHealthyGuest=True)
        assert (failed.status_code, failed.json()["error"]["code"]) == (409, code), failed.text
        assert (await world.show(sandbox_id))["state"] == "ready"
    assert next(c for c in agent.commands if c.kind is Kind.ENSURE_SUSPENDED).strict


async def test_a_resume_that_fails_leaves_it_paused(world: World, agent: Agent) -> None:
    agent.script = resting
    async with agent.at_work():
        sandbox_id = (await world.create())["id"]
        await post(world, sandbox_id, "pause")
        agent.script = refusing(Kind.ENSURE_RUNNING, Code.RESUME_FAILED, observed=Observed.ERROR)
        failed = await post(world, sandbox_id, "resume")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "RESUME_FAILED"), failed.text
        assert (await world.show(sandbox_id))["state"] == "paused"
        agent.script = resting
        assert (await post(world, sandbox_id, "resume")).json()["state"] == "ready"


async def test_suspended_holds_its_disk_alone_and_comes_back_where_it_is(world: World, agent: Agent) -> None:
    agent.script = resting
    async with agent.at_work():
        sandbox_id = (await world.create())["id"]
        suspended = await post(world, sandbox_id, "suspend")
        assert (suspended.json()["state"], suspended.json()["saveMode"]) == ("suspended", "full"), suspended.text
        assert await world.used(agent.host_id) == SAVED
        assert (await post(world, sandbox_id, "suspend")).json()["state"] == "suspended", "said again"
        back = await post(world, sandbox_id, "resume")
        assert (back.json()["state"], back.json()["generation"]) == ("ready", 1)
        assert await world.used(agent.host_id) == FULL


@pytest.mark.parametrize("verb", ["pause", "suspend"])
async def test_delete_does_not_wait_for_a_way_to_end(world: World, agent: Agent, verb: str) -> None:
    agent.script = resting
    async with agent.at_work():
        sandbox_id = (await world.create())["id"]
    waiting = world.spawn(post(world, sandbox_id, verb))
    command = await agent.wanted()
    assert command.kind in RESTS
    assert (await world.call("DELETE", f"/sandboxes/{sandbox_id}")).status_code == 204
    assert (await waiting).status_code == 404
    removal = await agent.wanted()
    assert removal.kind is Kind.ENSURE_ABSENT
    await agent.obey(removal)
    assert (await world.show(sandbox_id))["state"] == "released"
    assert await world.used(agent.host_id) == ZERO


async def test_its_end_does_not_come_while_it_is_paused(world: World, agent: Agent) -> None:
    agent.script = resting
    async with agent.at_work():
        sandbox_id = (await world.create(timeoutSeconds=60))["id"]
        await post(world, sandbox_id, "pause")
        world.clock.pass_s(1e4)
        world.look_at_deadlines()
        await asyncio.sleep(0.1)
        assert (await world.show(sandbox_id))["state"] == "paused"


async def test_who_is_on_its_way_back_gets_its_payload_though_it_is_wanted_at_rest(world: World, agent: Agent) -> None:
    """A save has failed, and the next one is asked for before its guest serves again."""
    agent.script = resting
    async with agent.at_work():
        sandbox_id = (await world.create(timeoutSeconds=600, env={"A": "mine"}))["id"]
    (command,) = [c for c in agent.commands if c.sandbox_id == sandbox_id]
    asked = world.spawn(post(world, sandbox_id, "suspend"))
    wanted = await agent.wanted()
    assert wanted.kind is Kind.ENSURE_SUSPENDED
    assert (await agent.fetch(command)).payloads[sandbox_id].env["A"] == "mine"
    await agent.obey(wanted)
    assert (await asked).json()["state"] == "suspended"
    await world.release(sandbox_id)
    assert (await agent.fetch(command)).payloads == {}
