"""Operators and hosts: tokens, draining, and the fence that frees what a lost host held."""

from __future__ import annotations

import asyncio

import pytest

from atoll.control.loops.fencing import SKEW_S
from atoll.domain.deployment import Deployment, DeploymentLimits
from atoll.domain.host import LEASE_S, LOST_AFTER_S
from tests.sim.world import Agent, Refusal, World


async def host(world: World, verb: str = "", name: str = "local", **body: object) -> dict[str, object]:
    answer = await (world.call("POST", f"/v1/hosts/{name}/{verb}", json=body) if verb else world.call("GET", f"/v1/hosts/{name}"))
    if answer.status_code != 200:
        raise Refusal(answer.status_code, answer.json()["error"])
    return answer.json()


async def ready(world: World, agent: Agent) -> str:
    async with agent.at_work():
        made = await world.create(template="base", timeoutSeconds=3600)
    return str(made["id"])


async def test_a_token_from_the_api_enrols_one_host_once(world: World) -> None:
    answer = await world.call("POST", "/v1/enrollment-tokens", json={"hostName": "second"})
    assert answer.status_code == 201, answer.text
    token = answer.json()["token"]
    assert token.encode() not in world.database.read_bytes()
    second = Agent(world, name="second")
    await second.enroll(token)
    with pytest.raises(Refusal, match="ENROLLMENT_TOKEN_INVALID"):
        await Agent(world, name="second").enroll(token)


async def test_members_may_not_touch_hosts(world: World, agent: Agent) -> None:
    key = await world.team("others")
    for path in ("/v1/hosts/local/drain", "/v1/hosts/local/disable", "/v1/hosts/local/activate"):
        assert (await world.call("POST", path, key=key)).status_code == 403
    assert (await world.call("POST", "/v1/enrollment-tokens", key=key, json={"hostName": "x"})).status_code == 403


async def test_a_host_that_there_is_not(world: World, agent: Agent) -> None:
    for verb in ("", "drain", "disable"):
        with pytest.raises(Refusal, match="HOST_NOT_FOUND"):
            await host(world, verb, name="nowhere")


async def test_a_draining_host_keeps_what_it_has_and_takes_no_more(world: World, agent: Agent) -> None:
    kept = await ready(world, agent)
    assert (await host(world, "drain"))["admin"] == "draining"
    with pytest.raises(Refusal, match="NO_CAPACITY"):
        await world.create(template="base", timeoutSeconds=60, **{"class": "impatient"})
    assert (await world.show(kept))["state"] == "ready"
    assert (await host(world, "activate"))["admin"] == "active"
    await ready(world, agent)


async def test_a_fence_frees_nothing_before_the_last_lease_has_run_out(world: World, agent: Agent) -> None:
    held = await ready(world, agent)
    assert (await host(world, "disable"))["admin"] == "disabled"
    with pytest.raises(Refusal, match="CREDENTIAL_REVOKED"):
        await agent.poll()
    await world.running.fencing.step()
    assert (await world.show(held))["state"] == "ready"
    world.clock.step_s(3600)  # a wrong hand at the wall clock shortens no lease
    await world.running.fencing.step()
    assert (await world.show(held))["state"] == "ready"
    world.clock.step_s(-3600)
    world.clock.pass_s(LEASE_S + SKEW_S)
    await world.running.fencing.step()
    ended = await world.show(held)
    assert (ended["state"], ended["reason"]) == ("failed", "PLACEMENT_LOST")
    assert await world.held(agent.host_id) == 0


async def test_a_restarted_control_waits_a_whole_lease(world: World, agent: Agent) -> None:
    held = await ready(world, agent)
    await host(world, "disable")
    world.clock.pass_s(LEASE_S - 1)
    await world.restart()
    await world.running.fencing.step()
    world.clock.pass_s(LEASE_S - 1)
    await world.running.fencing.step()
    assert (await world.show(held))["state"] == "ready"
    world.clock.pass_s(SKEW_S + 1)
    await world.running.fencing.step()
    assert (await world.show(held))["state"] == "failed"


async def test_the_operators_word_that_it_is_off_frees_at_once(world: World, agent: Agent) -> None:
    held = await ready(world, agent)
    await host(world, "disable", off=True)
    await world.until(held, "failed", timeout_s=10)


async def test_a_disabled_host_is_not_activated_but_reset_and_enrolled_again(world: World, agent: Agent) -> None:
    with pytest.raises(Refusal, match="ILLEGAL_STATE"):
        await host(world, "reset")
    await host(world, "disable")
    with pytest.raises(Refusal, match="ILLEGAL_STATE"):
        await host(world, "activate")
    assert (await host(world, "disable"))["admin"] == "disabled"
    with pytest.raises(Refusal, match="ENROLLMENT_CONFLICT"):
        await Agent(world).enroll(await world.token("local"))
    waiting = await host(world, "reset")
    assert (waiting["admin"], waiting["health"]) == ("draining", "unknown")
    again = Agent(world)
    await again.enroll(await world.token("local"))
    await again.poll()
    assert again.host_id == agent.host_id
    assert (await host(world))["admin"] == "active"
    await ready(world, again)


async def test_an_agent_that_comes_back_after_a_fence_is_told_to_remove_what_it_has(world: World, agent: Agent) -> None:
    await ready(world, agent)
    (placement,) = agent.holds
    await host(world, "disable", off=True)
    while await world.held(agent.host_id):
        await world.running.fencing.step()
    await host(world, "reset")
    again = Agent(world, holds=dict(agent.holds), generations=dict(agent.generations), seqs=agent.seqs)
    await again.enroll(await world.token("local"))
    answer = await again.poll()
    assert [(c.kind.value, c.placement_id) for c in answer.commands] == [("ensure_absent", placement)]


async def test_a_fenced_host_is_not_reset_while_its_sandboxes_may_still_run(world: World, agent: Agent) -> None:
    held = await ready(world, agent)
    await host(world, "disable")
    with pytest.raises(Refusal, match="ILLEGAL_STATE") as refused:
        await host(world, "reset")
    assert "--off" in refused.value.body["hint"]
    await host(world, "disable", off=True)
    await world.until(held, "failed", timeout_s=10)
    assert (await host(world, "reset"))["admin"] == "draining"


async def test_a_lost_host_is_said_so_and_ends_nothing(world: World, agent: Agent) -> None:
    held = await ready(world, agent)
    watch = world.running.watch
    await watch.step()
    assert (await world.show(held))["conditions"] == []
    world.clock.pass_s(LOST_AFTER_S + 1)
    await watch.step()
    await watch.step()
    lost = await world.show(held)
    assert (lost["state"], lost["conditions"]) == ("ready", ["UNREACHABLE"])
    assert (await host(world))["health"] == "lost"
    assert await world.held(agent.host_id) == 1
    await agent.poll()
    await watch.step()
    assert (await world.show(held))["conditions"] == []
    history = await world.history(held)
    assert history.count("sandbox.unreachable") == history.count("sandbox.reachable") == 1


async def test_a_host_too_many_to_be_active_drains_until_there_is_a_place(world: World) -> None:
    world.deployment = Deployment(deployment=DeploymentLimits(active_hosts=1))
    await world.restart()
    await world.agent()
    await world.agent("second", token=await world.token("second"))
    assert [(await host(world, name=name))["admin"] for name in ("local", "second")] == ["active", "draining"]
    with pytest.raises(Refusal, match="ACTIVE_HOST_QUOTA") as refused:
        await host(world, "activate", name="second")
    assert refused.value.status == 409
    assert (await host(world, "activate"))["admin"] == "active", "what is active stays so"
    await host(world, "drain")
    assert (await host(world, "activate", name="second"))["admin"] == "active"


async def test_a_disabled_host_is_registered_no_more(world: World) -> None:
    world.deployment = Deployment(deployment=DeploymentLimits(registered_hosts=1))
    await world.restart()
    await world.agent()
    second = Agent(world, name="second")
    with pytest.raises(Refusal, match="HOST_QUOTA"):
        await second.enroll(await world.token("second"))
    await host(world, "disable", off=True)
    await second.enroll(await world.token("second"))
    with pytest.raises(Refusal, match="HOST_QUOTA"):
        await host(world, "reset")
    assert (await host(world))["admin"] == "disabled"


async def test_racing_enrolments_do_not_pass_the_quota(world: World) -> None:
    world.deployment = Deployment(deployment=DeploymentLimits(registered_hosts=3, active_hosts=2))
    await world.restart()
    agents = [Agent(world, name=f"host-{n}") for n in range(8)]
    tokens = [await world.token(one.name) for one in agents]
    outcomes = await asyncio.gather(*(one.enroll(token) for one, token in zip(agents, tokens, strict=True)), return_exceptions=True)
    assert sum(not isinstance(one, BaseException) for one in outcomes) == 3
    listed = (await world.call("GET", "/v1/hosts")).json()["items"]
    assert sorted(one["admin"] for one in listed) == ["active", "active", "draining"]
