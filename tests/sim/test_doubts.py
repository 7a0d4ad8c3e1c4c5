"""Commits of which their own process does not hear: whoever waits, and the edges, learn of them all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.planning.stimuli import ReleaseRequested
from tests.sim.duo import Duo, duo
from tests.sim.world import Agent

SOON_S = 3.0


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Duo, Agent]]:
    async with duo(tmp_path) as made:
        yield made


async def ready(world: Duo, agent: Agent) -> str:
    async with agent.at_work():
        made = str((await world.create(timeoutSeconds=600))["id"])
    await routed(world, made, True)
    return made


async def routed(world: Duo, sandbox_id: str, wanted: bool) -> None:
    """Every replica tells its edges so."""
    async with asyncio.timeout(SOON_S):
        while any((control._routes.get(sandbox_id) is not None) is not wanted for control in world.controls):
            await asyncio.sleep(0.02)


async def test_a_commit_whose_answer_was_lost_is_published(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    made = await ready(world, agent)
    world.database_.weather.forgets = 1.0
    answer = await world.call("DELETE", f"/v1/sandboxes/{made}")
    world.database_.weather.forgets = 0.0
    assert answer.json()["error"]["code"] == "OUTCOME_UNKNOWN"
    await routed(world, made, False)
    removal = await agent.wanted()
    assert removal.kind == "ensure_absent"


async def test_a_commit_whose_caller_has_gone_is_published(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    made = await ready(world, agent)
    world.database_.weather.slow_s = 0.3
    asking = asyncio.ensure_future(world.running.reconciler.apply(made, ReleaseRequested()))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await routed(world, made, False)


async def test_what_was_read_for_nothing_changes_nothing(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    made = await ready(world, agent)
    before = await world.facts(made)
    world.running.reconciler.doubt(made)
    world.running.reconciler.doubt("i" + "z" * 20)
    async with asyncio.timeout(SOON_S):
        while world.running.reconciler.doubtful:
            await asyncio.sleep(0.02)
    assert await world.facts(made) == before
    await routed(world, made, True)
