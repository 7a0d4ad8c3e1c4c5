"""Snapshots and forks: one moment, kept on its host, begun from by others, and gone when nobody needs it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from atoll.domain.command import Kind
from atoll.domain.snapshot import State
from atoll.domain.spec import SaveMode
from atoll.store import snapshots
from atoll.store.tables import SANDBOXES
from atoll.wire import agent as wire
from tests.sim.world import Agent, Refusal, World, keeper


async def post(world: World, path: str, body: dict[str, Any] | None = None, *, key: str = "") -> httpx.Response:
    options: dict[str, Any] = {"key": key} if key else {}
    return await world.call("POST", f"/v1/sandboxes/{path}", json=body or {}, **options)


async def took(world: World, sandbox_id: str, **body: Any) -> dict[str, Any]:
    answer = await post(world, f"{sandbox_id}/snapshots", body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def forked(world: World, sandbox_id: str, **body: Any) -> list[dict[str, Any]]:
    answer = await post(world, f"{sandbox_id}/forks", body)
    assert answer.status_code == 201, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


async def state_of(world: World, snapshot_id: str) -> State:
    found = await world.store.read(lambda conn: snapshots.get(conn, snapshot_id))
    assert found is not None
    return State(found.state)


async def until(done: Any) -> None:
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.01)


async def until_gone(world: World, snapshot_id: str) -> None:
    async with asyncio.timeout(10):
        while (await state_of(world, snapshot_id)) is not State.DELETED:
            await asyncio.sleep(0.01)


async def test_a_snapshot_is_taken_listed_begun_from_and_deleted(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create(env={"SECRET": "mine"}, metadata={"a": "b"})
        before = await world.used(agent.host_id)
        taken = await took(world, parent["id"], name="warm")
        assert (taken["state"], taken["mode"], taken["name"], taken["version"], taken["bytes"]) == ("ready", "full", "warm", 1, 3 << 20)
        assert (await world.used(agent.host_id)).disk_mib == before.disk_mib + 3, "what is kept is counted as disk"
        assert (await world.show(parent["id"]))["state"] == "ready"
        second = await took(world, parent["id"], name="warm")
        assert second["version"] == 2
        listed = (await world.call("GET", "/v1/snapshots")).json()["items"]
        assert [one["id"] for one in listed] == [second["id"], taken["id"]]
        clone = await world.create(template="warm", clientRequestId="once")
        assert clone["origin"] == {"snapshotId": second["id"], "mode": "full"}, "the newest of a name is meant"
        assert clone["template"]["id"] == second["id"]
        assert clone["id"] != parent["id"]
        assert clone["accessToken"] != parent["accessToken"]
        assert clone["metadata"] == {}
        command = next(c for c in reversed(agent.commands) if c.sandbox_id == clone["id"])
        assert (command.kind, command.hostname) == (Kind.ENSURE_RUNNING, clone["id"])
        assert command.spec is not None
        assert command.spec.origin is not None
        assert "SECRET" not in agent.payloads[clone["id"]].env, "what somebody has brought for one sandbox is not another's"
        assert (await world.create(template="warm", clientRequestId="once"))["id"] == clone["id"]
        answer = await world.call("DELETE", f"/v1/snapshots/{second['id']}")
        assert (answer.status_code, code_of(answer)) == (409, "SNAPSHOT_IN_USE")
        await world.call("DELETE", f"/v1/sandboxes/{clone['id']}")
        assert (await world.call("DELETE", f"/v1/snapshots/{second['id']}")).status_code == 200
        assert code_of(await world.call("DELETE", f"/v1/snapshots/{second['id']}")) == "SNAPSHOT_NOT_FOUND"
        await until_gone(world, second["id"])
        assert set(agent.kept) == {taken["id"]}
        assert (await world.used(agent.host_id)).disk_mib == before.disk_mib + 3
    assert [kind for kind in await world.history(parent["id"]) if "snapshot" in kind] == [
        "sandbox.snapshot_taking", "sandbox.snapshot_taken", "sandbox.snapshot_taking", "sandbox.snapshot_taken",
    ]  # fmt: skip


async def test_what_a_host_cannot_keep_is_said(world: World, agent: Agent) -> None:
    agent.keeping = lambda order: keeper(order).model_copy(update={"save_mode": SaveMode.FILES})
    async with agent.at_work():
        assert (await took(world, (await world.create())["id"]))["mode"] == "filesystem"


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("HOST_DISK_FULL", 503, "HOST_DISK_FULL"),
        ("NOT_SUPPORTED", 400, "NOT_SUPPORTED"),
        ("PLACEMENT_LOST", 409, "ILLEGAL_STATE"),
        ("WHAT", 503, "SAVE_FAILED"),
    ],
)
async def test_a_failure_is_told_and_nothing_is_listed(world: World, agent: Agent, code: str, status: int, told: str) -> None:
    agent.keeping = lambda order: wire.SnapshotSeen(id=order.id, state=wire.SnapshotState.FAILED, code=code, message="no")
    async with agent.at_work():
        parent = await world.create()
        before = await world.used(agent.host_id)
        for path in ("snapshots", "forks"):
            answer = await post(world, f"{parent['id']}/{path}")
            assert (answer.status_code, code_of(answer)) == (status, told)
        assert (await world.show(parent["id"]))["state"] == "ready", "it goes on"
        assert (await world.call("GET", "/v1/snapshots")).json() == {"items": [], "nextCursor": None}
        assert await world.used(agent.host_id) == before


async def test_only_what_runs_is_kept_and_only_by_its_team(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create()
        taken = await took(world, parent["id"])
        key = await world.team("others")
        assert code_of(await post(world, f"{parent['id']}/snapshots", key=key)) == "SANDBOX_NOT_FOUND"
        assert code_of(await post(world, f"{parent['id']}/forks", key=key)) == "SANDBOX_NOT_FOUND"
        assert code_of(await world.call("GET", f"/v1/snapshots/{taken['id']}", key=key)) == "SNAPSHOT_NOT_FOUND"
        assert code_of(await world.call("DELETE", f"/v1/snapshots/{taken['id']}", key=key)) == "SNAPSHOT_NOT_FOUND"
        with pytest.raises(Refusal) as refused:
            await world.create(template=taken["id"], key=key)
        assert refused.value.code == "TEMPLATE_NOT_FOUND"
        await world.call("DELETE", f"/v1/sandboxes/{parent['id']}")
        assert code_of(await post(world, f"{parent['id']}/snapshots")) == "SANDBOX_NOT_FOUND"
        clone = await world.create(template=taken["id"])
        assert clone["state"] == "ready", "it outlives whom it is of"


@pytest.mark.parametrize("body", [{"size": {"memoryMib": 1024}}, {"requireHost": "hst_other"}, {"class": "none"}], ids=str)
async def test_a_create_that_the_snapshot_cannot_be_is_refused(world: World, agent: Agent, body: dict[str, Any]) -> None:
    async with agent.at_work():
        taken = await took(world, (await world.create())["id"])
        with pytest.raises(Refusal) as refused:
            await world.create(template=taken["id"], **body)
        assert refused.value.code == "INVALID_REQUEST"


@pytest.mark.parametrize("name", ["base", "UPPER", "a b", "snp_" + "a" * 20, "other/name"])
async def test_names_that_mean_something_else_are_refused(world: World, agent: Agent, name: str) -> None:
    async with agent.at_work():
        answer = await post(world, f"{(await world.create())['id']}/snapshots", {"name": name})
        assert answer.status_code in (400, 403), answer.text


async def test_one_that_takes_too_long_is_removed_from_its_host(world: World, agent: Agent) -> None:
    agent.keeping = lambda order: keeper(order) if order.wish is wire.SnapshotWish.DROP else None
    async with agent.at_work():
        parent = await world.create(timeoutSeconds=3600)
        asked = asyncio.create_task(post(world, f"{parent['id']}/snapshots"))
        await until(lambda: bool(agent.snapshots))
        snapshot_id = next(iter(agent.snapshots))
        world.clock.pass_s(301)
        world.running.snapshots.due.set()
        answer = await asked
        assert (answer.status_code, code_of(answer)) in ((503, "SAVE_TIMEOUT"), (504, "OUTCOME_UNKNOWN"))
        await until_gone(world, snapshot_id)
        await agent.tell(keeper(wire.SnapshotOrder(id=snapshot_id, wish=wire.SnapshotWish.KEEP, placement_id="plc_x")))
        assert await state_of(world, snapshot_id) is State.DELETED, "a late word revives nothing"


async def test_an_order_is_said_until_it_is_heard_and_by_no_other_host(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create(requireHost="local")
    other = await world.agent("other", token=await world.token("other"))
    asked = asyncio.create_task(post(world, f"{parent['id']}/snapshots"))
    await asyncio.sleep(0.1)
    order = (await agent.poll()).snapshots[0]
    agent.snapshots.clear()
    assert (await agent.poll()).snapshots == [order], "an agent that has lost it is told again"
    assert not (await agent.poll()).snapshots, "one that is at it is not"
    assert not (await other.poll()).snapshots
    await other.tell(keeper(order))
    assert not asked.done(), "another host's word means nothing"
    old, agent = replace(agent), agent.next_run()
    await agent.poll()
    with pytest.raises(Refusal) as refused:
        await old.tell(keeper(order))
    assert refused.value.code == "STALE_AGENT_EPOCH"
    await agent.tell(keeper(order))
    await agent.tell(keeper(order))
    assert (await asked).status_code == 201


async def test_a_control_that_is_killed_meanwhile_finds_it(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create()
    asked = asyncio.create_task(post(world, f"{parent['id']}/snapshots"))
    await asyncio.sleep(0.1)
    asked.cancel()
    await world.restart()
    async with agent.at_work(), asyncio.timeout(10):
        while not (found := (await world.call("GET", "/v1/snapshots")).json()["items"]):
            await asyncio.sleep(0.02)
    assert found[0]["state"] == "ready"


async def test_a_fenced_host_takes_its_snapshots_with_it(world: World, agent: Agent) -> None:
    async with agent.at_work():
        taken = await took(world, (await world.create())["id"])
    assert (await world.call("POST", "/v1/hosts/local/disable", json={"off": True})).status_code == 200
    async with asyncio.timeout(10):
        while await state_of(world, taken["id"]) is not State.FAILED:
            await asyncio.sleep(0.02)
    assert (await world.used(agent.host_id)).disk_mib == 0
    with pytest.raises(Refusal) as refused:
        await world.create(template=taken["id"])
    assert refused.value.code == "TEMPLATE_NOT_FOUND"


async def test_who_still_has_what_was_given_up_is_told_to_drop_it(world: World, agent: Agent) -> None:
    """A machine that was off and fenced, and is a host again with the disk that it had."""
    async with agent.at_work():
        taken = await took(world, (await world.create())["id"])
    assert not (await agent.poll(kept=[taken["id"]])).snapshots, "nobody has given it up"
    assert (await world.call("POST", "/v1/hosts/local/disable", json={"off": True})).status_code == 200
    async with asyncio.timeout(10):
        while await state_of(world, taken["id"]) is not State.FAILED:
            await asyncio.sleep(0.02)
    again = await world.agent("other", token=await world.token("other"))
    (order,) = (await again.poll(kept=[taken["id"], "snp_" + "x" * 20])).snapshots
    assert (order.id, order.wish) == (taken["id"], wire.SnapshotWish.DROP), "what is on no record is left alone"
    assert not (await again.poll()).snapshots


async def test_pages_go_through_all_of_them(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create()
        made = [(await took(world, parent["id"]))["id"] for _ in range(5)]
        seen: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = (await world.call("GET", f"/v1/snapshots?limit=2&cursor={cursor}")).json()
            seen += [one["id"] for one in page["items"]]
            cursor = page["nextCursor"]
        assert seen == made[::-1]
        assert code_of(await world.call("GET", "/v1/snapshots?cursor=x")) == "INVALID_REQUEST"


async def test_forks_are_of_one_moment_and_have_lives_of_their_own(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create(env={"KEY": "value"}, metadata={"a": "b"}, timeoutSeconds=600, clientRequestId="parent")
        made = [item["sandbox"] for item in await forked(world, parent["id"], count=3, timeoutSeconds=100)]
        assert len({one["id"] for one in made} | {parent["id"]}) == 4
        assert len({one["accessToken"] for one in made} | {parent["accessToken"]}) == 4
        assert {one["state"] for one in made} == {"ready"}
        assert len({one["origin"]["snapshotId"] for one in made}) == 1, "one moment"
        assert [one["metadata"] for one in made] == [{"a": "b"}] * 3
        assert {one["timeoutSeconds"] for one in made} == {100}
        assert {one["template"]["id"] for one in made} == {parent["template"]["id"]}
        assert {one["clientRequestId"] for one in made} == {None}
        assert (await world.call("GET", "/v1/snapshots")).json()["items"] == [], "its moment is no snapshot of the team's"
        await until_gone(world, made[0]["origin"]["snapshotId"])
        assert not agent.kept, "nor is it left on the host"
        (grandchild,) = await forked(world, made[0]["id"])
        assert grandchild["sandbox"]["id"] not in {one["id"] for one in made}


async def test_clones_have_the_environment_and_not_the_name(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = (await world.call("POST", "/v2/sandboxes", json={"templateID": "base", "envVars": {"KEY": "value"}})).json()
        answer = await world.call("POST", f"/sandboxes/{parent['sandboxID']}/fork", json={"count": 2, "timeout": 60})
        assert answer.status_code == 201, answer.text
        clones = [item["sandbox"] for item in answer.json()]
        assert len({one["envdAccessToken"] for one in clones} | {parent["envdAccessToken"]}) == 3
    again = agent.next_run()
    await again.poll()
    for clone in clones:
        command = next(c for c in agent.commands if c.sandbox_id == clone["sandboxID"])
        assert command.spec is not None
        assert command.spec.origin is not None
        assert command.payload_ref == clone["sandboxID"]


async def test_each_clone_is_admitted_for_itself(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create(**{"class": "impatient"})
        made = await forked(world, parent["id"], count=9)
        assert sum(item["sandbox"] is not None for item in made) == 7, "eight have room on this host"
        assert {item["error"]["code"] for item in made if item["error"] is not None} <= {"NO_CAPACITY", "CREATE_TIMEOUT"}
        await until(lambda: not agent.kept)


async def test_a_fork_that_is_said_again_is_the_same(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create()
        body = {"count": 2, "clientRequestId": "fork-1"}
        first = [item["sandbox"]["id"] for item in await forked(world, parent["id"], **body)]
        assert [item["sandbox"]["id"] for item in await forked(world, parent["id"], **body)] == first
        other = await post(world, f"{parent['id']}/forks", {**body, "timeoutSeconds": 7})
        assert {item["error"]["code"] for item in other.json()["items"]} == {"REQUEST_MISMATCH"}


async def test_a_fork_whose_control_is_killed_leaves_no_moment_behind(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create(timeoutSeconds=3600)
    asked = asyncio.create_task(post(world, f"{parent['id']}/forks", {"count": 2}))
    await asyncio.sleep(0.1)
    await agent.poll()
    asked.cancel()
    await world.restart()
    async with agent.at_work():
        async with asyncio.timeout(10):
            while True:
                found = await world.store.read(lambda conn: snapshots.held_on(conn, agent.host_id))
                if found and found[0].state is State.READY:
                    break
                await asyncio.sleep(0.02)
        world.clock.pass_s(300)
        world.running.snapshots.due.set()
        await until_gone(world, found[0].id)
        assert (await world.show(parent["id"]))["state"] == "ready"


async def test_what_is_at_rest_is_neither_kept_nor_forked(world: World, agent: Agent) -> None:
    async with agent.at_work():
        parent = await world.create()
        resting = sa.update(SANDBOXES).where(SANDBOXES.c.id == parent["id"]).values(state="paused", deadline_at=None)
        await world.store.write(lambda conn: conn.execute(resting))
        for path in ("snapshots", "forks"):
            answer = await post(world, f"{parent['id']}/{path}")
            assert (answer.status_code, code_of(answer)) == (409, "ILLEGAL_STATE")
