"""What an agent is told: the same intent has the same command however often it is asked, and secrets travel beside it."""

from __future__ import annotations

import base64

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.domain import command as commands
from atoll.domain.placement import Observed
from atoll.domain.spec import LOCAL_S
from atoll.wire import agent as wire
from tests.sim.world import Agent, Refusal, World

NOTHING = {"payloads": {}, "refused": [], "guest_tokens": {}}
SECRET = "tops3cret-value"


async def test_a_command_s_id_says_what_it_is_of(world: World, agent: Agent) -> None:
    await world.accept()
    command = await agent.wanted()
    assert command.id == f"{command.placement_id}:1:1"
    await world.release(command.sandbox_id)
    removal = await agent.wanted()
    assert removal.id == f"{command.placement_id}:1:2"
    assert removal.spec is None
    assert removal.payload_ref is None


async def test_a_lost_answer_is_given_again_word_for_word(world: World, agent: Agent) -> None:
    """Also by another control process: the content follows from rows that do not change under one desired revision."""
    await world.accept(env={"A": "b"})
    first = await agent.wanted()
    agent.holds.clear()
    again = await agent.wanted()
    await world.restart()
    agent.holds.clear()
    later = await agent.wanted()
    assert first == again == later
    successor = agent.next_run()
    successor.holds.clear()
    other_epoch = await successor.wanted()
    assert other_epoch.digest == first.digest, "the digest is of what is wanted, not of who is asked"
    assert other_epoch.epoch != first.epoch


async def test_the_digest_covers_all_but_epoch_and_itself(world: World, agent: Agent) -> None:
    await world.accept(env={"A": "b"})
    command = await agent.wanted()
    # How it is saved is said only where it is to be, and a manifest only where there is one: earlier commands keep their digests.
    content = command.model_dump(mode="json", exclude={"digest", "epoch", "carried_out", "save_mode", "strict", "moment", "claimed"})
    assert content["spec"].pop("manifest") == ""
    assert content["spec"].pop("origin") is None
    assert content["spec"].pop("local_s") == LOCAL_S
    assert commands.digest(content) == command.digest
    for name in content:
        assert commands.digest({**content, name: "changed"}) != command.digest


async def test_an_accepted_command_is_not_sent_again(world: World, agent: Agent) -> None:
    await world.accept()
    await agent.wanted()
    assert (await agent.poll()).commands == []


async def test_a_command_that_was_overtaken_is_never_sent(world: World, agent: Agent) -> None:
    """Released before the agent heard of it: it is told to make sure of absence, not to start first."""
    sandbox_id = await world.accept()
    await world.release(sandbox_id)
    command = await agent.wanted()
    assert (command.kind, command.desired_revision) == ("ensure_absent", 2)


async def test_the_payload_is_in_no_command_and_in_no_table_in_clear(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept(env={"API_TOKEN": SECRET}, metadata={"note": "visible-metadata"})
    command = await agent.wanted()
    assert agent.payloads == {}
    await agent.fetch(command)
    payload = agent.payloads[sandbox_id]
    assert payload.env["API_TOKEN"] == SECRET
    assert payload.access_token
    assert SECRET not in command.model_dump_json()
    assert payload.access_token not in command.model_dump_json()
    assert command.payload_ref == sandbox_id
    assert command.payload_digest
    assert SECRET not in repr(payload)
    agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    await agent.observe()
    assert SECRET not in str(await world.show(sandbox_id))
    events = await world.call("GET", f"/v1/sandboxes/{sandbox_id}/events")
    assert SECRET not in events.text
    await world.stop()
    content = b"".join(path.read_bytes() for path in world.path.glob("atoll.db*"))
    assert b"visible-metadata" in content, "the test reads the right files"
    assert SECRET.encode() not in content
    assert base64.b64encode(SECRET.encode())[:-4] not in content
    assert payload.access_token.encode() not in content


async def test_a_restarted_agent_asks_for_tokens_and_what_exposes_nothing_again(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept()
    command = await agent.wanted()
    assert sandbox_id in agent.payloads, "what gives no power outside comes beside its command"
    successor = agent.next_run()
    await successor.poll()
    for _ in range(2):
        answer = await successor.fetch(command)
        assert answer.payloads[sandbox_id] == agent.payloads[sandbox_id]
        assert answer.guest_tokens == {command.placement_id: command.guest_token}


async def test_a_host_gets_payloads_of_its_own_sandboxes_only(world: World, agent: Agent) -> None:
    other = await world.agent("other", token=await world.token("other"))
    sandbox_id = await world.accept(env={"A": SECRET}, requireHost="local")
    command = await agent.wanted()
    wanted = wire.PayloadsWanted(host_id=other.host_id, epoch=other.epoch, refs=[sandbox_id], placements=[command.placement_id])
    assert await other._post("payloads", wanted) == NOTHING


async def test_an_ended_sandbox_s_payload_is_gone(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept(env={"A": SECRET})
    command = await agent.wanted()
    await world.release(sandbox_id)
    await agent.obey(await agent.wanted())
    wanted = wire.PayloadsWanted(host_id=agent.host_id, epoch=agent.epoch, refs=[sandbox_id, "iunknown"], placements=[command.placement_id])
    assert await agent._post("payloads", wanted) == NOTHING


async def test_guest_tokens_are_for_one_placement_s_guest(world: World, agent: Agent) -> None:
    await world.accept()
    command = await agent.wanted()
    assert command.guest_public_key is not None
    assert command.guest_token is not None
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(command.guest_public_key))
    claims = jwt.decode(command.guest_token, key, algorithms=["EdDSA"])
    assert claims == {
        "sub": command.sandbox_id,
        "plc": command.placement_id,
        "gen": 1,
        "non": command.nonce,
        "scp": ["control"],
    }


async def test_the_spec_travels_whole(world: World, agent: Agent) -> None:
    await world.accept(size={"cpuMillis": 100, "memoryMib": 64, "diskMib": 128}, timeoutSeconds=77, network={"internet": False})
    spec = (await agent.wanted()).spec
    assert spec is not None
    assert (spec.cpu_millis, spec.memory_mib, spec.disk_mib, spec.timeout_s) == (100, 64, 128, 77)
    assert spec.network.internet is False
    assert spec.image_name == "base"


@pytest.mark.parametrize("secured", [True, False])
async def test_a_guest_demands_a_token_only_where_asked(world: World, agent: Agent, secured: bool) -> None:
    sandbox_id = await world.accept(secured=secured)
    await agent.wanted()
    assert (agent.payloads[sandbox_id].access_token is not None) == secured


async def test_a_new_end_reaches_the_agent_once(world: World, agent: Agent) -> None:
    async with agent.at_work():
        created = await world.create(timeoutSeconds=300)
    placement_id = agent.commands[0].placement_id
    await agent.poll()  # what the agent was told when the test took it from its work
    assert (await agent.poll()).ends == []
    moved = await world.call("POST", f"/v1/sandboxes/{created['id']}/end", json={"timeoutSeconds": 900})
    assert moved.status_code == 200, moved.text
    (end,) = (await agent.poll()).ends
    assert end.placement_id == placement_id
    assert 895 < end.remaining_s <= 900
    assert (await agent.poll()).ends == []


async def test_ends_travel_as_remaining_seconds(world: World, agent: Agent) -> None:
    """A wrong hand at control's wall clock between two polls moves nothing that an agent was told."""
    async with agent.at_work():
        created = await world.create(timeoutSeconds=300)
    await agent.poll()
    before = agent.ends[agent.commands[0].placement_id]
    world.clock.step_s(-7200)
    assert (await agent.poll()).ends == []
    assert agent.ends[agent.commands[0].placement_id] == before
    assert created["state"] == "ready"


async def test_near_its_end_a_longer_life_is_confirmed_by_the_agent(world: World, agent: Agent) -> None:
    async with agent.at_work():
        created = await world.create(timeoutSeconds=20)
        moved = await world.call("POST", f"/v1/sandboxes/{created['id']}/end", json={"timeoutSeconds": 600})
        assert moved.status_code == 200, moved.text
        assert agent.ends[agent.commands[0].placement_id].remaining_s > 500, "answered before the agent enforces it"


async def test_near_its_end_without_the_agent_s_word_the_outcome_is_unknown(world: World, agent: Agent) -> None:
    async with agent.at_work():
        created = await world.create(timeoutSeconds=20)
    moved = await world.call("POST", f"/v1/sandboxes/{created['id']}/end", json={"timeoutSeconds": 600})
    assert moved.status_code == 504
    assert moved.json()["error"]["code"] == "OUTCOME_UNKNOWN"


async def test_a_longer_life_on_a_host_that_is_not_heard_of_is_not_taken_for_granted(world: World, agent: Agent) -> None:
    """However far its end is: the agent may enforce it before it hears of another."""
    async with agent.at_work():
        created = await world.create(timeoutSeconds=3000)
    end = f"/v1/sandboxes/{created['id']}/end"
    assert (await world.call("POST", end, json={"timeoutSeconds": 3100})).status_code == 200
    world.clock.pass_s(60.0)
    moved = await world.call("POST", end, json={"timeoutSeconds": 3200})
    assert (moved.status_code, moved.json()["error"]["code"]) == (504, "OUTCOME_UNKNOWN")


async def test_a_life_that_no_agent_has_confirmed_is_not_taken_for_granted(world: World, agent: Agent) -> None:
    """Its agent may be about to enforce the end before: a later call must not be answered by what only the record says."""
    async with agent.at_work():
        created = await world.create(timeoutSeconds=20)
    end = f"/v1/sandboxes/{created['id']}/end"
    for seconds, extend in ((600, False), (300, True), (900, True)):
        moved = await world.call("POST", end, json={"timeoutSeconds": seconds, "onlyExtend": extend})
        assert (moved.status_code, moved.json().get("error", {}).get("code")) == (504, "OUTCOME_UNKNOWN"), (seconds, moved.text)
    async with agent.at_work():
        moved = await world.call("POST", end, json={"timeoutSeconds": 300, "onlyExtend": True})
    assert moved.status_code == 200, moved.text


async def test_a_console_is_asked_for_and_handed_in(world: World, agent: Agent) -> None:
    async with agent.at_work():
        created = await world.create()
    reading = world.spawn(world.call("GET", f"/v1/sandboxes/{created['id']}/logs"))
    (wish,) = (await agent.poll(park_s=5.0)).collect
    assert wish.placement_id == agent.commands[0].placement_id
    body = wire.Collected(
        host_id=agent.host_id,
        epoch=agent.epoch,
        id=wish.id,
        placement_id=wish.placement_id,
        console_base64=base64.b64encode(b"hello\n").decode(),
    )
    assert await agent._post("collected", body) == {}
    answer = await reading
    assert (answer.status_code, answer.text) == (200, "hello\n")
    assert (await agent.poll()).collect == []


async def test_a_console_that_is_no_base64_is_the_agent_s_fault(world: World, agent: Agent) -> None:
    async with agent.at_work():
        created = await world.create()
    world.spawn(world.call("GET", f"/v1/sandboxes/{created['id']}/logs"))
    (wish,) = (await agent.poll(park_s=5.0)).collect
    body = wire.Collected(host_id=agent.host_id, epoch=agent.epoch, id=wish.id, placement_id=wish.placement_id, console_base64="???")
    with pytest.raises(Refusal) as refused:
        await agent._post("collected", body)
    assert refused.value.code == "INVALID_REQUEST"
