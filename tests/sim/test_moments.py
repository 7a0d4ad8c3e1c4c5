"""A whole control and scripted agents: what is saved gets into the artifact store, leaves its host, and comes back on another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from atoll.base.errors import Code
from atoll.base.units import ZERO, Vector
from atoll.domain.command import Kind
from atoll.domain.host import Health, health
from atoll.domain.placement import Observed
from atoll.domain.sandbox import Condition, State
from atoll.domain.snapshot import Copy
from atoll.planning.stimuli import CopyUnwanted, HostHeard
from atoll.store import moments, restoring, snapshots
from atoll.wire import agent as wire
from tests.sim.world import Agent, World, keeper, obedient

KIND = "fake/gvisor/x86_64"
DIGEST = "sha256:" + "5" * 64
DISK = Vector(0, 0, 2048, 0)
STORED: dict[str, Any] = {"observed": Observed.SAVED, "save_mode": "full", "moment": DIGEST, "moment_size": 7 << 20, "moment_kind": KIND}


def uploading(command: wire.Command) -> Mapping[str, Any] | None:
    """What is saved is in the store at once."""
    return STORED if command.kind is Kind.ENSURE_SUSPENDED else obedient(command)


def lasting(command: wire.Command) -> Mapping[str, Any] | None:
    """What is saved stays where it is."""
    return {"observed": Observed.SAVED, "save_mode": "full"} if command.kind is Kind.ENSURE_SUSPENDED else obedient(command)


@pytest.fixture
async def other(world: World, agent: Agent) -> Agent:
    """A second host. The first is fuller, and is asked first."""
    agent.moments = (KIND,)
    agent.script = uploading
    await agent.poll()
    made = await world.agent("other", token=await world.token("other"), moments=(KIND,))
    made.script = uploading
    return made


async def post(world: World, sandbox_id: str, verb: str, **body: Any) -> httpx.Response:
    return await world.call("POST", f"/v1/sandboxes/{sandbox_id}/{verb}", json=body)


async def suspended(world: World, host: str = "local", **more: Any) -> str:
    sandbox_id = (await world.create(timeoutSeconds=600, preferHost=host, **more))["id"]
    answer = await post(world, sandbox_id, "suspend")
    assert (answer.status_code, answer.json()["state"]) == (200, "suspended"), answer.text
    return str(sandbox_id)


async def heard_of(world: World, *agents: Agent) -> None:
    """These have polled just now."""
    async with asyncio.timeout(15):
        for one in agents:
            while health(world.running.reconciler.directory.host(one.host_id), now=world.clock.now()) is not Health.HEALTHY:
                await asyncio.sleep(0.05)


async def resting(world: World, sandbox_id: str) -> None:
    """Its host has given its copy up, and that was seen."""
    await world.running.reconciler.apply(sandbox_id, CopyUnwanted())
    async with asyncio.timeout(10):
        while (await world.facts(sandbox_id)).sandbox.unseen:
            await asyncio.sleep(0.01)


async def test_what_is_saved_leaves_its_host_and_comes_back_on_another(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        sandbox_id = await suspended(world)
        before = await world.show(sandbox_id)
        assert before["stored"] == {"moment": DIGEST, "bytes": 7 << 20}, before
        assert await world.used(agent.host_id) == DISK
        world.clock.pass_s(61)
        world.look_at_deadlines()
        async with asyncio.timeout(10):
            while (await world.used(agent.host_id)) != ZERO:
                await asyncio.sleep(0.01)
        shown = await world.show(sandbox_id)
        assert (shown["state"], shown["placement"], shown["generation"]) == ("suspended", None, 1)
        assert (await world.call("POST", f"/v1/hosts/{agent.host_id}/drain")).status_code == 200
        await heard_of(world, other)
        back = await post(world, sandbox_id, "resume", timeoutSeconds=100)
        assert (back.status_code, back.json()["state"], back.json()["generation"]) == (200, "ready", 2), back.text
        assert back.json()["placement"]["hostId"] == other.host_id
        assert (back.json()["accessToken"], back.json()["stored"]) == (before["accessToken"], None)
        assert await world.used(other.host_id) == Vector(1000, 512, 2048, 1)
        command = next(c for c in reversed(other.commands) if c.kind is Kind.ENSURE_RUNNING)
        assert (command.moment, command.save_mode, command.generation, command.timeout_s) == (DIGEST, "full", 2, 100)
        assert (command.hostname, command.carried_out) == (sandbox_id, False)
    # What it came back from is the past now, and the command is the same all the same: another word would be a conflict.
    again = next(c for c in (await other.next_run().poll(holds={})).commands if c.sandbox_id == sandbox_id)
    assert (again.id, again.digest, again.moment, again.carried_out) == (command.id, command.digest, None, True)
    history = await world.history(sandbox_id)
    assert [one for one in history if one in ("sandbox.uploaded", "sandbox.host_left", "placement.gone", "sandbox.resumed")] == [
        "sandbox.uploaded", "sandbox.host_left", "placement.gone", "sandbox.resumed",
    ]  # fmt: skip


async def test_the_host_that_saved_it_is_preferred(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        sandbox_id = await suspended(world, "other")
        await resting(world, sandbox_id)
        back = await post(world, sandbox_id, "resume")
        assert (back.json()["placement"]["hostId"], back.json()["generation"]) == (other.host_id, 2)


async def test_of_many_resumes_one_brings_it_back(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        sandbox_id = await suspended(world)
        await resting(world, sandbox_id)
        answers = await asyncio.gather(*(post(world, sandbox_id, "resume") for _ in range(20)))
        assert {(answer.status_code, answer.json()["generation"]) for answer in answers} == {(200, 2)}
    assert (await world.history(sandbox_id)).count("sandbox.resuming") == 1
    assert (await world.used(agent.host_id)) + (await world.used(other.host_id)) == Vector(1000, 512, 2048, 1)


async def test_without_room_anywhere_it_stays_as_it_is(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        sandbox_id = await suspended(world)
        await resting(world, sandbox_id)
        for host in (agent, other):
            await world.call("POST", f"/v1/hosts/{host.host_id}/drain")
        refused = await post(world, sandbox_id, "resume")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "NO_CAPACITY"), refused.text
        assert "HOST_NOT_ACTIVE x2" in refused.text
        assert (await world.show(sandbox_id))["state"] == "suspended"
        await world.call("POST", f"/v1/hosts/{agent.host_id}/activate")
        assert (await post(world, sandbox_id, "resume")).json()["state"] == "ready"


async def test_hosts_of_another_kind_are_not_asked_and_why_says_so(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        sandbox_id = await suspended(world)
        await resting(world, sandbox_id)
    other.moments = agent.moments = ("fake/gvisor/aarch64",)
    await agent.poll()
    await other.poll()
    async with agent.at_work(), other.at_work():
        refused = await post(world, sandbox_id, "resume")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "NO_CAPACITY")
        why = (await world.call("GET", f"/v1/sandboxes/{sandbox_id}/placement")).text
        assert "MOMENT_UNSUPPORTED" in why


async def test_a_full_host_lets_it_come_back_elsewhere(world: World, agent: Agent, other: Agent) -> None:
    """Its copy is still there, and there is no room for what it has given back."""
    async with agent.at_work(), other.at_work():
        sandbox_id = await suspended(world)
        for _ in range(agent.capacity.slots):
            await world.create(requireHost="local", timeoutSeconds=600)
        back = await post(world, sandbox_id, "resume")
        assert (back.status_code, back.json()["placement"]["hostId"], back.json()["generation"]) == (200, other.host_id, 2), back.text


async def test_it_does_not_need_a_host_that_is_lost(world: World, agent: Agent, other: Agent) -> None:
    async with other.at_work():
        async with agent.at_work():
            sandbox_id, there = await suspended(world), await suspended(world)
        for one in (sandbox_id, there):
            await world.running.reconciler.apply(one, HostHeard(lost=True))
        assert (await world.show(sandbox_id))["conditions"] == []
        assert (await world.facts(sandbox_id)).sandbox.rests_in_store
        world.clock.pass_s(91)
        await heard_of(world, other)
        back = await post(world, sandbox_id, "resume")
        assert (back.json()["placement"]["hostId"], back.json()["generation"]) == (other.host_id, 2), back.text
        assert (await world.release(there))["state"] == "releasing", "what its host holds is not seen gone"


async def test_what_only_a_lost_host_has_says_so_and_ends_with_it(world: World, agent: Agent, other: Agent) -> None:
    agent.script = lasting
    async with agent.at_work():
        sandbox_id = await suspended(world)
    await world.running.reconciler.apply(sandbox_id, HostHeard(lost=True))
    assert (await world.show(sandbox_id))["conditions"] == [Condition.UNREACHABLE]
    assert (await world.call("POST", f"/v1/hosts/{agent.host_id}/disable", json={"off": True})).status_code == 200
    ended = await world.until(sandbox_id, "failed")
    assert ended["reason"] == Code.PLACEMENT_LOST
    assert "not in the artifact store" in ended["detail"]


async def test_a_moment_that_the_store_does_not_give_is_said_and_can_be_tried_again(world: World, agent: Agent, other: Agent) -> None:
    broken: dict[str, Any] = {"observed": Observed.ERROR, "applied_revision": 0}

    def away(command: wire.Command) -> Mapping[str, Any] | None:
        if command.moment is None:
            return uploading(command)
        return {**broken, "failed_revision": command.desired_revision, "reason": Code.MOMENT_UNAVAILABLE, "detail": "no answer"}

    def nothing(command: wire.Command) -> Mapping[str, Any] | None:
        if command.kind is Kind.ENSURE_SUSPENDED and command.generation > 1:
            return {**broken, "failed_revision": command.desired_revision, "reason": Code.PLACEMENT_LOST, "detail": "nothing to save"}
        return away(command)

    async with agent.at_work(), other.at_work():
        sandbox_id = await suspended(world)
        await resting(world, sandbox_id)
        agent.script = other.script = nothing
        failed = await post(world, sandbox_id, "resume")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "MOMENT_UNAVAILABLE"), failed.text
        async with asyncio.timeout(10):
            while not (await world.facts(sandbox_id)).sandbox.rests_in_store:
                await asyncio.sleep(0.01)
        assert await world.used(agent.host_id) == ZERO
        agent.script = other.script = uploading
        back = await post(world, sandbox_id, "resume")
        assert (back.status_code, back.json()["state"], back.json()["generation"]) == (200, "ready", 3), back.text


async def test_deleted_on_no_host_it_is_gone_at_once(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        sandbox_id = await suspended(world)
        await resting(world, sandbox_id)
        assert await world.store.read(moments.needed) == {DIGEST}
        assert (await world.release(sandbox_id))["state"] == "released"
        assert await world.store.read(moments.needed) == set()


async def test_a_control_that_begins_again_wakes_it_for_traffic(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        made = await world.call("POST", "/sandboxes", json={"templateID": "base", "autoPause": True, "autoResume": {"enabled": True}})
        assert made.status_code == 201, made.text
        sandbox_id = made.json()["sandboxID"]
        await post(world, sandbox_id, "suspend")
        await resting(world, sandbox_id)
    await world.restart()
    route = world.running._routes.get(sandbox_id)
    assert route is not None
    assert (route.state, route.auto_resume, route.placement_id, route.reach.ip) == ("suspended", True, "", "")
    async with agent.at_work(), other.at_work():
        await world.running._routes.wake(sandbox_id)
        assert (await world.show(sandbox_id))["state"] == "ready"


async def test_after_a_restore_nobody_resumes_it_before_every_host_has_settled(world: World, agent: Agent, other: Agent) -> None:
    """It may have come back on one of them since the backup."""
    async with agent.at_work(), other.at_work():
        sandbox_id = await suspended(world)
        await resting(world, sandbox_id)
    await world.store.write(lambda conn: restoring.next_life(conn, now=world.clock.now(), chance=lambda count: b"x" * count))
    await world.restart()
    async with agent.at_work():
        early = await post(world, sandbox_id, "resume")
        assert (early.status_code, early.json()["error"]["code"]) == (503, "STORE_RESTORED"), early.text
        assert "other" in early.text
        assert (await world.show(sandbox_id))["conditions"] == [Condition.HOSTS_UNSETTLED]
        async with other.at_work():
            await heard_of(world, agent, other)
            back = await post(world, sandbox_id, "resume")
            assert (back.status_code, back.json()["state"], back.json()["conditions"]) == (200, "ready", []), back.text


# Snapshots.


def keeping(order: wire.SnapshotOrder) -> wire.SnapshotSeen:
    """Kept, and in the store at once."""
    seen = keeper(order)
    return (
        seen
        if order.wish is wire.SnapshotWish.DROP
        else seen.model_copy(update={"moment": DIGEST, "moment_size": 2 << 20, "moment_kind": KIND})
    )


async def taken(world: World, agent: Agent) -> str:
    agent.keeping = keeping
    parent = await world.create(preferHost="local", timeoutSeconds=600)
    answer = await world.call("POST", f"/v1/sandboxes/{parent['id']}/snapshots", json={"name": "warm"})
    assert (answer.status_code, answer.json()["stored"]) == (201, {"moment": DIGEST, "bytes": 2 << 20}), answer.text
    return str(answer.json()["id"])


async def test_a_snapshot_in_the_store_is_begun_from_on_any_host(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        await taken(world, agent)
        first = await world.create(template="warm", timeoutSeconds=600)
        assert first["placement"]["hostId"] == agent.host_id, "where the copy is"
        await world.call("POST", f"/v1/hosts/{agent.host_id}/drain")
        second = await world.create(template="warm", timeoutSeconds=600)
        assert second["placement"]["hostId"] == other.host_id
    command = next(c for c in reversed(other.commands) if c.sandbox_id == second["id"])
    assert command.spec is not None
    assert command.spec.origin is not None
    assert (command.spec.origin.moment, command.moment) == (DIGEST, None)


async def test_a_snapshot_outlives_its_host_once_it_is_in_the_store(world: World, agent: Agent, other: Agent) -> None:
    async with other.at_work():
        async with agent.at_work():
            snapshot_id = await taken(world, agent)
        assert (await world.call("POST", f"/v1/hosts/{agent.host_id}/disable", json={"off": True})).status_code == 200
        async with asyncio.timeout(10):
            while (await world.store.read(lambda conn: snapshots.get(conn, snapshot_id))).copy is not Copy.NONE:
                await asyncio.sleep(0.01)
        assert (await world.create(template="warm", timeoutSeconds=600))["placement"]["hostId"] == other.host_id
        used = await world.call("DELETE", f"/v1/snapshots/{snapshot_id}")
        assert used.json()["error"]["code"] == "SNAPSHOT_IN_USE"


async def test_its_copy_goes_where_the_disk_is_wanted(world: World, agent: Agent, other: Agent) -> None:
    async with agent.at_work(), other.at_work():
        snapshot_id = await taken(world, agent)
        await world.running.relief.step()
        assert (await world.store.read(lambda conn: snapshots.get(conn, snapshot_id))).copy is Copy.HERE
        await world.call("POST", f"/v1/hosts/{agent.host_id}/drain")
        await world.running.relief.step()
        async with asyncio.timeout(10):
            while (await world.store.read(lambda conn: snapshots.get(conn, snapshot_id))).copy is not Copy.NONE:
                await asyncio.sleep(0.01)
        assert snapshot_id not in agent.kept
        gone = await world.call("DELETE", f"/v1/snapshots/{snapshot_id}")
        assert gone.status_code in (200, 204), gone.text
        found = await world.store.read(lambda conn: snapshots.get(conn, snapshot_id))
        assert (found.state.value, await world.store.read(moments.needed)) == ("deleted", set())


async def test_an_older_agent_is_given_nothing_to_fetch(world: World, agent: Agent) -> None:
    """It says nothing of moments, and goes on as it did."""
    agent.script = lasting
    old = await world.agent("old", token=await world.token("old"))
    async with agent.at_work(), old.at_work():
        sandbox_id = await suspended(world)
        await world.running.reconciler.apply(sandbox_id, CopyUnwanted())
        assert (await world.facts(sandbox_id)).sandbox.placement_id is not None
        back = await post(world, sandbox_id, "resume")
        assert (back.json()["state"], back.json()["generation"], back.json()["stored"]) == ("ready", 1, None)
    assert all(command.moment is None for command in (*agent.commands, *old.commands))


async def test_hosts_send_what_they_save_where_another_could_go_on_from_it(world: World, agent: Agent) -> None:
    assert (await agent.poll()).moments is False, "there is no other"
    assert State.SUSPENDED in State
