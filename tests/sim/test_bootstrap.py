"""What a create brought for its guest: given once, to one run, and not before it is written down that it is out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import sqlalchemy as sa

from atoll.base.errors import Code
from atoll.domain.placement import Observed
from atoll.domain.spec import OnExit, OnLoss
from atoll.domain.warmth import OWN_TEAM
from atoll.store.tables import PAYLOADS, SANDBOXES
from atoll.wire import agent as wire
from tests.sim.test_replacement import authorize
from tests.sim.world import BRISK, Agent, World

SECRET = "s3cr3t-of-the-client"
CLASS = "comes-back"
READY = sa.select(sa.func.count()).where(SANDBOXES.c.team_id == OWN_TEAM, SANDBOXES.c.state == "ready")


@pytest.fixture(autouse=True)
def classes(world: World, agent: Agent) -> None:
    """`brisk` ends what is lost; of this one another generation may begin."""
    configuration = world.running.configuration
    policy = replace(BRISK, name=CLASS, on_loss=OnLoss.REPLACE)
    stays = replace(BRISK, name="stays", on_exit=OnExit.RESTART)
    configuration.current = replace(configuration.current, classes={**configuration.current.classes, CLASS: policy, "stays": stays})


async def payload_rows(world: World) -> int:
    return await world.store.read(lambda conn: conn.execute(sa.select(sa.func.count()).select_from(PAYLOADS)).scalar_one())


async def kinds(world: World, sandbox_id: str) -> list[str]:
    answer = await world.call("GET", f"/v1/sandboxes/{sandbox_id}/events")
    return [one["type"] for one in answer.json()["items"]]


async def delivered(world: World, agent: Agent, *, class_name: str = "brisk") -> tuple[str, wire.Command]:
    sandbox_id = await world.accept(**{"class": class_name, "timeoutSeconds": 3600, "env": {"A": SECRET}})
    command = await agent.wanted()
    assert (await agent.fetch(command)).payloads[sandbox_id].env["A"] == SECRET
    return sandbox_id, command


async def fail(agent: Agent, command: wire.Command, reason: str) -> None:
    agent.see(command.placement_id, observed=Observed.ERROR, reason=reason, applied_revision=0)
    await agent.observe()


async def take_away(agent: Agent) -> None:
    command = await agent.wanted()
    assert command.kind == "ensure_absent"
    agent.see(command.placement_id, observed=Observed.ABSENT)
    await agent.observe()


async def test_that_it_leaves_is_written_down_first(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept(env={"A": SECRET})
    command = await agent.wanted()
    assert agent.payloads == {}, "nothing leaves with the command"
    assert (await world.show(sandbox_id))["bootstrapExposed"] is False
    await agent.fetch(command)
    assert (await world.show(sandbox_id))["bootstrapExposed"] is True
    assert (await kinds(world, sandbox_id)).count("sandbox.bootstrap_exposed") == 1


async def test_a_lost_answer_is_given_again_to_the_same_run(world: World, agent: Agent) -> None:
    sandbox_id, command = await delivered(world, agent)
    again = await agent.fetch(command)
    assert again.payloads[sandbox_id] == agent.payloads[sandbox_id]
    assert (await kinds(world, sandbox_id)).count("sandbox.bootstrap_exposed") == 1


async def test_no_other_run_gets_it(world: World, agent: Agent) -> None:
    sandbox_id, command = await delivered(world, agent)
    successor = agent.next_run()
    await successor.poll()
    for _ in range(2):
        answer = await successor.fetch(command)
        assert (answer.refused, answer.payloads) == ([sandbox_id], {})
        assert answer.guest_tokens == {command.placement_id: command.guest_token}, "it may ask the guest whether that has it"


async def test_control_is_killed_between_the_delivery_and_the_next_question(world: World, agent: Agent) -> None:
    sandbox_id, command = await delivered(world, agent)
    await world.stop()
    await world.start()
    assert (await agent.fetch(command)).payloads[sandbox_id].env["A"] == SECRET
    successor = agent.next_run()
    await successor.poll()
    assert (await successor.fetch(command)).refused == [sandbox_id]


async def test_after_the_receipt_nobody_gets_it_and_it_is_sealed_until_the_end(world: World, agent: Agent) -> None:
    sandbox_id, command = await delivered(world, agent)
    assert await payload_rows(world) == 1
    receipt = agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    await agent.observe(receipt)
    await agent.observe(receipt)  # its answer was lost
    assert (await world.show(sandbox_id))["state"] == "ready"
    assert await payload_rows(world) == 1, "what is suspended needs it once more"
    assert (await agent.fetch(command)).refused == [sandbox_id]
    await world.release(sandbox_id)
    await agent.obey(await agent.wanted())
    assert await payload_rows(world) == 0


async def test_a_receipt_that_was_lost_is_the_next_run_s_to_give(world: World, agent: Agent) -> None:
    """Killed between the delivery and the receipt, with a guest that has it: that says so, and is ready."""
    sandbox_id, command = await delivered(world, agent)
    successor = agent.next_run()
    await successor.poll()
    assert (await successor.fetch(command)).refused == [sandbox_id]
    successor.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    await successor.observe()
    assert (await world.show(sandbox_id))["state"] == "ready"
    assert (await successor.fetch(command)).refused == [sandbox_id]


async def test_killed_between_delivery_and_receipt_no_other_is_begun(world: World, agent: Agent) -> None:
    """The guest does not have it, and nobody knows who has: the start fails, and is not tried again by itself."""
    sandbox_id, command = await delivered(world, agent)
    await fail(agent, command, Code.BOOTSTRAP_DELIVERED)
    await take_away(agent)
    shown = await world.show(sandbox_id)
    assert (shown["state"], shown["reason"], shown["generation"]) == ("failed", "BOOTSTRAP_DELIVERED", 1)
    assert "sandbox.replaced" not in await kinds(world, sandbox_id)


async def test_a_start_that_fails_before_anything_was_given_is_tried_again(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept(env={"A": SECRET})
    await fail(agent, await agent.wanted(), Code.START_FAILED)
    await take_away(agent)
    again = await agent.wanted()
    assert again.generation == 2
    assert (await agent.fetch(again)).payloads[sandbox_id].env["A"] == SECRET


async def test_a_class_that_replaces_waits_for_a_word(world: World, agent: Agent) -> None:
    sandbox_id, command = await delivered(world, agent, class_name=CLASS)
    await fail(agent, command, Code.BOOTSTRAP_DELIVERED)
    await take_away(agent)
    shown = await world.show(sandbox_id)
    assert (shown["state"], shown["generation"], shown["conditions"]) == ("pending", 2, ["REPLACEMENT_BLOCKED"])
    world.clock.pass_s(5)
    assert (await agent.poll()).commands == [], "nothing is begun by itself"
    await authorize(world, sandbox_id, 1, statement="the job's keys are revoked")
    again = await agent.wanted()
    assert again.generation == 2
    assert (await world.show(sandbox_id))["bootstrapExposed"] is False
    assert (await agent.fetch(again)).payloads[sandbox_id].env["A"] == SECRET, "another delivery, to another guest"


async def test_a_start_that_is_late_waits_for_a_word_too(world: World, agent: Agent) -> None:
    sandbox_id, command = await delivered(world, agent, class_name=CLASS)
    world.clock.pass_s(1000)
    await world.running.reconciler.settle(sandbox_id)
    assert (await world.show(sandbox_id))["state"] == "provisioning"
    await take_away(agent)
    shown = await world.show(sandbox_id)
    assert (shown["state"], shown["conditions"]) == ("pending", ["REPLACEMENT_BLOCKED"])
    assert shown["generation"] == command.generation + 1


async def test_a_release_revokes_the_delivery(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept(env={"A": SECRET})
    command = await agent.wanted()
    await world.release(sandbox_id)
    answer = await agent.fetch(command)
    assert (answer.payloads, answer.refused) == ({}, [])
    assert (await world.show(sandbox_id))["bootstrapExposed"] is False


async def test_a_guest_that_is_begun_again_in_its_place_gets_it_again(world: World, agent: Agent) -> None:
    """Another start is another delivery; a late question for the one before finds that it was received."""
    sandbox_id, command = await delivered(world, agent, class_name="stays")
    agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    await agent.observe()
    assert await payload_rows(world) == 1
    assert (await agent.fetch(command)).refused == [sandbox_id]
    agent.see(command.placement_id, observed=Observed.STOPPED, reason="GUEST_EXITED", ready=False)
    await agent.observe()
    again = await agent.wanted()
    assert again.desired_revision == 2
    assert (await agent.fetch(again)).payloads[sandbox_id].env["A"] == SECRET


async def test_what_gives_no_power_outside_is_given_as_often_as_it_is_asked_for(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept()
    command = await agent.wanted()
    assert sandbox_id in agent.payloads
    successor = agent.next_run()
    await successor.poll()
    assert sandbox_id in (await successor.fetch(command)).payloads
    assert (await world.show(sandbox_id))["bootstrapExposed"] is False


async def claimed(world: World, agent: Agent) -> tuple[str, wire.Command]:
    """A create that has taken over a guest made ahead, and the command that says so; its payload is with the first run."""
    async with agent.at_work():
        answer = await world.call("PUT", "/v1/templates/base/warm", json={"count": 1})
        assert answer.status_code == 200, answer.text
        async with asyncio.timeout(10):
            while not await world.store.read(lambda conn: conn.execute(READY).scalar_one()):
                await asyncio.sleep(0.02)
    answer = await world.call("PUT", "/v1/templates/base/warm", json={"count": 0})
    assert answer.status_code == 200, answer.text
    sandbox_id = await world.accept(timeoutSeconds=3600, env={"A": SECRET})
    command = await agent.wanted()
    assert command.claimed
    assert (await agent.fetch(command)).payloads[sandbox_id].env["A"] == SECRET
    return sandbox_id, command


async def test_the_next_run_gets_what_a_claimed_guest_says_that_it_lacks(world: World, agent: Agent) -> None:
    sandbox_id, command = await claimed(world, agent)
    successor = agent.next_run()
    await successor.poll()
    assert (await successor.fetch(command)).refused == [sandbox_id], "nobody has said what became of it"
    assert (await successor.fetch(command, missing=True)).payloads[sandbox_id].env["A"] == SECRET
    assert (await kinds(world, sandbox_id)).count("sandbox.bootstrap_exposed") == 1
    assert (await successor.fetch(command)).payloads[sandbox_id].env["A"] == SECRET, "from then on it is this run's"
    successor.see(
        command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2", applied_revision=command.desired_revision
    )
    await successor.observe()
    assert (await world.show(sandbox_id))["state"] == "ready"
    assert (await successor.fetch(command, missing=True)).refused == [sandbox_id], "it has said that it has it"


async def test_of_a_guest_that_its_run_has_begun_no_word_counts(world: World, agent: Agent) -> None:
    """Another one may have been there before it, and have had the payload."""
    sandbox_id, command = await delivered(world, agent)
    successor = agent.next_run()
    await successor.poll()
    assert (await successor.fetch(command, missing=True)).refused == [sandbox_id]
