"""Idempotency keys, quotas and the walls between teams, through both APIs."""

from __future__ import annotations

import asyncio
import base64
import re
from typing import Any

import pytest
import sqlalchemy as sa

from atoll.base.units import Vector
from atoll.domain.deployment import ClientLimits, Deployment, DeploymentLimits, Rate, TeamLimits
from atoll.store.tables import SANDBOXES
from tests.sim.world import OPERATOR_KEY, Agent, Refusal, World, failing


async def code_of(work: Any) -> str:
    with pytest.raises(Refusal) as refused:
        await work
    return str(refused.value.code)


# Idempotency.


async def test_the_same_request_gives_the_same_sandbox(world: World, agent: Agent) -> None:
    async with agent.at_work():
        first = await world.create(clientRequestId="r1", metadata={"a": "b"})
        again = await world.create(clientRequestId="r1", metadata={"a": "b"})
        other = await world.create(clientRequestId="r2", metadata={"a": "b"})
    assert first["id"] == again["id"] != other["id"]
    assert await world.held(agent.host_id) == 2


async def test_another_body_under_the_same_key_is_refused(world: World, agent: Agent) -> None:
    async with agent.at_work():
        first = await world.create(clientRequestId="r1")
        for change in ({"metadata": {"a": "b"}}, {"env": {"A": "b"}}, {"timeoutSeconds": 299}, {"secured": False}):
            assert await code_of(world.create(clientRequestId="r1", **change)) == "REQUEST_MISMATCH"
    assert (await world.create(clientRequestId="r1"))["id"] == first["id"]


async def test_while_the_first_runs_the_second_is_told_so(world: World, agent: Agent) -> None:
    creating = world.spawn(world.create(clientRequestId="r1"))
    command = await agent.wanted()
    assert await code_of(world.create(clientRequestId="r1")) == "REQUEST_IN_PROGRESS"
    assert (await world.create(clientRequestId="r1", wait=False))["id"] == command.sandbox_id
    await agent.obey(command)
    assert (await creating)["id"] == command.sandbox_id


async def test_ten_at_once_make_one(world: World, agent: Agent) -> None:
    async with agent.at_work():
        results = await asyncio.gather(*(world.create(clientRequestId="r1") for _ in range(10)), return_exceptions=True)
    made = {r["id"] for r in results if isinstance(r, dict)}
    assert len(made) == 1
    assert {r.code for r in results if isinstance(r, Refusal)} <= {"REQUEST_IN_PROGRESS"}
    assert await world.held(agent.host_id) == 1


async def test_after_patience_the_key_is_free_again(world: World) -> None:
    assert await code_of(world.create(clientRequestId="r1", **{"class": "brisk"})) == "NO_CAPACITY"
    agent = await world.agent()
    async with agent.at_work():
        created = await world.create(clientRequestId="r1", **{"class": "brisk"})
    assert created["state"] == "ready"


async def test_after_a_failed_start_the_key_is_free_again(world: World, agent: Agent) -> None:
    agent.script = failing("START_FAILED")
    async with agent.at_work():
        assert await code_of(world.create(clientRequestId="r1")) == "START_FAILED"
        agent.script = type(agent)(world).script
        created = await world.create(clientRequestId="r1", metadata={"another": "body"})
    assert created["state"] == "ready"


async def test_after_its_end_the_same_request_is_answered_with_what_it_made(world: World, agent: Agent) -> None:
    async with agent.at_work():
        first = await world.create(clientRequestId="r1")
        await world.release(first["id"])
        await world.until(first["id"], "released")
        again = await world.create(clientRequestId="r1")
    assert (again["id"], again["state"]) == (first["id"], "released")


async def test_keys_are_a_team_s_own(world: World, agent: Agent) -> None:
    theirs = await world.team("theirs")
    async with agent.at_work():
        ours = await world.create(clientRequestId="r1")
        other = await world.create(clientRequestId="r1", key=theirs)
    assert ours["id"] != other["id"]


async def test_e2b_s_header_is_the_same_key(world: World, agent: Agent) -> None:
    async def create(**body: Any) -> Any:
        return await world.call("POST", "/sandboxes", headers={"Idempotency-Key": "k1"}, json={"templateID": "base", **body})

    async with agent.at_work():
        first, again, other = await create(), await create(), await create(metadata={"a": "b"})
    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
    assert first.json()["sandboxID"] == again.json()["sandboxID"]


async def test_a_request_s_digest_is_keyed(world: World, agent: Agent) -> None:
    """Who reads the database must not be able to try out environment values against it."""
    await world.accept(clientRequestId="r1", env={"PIN": "1234"})
    first = await digest_of(world, "r1")
    await world.accept(clientRequestId="r2", env={"PIN": "1234"})
    assert await digest_of(world, "r2") != first, "another request"
    assert re.fullmatch("[0-9a-f]{64}", first)
    body = {"clientRequestId": "r1", "env": {"PIN": "1234"}, "wait": False}
    assert (await world.call("POST", "/v1/sandboxes", json=body)).status_code == 202
    (world.path / "secrets" / "token.key").write_text(base64.b64encode(b"k" * 32).decode())
    await world.restart()
    refused = await world.call("POST", "/v1/sandboxes", json=body)
    assert refused.json()["error"]["code"] == "REQUEST_MISMATCH", "the digest does not depend on the key"


async def digest_of(world: World, request_id: str) -> str:
    found = await world.store.read(
        lambda conn: conn.execute(sa.select(SANDBOXES.c.request_digest).where(SANDBOXES.c.request_id == request_id))
    )
    return str(found.scalar_one())


async def test_a_request_of_before_keyed_digests_is_known_by_its_id(world: World, agent: Agent) -> None:
    made = await world.accept(clientRequestId="r1")
    await world.store.write(lambda conn: conn.execute(sa.update(SANDBOXES).values(request_digest=None)))
    assert await world.accept(clientRequestId="r1", metadata={"what": "ever"}) == made


async def test_racing_requests_of_one_id_make_one_sandbox(world: World, agent: Agent) -> None:
    made = await asyncio.gather(*(world.accept(clientRequestId="r1") for _ in range(20)))
    assert len(set(made)) == 1
    others = await asyncio.gather(
        *(world.create(clientRequestId="r1", wait=False, metadata={"n": "1"}) for _ in range(3)), return_exceptions=True
    )
    assert {one.code for one in others if isinstance(one, Refusal)} == {"REQUEST_MISMATCH"}
    assert len((await world.call("GET", "/v1/sandboxes")).json()["items"]) == 1


# Quotas.


async def test_a_team_s_quota_counts_what_lives(world: World) -> None:
    world.deployment = Deployment(team=TeamLimits(sandboxes=2))
    await world.restart()
    key = await world.team("small")
    first = await world.create(key=key, wait=False)
    await world.create(key=key, wait=False)
    assert await code_of(world.create(key=key, wait=False)) == "TEAM_SANDBOX_QUOTA"
    e2b = await world.call("POST", "/sandboxes", key=key, json={"templateID": "base"})
    assert e2b.status_code == 429
    assert e2b.headers["should-retry"] == "false"
    await world.release(first["id"], key=key)
    await world.create(key=key, wait=False)


async def test_a_refused_request_leaves_no_record(world: World) -> None:
    world.deployment = Deployment(teams={"none": TeamLimits(sandboxes=0)})
    await world.restart()
    key = await world.team("none")
    assert await code_of(world.create(key=key, clientRequestId="r1")) == "TEAM_SANDBOX_QUOTA"
    listed = await world.call("GET", "/v1/sandboxes?scope=all", key=key)
    assert listed.json()["items"] == []
    assert await code_of(world.create(key=key, clientRequestId="r1", metadata={"other": "body"})) == "TEAM_SANDBOX_QUOTA"


async def test_racing_creates_do_not_pass_a_quota(world: World) -> None:
    world.deployment = Deployment(team=TeamLimits(sandboxes=3))
    await world.restart()
    key = await world.team("small")
    results = await asyncio.gather(*(world.create(key=key, wait=False) for _ in range(10)), return_exceptions=True)
    assert sum(isinstance(r, dict) for r in results) == 3


async def test_the_deployment_has_a_quota_of_its_own(world: World) -> None:
    world.deployment = Deployment(deployment=DeploymentLimits(sandboxes=1))
    await world.restart()
    await world.create(wait=False)
    assert await code_of(world.create(wait=False, key=await world.team("other"))) == "DEPLOYMENT_SANDBOX_QUOTA"


async def test_too_many_requests_are_told_when_to_come_again(world: World) -> None:
    world.deployment = Deployment(client=ClientLimits(requests=Rate(1.0, burst=3)))
    await world.restart()
    key = await world.team("fast")
    answers = [await world.call("GET", "/sandboxes", key=key) for _ in range(5)]
    assert [a.status_code for a in answers] == [200, 200, 200, 429, 429]
    assert int(answers[-1].headers["retry-after"]) >= 1
    world.clock.pass_s(2)
    assert (await world.call("GET", "/sandboxes", key=key)).status_code == 200
    assert (await world.call("GET", "/sandboxes")).status_code == 200, "another key is not slowed down"


async def test_a_key_has_a_quota_of_its_own(world: World) -> None:
    world.deployment = Deployment(client=ClientLimits(sandboxes=1))
    await world.restart()
    first, second = await world.team("two keys"), await world.team("two keys")
    await world.create(key=first, wait=False)
    assert await code_of(world.create(key=first, wait=False)) == "CLIENT_SANDBOX_QUOTA"
    await world.create(key=second, wait=False)
    refused = await world.call("POST", "/v1/sandboxes", key=first, json={"wait": False})
    assert refused.status_code == 409


async def test_records_have_quotas_of_team_and_deployment(world: World) -> None:
    world.deployment = Deployment(team=TeamLimits(sandboxes=2, records=2), deployment=DeploymentLimits(sandboxes=3, records=3))
    await world.restart()
    first = await world.create(wait=False)
    await world.release(first["id"])
    await world.create(wait=False)
    assert await code_of(world.create(wait=False)) == "RECORDS_QUOTA"
    other = await world.team("others")
    await world.create(key=other, wait=False)
    assert await code_of(world.create(key=other, wait=False)) == "DEPLOYMENT_RECORDS_QUOTA"
    e2b = await world.call("POST", "/v2/sandboxes", key=other, json={"templateID": "base"})
    assert (e2b.status_code, e2b.headers["should-retry"], "retry-after" in e2b.headers) == (429, "false", False)


async def test_rates_of_team_and_deployment(world: World) -> None:
    world.deployment = Deployment(team=TeamLimits(requests=Rate(1.0, 3)), deployment=DeploymentLimits(requests=Rate(1.0, 1000)))
    await world.restart()
    keys = [await world.team("fast") for _ in range(2)]
    statuses = [(await world.call("GET", "/v1/sandboxes", key=key)).status_code for key in keys * 2]
    assert statuses == [200, 200, 200, 429]
    refused = await world.call("GET", "/v1/sandboxes", key=keys[0])
    assert (refused.json()["error"]["code"], refused.json()["error"]["detail"]["scope"]) == ("RATE_LIMITED", "team")
    assert int(refused.headers["retry-after"]) >= 1


# Walls.


async def test_a_stranger_learns_nothing_of_another_team_s_sandbox(world: World, agent: Agent) -> None:
    theirs = await world.team("theirs")
    async with agent.at_work():
        ours = (await world.create(metadata={"who": "ours"}))["id"]
        never = "i" + "0" * 20
        calls: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", "/sandboxes/{}", {}),
            ("DELETE", "/sandboxes/{}", {}),
            ("POST", "/sandboxes/{}/timeout", {"json": {"timeout": 60}}),
            ("POST", "/sandboxes/{}/refreshes", {"json": {"duration": 60}}),
            ("POST", "/sandboxes/{}/connect", {"json": {"timeout": 60}}),
            ("GET", "/sandboxes/{}/logs", {}),
            ("GET", "/v1/sandboxes/{}", {}),
            ("DELETE", "/v1/sandboxes/{}", {}),
            ("POST", "/v1/sandboxes/{}/end", {"json": {"timeoutSeconds": 60}}),
            ("GET", "/v1/sandboxes/{}/events", {}),
            ("GET", "/v1/sandboxes/{}/logs", {}),
        ]
        for method, path, options in calls:
            answer = await world.call(method, path.format(ours), key=theirs, **options)
            ghost = await world.call(method, path.format(never), key=theirs, **options)
            assert answer.status_code == ghost.status_code == 404, f"{method} {path}"
            words, ghostly = answer.text.replace(ours, "ID"), ghost.text.replace(never, "ID")
            assert without_request_id(words) == without_request_id(ghostly), "the words tell them apart"
    assert (await world.facts(ours)).sandbox.state == "ready"


def without_request_id(text: str) -> str:
    return re.sub(r'"requestId":\s*"[^"]*"', "", text)


async def test_lists_are_a_team_s_own(world: World, agent: Agent) -> None:
    theirs = await world.team("theirs")
    async with agent.at_work():
        ours = await world.create(metadata={"who": "ours"})
        other = await world.create(key=theirs)
    for path in ("/sandboxes", "/v2/sandboxes", "/sandboxes?metadata=who%3Dours", "/v2/sandboxes?metadata=who%3Dours"):
        answer = await world.call("GET", path, key=theirs)
        assert ours["id"] not in answer.text
    listed = await world.call("GET", "/v2/sandboxes", key=theirs)
    assert [item["sandboxID"] for item in listed.json()] == [other["id"]]
    assert listed.headers["x-total-running"] == "1"


async def test_hosts_are_for_operators(world: World, agent: Agent) -> None:
    theirs = await world.team("theirs")
    assert (await world.call("GET", "/v1/hosts", key=theirs)).status_code == 403
    shown = (await world.call("GET", "/v1/hosts")).json()["items"]
    assert [item["id"] for item in shown] == [agent.host_id]


async def test_members_make_no_operators_and_no_other_team_s_keys(world: World) -> None:
    theirs = await world.team("theirs")
    for body in ({"name": "k", "role": "operator"}, {"name": "k", "team": "default"}, {"name": "k", "team": "new"}):
        assert (await world.call("POST", "/v1/keys", key=theirs, json=body)).status_code == 403


async def test_a_revoked_key_ends_at_once(world: World) -> None:
    key = await world.team("theirs")
    own = (await world.call("POST", "/v1/keys", key=key, json={"name": "second"})).json()
    assert (await world.call("GET", "/sandboxes", key=own["secret"])).status_code == 200
    revoked = await world.call("DELETE", f"/v1/keys/{own['key']['id']}", key=key)
    assert revoked.status_code in (200, 204), revoked.text
    assert (await world.call("GET", "/sandboxes", key=own["secret"])).status_code == 401


async def test_an_operator_ends_the_keys_that_it_made_for_another_team(world: World) -> None:
    stranger = await world.team("strangers")
    made = (await world.call("POST", "/v1/keys", json={"name": "lost", "team": "theirs"})).json()
    path = f"/v1/keys/{made['key']['id']}"
    assert (await world.call("DELETE", path, key=stranger)).status_code == 404
    assert (await world.call("GET", "/sandboxes", key=made["secret"])).status_code == 200
    assert (await world.call("DELETE", path)).status_code == 200
    assert (await world.call("GET", "/sandboxes", key=made["secret"])).status_code == 401


async def test_keys_are_on_disk_as_digests_only(world: World) -> None:
    key = await world.team("theirs")
    await world.stop()
    content = b"".join(path.read_bytes() for path in world.path.glob("atoll.db*"))
    assert b"theirs" in content
    for secret in (key, OPERATOR_KEY):
        assert secret.encode() not in content


async def test_the_bootstrap_key_is_taken_once(world: World) -> None:
    await world.restart()
    await world.restart()
    keys = (await world.call("GET", "/v1/keys")).json()["items"]
    assert len(keys) == 1
    assert keys[0]["role"] == "operator"


async def test_capacity_is_shown_to_operators_as_it_is_held(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await world.create(size={"cpuMillis": 100, "memoryMib": 64, "diskMib": 128})
    (shown,) = (await world.call("GET", "/v1/hosts")).json()["items"]
    assert await world.used(agent.host_id) == Vector(100, 64, 128, 1)
    assert shown["used"] == {"cpuMillis": 100, "memoryMib": 64, "diskMib": 128, "slots": 1}
