"""A lost host, and what becomes of its sandboxes: blocked, fenced, certified; and what the lost placement holds meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from atoll.domain.host import LEASE_S, LOST_AFTER_S
from atoll.domain.placement import Holding, Observed
from atoll.domain.spec import OnLoss
from tests.sim.world import BRISK, OPERATOR_KEY, Agent, Refusal, World

CLASS = "comes-back"


@pytest.fixture
async def second(world: World, agent: Agent) -> Agent:
    """A second host, and a class whose sandboxes are replaced."""
    configuration = world.running.configuration
    policy = replace(BRISK, name=CLASS, on_loss=OnLoss.REPLACE)
    configuration.current = replace(configuration.current, classes={**configuration.current.classes, CLASS: policy})
    return await world.agent("second", token=await world.token("second"))


async def ready_on(world: World, agent: Agent, *, class_name: str = CLASS) -> str:
    async with agent.at_work():
        made = await world.create(**{"class": class_name, "requireHost": agent.host_id, "timeoutSeconds": 3600})
    return str(made["id"])


async def lose(world: World, lost: Agent, *others: Agent) -> None:
    """Time goes by, and only the others are heard of."""
    world.clock.pass_s(LOST_AFTER_S + 1)
    for one in others:
        await one.poll()
    await world.running.watch.step()


async def authorize(world: World, sandbox_id: str, generation: int, *, key: str = OPERATOR_KEY, statement: str = "") -> dict[str, object]:
    path = f"/v1/sandboxes/{sandbox_id}/replacement-authorizations"
    answer = await world.call("POST", path, key=key, json={"generation": generation, "statement": statement})
    if answer.status_code != 201:
        raise Refusal(answer.status_code, answer.json()["error"])
    return dict(answer.json())


async def unpin(world: World, sandbox_id: str) -> None:
    """It was pinned to bring it to its host; the replacement may go anywhere."""
    from atoll.store.tables import SANDBOXES

    def work(conn: object) -> None:
        row = conn.execute(SANDBOXES.select().where(SANDBOXES.c.id == sandbox_id)).mappings().one()  # type: ignore[attr-defined]
        spec = {**row["spec"], "require_host": None}
        conn.execute(SANDBOXES.update().where(SANDBOXES.c.id == sandbox_id).values(spec=spec))  # type: ignore[attr-defined]

    await world.store.write(work)


async def test_until_somebody_says_so_nothing_replaces_a_lost_guest(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent)
    await unpin(world, made)
    await lose(world, agent, second)
    shown = await world.show(made)
    assert (shown["state"], shown["conditions"]) == ("ready", ["REPLACEMENT_BLOCKED", "UNREACHABLE"])
    await agent.poll()
    await world.running.watch.step()
    assert (await world.show(made))["conditions"] == []


async def test_a_class_that_ends_is_not_blocked(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent, class_name="brisk")
    await lose(world, agent, second)
    assert (await world.show(made))["conditions"] == ["UNREACHABLE"]
    with pytest.raises(Refusal, match="REPLACEMENT_NOT_BLOCKED") as refused:
        await authorize(world, made, 1)
    assert refused.value.status == 409


async def test_a_certificate_begins_the_next_generation(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent)
    await unpin(world, made)
    await lose(world, agent, second)
    answered = await authorize(world, made, 1, statement="keys of the job are revoked")
    assert (answered["state"], answered["generation"]) == ("pending", 2)
    assert await authorize(world, made, 1), "said again"
    async with second.at_work():
        now = await world.until(made, "ready")
    assert (now["generation"], now["placement"]["hostId"], now["conditions"]) == (2, second.host_id, [])
    events = (await world.call("GET", f"/v1/sandboxes/{made}/events")).json()["items"]
    (word,) = [one for one in events if one["type"] == "sandbox.replacement_authorized"]
    assert (word["data"]["statement"], word["data"]["generation"]) == ("keys of the job are revoked", 1)
    assert word["data"]["client_id"].startswith("cli_")
    (kept,) = (await world.call("GET", "/v1/operations/audit?action=sandbox.authorize_replacement")).json()["items"]
    assert (kept["subject"], kept["result"], kept["clientId"]) == (made, "done", word["data"]["client_id"])
    assert kept["data"] == {"generation": 1, "statement": "keys of the job are revoked"}
    with pytest.raises(Refusal, match="REPLACEMENT_NOT_BLOCKED"):
        await authorize(world, made, 2)


async def test_the_lost_placement_holds_until_it_is_seen_gone(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent)
    await unpin(world, made)
    held = await world.used(agent.host_id)
    await lose(world, agent, second)
    await authorize(world, made, 1)
    async with second.at_work():
        await world.until(made, "ready")
        assert await world.used(agent.host_id) == held, "the certificate frees nothing"
        await world.release(made)
        async with asyncio.timeout(20):
            while await world.held(second.host_id):
                await asyncio.sleep(0.01)
    ending = await world.show(made)
    assert (ending["state"], ending["conditions"]) == ("releasing", ["CLEANUP_PENDING"])
    assert [one.holding for one in (await world.facts(made)).older] == [Holding.CLEANUP_PENDING]
    async with agent.at_work():  # its host comes back and is told to remove what it has
        ended = await world.until(made, "released")
    assert ended["conditions"] == []
    assert (await world.held(agent.host_id), await world.held(second.host_id)) == (0, 0)


async def test_a_lost_host_that_comes_back_removes_the_old_one_and_not_the_new_one(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent)
    await unpin(world, made)
    await lose(world, agent, second)
    await authorize(world, made, 1)
    async with second.at_work():
        await world.until(made, "ready")
    (command,) = (await agent.poll()).commands
    assert (command.kind, command.generation) == ("ensure_absent", 1)
    await agent.obey(command)
    now = await world.facts(made)
    assert (now.sandbox.state, now.sandbox.unseen, now.older) == ("ready", 0, ())
    assert await world.held(agent.host_id) == 0
    assert now.placement is not None
    assert now.placement.host_id == second.host_id
    answer = await agent.poll()
    assert answer.commands == []


async def test_a_fence_is_the_operators_way(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent)
    await unpin(world, made)
    await lose(world, agent, second)
    await world.call("POST", "/v1/hosts/local/disable")
    world.clock.pass_s(LEASE_S + 10)
    await second.poll()
    await world.running.fencing.step()
    world.look_at_deadlines()
    async with second.at_work():
        now = await world.until(made, "ready")
    assert (now["generation"], now["placement"]["hostId"], now["conditions"]) == (2, second.host_id, [])
    assert await world.held(agent.host_id) == 0


async def test_a_fence_frees_the_old_placement_of_a_certified_one(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent)
    await unpin(world, made)
    await lose(world, agent, second)
    await authorize(world, made, 1)
    async with second.at_work():
        await world.until(made, "ready")
    await world.call("POST", "/v1/hosts/local/disable", json={"off": True})
    await world.running.fencing.step()
    assert await world.held(agent.host_id) == 0
    now = await world.facts(made)
    assert (now.sandbox.state, now.sandbox.generation, now.sandbox.unseen) == ("ready", 2, 0)


async def test_a_host_that_forgot_its_guest_leaves_it_waiting_for_word(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent)
    await unpin(world, made)
    (placement,) = agent.holds
    agent.see(placement, observed=Observed.ABSENT, reason="PLACEMENT_LOST")
    await agent.observe()
    shown = await world.show(made)
    assert (shown["state"], shown["generation"], shown["conditions"]) == ("pending", 2, ["REPLACEMENT_BLOCKED"])
    assert (await world.call("GET", f"/sandboxes/{made}")).status_code == 404, "E2B's clients don't see it"
    assert await world.held(agent.host_id) == 0
    await authorize(world, made, 1)
    async with agent.at_work(), second.at_work():
        assert (await world.until(made, "ready"))["generation"] == 2


async def test_it_can_be_released_while_it_is_blocked(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent)
    await lose(world, agent, second)
    await world.release(made)
    async with agent.at_work():
        await world.until(made, "released")
    with pytest.raises(Refusal, match="SANDBOX_NOT_FOUND"):
        await authorize(world, made, 1)


async def test_it_goes_on_after_a_restart_of_control(world: World, agent: Agent, second: Agent) -> None:
    made = await ready_on(world, agent)
    await unpin(world, made)
    await lose(world, agent, second)
    await authorize(world, made, 1)
    await world.restart()
    for one in (agent, second):
        await one.poll()
    async with second.at_work(), agent.at_work():
        now = await world.until(made, "ready")
        assert now["placement"]["hostId"] in (second.host_id, agent.host_id)
        await world.release(made)
        await world.until(made, "released")
    assert (await world.held(agent.host_id), await world.held(second.host_id)) == (0, 0)


async def test_only_its_team_and_operators_may_say_so(world: World, agent: Agent, second: Agent) -> None:
    theirs = await world.team("theirs")
    async with agent.at_work():
        made = (await world.create(key=theirs, **{"class": CLASS, "requireHost": agent.host_id, "timeoutSeconds": 3600}))["id"]
    await unpin(world, made)
    await lose(world, agent, second)
    stranger = await world.team("strangers")
    with pytest.raises(Refusal, match="SANDBOX_NOT_FOUND"):
        await authorize(world, made, 1, key=stranger)
    assert (await authorize(world, made, 1))["generation"] == 2, "an operator of another team"
    assert (await authorize(world, made, 1, key=theirs))["generation"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"generation": 0},
        {"generation": "1"},
        {"generation": 1, "statement": "x" * 501},
        {"generation": 1, "statement": "a\nb"},
        {"more": 1, "generation": 1},
    ],
)
async def test_a_certificate_that_says_nothing_is_none(world: World, agent: Agent, body: dict[str, object]) -> None:
    answer = await world.call("POST", f"/v1/sandboxes/{'i' + 'a' * 20}/replacement-authorizations", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_REQUEST")
