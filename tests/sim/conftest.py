from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from tests.sim.world import Agent, World


@pytest.fixture
def quiet() -> Iterator[None]:
    """Whole worlds say much, and their trace says it better."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


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
