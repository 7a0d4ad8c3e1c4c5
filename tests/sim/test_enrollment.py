"""Joining: what is lost, repeated, raced or replayed on the way to a host's own credential."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from atoll.base.units import Vector
from atoll.control.hosts.enrollment import TOKEN_LIFE_S
from atoll.control.loops import retention
from atoll.control.loops.retention import TOKENS_KEPT_S
from atoll.domain.host import LOST_AFTER_S
from atoll.store import hosts
from atoll.wire import agent as wire
from tests.sim.world import Agent, Refusal, World

FACTS = wire.HostFacts(arch="x86_64", cpu_count=4, memory_mib=8192, disk_mib=100_000)
ROOM = Vector(cpu_millis=12_000, memory_mib=7168, disk_mib=80_000, slots=8)


def form(name: str = "far", **changes: Any) -> dict[str, Any]:
    """What a joining host registers, for `Agent.enroll`."""
    values = {
        "name": name,
        "capacity": ROOM,
        "facts": FACTS,
        "reserve": Vector(cpu_millis=1000, memory_mib=1024, disk_mib=20_000),
        "overcommit": wire.Overcommit(cpu=4.0),
        "slots": "10.65.0.0/16",
        "region": "north",
        "labels": {"disk": "ssd"},
    }
    return {**values, **changes}


def own(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


async def refused(work: Any) -> str:
    with pytest.raises(Refusal) as caught:
        await work
    assert caught.value.body["hint"]
    return str(caught.value.code)


async def test_a_host_brings_its_own_credential_and_control_sees_only_a_digest(world: World) -> None:
    joining = Agent(world, name="far", credential="hk_mine")
    enrolled = await joining.enroll(await world.token("far"), **form(credential_digest=own("hk_mine")))
    assert enrolled.credential == ""
    await joining.poll()
    host = await world.store.read(lambda conn: hosts.by_name(conn, "far"))
    assert (host.region, host.labels, host.capacity) == ("north", {"disk": "ssd"}, ROOM)
    assert (host.registered.slots, host.registered.reserve.memory_mib, host.registered.overcommit.cpu) == ("10.65.0.0/16", 1024, 4.0)


async def test_a_lost_answer_is_given_again_to_who_knows_token_and_credential(world: World) -> None:
    token, mine = await world.token("far"), form(credential_digest=own("hk_mine"))
    first = await Agent(world, name="far").enroll(token, **mine)
    world.clock.pass_s(TOKEN_LIFE_S + 1)  # the token may have expired meanwhile: it was used in time
    joining = Agent(world, name="far", credential="hk_mine")
    assert await joining.enroll(token, **mine) == first
    await joining.poll()
    assert await joining.enroll(token, **mine) == first, "and once more, when it is at work"
    assert (await world.store.read(lambda conn: hosts.by_name(conn, "far"))).credential_version == 1


async def test_a_host_finds_out_who_it_is_by_its_credential_alone(world: World) -> None:
    first = await Agent(world, name="far").enroll(await world.token("far"), **form(credential_digest=own("hk_mine")))
    known = await Agent(world, credential="hk_mine").identify()
    assert (known.host_id, known.name, known.credential_version, known.install_id) == (first.host_id, "far", 1, world.install_id)
    assert await refused(Agent(world, credential="hk_other").identify()) == "CREDENTIAL_REVOKED"


@pytest.mark.parametrize(
    "changed",
    [
        {"region": "south"},
        {"labels": {}},
        {"capacity": Vector(1000, 1024, 4096, 1)},
        {"reserve": None},
        {"overcommit": wire.Overcommit(cpu=16.0)},
        {"slots": "10.66.0.0/16"},
        {"facts": FACTS.model_copy(update={"arch": "aarch64"})},
    ],
)
async def test_a_token_that_comes_again_with_another_configuration_is_a_conflict(world: World, changed: dict[str, Any]) -> None:
    token, mine = await world.token("far"), form(credential_digest=own("hk_mine"))
    await Agent(world, name="far").enroll(token, **mine)
    assert await refused(Agent(world, name="far").enroll(token, **{**mine, **changed})) == "ENROLLMENT_CONFLICT"
    await Agent(world, name="far", credential="hk_mine").identify()


async def test_what_a_machine_may_have_changed_since_is_no_other_configuration(world: World) -> None:
    token, mine = await world.token("far"), form(credential_digest=own("hk_mine"))
    first = await Agent(world, name="far").enroll(token, **mine)
    rebooted = FACTS.model_copy(update={"boot_id": "another", "kernel": "6.2"})
    assert await Agent(world, name="far").enroll(token, **{**mine, "facts": rebooted, "agent_version": "9"}) == first


async def test_a_stolen_token_gives_nothing_after_it_was_used(world: World) -> None:
    token = await world.token("far")
    await Agent(world, name="far").enroll(token, **form(credential_digest=own("hk_mine")))
    assert await refused(Agent(world, name="far").enroll(token, **form(credential_digest=own("hk_thief")))) == "ENROLLMENT_TOKEN_INVALID"
    assert await refused(Agent(world, name="far").enroll(token, **form())) == "ENROLLMENT_TOKEN_INVALID"


async def test_a_machine_that_joins_twice_at_once_is_one_host(world: World) -> None:
    token, mine = await world.token("far"), form(credential_digest=own("hk_mine"))
    answers = await asyncio.gather(*(Agent(world, name="far").enroll(token, **mine) for _ in range(10)))
    assert len({answer.host_id for answer in answers}) == 1
    assert {answer.credential_version for answer in answers} == {1}


async def test_two_machines_with_two_tokens_for_one_name_are_one_host_and_one_refusal(world: World) -> None:
    tokens = [await world.token("far") for _ in range(2)]
    first = Agent(world, name="far", credential="hk_0")
    await first.enroll(tokens[0], **form(credential_digest=own("hk_0")))
    await first.poll()
    assert await refused(Agent(world, name="far").enroll(tokens[1], **form(credential_digest=own("hk_1")))) == "ENROLLMENT_CONFLICT"
    await first.poll()
    world.clock.pass_s(LOST_AFTER_S)
    second = Agent(world, name="far", credential="hk_1")
    await second.enroll(tokens[1], **form(credential_digest=own("hk_1")))
    await second.poll()
    assert await refused(first.poll()) == "CREDENTIAL_REVOKED"


async def test_a_used_token_does_not_bring_back_a_disabled_host(world: World) -> None:
    token, mine = await world.token("far"), form(credential_digest=own("hk_mine"))
    await Agent(world, name="far").enroll(token, **mine)
    for verb in ("disable", "reset"):
        assert (await world.call("POST", f"/v1/hosts/far/{verb}", json={} if verb == "disable" else None)).status_code == 200
        assert await refused(Agent(world, name="far").enroll(token, **mine)) == "ENROLLMENT_TOKEN_INVALID"


@pytest.mark.parametrize("capacity", [Vector(12_001, 7168, 80_000, 8), Vector(12_000, 7169, 80_000, 8), Vector(12_000, 7168, 80_001, 8)])
async def test_no_host_grants_more_than_it_reckons(world: World, capacity: Vector) -> None:
    assert await refused(Agent(world, name="far").enroll(await world.token("far"), **form(capacity=capacity))) == "INVALID_REQUEST"


async def test_a_host_that_is_not_activated_by_itself_waits_for_an_operator(world: World) -> None:
    world.changes["auto_activate"] = False
    await world.restart()
    await Agent(world, name="far").enroll(await world.token("far"), **form())
    assert (await world.call("GET", "/v1/hosts/far")).json()["admin"] == "draining"


async def test_no_two_hosts_have_the_same_addresses(world: World) -> None:
    """Else the edge would give one sandbox's traffic to another."""
    first = Agent(world, name="near", credential="hk_near", capacity=ROOM)
    await first.enroll(await world.token("near"), **form("near"))
    token = await world.token("far")
    assert await refused(Agent(world, name="far").enroll(token, **form())) == "ENROLLMENT_CONFLICT"
    await Agent(world, name="far").enroll(token, **form(slots="10.66.0.0/16"))
    await first.poll(facts=FACTS)
    await world.accept(requireHost=first.host_id)
    while not await world.held(first.host_id):
        await asyncio.sleep(0.01)
    await world.call("POST", "/v1/hosts/near/disable", json={})
    third = await world.token("third")
    assert await refused(Agent(world, name="third").enroll(third, **form("third"))) == "ENROLLMENT_CONFLICT", "it may still act"
    await world.call("POST", "/v1/hosts/near/disable", json={"off": True})
    while await world.held(first.host_id):
        await world.running.fencing.step()
    await Agent(world, name="third").enroll(third, **form("third"))


async def test_tokens_are_forgotten_a_day_after_they_expired(world: World) -> None:
    token, mine = await world.token("far"), form(credential_digest=own("hk_mine"))
    await Agent(world, name="far").enroll(token, **mine)
    kept = retention.Kept(records_s=1e9, audit_s=1e9, alerts_s=1e9, events_s=1e9)
    await retention.step(world.store, world.clock, kept)
    await Agent(world, name="far").enroll(token, **mine)
    world.clock.pass_s(TOKEN_LIFE_S + TOKENS_KEPT_S + 1)
    await retention.step(world.store, world.clock, kept)
    assert await refused(Agent(world, name="far").enroll(token, **mine)) == "ENROLLMENT_TOKEN_INVALID"
