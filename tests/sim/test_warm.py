"""Warm guests: made ahead, claimed by one commit, never by two; what was before is nobody's to see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from atoll.base.units import Vector
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.spec import OnEnd, OnLeaseExpiry, OnLoss
from atoll.domain.warmth import OWN_TEAM
from atoll.store import warmth
from atoll.store.tables import EVENTS, SANDBOXES, TEMPLATES
from atoll.wire import agent as wire
from tests.sim.test_pausing import post, resting
from tests.sim.world import BRISK, Agent, Refusal, World, failing, obedient


async def keep(world: World, count: int, **body: Any) -> dict[str, Any]:
    answer = await world.call("PUT", "/v1/templates/base/warm", json={"count": count, **body})
    assert answer.status_code == 200, answer.text
    kept: dict[str, Any] = answer.json()
    return kept


async def policies(world: World) -> list[dict[str, Any]]:
    answer = await world.call("GET", "/v1/warm")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


async def warm_ids(world: World, state: str = "ready") -> list[str]:
    query = sa.select(SANDBOXES.c.id).where(SANDBOXES.c.team_id == OWN_TEAM, SANDBOXES.c.state == state)
    found: list[str] = await world.store.read(lambda conn: list(conn.execute(query).scalars()))
    return found


async def until(done: Callable[[], Any], what: str = "") -> None:
    async with asyncio.timeout(15):
        while not await done():
            await asyncio.sleep(0.02)


async def until_warm(world: World, count: int) -> None:
    async def there() -> bool:
        return len(await warm_ids(world)) == count

    await until(there)


async def test_a_create_takes_over_what_is_there(world: World, agent: Agent) -> None:
    async with agent.at_work():
        kept = await keep(world, 2)
        assert (kept["template"], kept["class"], kept["count"]) == ("base", "default", 2)
        await until_warm(world, 2)
        before = await warm_ids(world)
        assert (await world.call("GET", "/v1/sandboxes")).json()["items"] == [], "no team's list shows them"
        made = await world.create(env={"SECRET": "mine"}, metadata={"a": "b"}, clientRequestId="once", timeoutSeconds=77)
        assert made["id"] in before
        assert (made["state"], made["metadata"]) == ("ready", {"a": "b"})
        again = await world.create(env={"SECRET": "mine"}, metadata={"a": "b"}, clientRequestId="once", timeoutSeconds=77)
        assert again["id"] == made["id"], "asked for once more, it is the same one"
        assert await world.history(made["id"]) == ["sandbox.claimed", "sandbox.bootstrap_exposed", "sandbox.ready"] or (
            await world.history(made["id"]) == ["sandbox.claimed", "sandbox.ready"]
        )
        facts = await world.facts(made["id"])
        assert facts.sandbox.claimable is None
        assert facts.placement is not None
        assert facts.placement.generation == 1
        last = [one for one in agent.commands if one.placement_id == facts.placement.id][-1]
        assert (last.claimed, last.desired_revision, last.timeout_s, last.kind) == (True, 2, 77.0, Kind.ENSURE_RUNNING)
        assert last.spec is not None
        assert last.spec.timeout_s == 77
        await until_warm(world, 2)
        assert made["id"] not in await warm_ids(world), "what was claimed is replaced, and is never there again"
        await world.release(made["id"])
        await world.until(made["id"], "released")


async def test_a_guest_is_made_with_nothing_of_anybody(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await keep(world, 1)
        await until_warm(world, 1)
        first = agent.commands[0]
        assert not first.claimed
        assert first.team_id == OWN_TEAM
        assert agent.payloads[first.sandbox_id].env == {}
        made = await world.create(metadata={"mine": "1"})
        assert made["id"] == first.sandbox_id
        # What the create has brought travels with the claim.
        assert agent.payloads[first.sandbox_id].access_token == made["accessToken"]


async def test_a_hundred_racers_and_few_guests(world: World) -> None:
    agent = await world.agent(capacity=Vector(cpu_millis=200_000, memory_mib=200_000, disk_mib=2_000_000, slots=200))
    async with agent.at_work():
        await keep(world, 5)
        await until_warm(world, 5)
        there = set(await warm_ids(world))
        answers = await asyncio.gather(*(world.create() for _ in range(100)))
        ids = [one["id"] for one in answers]
        assert len(set(ids)) == 100, "nothing is given twice"
        assert there <= set(ids), "and what was there is taken"
        for one in there:
            facts = await world.facts(one)
            assert facts.sandbox.team_id != OWN_TEAM
            assert facts.placement is not None
            assert facts.placement.desired_revision == 2


async def test_only_operators_say_what_is_kept_warm(world: World, agent: Agent) -> None:
    key = await world.team("others")
    answer = await world.call("PUT", "/v1/templates/base/warm", key=key, json={"count": 1})
    assert answer.status_code == 403
    assert (await world.call("GET", "/v1/warm", key=key)).status_code == 403
    answer = await world.call("PUT", "/v1/templates/nothing/warm", json={"count": 1})
    assert answer.status_code == 404
    async with agent.at_work():
        await keep(world, 1)
        await until_warm(world, 1)
        (one,) = await warm_ids(world)
        for path in ("", "/events"):
            assert (await world.call("GET", f"/v1/sandboxes/{one}{path}", key=key)).status_code == 404
        with pytest.raises(Refusal):
            await world.release(one, key=key)
        answer = await world.call("POST", "/v1/keys", json={"name": "x", "team": "the deployment"})
        assert answer.status_code == 403, "nobody gets a key of the deployment's own team"


async def test_a_claim_that_fails_is_a_cold_create(world: World, agent: Agent) -> None:
    def broken(command: wire.Command) -> Mapping[str, Any] | None:
        return failing("GUEST_BOOT_TIMEOUT")(command) if command.claimed else obedient(command)

    agent.script = broken
    async with agent.at_work():
        await keep(world, 1)
        await until_warm(world, 1)
        (one,) = await warm_ids(world)
        made = await world.create()
        assert made["id"] == one
        facts = await world.facts(one)
        assert (facts.sandbox.state, facts.sandbox.generation) == ("ready", 2)
        claimed = [command for command in agent.commands if command.claimed]
        away = [command for command in agent.commands if command.kind is Kind.ENSURE_ABSENT]
        assert claimed[0].placement_id == away[0].placement_id, "the broken guest is gone before another one begins"


async def test_what_ends_under_a_claim_is_begun_anew(world: World, agent: Agent) -> None:
    def dying(command: wire.Command) -> Mapping[str, Any] | None:
        return {"observed": Observed.ABSENT, "ended_by": "exit", "reason": "GUEST_EXITED"} if command.claimed else obedient(command)

    agent.script = dying
    async with agent.at_work():
        await keep(world, 1)
        await until_warm(world, 1)
        made = await world.create()
        assert (await world.facts(made["id"])).sandbox.generation == 2


async def test_a_new_build_retires_what_is_there(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await keep(world, 2)
        await until_warm(world, 2)
        old = await warm_ids(world)
        image = "sha256:" + "7" * 64
        await world.store.write(lambda conn: conn.execute(sa.update(TEMPLATES).where(TEMPLATES.c.name == "base").values(image=image)))
        made = await world.create()
        assert made["id"] not in old, "a create of the new build does not get the old one"
        world.running.warming.changed.set()

        async def replaced() -> bool:
            now = await warm_ids(world)
            return len(now) == 2 and not set(now) & set(old)

        await until(replaced)
        for one in old:
            found = await world.facts(one)
            assert found.sandbox.reason == "WARM_OUTDATED"


async def test_a_create_that_finds_no_room_gets_that_of_a_guest(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await keep(world, 8)
        await until_warm(world, 8)
        made = await world.create(size={"memoryMib": 2048})
        assert made["state"] == "ready"
        given_up = sa.select(sa.func.count()).where(SANDBOXES.c.reason == "WARM_GIVEN_UP")
        count = await world.store.read(lambda conn: conn.execute(given_up).scalar_one())
        assert count >= 1
        (policy,) = await policies(world)

        async def said() -> bool:
            return (await policies(world))[0]["problem"] is not None

        await until(said)
        assert policy["count"] == 8


async def test_what_never_fits_keeps_nobody_from_making_guests(world: World, agent: Agent) -> None:
    async with agent.at_work():
        hopeless = await world.accept(size={"memoryMib": 16_384})
        await keep(world, 2)
        await until_warm(world, 2)
        assert (await world.facts(hopeless)).sandbox.state == "pending"


async def test_a_start_that_fails_is_not_tried_again_at_once(world: World, agent: Agent) -> None:
    agent.script = failing("START_FAILED", "no kernel")
    async with agent.at_work():
        await keep(world, 1)

        async def said() -> bool:
            return "START_FAILED" in str((await policies(world))[0]["problem"])

        await until(said)
        assert len(await warm_ids(world, "failed")) <= 4
        agent.script = obedient
        await until_warm(world, 1)


async def test_what_a_guest_cannot_be_given_begins_from_nothing(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await keep(world, 1)
        await until_warm(world, 1)
        (one,) = await warm_ids(world)
        for body in ({"size": {"memoryMib": 256}}, {"network": {"internet": False}}, {"class": "shared-kernel"}):
            made = await world.create(**body)
            assert made["id"] != one, body
        assert await warm_ids(world) == [one]


async def test_an_agent_that_knows_nothing_of_claims_gets_none(world: World) -> None:
    agent = await world.agent(claims=False)
    async with agent.at_work():
        await keep(world, 1)
        made = await world.create()
        assert made["state"] == "ready"
        assert await warm_ids(world) == []
        assert not any(command.claimed for command in agent.commands)


async def test_a_claim_counts_for_who_makes_it(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await keep(world, 2)
        await until_warm(world, 2)
        team = (await world.show((await world.create())["id"]))["teamId"]

        def living(conn: sa.Connection) -> tuple[int, int]:
            from atoll.store.tables import TALLIES

            def of(scope: str) -> int:
                query = sa.select(sa.func.coalesce(sa.func.sum(TALLIES.c.living), 0)).where(TALLIES.c.scope == scope)
                return int(conn.execute(query).scalar_one())

            return of(team), of(OWN_TEAM)

        assert await world.store.read(living) == (1, 0)


async def test_fewer_are_wanted(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await keep(world, 3)
        await until_warm(world, 3)
        await keep(world, 1)
        await until_warm(world, 1)
        surplus = sa.select(sa.func.count()).where(SANDBOXES.c.reason == "WARM_SURPLUS")
        assert await world.store.read(lambda conn: conn.execute(surplus).scalar_one()) == 2
        await keep(world, 0)
        await until_warm(world, 0)
        assert await policies(world) == []


async def test_the_document_bounds_how_many_there_may_be(world: World) -> None:
    answer = await world.call("PUT", "/v1/templates/base/warm", json={"count": 1000})
    assert answer.status_code == 200, answer.text
    answer = await world.call("PUT", "/v1/templates/base/warm", json={"count": 1, "size": {"memoryMib": 256}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "WARM_QUOTA")


async def test_events_from_before_a_claim_are_not_shown(world: World, agent: Agent) -> None:
    async with agent.at_work():
        await keep(world, 1)
        await until_warm(world, 1)
        made = await world.create()
        assert (await world.history(made["id"]))[0] == "sandbox.claimed"
        teams = sa.select(EVENTS.c.type, EVENTS.c.team_id).where(EVENTS.c.sandbox_id == made["id"]).order_by(EVENTS.c.seq)
        rows = await world.store.read(lambda conn: list(conn.execute(teams)))
        assert {team for _, team in rows[:3]} == {OWN_TEAM}
        found = await world.store.read(warmth.guests)
        assert made["id"] not in {one.id for one in found}


async def test_what_is_lost_waits_for_nobody(world: World, agent: Agent) -> None:
    """Whatever its class does with what somebody has: nobody would give it a word, or bring it back from rest."""
    configuration = world.running.configuration
    policy = replace(BRISK, name="stays", on_loss=OnLoss.REPLACE, on_lease_expiry=OnLeaseExpiry.SUSPEND)
    configuration.current = replace(configuration.current, classes={**configuration.current.classes, "stays": policy})
    async with agent.at_work():
        await keep(world, 1, **{"class": "stays"})
        await until_warm(world, 1)
        (one,) = await warm_ids(world)
        spec = agent.commands[-1].spec
        assert spec is not None
        assert (spec.on_loss, spec.on_lease_expiry, spec.on_end) == (OnLoss.END, OnLeaseExpiry.END, OnEnd.KILL)
        made = await world.create(**{"class": "stays"})
        assert made["id"] == one
        spec = agent.commands[-1].spec
        assert spec is not None
        assert (spec.on_loss, spec.on_lease_expiry) == (OnLoss.REPLACE, OnLeaseExpiry.SUSPEND), "and a create's own is as its class says"


@pytest.mark.parametrize("rest", ["pause", "suspend"])
async def test_a_resume_that_finds_no_room_gets_that_of_a_guest(world: World, agent: Agent, rest: str) -> None:
    """Where it is: a paused one needs its CPU again, a suspended one all but its disk."""
    agent.script = resting
    big = {"cpuMillis": 8000, "memoryMib": 4096, "diskMib": 1024}
    async with agent.at_work():
        made = (await world.create(size=big))["id"]
        assert (await post(world, made, rest)).status_code == 200
        await keep(world, 7, size={"cpuMillis": 2000, "memoryMib": 256, "diskMib": 512})
        await until_warm(world, 7)
        back = await post(world, made, "resume")
        assert (back.status_code, back.json().get("state")) == (200, "ready"), back.text
        assert await count_of(world, "WARM_GIVEN_UP") == 3, "no more than it takes"


async def test_a_resume_takes_no_guest_s_room_where_that_is_not_enough(world: World, agent: Agent) -> None:
    agent.script = resting
    async with agent.at_work():
        made = (await world.create(size={"cpuMillis": 8000, "memoryMib": 512, "diskMib": 512}))["id"]
        assert (await post(world, made, "pause")).status_code == 200
        for cpu_millis in (8000, 2000):
            await world.create(size={"cpuMillis": cpu_millis, "memoryMib": 512, "diskMib": 512})
        await keep(world, 2, size={"cpuMillis": 1000, "memoryMib": 512, "diskMib": 512})
        await until_warm(world, 2)
        refused = await post(world, made, "resume")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "INSUFFICIENT_CPU"), refused.text
        assert await count_of(world, "WARM_GIVEN_UP") == 0


async def count_of(world: World, reason: str) -> int:
    given_up = sa.select(sa.func.count()).where(SANDBOXES.c.reason == reason)
    found: int = await world.store.read(lambda conn: conn.execute(given_up).scalar_one())
    return found
