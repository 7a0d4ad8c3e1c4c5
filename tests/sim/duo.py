"""Two control replicas over one store, on the real clock: what `World` is to one, for tests of what may come to another replica."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
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
class Lines:
    """Implements control.replicas.peers.Line between the controls of one test, by their addresses."""

    controls: dict[str, Control] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        self.calls.append(url)
        async with self._client(url) as client:
            answer = await client.post(url, content=content, headers=dict(headers))
        return answer.status_code, answer.content

    @contextlib.asynccontextmanager
    async def get(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        self.calls.append(url)
        async with self._client(url) as client, client.stream("GET", url, headers=dict(headers)) as answer:
            yield answer.status_code, answer.aiter_bytes()

    def _client(self, url: str) -> httpx.AsyncClient:
        host = httpx.URL(url).host
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.controls[f"http://{host}"].app), timeout=60)


@dataclass
class Duo(World):
    """`at` is the replica that the next call goes to."""

    controls: list[Control] = field(default_factory=list)
    database_: Database = field(default_factory=lambda: Database(on_statement=lambda _statement: None, wall=time.time))
    at: int = 0
    numbers: Any = field(default_factory=itertools.count)
    lines: Lines = field(default_factory=Lines)
    clocks: tuple[Callable[[Any], Any], ...] = (lambda clock: clock, lambda clock: clock)

    async def start(self) -> None:
        self.write_files()
        for clock_of in self.clocks:
            number = next(self.numbers)
            dice = random.Random(number)
            handle = SharedHandle(self.database_, Process(f"control {number}"), dice)
            settings = replace(self.settings(), address=f"http://replica-{number}", line=self.lines)
            if settings.images is not None:
                settings = replace(settings, images=settings.images.with_name(f"images-{number}"))
            control = Control(settings, clock=clock_of(self.clock), dice=dice.randbytes, store=handle)
            await control.start()
            self.controls.append(control)
            self.lines.controls[settings.address] = control

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
