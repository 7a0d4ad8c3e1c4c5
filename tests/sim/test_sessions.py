"""Who may speak for a host: enrolment, credentials, epochs, polls; each layer refuses one kind of stale message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atoll.base.units import Vector
from atoll.control.sessions.sessions import FRESH_S, LEASE_S
from atoll.domain.command import Kind
from atoll.domain.deployment import Deployment, DeploymentLimits
from atoll.domain.host import LOST_AFTER_S
from atoll.domain.placement import Observed
from atoll.store import hosts
from atoll.wire import agent as wire
from tests.sim.world import TOKEN, Agent, Refusal, World


async def refused(work: Any) -> str:
    with pytest.raises(Refusal) as caught:
        await work
    assert caught.value.body["hint"]
    return str(caught.value.code)


# Enrolment.


async def test_a_token_enrols_one_host_once(world: World) -> None:
    agent = Agent(world)
    enrolled = await agent.enroll()
    assert enrolled.host_id.startswith("hst_")
    assert enrolled.install_id == world.install_id
    assert await refused(Agent(world).enroll()) == "ENROLLMENT_TOKEN_INVALID"
    await agent.poll()


async def test_a_hundred_racers_with_one_token_make_one_host(world: World) -> None:
    results = await asyncio.gather(*(Agent(world).enroll() for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(r, wire.Enrolled) for r in results) == 1
    assert {r.code for r in results if isinstance(r, Refusal)} == {"ENROLLMENT_TOKEN_INVALID"}
    assert len(await world.store.read(hosts.all_hosts)) == 1


@pytest.mark.parametrize("token", ["", "unknown", TOKEN + "x", TOKEN.upper()])
async def test_another_token_enrols_nobody(world: World, token: str) -> None:
    assert await refused(Agent(world).enroll(token)) == "ENROLLMENT_TOKEN_INVALID"


async def test_a_token_expires(world: World) -> None:
    world.clock.pass_s(3601)
    assert await refused(Agent(world).enroll()) == "ENROLLMENT_TOKEN_INVALID"


async def test_a_token_is_for_the_host_it_names(world: World) -> None:
    assert await refused(Agent(world, name="another").enroll()) == "ENROLLMENT_CONFLICT"
    await Agent(world).enroll()


async def test_neither_token_nor_credential_is_on_disk(world: World) -> None:
    agent = await world.agent()
    secret = agent.credential
    await world.stop()
    content = b"".join(path.read_bytes() for path in world.path.glob("atoll.db*"))
    assert agent.host_id.encode() in content
    assert secret.encode() not in content
    assert TOKEN.encode() not in content
    assert secret.removeprefix("hk_").encode() not in content


async def test_a_host_that_holds_sandboxes_is_not_enrolled_anew(world: World, agent: Agent) -> None:
    await world.accept()
    await agent.wanted()
    assert await refused(Agent(world).enroll(await world.token("local"))) == "ENROLLMENT_CONFLICT"


async def test_an_empty_host_that_nobody_hears_of_may_enrol_again_and_its_old_credential_ends(world: World, agent: Agent) -> None:
    world.clock.pass_s(LOST_AFTER_S)
    again = Agent(world, capacity=Vector(1000, 1024, 4096, 1))
    enrolled = await again.enroll(await world.token("local"))
    assert enrolled.host_id == agent.host_id
    assert enrolled.credential_version == 2
    assert await refused(agent.poll()) == "CREDENTIAL_REVOKED"
    await again.poll()
    host = await world.store.read(lambda conn: hosts.by_id(conn, agent.host_id))
    assert host.capacity == Vector(1000, 1024, 4096, 1)


async def test_a_quota_limits_how_many_hosts_there_are(world: World) -> None:
    world.deployment = Deployment(deployment=DeploymentLimits(registered_hosts=1))
    await world.restart()
    await world.agent()
    assert await refused(Agent(world, name="second").enroll(await world.token("second"))) == "HOST_QUOTA"


# Credentials.


async def test_a_call_without_a_credential_is_refused(world: World, agent: Agent) -> None:
    agent.credential = "hk_" + "0" * 64
    for call in (agent.poll(), agent.observe()):
        assert await refused(call) == "CREDENTIAL_REVOKED"


async def test_a_credential_speaks_for_its_own_host_only(world: World, agent: Agent) -> None:
    other = await world.agent("other", token=await world.token("other"))
    assert await refused(agent.poll(host_id=other.host_id)) == "CREDENTIAL_REVOKED"


async def test_another_protocol_is_refused(world: World, agent: Agent) -> None:
    assert await refused(agent.poll(protocol=2)) == "PROTOCOL_UNSUPPORTED"


# Epochs.


async def test_a_run_that_proves_the_last_one_takes_over_at_once(world: World, agent: Agent) -> None:
    successor = agent.next_run()
    await successor.poll()
    assert await refused(agent.poll()) == "STALE_AGENT_EPOCH"
    await successor.poll()


async def test_a_run_that_cannot_is_refused_while_the_other_is_fresh(world: World, agent: Agent) -> None:
    stranger = agent.next_run(proves=False)
    assert await refused(stranger.poll()) == "OVERLAPPING_AGENT_SESSION"
    await agent.poll()
    world.clock.pass_s(FRESH_S + 1)
    await stranger.poll()
    assert await refused(agent.poll()) == "STALE_AGENT_EPOCH"


async def test_an_epoch_that_was_taken_over_never_comes_back(world: World, agent: Agent) -> None:
    second = agent.next_run()
    await second.poll()
    third = second.next_run()
    await third.poll()
    world.clock.pass_s(1e6)
    for old in (agent, second):
        assert await refused(old.poll(previous_epoch=third.epoch)) == "STALE_AGENT_EPOCH"
    await third.poll()


async def test_an_old_epoch_is_refused_beside_the_poll_too(world: World, agent: Agent) -> None:
    await world.accept()
    command = await agent.wanted()
    successor = agent.next_run()
    await successor.poll()
    agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    assert await refused(agent.observe()) == "STALE_AGENT_EPOCH"
    assert (await world.facts(command.sandbox_id)).sandbox.state == "provisioning"
    wanted = wire.PayloadsWanted(host_id=agent.host_id, epoch=agent.epoch, refs=[command.sandbox_id])
    assert await refused(agent._post("payloads", wanted)) == "STALE_AGENT_EPOCH"
    collected = wire.Collected(host_id=agent.host_id, epoch=agent.epoch, id="dlv_x", placement_id=command.placement_id)
    assert await refused(agent._post("collected", collected)) == "STALE_AGENT_EPOCH"


async def test_a_take_over_ends_the_poll_that_is_parked(world: World, agent: Agent) -> None:
    parked = world.spawn(agent.poll(park_s=20.0))
    await asyncio.sleep(0.1)
    await agent.next_run().poll()
    assert await asyncio.wait_for(refused(parked), timeout=30) in ("STALE_POLL", "STALE_AGENT_EPOCH")


async def test_a_parked_poll_of_a_run_before_the_enrolment_gets_no_work(world: World, agent: Agent) -> None:
    """Else two machines would start what one was asked for."""
    parked = world.spawn(agent.poll(park_s=20.0))
    await asyncio.sleep(0.1)
    world.clock.pass_s(LOST_AFTER_S)
    again = Agent(world)
    await again.enroll(await world.token("local"))
    sandbox_id = await world.accept()
    world.look_at_deadlines()
    world.running.reconciler.hub.wake_host(agent.host_id)
    assert await asyncio.wait_for(refused(parked), timeout=30) == "STALE_AGENT_EPOCH"
    await again.poll()
    assert (await again.wanted()).sandbox_id == sandbox_id


# Polls.


async def test_only_the_newest_poll_is_answered(world: World, agent: Agent) -> None:
    parked = world.spawn(agent.poll(park_s=20.0))
    await asyncio.sleep(0.1)
    newer = world.spawn(agent.poll(park_s=20.0))
    assert await asyncio.wait_for(refused(parked), timeout=30) == "STALE_POLL"
    await world.accept()
    assert len((await asyncio.wait_for(newer, timeout=30)).commands) == 1


async def test_a_poll_may_tell_only_what_is_new_since_one_that_was_taken_in(world: World, agent: Agent) -> None:
    first = await world.accept()
    command = await agent.wanted()
    await agent.obey(command)
    told = (await agent.poll()).told
    assert told == agent.poll_seq
    answer = await agent.poll(since=told, holds={}, end_revisions={})
    assert (answer.commands, answer.ends, answer.told) == ([], [], agent.poll_seq)
    # What is held no longer is wanted again; what is told of nothing is as it was.
    second = await world.accept()
    answer = await agent.poll(since=answer.told, holds={}, end_revisions={}, dropped=[command.placement_id])
    assert {c.sandbox_id for c in answer.commands} == {first, second}


@pytest.mark.parametrize("since", [0, 10_000])
async def test_a_poll_that_builds_on_what_is_not_known_here_is_asked_for_the_whole(world: World, agent: Agent, since: int) -> None:
    await agent.poll()
    await world.accept()
    answer = await agent.poll(since=since, holds={}, end_revisions={}, park_s=20.0)
    assert (answer.commands, answer.told) == ([], None)
    assert answer.lease_s > 0
    # Not even what it was told before counts now.
    assert (await agent.poll(since=agent.poll_seq - 1, holds={}, end_revisions={})).told is None
    assert len((await agent.poll()).commands) == 1


async def test_a_change_that_comes_after_a_poll_is_seen_by_the_next(world: World, agent: Agent) -> None:
    """What is remembered of what is wanted follows each commit: ends, releases, other placements."""
    sandbox_id = await world.accept()
    command = await agent.wanted()
    await agent.obey(command)
    known = await agent.poll()
    await world.call("POST", f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 900})
    answer = await agent.poll(since=known.told, holds={}, end_revisions={})
    assert [end.placement_id for end in answer.ends] == [command.placement_id]
    revisions = {command.placement_id: answer.ends[0].revision}
    await world.call("DELETE", f"/v1/sandboxes/{sandbox_id}")
    answer = await agent.poll(since=answer.told, holds={}, end_revisions=revisions)
    assert [(c.kind, c.placement_id) for c in answer.commands] == [(Kind.ENSURE_ABSENT, command.placement_id)]


async def test_a_poll_that_comes_late_is_stale(world: World, agent: Agent) -> None:
    await agent.poll()
    assert await refused(agent.poll(poll_seq=1)) == "STALE_POLL"


async def test_a_parked_poll_is_answered_the_moment_there_is_work(world: World, agent: Agent) -> None:
    parked = world.spawn(agent.poll(park_s=20.0))
    await asyncio.sleep(0.05)
    sandbox_id = await world.accept()
    answer = await asyncio.wait_for(parked, timeout=30)
    assert [c.sandbox_id for c in answer.commands] == [sandbox_id]


async def test_a_poll_without_news_is_parked_as_long_as_asked(world: World, agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    answer = await agent.poll(park_s=0.3)
    assert loop.time() - began >= 0.3
    assert answer.commands == []


async def test_a_poll_renews_the_lease_before_it_is_answered(world: World, agent: Agent) -> None:
    parked = world.spawn(agent.poll(park_s=20.0))
    await asyncio.sleep(0.1)
    assert not parked.done()
    host = await world.store.read(lambda conn: hosts.by_id(conn, agent.host_id))
    assert abs(host.lease_until - world.clock.now() - LEASE_S) < 5
    world.clock.pass_s(100)
    answer = await agent.poll()
    assert answer.lease_s == LEASE_S
    renewed = await world.store.read(lambda conn: hosts.by_id(conn, agent.host_id))
    assert renewed.lease_until > host.lease_until + 90


async def test_an_agent_that_hangs_up_leaves_no_poll_behind(world: World, agent: Agent) -> None:
    """Its parked poll ends with it: the next one is not stale because of it."""
    parked = world.spawn(agent.poll(park_s=20.0))
    await asyncio.sleep(0.1)
    parked.cancel()
    await asyncio.gather(parked, return_exceptions=True)
    await agent.poll()


async def test_every_poll_names_the_same_incarnation_until_a_restore(world: World, agent: Agent) -> None:
    first = (await agent.poll()).incarnation
    await world.restart()
    assert (await agent.poll()).incarnation == first


# Bounds.


@pytest.mark.parametrize(
    ("path", "content", "code"),
    [
        ("poll", b"not json", "INVALID_REQUEST"),
        ("poll", b"{}", "INVALID_REQUEST"),
        ("poll", b'{"host_id": 5}', "INVALID_REQUEST"),
        ("observe", b"[]", "INVALID_REQUEST"),
        ("enroll", b'{"token": "t"}', "INVALID_REQUEST"),
        ("nothing", b"{}", "INVALID_REQUEST"),
        ("poll", b" " * (wire.MESSAGE_BYTES_MAX + 1), "BODY_TOO_LARGE"),
        ("enroll", b" " * (wire.MESSAGE_BYTES_MAX + 1), "BODY_TOO_LARGE"),
    ],
)
async def test_what_is_no_message_is_refused_by_name(world: World, agent: Agent, path: str, content: bytes, code: str) -> None:
    async with world._client() as client:
        answer = await client.post(f"/agent/v1/{path}", headers={"Authorization": f"Bearer {agent.credential}"}, content=content)
    assert answer.json()["code"] == code
    assert answer.status_code == (413 if code == "BODY_TOO_LARGE" else 400)


async def test_a_refusal_never_repeats_what_was_sent(world: World) -> None:
    async with world._client() as client:
        answer = await client.post("/agent/v1/enroll", content=b'{"token": ["tops3cret"]}')
    assert answer.status_code == 400
    assert "tops3cret" not in answer.text


async def test_fields_of_the_future_are_ignored(world: World, agent: Agent) -> None:
    message = agent.message().model_dump(mode="json") | {"from_the_future": {"a": 1}}
    message["health"]["also_new"] = True
    async with world._client() as client:
        answer = await client.post("/agent/v1/poll", headers={"Authorization": f"Bearer {agent.credential}"}, json=message)
    assert answer.status_code == 200, answer.text
