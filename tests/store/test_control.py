"""A whole control on PostgreSQL: what its suite proves on SQLite holds there too, from the first request to the last."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.sim.world import World
from tests.store.server import Server


async def test_a_sandboxs_whole_life(tmp_path: Path, server: Server) -> None:
    world = World(tmp_path)
    world.write_files()
    (tmp_path / "secrets" / "database.url").write_text(await server.database())
    await world.start()
    try:
        assert not world.database.exists()
        agent = await world.agent()
        async with agent.at_work():
            made = await asyncio.gather(*(world.create(template="base", timeoutSeconds=600, env={"A": "b"}) for _ in range(8)))
            assert {one["state"] for one in made} == {"ready"}
        await world.restart()
        async with agent.at_work():
            for one in made:
                await world.release(one["id"])
            for one in made:
                await world.until(one["id"], "released")
        assert await world.held(agent.host_id) == 0
    finally:
        await world.stop()
