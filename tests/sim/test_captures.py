"""Steps in sandboxes of a scripted host: how they are placed, hidden, captured and ended. Only the inside is pretended."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from atoll.base.units import ZERO
from atoll.control.builds.port import Ended, Told
from atoll.control.sessions import captures as module
from atoll.wire import agent as wire
from tests.builders import IMAGE
from tests.sim.test_builds import begin, code_of, ended, request, run, status
from tests.sim.world import Agent, World


@dataclass
class Inside:
    """What runs in every sandbox: it says what it is asked to run."""

    ran: list[tuple[str, str]] = field(default_factory=list)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(
        self, command: Sequence[str], *, user: str, cwd: str | None, env: Mapping[str, str], timeout_s: float, told: Told
    ) -> Ended:
        self.ran.append((user, command[-1]))
        if command[-1] == "hang":
            self.holding.set()
            await self.go.wait()
        return Ended(0)

    async def put(self, path: str, source: Path) -> None:
        return

    async def close(self) -> None:
        return


def layer(name: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return made.getvalue()


@pytest.fixture
async def inside() -> Inside:
    return Inside()


@pytest.fixture
async def world(tmp_path: Path, inside: Inside) -> AsyncIterator[World]:
    changes = {"inside": lambda _sandbox_id, _token: inside, "images": tmp_path / "images", "image_program": Path("/bin/false")}
    made = World(tmp_path, changes=changes)
    await made.start()
    yield made
    await made.stop()


async def send(agent: Agent, wish_id: str, content: bytes, *, entries: str = "1") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {agent.credential}", "Atoll-Entries": entries}
    async with agent.world._client() as client:
        answer = await client.put(f"/agent/v1/layers/{wish_id}", headers=headers, content=content)
    return answer.status_code, "" if not answer.content else str(answer.json()["code"])


@contextlib.asynccontextmanager
async def hands(
    agent: Agent, *, fails: str | None = None, wishes: list[wire.Collect] | None = None, mute: bool = False
) -> AsyncIterator[None]:
    """A host that obeys, and hands in a layer of each placement that it is asked for."""

    async def collected(wish: wire.Collect) -> None:
        if wishes is not None:
            wishes.append(wish)
        if mute:
            return
        if fails is not None:
            answer = wire.Collected(
                host_id=agent.host_id, epoch=agent.epoch, id=wish.id, placement_id=wish.placement_id, code=fails, message="the disk says no"
            )
            await agent._post("collected", answer)
        else:
            assert await send(agent, wish.id, layer(wish.placement_id)) == (204, "")

    async def work() -> None:
        while True:
            answer = await agent.poll(park_s=5.0)
            for command in answer.commands:
                await agent.obey(command)
            for wish in answer.collect:
                await collected(wish)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_each_step_has_a_sandbox_that_ends_with_it(world: World, agent: Agent, inside: Inside) -> None:
    asked = await request(world, cpuCount=1)
    async with hands(agent):
        await begin(world, asked, run("one"), run("two", args=["two", "root"]))
        done = await ended(world, asked)
        assert done["status"] == "ready", done
        async with asyncio.timeout(10):
            while await world.used(agent.host_id) != ZERO:
                await asyncio.sleep(0.02)
    assert inside.ran == [("user", "one"), ("root", "two")]
    started = [command for command in agent.commands if command.spec is not None]
    assert next(command.spec.image for command in started if command.spec) == IMAGE
    assert started[-1].spec is not None
    assert started[-1].spec.image != IMAGE
    assert all(command.spec.tmp_on_disk for command in started if command.spec)
    image = (await world.call("GET", "/v1/templates/mine")).json()["image"]
    blobs = world.path / "images" / "blobs" / "sha256"
    assert (blobs / image.removeprefix("sha256:")).exists()
    for command in started:
        content = layer(command.placement_id)
        assert (blobs / hashlib.sha256(content).hexdigest()).read_bytes() == content
    assert not list((world.path / "images" / "partial").iterdir())


async def test_sandboxes_of_builds_are_the_builds_own(world: World, agent: Agent, inside: Inside) -> None:
    asked = await request(world)
    key = await world.team("others")
    async with hands(agent):
        await begin(world, asked, run("hang"))
        await inside.holding.wait()
        sandbox_id = next(command.sandbox_id for command in agent.commands)
        for path in ("/v2/sandboxes", "/sandboxes"):
            assert (await world.call("GET", path)).json() == []
        for who in ({}, {"key": key}):
            assert (await world.call("GET", f"/sandboxes/{sandbox_id}", **who)).status_code == 404 or not who
        assert (await world.call("GET", f"/sandboxes/{sandbox_id}", key=key)).status_code == 404
        assert (await world.call("DELETE", f"/sandboxes/{sandbox_id}", key=key)).status_code == 404
        # What the team asks of its template is not kept waiting by its own build.
        assert (await world.call("DELETE", "/templates/mine")).status_code == 204
        async with asyncio.timeout(10):
            while await world.used(agent.host_id) != ZERO:
                await asyncio.sleep(0.02)


async def test_why_a_host_hands_in_nothing_is_told(world: World, agent: Agent) -> None:
    asked = await request(world)
    async with hands(agent, fails="HOST_DISK_FULL"):
        await begin(world, asked, run("one"))
        failed = await ended(world, asked)
    assert (failed["reason"]["message"], failed["reason"]["step"]) == ("the disk says no", "1")
    assert await code_of(world, asked) == "HOST_DISK_FULL"


async def test_the_next_run_of_an_agent_is_asked_again(world: World, agent: Agent) -> None:
    asked = await request(world)
    first: list[wire.Collect] = []
    async with hands(agent, wishes=first, mute=True):
        await begin(world, asked, run("one"))
        async with asyncio.timeout(10):
            while not first:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        assert len(first) == 1, "a run that has the wish is not told again"
    later = agent.next_run()
    async with hands(later):
        assert (await ended(world, asked))["status"] == "ready"


async def test_only_who_was_asked_sends_a_layer(world: World, agent: Agent) -> None:
    asked = await request(world)
    wishes: list[wire.Collect] = []
    async with hands(agent, wishes=wishes, mute=True):
        await begin(world, asked, run("one"))
        async with asyncio.timeout(10):
            while not wishes:
                await asyncio.sleep(0.02)
        other = await world.agent("other", token=await world.token("other"))
        assert await send(other, wishes[0].id, b"x") == (400, "INVALID_REQUEST")
        assert await send(agent, "dlv_nobodyaskedforthisone", b"x") == (400, "INVALID_REQUEST")
        assert await send(agent, wishes[0].id, b"x", entries="many") == (400, "INVALID_REQUEST")
        stranger = Agent(world, credential="nobody")
        assert (await send(stranger, wishes[0].id, b"x"))[0] == 401
        assert (await status(world, asked))["status"] == "building"
        assert await send(agent, wishes[0].id, layer("a")) == (204, "")
        assert (await ended(world, asked))["status"] == "ready"
        assert await send(agent, wishes[0].id, layer("b")) == (400, "INVALID_REQUEST")


async def test_a_layer_has_an_end(world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_MAX", 100)
    asked = await request(world)
    wishes: list[wire.Collect] = []
    async with hands(agent, wishes=wishes, mute=True):
        await begin(world, asked, run("one"))
        async with asyncio.timeout(10):
            while not wishes:
                await asyncio.sleep(0.02)
        assert await send(agent, wishes[0].id, b"x" * 101) == (413, "BODY_TOO_LARGE")
        failed = await ended(world, asked)
    assert failed["status"] == "error"
    assert not list((world.path / "images" / "partial").iterdir())


async def test_what_a_killed_control_had_on_hosts_ends(world: World, agent: Agent, inside: Inside) -> None:
    asked = await request(world)
    async with hands(agent):
        await begin(world, asked, run("hang"))
        await inside.holding.wait()
        left = {command.placement_id for command in agent.commands}
    world.running.builds._stop(list(world.running.builds.tasks))
    await asyncio.sleep(0.1)
    inside.holding.clear()
    await world.restart()
    async with hands(agent):
        await inside.holding.wait()
        inside.go.set()
        assert (await ended(world, asked))["status"] == "ready"
        async with asyncio.timeout(10):
            while await world.used(agent.host_id) != ZERO:
                await asyncio.sleep(0.02)
    assert left <= set(agent.tombstones) | {p for p in left if p not in agent.holds}
