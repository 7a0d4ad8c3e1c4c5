"""Stale messages, each refused by the layer that stands for it: see docs/FENCING.md, which names a test for every row."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from atoll.base.errors import Unavailable
from atoll.base.ids import Prefix
from atoll.base.units import Vector
from atoll.control.loops.fencing import SKEW_S
from atoll.control.sessions import agents
from atoll.control.sessions.answers import FORGET_PER_POLL_MAX
from atoll.control.sessions.orders import PAYLOAD_BYTES_MAX
from atoll.control.sessions.sessions import FRESH_S, RENEW_S
from atoll.domain.command import Kind
from atoll.domain.host import LEASE_S
from atoll.domain.placement import Observed
from atoll.store import hosts
from atoll.store.tables import TEMPLATES
from atoll.wire import agent as wire
from tests.builders import fresh
from tests.sim.duo import Duo, duo, twin
from tests.sim.test_lost_journal import amnesiac
from tests.sim.world import Agent, Refusal, World

SMALL = {"cpuMillis": 50, "memoryMib": 64, "diskMib": 64}


async def refused(work: Any) -> str:
    with pytest.raises(Refusal) as caught:
        await work
    return str(caught.value.code)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Duo, Agent]]:
    async with duo(tmp_path) as made:
        yield made


async def ready(world: World, agent: Agent, **body: Any) -> wire.Command:
    await world.accept(**body)
    command = await agent.wanted()
    agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    await agent.observe()
    return command


# Polls, on one replica and on another.


async def test_an_old_poll_is_refused_by_another_replica(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    late = agent.message()
    for _ in range(2):
        world.clock.pass_s(RENEW_S + 1)  # polls that follow each other faster are not committed each
        await agent.poll()
    for number in (0, 1):
        with world.through(number):
            assert await refused(agent._post("poll", late)) == "STALE_POLL"
    await agent.poll()


async def test_an_old_poll_changes_nothing_of_what_the_host_is_said_to_be(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    late = agent.message()
    agent.checks.append(wire.Check(id="disk.space", ok=False, fatal=True))
    await agent.poll()
    with world.through(1):
        assert await refused(agent._post("poll", late)) == "STALE_POLL"
        host = await world.store.read(lambda conn: hosts.by_id(conn, agent.host_id))
    assert host.problems == ("disk.space",)


async def test_a_parked_poll_is_not_answered_after_a_newer_one_came_to_another_replica(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    parked = world.spawn(twin(agent)._post("poll", agent.message(park_s=1.0)))
    await asyncio.sleep(0.2)
    with world.through(1):
        await agent.poll()
        await world.accept()
    assert await asyncio.wait_for(refused(parked), timeout=30) == "STALE_POLL"
    with world.through(1):
        assert len((await agent.poll()).commands) == 1, "the command went to nobody and is sent again"


async def test_polls_may_go_to_either_replica_in_turn(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    for number in (0, 1, 1, 0, 1, 0, 0):
        with world.through(number):
            assert (await agent.poll()).lease_s > 290


async def test_a_run_that_was_taken_over_is_refused_by_every_replica(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    successor = agent.next_run()
    with world.through(1):
        await successor.poll()
    for number in (0, 1):
        with world.through(number):
            assert await refused(agent.poll()) == "STALE_AGENT_EPOCH"


async def test_one_command_has_one_id_and_digest_whichever_replica_sends_it(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    await world.accept(env={"A": "b"})
    first = await agent.wanted()
    agent.holds.clear()
    with world.through(1):
        again = await agent.wanted()
    assert (again.id, again.digest) == (first.id, first.digest)


# Observations.


async def test_a_word_that_is_committed_after_a_take_over_is_refused(world: World, agent: Agent) -> None:
    """It was checked before and waits for the writer: the next run counts from one, and this number would make all of its own stale."""
    command = await ready(world, agent)
    for _ in range(5):
        agent.see(command.placement_id, observed=Observed.RUNNING, ready=True)
    loaded = await world.store.read(lambda conn: hosts.by_id(conn, agent.host_id))
    world.clock.pass_s(FRESH_S + 1)
    again = amnesiac(agent)
    await again.poll()
    with pytest.raises(Exception, match="does not hold the host any more"):
        await world.running.sessions.hear(loaded, list(agent.unheard.values()), epoch=agent.epoch)
    assert (await world.facts(command.sandbox_id)).placement.seq == 0


async def test_a_word_that_is_committed_after_a_fence_is_refused(world: World, agent: Agent) -> None:
    await world.accept()
    command = await agent.wanted()
    seen = agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    loaded = await world.store.read(lambda conn: hosts.by_id(conn, agent.host_id))
    assert (await world.call("POST", f"/v1/hosts/{agent.host_id}/disable")).status_code == 200
    with pytest.raises(Exception, match="fenced or enrolled anew"):
        await world.running.sessions.hear(loaded, [seen], epoch=agent.epoch)
    assert (await world.facts(command.sandbox_id)).sandbox.state == "provisioning"


async def test_an_absence_survives_a_lost_acknowledgement_and_another_replica(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    command = await ready(world, agent)
    await world.release(command.sandbox_id)
    removal = await agent.wanted()
    gone = agent.see(removal.placement_id, observed=Observed.ABSENT, ended_by="command")
    await agent._post("observe", wire.Observe(host_id=agent.host_id, epoch=agent.epoch, observations=[gone]))  # its answer is lost
    with world.through(1):
        answer = await agent.observe(gone)
        assert answer.acknowledged == {removal.placement_id: gone.seq}
        assert (await world.show(command.sandbox_id))["state"] == "released"
        early = gone.model_copy(update={"observed": Observed.RUNNING, "ready": True, "seq": gone.seq + 5})
        await agent.observe(early)
        assert (await world.show(command.sandbox_id))["state"] == "released", "a tombstone came back"
        assert await world.held(agent.host_id) == 0


# Commands.


async def test_a_new_run_without_its_database_is_asked_again_under_its_own_epoch(world: World, agent: Agent) -> None:
    await world.accept()
    command = await agent.wanted()
    world.clock.pass_s(FRESH_S + 1)
    again = amnesiac(agent)
    reissued = await again.wanted()
    assert (reissued.id, reissued.digest, reissued.epoch) == (command.id, command.digest, again.epoch)
    assert reissued.carried_out is False


async def test_a_new_run_with_its_database_is_not_asked_again(world: World, agent: Agent) -> None:
    await world.accept()
    await agent.wanted()
    assert (await agent.next_run().poll()).commands == []


async def test_a_command_says_that_it_was_carried_out_once(world: World, agent: Agent) -> None:
    """Whoever gets it and does not know it has lost its memory: a guest that was ready is not begun anew behind its client's back."""
    command = await ready(world, agent)
    assert command.carried_out is False
    world.clock.pass_s(FRESH_S + 1)
    again = amnesiac(agent)
    reissued = await again.wanted()
    assert (reissued.id, reissued.digest, reissued.carried_out) == (command.id, command.digest, True)


async def test_what_was_fenced_and_is_found_again_is_ordered_away(world: World, agent: Agent) -> None:
    """Its agent has lost its database, its host was set up again, and the machine still has what control counts as gone."""
    command = await ready(world, agent)
    await world.call("POST", f"/v1/hosts/{agent.host_id}/disable", json={"off": True})
    async with asyncio.timeout(10):
        while await world.held(agent.host_id):
            await asyncio.sleep(0.02)
    await world.call("POST", f"/v1/hosts/{agent.host_id}/reset")
    again = amnesiac(agent)
    await again.enroll(await world.token("local"))
    again.quarantined.append(command.placement_id)
    removal = await again.wanted()
    assert (removal.placement_id, removal.kind) == (command.placement_id, Kind.ENSURE_ABSENT)


async def test_a_fence_waits_for_a_lease_that_another_replica_has_renewed(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    command = await ready(world, agent)
    world.clock.pass_s(200.0)
    with world.through(1):
        await agent.poll()
    await world.call("POST", f"/v1/hosts/{agent.host_id}/disable")
    await asyncio.sleep(0.2)
    # So long since the poll that this replica has seen, and less since the one that the other has.
    world.clock.pass_s(LEASE_S + SKEW_S - 150.0)
    for control in world.controls:
        await control.fencing.step()
    assert (await world.facts(command.sandbox_id)).sandbox.state == "ready"
    world.clock.pass_s(160.0)
    for control in world.controls:
        await control.fencing.step()
    assert (await world.facts(command.sandbox_id)).sandbox.state == "failed"


# Lives of the store.


async def test_a_replica_that_outlives_a_restore_answers_no_agent_and_ends(pair: tuple[Duo, Agent]) -> None:
    """It was overlooked when the store was taken back, and remembers another world."""
    world, agent = pair
    backup = world.database_.back_up()
    await ready(world, agent)
    world.database_.take_back(backup, now=world.clock.now(), chance=os.urandom)
    for number in (0, 1):
        with world.through(number):
            assert await refused(agent.poll()) == "CONTROL_UNAVAILABLE"
    known = await world.store.read(lambda conn: hosts.by_id(conn, agent.host_id))
    assert (known.epoch, known.seen_at) == (None, None), "nothing of it was written"
    control = world.running
    assert not control.outlived.is_set()
    assert control._replicas is not None
    with pytest.raises(Unavailable):
        await control._replicas.beat()
    assert control.outlived.is_set()


async def test_accounts_that_another_life_of_the_store_asked_for_are_not_taken(world: World, agent: Agent) -> None:
    """The agent goes on, and hears with its next poll which life there is."""
    message = wire.Accounts(host_id=agent.host_id, epoch=agent.epoch, incarnation="1.before", accounts=[])
    assert await refused(agent._post("accounts", message)) == "CONTROL_UNAVAILABLE"
    assert (await agent.poll()).incarnation != "1.before"


# Limits.


async def test_no_more_than_sixteen_commands_come_at_once(world: World) -> None:
    agent = await world.agent(capacity=wide())
    made = {await world.accept(size=SMALL) for _ in range(20)}
    first = await agent.poll()
    second = await agent.poll()
    assert (len(first.commands), len(second.commands)) == (wire.COMMANDS_PER_POLL_MAX, 4)
    assert {c.sandbox_id for c in (*first.commands, *second.commands)} == made


def wide() -> Vector:
    return Vector(64_000, 65_536, 1_000_000, 64)


async def test_an_answer_keeps_within_a_message_whatever_its_payloads_are(world: World) -> None:
    """Those that travel beside their commands: of templates with many values of their own."""
    agent = await world.agent(capacity=wide())
    await world.store.write(lambda conn: conn.execute(sa.update(TEMPLATES).values(env={"BIG": "x" * 60_000})))
    made = [await world.accept(size=SMALL) for _ in range(8)]
    polls = 0
    while len(agent.payloads) < len(made):
        polls += 1
        answer = await agent._post("poll", agent.message())
        told = wire.PollAnswer.model_validate(answer)
        assert len(told.model_dump_json()) <= wire.MESSAGE_BYTES_MAX
        assert told.commands, "an answer without a command makes no way"
        for command in told.commands:
            agent.holds[command.placement_id] = command.desired_revision
        assert set(told.payloads) == {c.payload_ref for c in told.commands}, "a command came without what it refers to"
        agent.payloads.update(told.payloads)
    assert polls > 1


async def test_payloads_that_are_asked_for_keep_within_a_message_too(world: World) -> None:
    agent = await world.agent(capacity=wide())
    for _ in range(5):
        await world.accept(size=SMALL, env={"BIG": "x" * 60_000})
    while len(agent.commands) < 5:
        await agent.poll()
    refs = [str(command.payload_ref) for command in agent.commands]
    asked = 0
    while refs:
        asked += 1
        body = wire.PayloadsWanted(host_id=agent.host_id, epoch=agent.epoch, refs=refs)
        answer = wire.Payloads.model_validate(await agent._post("payloads", body))
        assert len(answer.model_dump_json()) <= wire.MESSAGE_BYTES_MAX
        assert answer.payloads, "an answer without a payload makes no way"
        refs = [ref for ref in refs if ref not in answer.payloads]
    assert 1 < asked < 5


async def test_a_payload_that_no_message_could_carry_is_refused(world: World) -> None:
    """Its letters are few, and each takes six bytes as it travels."""
    agent = await world.agent()
    with pytest.raises(Refusal) as caught:
        await world.accept(env={"BELLS": "\x07" * (PAYLOAD_BYTES_MAX // 6 + 100)})
    assert caught.value.code == "CLASS_LIMIT"
    assert (await agent.poll()).commands == []


async def test_many_tombstones_are_confirmed_in_parts(world: World, agent: Agent) -> None:
    agent.tombstones.extend(fresh(Prefix.PLACEMENT) for _ in range(FORGET_PER_POLL_MAX + 10))
    assert len((await agent.poll()).forget) == FORGET_PER_POLL_MAX
    assert len((await agent.poll()).forget) == 10


async def test_a_host_that_spins_is_slowed_and_others_are_not(world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    other = await world.agent("other", token=await world.token("other"))
    served = next(app for prefix, app in world.running.hot if prefix == agents.PREFIX).app
    monkeypatch.setattr(served, "_pace", agents.Pace(per_s=1.0, at_once=3.0))
    served._buckets.clear()
    for _ in range(3):
        await agent.poll()
    async with world._client() as client:
        headers = {"Authorization": f"Bearer {agent.credential}"}
        answer = await client.post("/agent/v1/poll", headers=headers, content=agent.message().model_dump_json())
    assert (answer.status_code, answer.json()["code"]) == (429, "RATE_LIMITED")
    assert 1 <= float(answer.headers["Retry-After"]) <= 60
    await other.poll()
    world.clock.pass_s(5)
    await agent.poll()


@pytest.mark.parametrize("call", ["poll", "enroll"])
async def test_strangers_are_slowed_before_they_have_guessed_much(world: World, agent: Agent, call: str) -> None:
    begun = time.monotonic()
    statuses: set[int] = set()
    body = {"poll": agent.message(), "enroll": wire.Enroll(token="wrong", name="n", capacity=wide(), facts=agent.facts())}[call]
    async with world._client() as client:
        while 429 not in statuses and time.monotonic() - begun < 30:
            answer = await client.post(f"/agent/v1/{call}", headers={"Authorization": "Bearer no"}, content=body.model_dump_json())
            statuses.add(answer.status_code)
    assert statuses == {401, 429}
    assert isinstance(answer, httpx.Response)
    assert answer.headers["Retry-After"]
    await agent.poll()
