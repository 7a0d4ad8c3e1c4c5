"""Two control replicas over one store, on the real clock: what `World` is to one, for tests of what may come to another replica."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from atoll.control.compose import Control
from atoll.testing.sim.handle import SharedHandle
from atoll.testing.sim.process import Process
from atoll.testing.sim.store import Database
from tests.sim.world import TOKEN, Agent, World


@dataclass
class Duo(World):
    """`at` is the replica that the next call goes to."""

    controls: list[Control] = field(default_factory=list)
    database_: Database = field(default_factory=lambda: Database(on_statement=lambda _statement: None, wall=time.time))
    at: int = 0
    numbers: Any = field(default_factory=itertools.count)
    clocks: tuple[Callable[[Any], Any], ...] = (lambda clock: clock, lambda clock: clock)

    async def start(self) -> None:
        self.write_files()
        for clock_of in self.clocks:
            number = next(self.numbers)
            dice = random.Random(number)
            handle = SharedHandle(self.database_, Process(f"control {number}"), dice)
            control = Control(self.settings(), clock=clock_of(self.clock), dice=dice.randbytes, store=handle)
            await control.start()
            self.controls.append(control)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        for control in self.controls:
            await control.stop()
        self.database_.dispose()

    @property
    def running(self) -> Control:
        return self.controls[self.at]

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.running.app), base_url="http://control.test", timeout=60)

    @contextlib.contextmanager
    def through(self, number: int) -> Any:
        """Calls of this block go to that replica."""
        before, self.at = self.at, number
        try:
            yield
        finally:
            self.at = before


@contextlib.asynccontextmanager
async def duo(path: Path, **changes: Any) -> AsyncIterator[tuple[Duo, Agent]]:
    """Two replicas and an enrolled agent."""
    made = Duo(path, **changes)
    await made.start()
    try:
        agent = Agent(made)
        await agent.enroll(TOKEN)
        await agent.poll()
        yield made, agent
    finally:
        await made.stop()


def twin(agent: Agent) -> Agent:
    """The same run, with bookkeeping of its own: for messages that are repeated or late."""
    return replace(agent, holds=dict(agent.holds), ends=dict(agent.ends), tombstones=list(agent.tombstones), unheard=dict(agent.unheard))
