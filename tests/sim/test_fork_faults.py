"""What goes wrong while a sandbox is forked: each clone is a sandbox or an error with its reason, its parent goes on, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from atoll.base.errors import Code
from atoll.base.units import ZERO
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.wire import agent as wire
from tests.sim.test_snapshots import code_of, forked, post, took, until, until_gone
from tests.sim.world import Agent, Refusal, World, obedient


def is_clone(command: wire.Command) -> bool:
    return command.kind is Kind.ENSURE_RUNNING and command.spec is not None and command.spec.origin is not None


def first_clone_fails(code: Code) -> Any:
    """The first clone's start ends so, each time that it is tried; the others work."""
    unlucky: list[str] = []

    def script(command: wire.Command) -> Mapping[str, Any] | None:
        if not is_clone(command):
            return obedient(command)
        if not unlucky:
            unlucky.append(command.sandbox_id)
        if command.sandbox_id not in unlucky:
            return obedient(command)
        broken: dict[str, Any] = {"observed": Observed.ERROR, "applied_revision": 0, "failed_revision": command.desired_revision}
        return {**broken, "reason": code, "detail": "it was killed"}

    return script


async def living(world: World) -> list[str]:
    return [one["id"] for one in (await world.call("GET", "/v1/sandboxes")).json()["items"]]


async def nothing_is_left(world: World, agent: Agent) -> None:
    """Of moments and clones; and what lives can be deleted, which leaves nothing at all."""
    await until(lambda: not agent.kept)
    for sandbox_id in await living(world):
        await world.release(sandbox_id)
        await world.until(sandbox_id, "released")
    assert await world.used(agent.host_id) == ZERO


@pytest.mark.parametrize("code", [Code.START_FAILED, Code.SNAPSHOT_UNAVAILABLE, Code.HOST_DISK_FULL])
async def test_a_clone_whose_start_fails_is_one_error_among_sandboxes(world: World, agent: Agent, code: Code) -> None:
    async with agent.at_work():
        parent = await world.create(timeoutSeconds=600)
        agent.script = first_clone_fails(code)
        made = await forked(world, parent["id"], count=3)
        assert sum(item["sandbox"] is not None for item in made) == 2
        (error,) = [item["error"] for item in made if item["error"] is not None]
        assert error["code"] in Code.__members__, error
        assert (await world.show(parent["id"]))["state"] == "ready"
        (again,) = await forked(world, parent["id"])
        assert again["sandbox"]["state"] == "ready", "the next fork is like the first"
        await nothing_is_left(world, agent)


async def test_a_clone_whose_guest_ends_is_an_end_like_any_other(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create(timeoutSeconds=600)
        (item,) = await forked(world, parent["id"])
        clone = item["sandbox"]
        agent.see(clone["placement"]["id"], observed=Observed.ABSENT, ended_by="exit", reason="GUEST_EXITED")
        await agent.observe()
        ended = await world.until(clone["id"], "failed", "released")
        assert ended["reason"] in Code.__members__, "why is told"
        assert (await world.show(parent["id"]))["state"] == "ready"
        await nothing_is_left(world, agent)


async def test_its_parent_is_deleted_while_the_moment_is_taken(world: World, agent: Agent) -> None:
    """Whoever forks is told; the moment that comes all the same is nobody's and goes."""
    async with agent.at_work():
        parent = await world.create(timeoutSeconds=600)
    asked = world.spawn(post(world, f"{parent['id']}/forks", {"count": 2}))
    await asyncio.sleep(0.1)
    await agent.poll()
    assert agent.snapshots, "its host is at it"
    assert (await world.call("DELETE", f"/v1/sandboxes/{parent['id']}")).status_code in (200, 202, 204)
    async with agent.at_work():
        async with asyncio.timeout(20):
            answer = await asked
        if answer.status_code == 201:
            assert all(item["sandbox"] is not None or item["error"]["code"] in Code.__members__ for item in answer.json()["items"])
        else:
            assert code_of(answer) in ("SANDBOX_NOT_FOUND", "ILLEGAL_STATE", "PLACEMENT_LOST", "SAVE_FAILED"), answer.text
        await world.until(parent["id"], "released")
        await nothing_is_left(world, agent)


async def test_its_parent_is_deleted_while_clones_begin(world: World, agent: Agent) -> None:
    """They need it no more."""
    async with agent.at_work():
        parent = await world.create(timeoutSeconds=600)
        held: list[wire.Command] = []

        def script(command: wire.Command) -> Mapping[str, Any] | None:
            if is_clone(command):
                held.append(command)
                return None
            return obedient(command)

        agent.script = script
        asked = world.spawn(post(world, f"{parent['id']}/forks", {"count": 2}))
        await until(lambda: len(held) == 2)
        assert (await world.call("DELETE", f"/v1/sandboxes/{parent['id']}")).status_code in (200, 202, 204)
        await world.until(parent["id"], "released")
        agent.script = obedient
        for command in held:
            await agent.obey(command)
        answer = await asked
        assert [item["sandbox"]["state"] for item in answer.json()["items"]] == ["ready", "ready"], answer.text
        await nothing_is_left(world, agent)


async def test_a_clone_is_deleted_while_it_begins(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create(timeoutSeconds=600)
        held: list[wire.Command] = []

        def script(command: wire.Command) -> Mapping[str, Any] | None:
            if is_clone(command) and not held:
                held.append(command)
            return None if held and command.sandbox_id == held[0].sandbox_id and is_clone(command) else obedient(command)

        agent.script = script
        asked = world.spawn(post(world, f"{parent['id']}/forks", {"count": 2}))
        await until(lambda: held)
        unlucky = held[0].sandbox_id
        assert (await world.call("DELETE", f"/v1/sandboxes/{unlucky}")).status_code in (200, 202, 204)
        await world.until(unlucky, "released")
        async with asyncio.timeout(20):
            items = (await asked).json()["items"]
        assert sorted(item["sandbox"] is not None for item in items) == [False, True], items
        assert (await world.show(parent["id"]))["state"] == "ready"
        await nothing_is_left(world, agent)


@pytest.mark.parametrize("heard", [False, True], ids=["before its host hears of clones", "before it has begun them"])
async def test_control_is_killed_while_clones_begin(world: World, agent: Agent, heard: bool) -> None:
    """Those that are on record begin, or end with a reason; the moment goes when nobody needs it."""
    async with agent.at_work():
        parent = await world.create(timeoutSeconds=3600)
    asked = world.spawn(post(world, f"{parent['id']}/forks", {"count": 2}))
    await asyncio.sleep(0.1)
    await agent.poll()
    await agent.keep()
    if heard:
        async with asyncio.timeout(5):
            while not any(is_clone(command) for command in agent.commands):
                await agent.poll(park_s=0.2)
    await world.restart()
    assert asked.done(), "whoever has asked has lost the way to control"
    async with agent.at_work():
        async with asyncio.timeout(20):
            while {(await world.show(one))["state"] for one in await living(world)} != {"ready"}:
                await asyncio.sleep(0.02)
        assert (await world.show(parent["id"]))["state"] == "ready"
        for _ in range(3):
            world.clock.pass_s(300)
            world.running.snapshots.due.set()
            await asyncio.sleep(0.1)
        await nothing_is_left(world, agent)


async def test_a_snapshot_is_deleted_while_somebody_begins_from_it(world: World, agent: Agent) -> None:
    """It is in use, and says so; without whoever uses it, it goes."""
    async with agent.at_work():
        parent = await world.create(timeoutSeconds=600)
        taken = await took(world, parent["id"], name="kept")
        held: list[wire.Command] = []

        def script(command: wire.Command) -> Mapping[str, Any] | None:
            if is_clone(command):
                held.append(command)
                return None
            return obedient(command)

        agent.script = script
        creating = world.spawn(world.create(template="kept", timeoutSeconds=600))
        await until(lambda: held)
        refused = await world.call("DELETE", f"/v1/snapshots/{taken['id']}")
        assert (refused.status_code, code_of(refused)) == (409, "SNAPSHOT_IN_USE")
        agent.script = obedient
        await agent.obey(held[0])
        made = await creating
        assert made["state"] == "ready"
        await world.release(made["id"])
        await world.until(made["id"], "released")
        assert (await world.call("DELETE", f"/v1/snapshots/{taken['id']}")).status_code == 200
        await until_gone(world, taken["id"])
        with pytest.raises(Refusal) as told:
            await world.create(template="kept")
        assert told.value.code == "TEMPLATE_NOT_FOUND"
        await nothing_is_left(world, agent)
