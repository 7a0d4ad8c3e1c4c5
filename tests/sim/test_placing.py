"""Placing over a whole control: who is asked, what is said about it, and what a wrong directory costs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from atoll.base.units import Vector
from atoll.domain.deployment import WorkloadClass
from atoll.domain.spec import PlacementPolicy
from tests.sim.world import BRISK, Agent, Refusal, World

SPREAD = replace(BRISK, name="spread", placement_policy=PlacementPolicy.SPREAD, placement_choices=16)
EU = WorkloadClass(name="eu", regions=("eu",), labels=(("disk", "ssd"),), create_patience_s=0.3)


async def hosts(world: World, *names: str, **changes: object) -> list[Agent]:
    return [await world.agent(name, token=await world.token(name), **changes) for name in names]


@pytest.fixture
def classes(world: World) -> World:
    known = dict(world.running.configuration.current.classes)
    world.running.configuration.current = replace(world.running.configuration.current, classes={**known, "spread": SPREAD, "eu": EU})
    return world


async def test_operators_see_hosts_and_members_see_sums(world: World, agent: Agent) -> None:
    (small,) = await hosts(world, "small", capacity=Vector(500, 256, 65_536, 8))
    async with agent.at_work():
        made = (await world.create())["id"]
        told = (await world.call("GET", f"/v1/sandboxes/{made}/placement")).json()
        assert (told["hosts"], told["candidates"], told["placement"]["hostId"]) == (2, 1, agent.host_id)
        assert told["removed"] == [
            {"filter": "INSUFFICIENT_CPU", "hosts": 1, "alone": 0},
            {"filter": "INSUFFICIENT_MEMORY", "hosts": 1, "alone": 0},
        ]
        first, second = told["verdicts"]
        assert (first["hostId"], first["rank"], first["objections"]) == (agent.host_id, 1, [])
        assert (second["hostId"], second["rank"]) == (small.host_id, None)
        assert second["objections"][0] == {"filter": "INSUFFICIENT_CPU", "detail": "500 millicores free, 1000 needed"}
        key = await world.team("theirs")
        theirs = (await world.create(key=key))["id"]
        hidden = (await world.call("GET", f"/v1/sandboxes/{theirs}/placement", key=key)).json()
        assert (hidden["hosts"], hidden["candidates"], hidden["verdicts"]) == (2, 1, None)
        assert small.host_id not in str(hidden)
        seen = await world.call("GET", f"/v1/sandboxes/{theirs}/placement")
        assert seen.status_code == 200, "operators may ask about every team's"
        stranger = await world.call("GET", f"/v1/sandboxes/{made}/placement", key=key)
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (404, "SANDBOX_NOT_FOUND")


async def test_a_dry_run_says_what_a_create_would_meet_and_makes_nothing(classes: World, agent: Agent) -> None:
    told = (await classes.call("POST", "/v1/placement/explain", json={"class": "eu"})).json()
    assert told["summary"] == "1 host(s): LABEL_MISMATCH x1, REGION_MISMATCH x1"
    assert (told["sandboxId"], told["state"], told["candidates"]) == (None, None, 0)
    assert [one["filter"] for one in told["verdicts"][0]["objections"]] == ["REGION_MISMATCH", "LABEL_MISMATCH"]
    with pytest.raises(Refusal) as refused:
        await classes.create(**{"class": "eu"})
    assert (refused.value.code, refused.value.body["message"]) == ("NO_CAPACITY", told["summary"])
    for body, status in (({"class": "none"}, 400), ({"template": "none"}, 404), ({"size": {"cpuMillis": 10**6}}, 400)):
        assert (await classes.call("POST", "/v1/placement/explain", json=body)).status_code == status
    listed = (await classes.call("GET", "/v1/sandboxes")).json()
    assert listed["items"] == []


async def test_why_a_waiting_sandbox_is_nowhere(world: World, agent: Agent) -> None:
    await world.call("POST", "/v1/hosts/local/drain")
    made = await world.accept()
    assert (await world.show(made))["conditions"] == ["NO_ELIGIBLE_HOST"]
    told = (await world.call("GET", f"/v1/sandboxes/{made}/placement")).json()
    assert (told["state"], told["placement"], told["summary"]) == ("pending", None, "1 host(s): HOST_NOT_ACTIVE x1")
    assert told["verdicts"][0]["objections"] == [{"filter": "HOST_NOT_ACTIVE", "detail": "draining"}]
    assert "sandbox.no_eligible_host" in await world.history(made)


async def test_pack_fills_one_host_and_spread_takes_the_emptiest(classes: World) -> None:
    room = Vector(4000, 2048, 8192, 4)
    agents = await hosts(classes, *(f"h{n}" for n in range(4)), capacity=room)
    packed = [await classes.accept(**{"class": "brisk"}) for _ in range(4)]
    places = {(await classes.show(one))["placement"]["hostId"] for one in packed}
    assert len(places) == 1
    spread = [await classes.accept(**{"class": "spread"}) for _ in range(3)]
    others = {(await classes.show(one))["placement"]["hostId"] for one in spread}
    assert others == {one.host_id for one in agents} - places


async def test_a_pinned_sandbox_goes_there_or_nowhere(world: World, agent: Agent) -> None:
    await hosts(world, "second")
    for name in ("second", agent.host_id):
        made = await world.accept(requireHost=name)
        shown = await world.show(made)
        assert shown["placement"] is not None
        assert (shown["placement"]["hostId"] == agent.host_id) is (name == agent.host_id)
    nowhere = await world.show(await world.accept(requireHost="none"))
    assert nowhere["detail"] == "2 host(s): OTHER_HOST_REQUIRED x2"


async def test_a_preferred_host_is_asked_first(world: World, agent: Agent) -> None:
    others = await hosts(world, "second", "third")
    for name, meant in ((others[1].host_id, others[1]), ("second", others[0]), ("local", agent)):
        shown = await world.show(await world.accept(preferHost=name))
        assert shown["placement"]["hostId"] == meant.host_id, name
    assert (await world.show(await world.accept(preferHost="nobody")))["placement"] is not None


async def test_a_refusal_corrects_the_directory(world: World, agent: Agent) -> None:
    """As on a replica that has not heard of what another one placed."""
    directory = world.running.reconciler.directory
    for _ in range(8):
        await world.accept()
    directory.use(agent.host_id, Vector())
    waiting = await world.accept()
    shown = await world.show(waiting)
    assert shown["conditions"] == ["NO_ELIGIBLE_HOST"]
    assert (await world.history(waiting)).count("sandbox.host_refused") == 1
    assert await world.used(agent.host_id) == Vector(8000, 4096, 16384, 8)
    second = await world.accept()
    assert "sandbox.host_refused" not in await world.history(second), "the next one was led astray, too"


async def test_a_host_that_was_drained_by_another_replica_refuses(world: World, agent: Agent) -> None:
    directory = world.running.reconciler.directory
    stale = directory.host(agent.host_id)
    assert stale is not None
    await world.call("POST", "/v1/hosts/local/drain")
    directory.put(stale)
    waiting = await world.accept()
    events = (await world.call("GET", f"/v1/sandboxes/{waiting}/events")).json()["items"]
    assert [one["data"]["code"] for one in events if one["type"] == "sandbox.host_refused"] == ["HOST_NOT_ACTIVE"]


async def test_a_host_that_became_unsuitable_refuses(world: World, agent: Agent) -> None:
    directory = world.running.reconciler.directory
    stale = directory.host(agent.host_id)
    assert stale is not None
    agent.isolations = ("shared-kernel",)
    await agent.poll()
    directory.put(stale)
    waiting = await world.accept()
    events = (await world.call("GET", f"/v1/sandboxes/{waiting}/events")).json()["items"]
    assert [one["data"]["code"] for one in events if one["type"] == "sandbox.host_refused"] == ["HOST_UNSUITABLE"]


async def test_a_hundred_racers_for_one_place(world: World) -> None:
    await hosts(world, "one", capacity=Vector(1000, 512, 2048, 1))
    made = await asyncio.gather(*(world.accept() for _ in range(100)))
    shown = await asyncio.gather(*(world.show(one) for one in made))
    assert sum(one["placement"] is not None for one in shown) == 1
    assert {one["state"] for one in shown} == {"pending", "provisioning"}
