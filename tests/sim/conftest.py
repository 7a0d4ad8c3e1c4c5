from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.sim.world import Agent, World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def agent(world: World) -> Agent:
    """The instance's own host: enrolled, one poll old, nothing on it."""
    return await world.agent()
