"""What control itself finds about a host: another machine than was registered, another clock; and what an operator does about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atoll.base.units import Vector
from atoll.control.hosts.inspection import SKEW_S_MAX
from atoll.wire import agent as wire
from tests.sim.world import Agent, Refusal, World

MACHINE = wire.HostFacts(arch="x86_64", cpu_count=4, memory_mib=8192, disk_mib=100_000, boot_id="boot-1")
RESERVE = Vector(cpu_millis=0, memory_mib=1024, disk_mib=20_000)
ROOM = Vector(cpu_millis=16_000, memory_mib=7168, disk_mib=80_000, slots=8)


async def joined(world: World) -> Agent:
    agent = Agent(world, name="far", capacity=ROOM)
    form: dict[str, Any] = {"facts": MACHINE, "reserve": RESERVE, "overcommit": wire.Overcommit(cpu=4.0)}
    await agent.enroll(await world.token("far"), **form)
    await agent.poll(facts=MACHINE)
    return agent


async def shown(world: World) -> dict[str, Any]:
    answer = await world.call("GET", "/v1/hosts/far")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def recount(world: World) -> dict[str, Any]:
    answer = await world.call("POST", "/v1/hosts/far/recount")
    if answer.status_code != 200:
        raise Refusal(answer.status_code, answer.json()["error"])
    return answer.json()


@pytest.mark.parametrize("change", [{"memory_mib": 4096}, {"cpu_count": 2}, {"disk_mib": 50_000}, {"memory_mib": 16_384}])
async def test_another_machine_than_was_registered_takes_nothing_and_says_why(world: World, change: dict[str, int]) -> None:
    agent = await joined(world)
    assert (await shown(world))["problems"] == []
    await agent.poll(facts=MACHINE.model_copy(update=change))
    host = await shown(world)
    (condition,) = host["conditions"]
    assert condition["id"] == "host.capacity"
    assert str(next(iter(change.values()))) in condition["detail"]
    assert host["capacity"] == {"cpuMillis": 16_000, "memoryMib": 7168, "diskMib": 80_000, "slots": 8}, "nothing is changed silently"
    with pytest.raises(Refusal, match="NO_CAPACITY") as refused:
        await world.create(template="base", timeoutSeconds=60, **{"class": "impatient"})
    assert "HOST_CHECK_FAILED" in refused.value.body["message"]
    await agent.poll(facts=MACHINE)
    assert (await shown(world))["conditions"] == []


async def test_an_operator_has_a_machine_counted_anew(world: World) -> None:
    agent = await joined(world)
    bigger = MACHINE.model_copy(update={"memory_mib": 16_384, "cpu_count": 8})
    await agent.poll(facts=bigger)
    host = await recount(world)
    assert host["capacity"] == {"cpuMillis": 32_000, "memoryMib": 15_360, "diskMib": 80_000, "slots": 8}
    assert (host["problems"], host["registered"]["inventory"]) == ([], {"cpuCount": 8, "memoryMib": 16_384, "diskMib": 100_000})
    await agent.poll(facts=bigger)
    assert (await shown(world))["problems"] == []


async def test_a_machine_is_not_counted_down_below_what_it_holds(world: World) -> None:
    agent = await joined(world)
    for _ in range(3):
        await world.accept()
    while await world.held(agent.host_id) < 3:
        await asyncio.sleep(0.01)
    smaller = MACHINE.model_copy(update={"memory_mib": 1024 + 1024})
    await agent.poll(facts=smaller)
    with pytest.raises(Refusal, match="ILLEGAL_STATE") as refused:
        await recount(world)
    assert "drain" in refused.value.body["hint"]
    assert (await shown(world))["capacity"]["memoryMib"] == 7168


async def test_a_host_that_never_said_how_it_reckons_is_not_counted(world: World, agent: Agent) -> None:
    answer = await world.call("POST", "/v1/hosts/local/recount")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "ILLEGAL_STATE")


async def test_members_have_no_host_counted_reset_or_registered(world: World) -> None:
    await joined(world)
    key = await world.team("others")
    for method, path, body in (
        ("POST", "/v1/hosts/far/recount", None),
        ("POST", "/v1/hosts/far/reset", None),
        ("PUT", "/v1/hosts/new/registration", REGISTRATION),
    ):
        assert (await world.call(method, path, key=key, json=body)).status_code == 403, path


# Clocks.


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0, SKEW_S_MAX + 1, -SKEW_S_MAX - 1])
async def test_a_host_with_another_time_takes_nothing_until_its_clock_is_right(world: World, skew_s: float) -> None:
    agent = await joined(world)
    for _ in range(3):
        await agent.poll(facts=MACHINE, sent_at=world.clock.now() + skew_s)
    host = await shown(world)
    assert host["problems"] == ["host.clock_skew"]
    assert abs(float(host["facts"]["clock_skew_s"]) - skew_s) < 1.0
    assert host["health"] == "healthy", "it is heard of all the same, and keeps what it has"
    await agent.poll(facts=MACHINE, sent_at=world.clock.now())
    assert (await shown(world))["problems"] == []


async def test_a_step_of_the_clock_of_control_s_own_machine_is_no_skew(world: World) -> None:
    """Control goes on by the time that it began with until it is restarted; an agent of the same machine shows the new one at once."""
    world.changes["stepped_s"] = lambda: 3600.0
    await world.restart()
    agent = await joined(world)
    for _ in range(4):
        await agent.poll(facts=MACHINE, sent_at=world.clock.now() + 3600.0)
    assert (await shown(world))["problems"] == []


@pytest.mark.parametrize("skew_s", [0.0, SKEW_S_MAX - 1, 1 - SKEW_S_MAX])
async def test_a_clock_that_is_nearly_right_is_right(world: World, skew_s: float) -> None:
    agent = await joined(world)
    for _ in range(4):
        await agent.poll(facts=MACHINE, sent_at=world.clock.now() + skew_s)
    assert (await shown(world))["problems"] == []


async def test_one_message_that_was_long_under_way_is_no_wrong_clock(world: World) -> None:
    agent = await joined(world)
    await agent.poll(facts=MACHINE, sent_at=world.clock.now())
    await agent.poll(facts=MACHINE, sent_at=world.clock.now() - 60)
    assert (await shown(world))["problems"] == []


async def test_an_agent_that_does_not_say_its_time_is_not_judged(world: World) -> None:
    agent = await joined(world)
    await agent.poll(facts=MACHINE)
    assert "clock_skew_s" not in (await shown(world))["facts"]


async def test_a_steady_host_costs_no_commit_of_its_facts(world: World) -> None:
    agent = await joined(world)
    await agent.poll(facts=MACHINE, sent_at=world.clock.now() - 0.2)
    before = await world.store.read(_revision)
    for tenth in range(8):
        world.clock.pass_s(3)
        await agent.poll(facts=MACHINE, sent_at=world.clock.now() - tenth / 10)
    assert await world.store.read(_revision) == before


def _revision(conn: Any) -> int:
    from atoll.store import hosts

    return int(hosts.by_name(conn, "far").revision)


# Registration by an operator's key.

REGISTRATION = {
    "credentialDigest": "7d1a54127b222502f5b79b5fb0803061152a44f92b37e23c6527baf665d4da9a",
    "arch": "x86_64",
    "inventory": {"cpuCount": 4, "memoryMib": 8192, "diskMib": 100_000},
    "capacity": {"cpuMillis": 16_000, "memoryMib": 7168, "diskMib": 80_000, "slots": 8},
    "reserve": {"memoryMib": 1024, "diskMib": 20_000},
    "overcommit": {"cpu": 4.0},
    "slots": "10.66.0.0/16",
    "region": "north",
    "labels": {"a": "b"},
}


async def test_an_operator_registers_a_host_and_it_may_speak_at_once(world: World) -> None:
    from hashlib import sha256

    body = {**REGISTRATION, "credentialDigest": sha256(b"hk_mine").hexdigest()}
    made = await world.call("PUT", "/v1/hosts/new/registration", json=body)
    assert made.status_code == 200, made.text
    host = made.json()
    assert (host["name"], host["region"], host["labels"], host["health"]) == ("new", "north", {"a": "b"}, "unknown")
    assert (await world.call("PUT", "/v1/hosts/new/registration", json=body)).json()["id"] == host["id"]
    agent = Agent(world, name="new", host_id=host["id"], credential="hk_mine")
    assert (await agent.identify()).host_id == host["id"]
    await agent.poll(facts=MACHINE)
    other = {**body, "capacity": {**body["capacity"], "slots": 9}}  # type: ignore[dict-item]
    answer = await world.call("PUT", "/v1/hosts/new/registration", json=other)
    assert answer.json()["error"]["code"] == "ENROLLMENT_CONFLICT"
    stranger = {**body, "credentialDigest": sha256(b"hk_other").hexdigest()}
    answer = await world.call("PUT", "/v1/hosts/new/registration", json=stranger)
    assert answer.json()["error"]["code"] == "ENROLLMENT_CONFLICT"


@pytest.mark.parametrize(
    "change",
    [
        {"credentialDigest": "short"},
        {"inventory": {"cpuCount": 0, "memoryMib": 1, "diskMib": 1}},
        {"capacity": {"memoryMib": 999_999}},
        {"slots": "here"},
        {"unknown": 1},
    ],
)
async def test_a_registration_that_makes_no_sense_is_refused(world: World, change: dict[str, Any]) -> None:
    answer = await world.call("PUT", "/v1/hosts/new/registration", json={**REGISTRATION, **change})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_REQUEST"), answer.text
    assert (await world.call("GET", "/v1/hosts/new")).status_code == 404
