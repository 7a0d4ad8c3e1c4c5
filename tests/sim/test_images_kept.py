"""What hosts say that they keep of images, on control's page of metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.control.artifacts import image_caches
from atoll.wire.agent import HostHealth, ImageCacheState
from tests.sim.duo import Duo, duo
from tests.sim.world import Agent, World

ENTRIES = tuple(f'atoll_host_image_entries{{what="{what}"}}' for what in ("trees", "blobs", "quarantined", "pinned"))
BYTES = tuple(f'atoll_host_image_bytes{{what="{what}"}}' for what in ("trees", "blobs"))
USES = tuple(f'atoll_host_image_uses{{how="{how}"}}' for how in ("hit", "fetched"))


async def shown(world: World) -> list[float | None]:
    answer = await world.call("GET", "/metrics")
    assert answer.status_code == 200, answer.text
    found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in answer.text.splitlines() if line[0] != "#")}
    return [found.get(name) for name in (*ENTRIES, *BYTES, *USES)]


def told(agent: Agent, **counts: int) -> dict[str, HostHealth]:
    return {"health": agent.message().health.model_copy(update={"image_cache": ImageCacheState(**counts)})}


async def test_what_hosts_keep_of_images_is_on_the_page(world: World, agent: Agent) -> None:
    assert await shown(world) == [0] * 8
    await agent.poll(**told(agent, trees=3, tree_bytes=30, blobs=4, blob_bytes=40, quarantined=1, pinned=2, hits=9, fetches=5))
    assert await shown(world) == [3, 4, 1, 2, 30, 40, 9, 5]
    await agent.poll(**told(agent, trees=1, tree_bytes=10))
    await agent.poll()
    assert await shown(world) == [1, 0, 0, 0, 10, 0, 0, 0], "an agent that is older says nothing, and what was said stays"


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Duo, Agent]]:
    async with duo(tmp_path) as (world, agent):
        for control in world.controls:
            assert control._replicas is not None
            await control._replicas.beat()
        yield world, agent


async def at(world: Duo, replica: int) -> list[float | None]:
    with world.through(replica):
        return await shown(world)


async def test_each_replica_says_the_same_and_counts_no_host_twice(pair: tuple[Duo, Agent]) -> None:
    world, agent = pair
    other = await world.agent("second", token=await world.token("second"))
    for number, count in ((0, 1), (1, 2), (0, 3), (1, 4)):
        with world.through(number):
            await agent.poll(**told(agent, trees=count, hits=count))
        with world.through(1 - number):
            await other.poll(**told(other, trees=10 * count))
        for replica in (0, 1):
            # Replicas hear of each other's commits a moment later.
            async with asyncio.timeout(60):
                while await at(world, replica) != [11 * count, 0, 0, 0, 0, 0, count, 0]:
                    await asyncio.sleep(0.01)


async def test_the_page_does_not_wait_for_a_replica_that_hangs(pair: tuple[Duo, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    world, agent = pair
    with world.through(0):
        await agent.poll(**told(agent, trees=5))

    async def hang(*_args: object) -> tuple[int, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(image_caches, "PATIENCE_S", 0.1)
    monkeypatch.setattr(world.lines, "post", hang)
    assert (await at(world, 0))[0] == 5
