"""What hosts say that they keep of images, on control's page of metrics."""

from __future__ import annotations

from atoll.wire.agent import HostHealth, ImageCacheState
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
