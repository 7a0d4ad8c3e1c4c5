"""What is waited for at one replica, of a host whose polls and answers come to another."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from atoll.base.errors import Code, OutcomeUnknown, Refused
from atoll.control.replicas.peers import LIFE_S, PREFIX, SIGNATURE
from atoll.control.sessions import consoles
from atoll.wire import agent as wire
from atoll.wire.replica import Wish
from tests.sim.duo import Duo, duo
from tests.sim.test_captures import layer, send
from tests.sim.world import Agent

Pair = tuple[Duo, Agent]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    changes = {"images": tmp_path / "images", "image_program": Path("/bin/false")}
    async with duo(tmp_path, changes=changes) as (world, agent):
        for control in world.controls:
            assert control._replicas is not None
            await control._replicas.beat()
        yield world, agent


async def made(world: Duo, agent: Agent) -> dict[str, str]:
    async with agent.at_work():
        return await world.create()


async def reads(world: Duo, sandbox_id: str) -> asyncio.Task[httpx.Response]:
    """Somebody who reads a console at the first replica, and has begun to."""
    with world.through(0):
        task = asyncio.ensure_future(world.call("GET", f"/v1/sandboxes/{sandbox_id}/logs"))
        async with asyncio.timeout(5):
            while not world.controls[0].consoles.wishes:
                await asyncio.sleep(0.01)
    return task


async def wished(agent: Agent) -> wire.Collect:
    """Poll until something is wished."""
    async with asyncio.timeout(20):
        while True:
            answer = await agent.poll(park_s=20.0)
            if answer.collect:
                (wish,) = answer.collect
                return wish


def answer_to(agent: Agent, wish: wire.Collect, **changes: str) -> wire.Collected:
    body = {"console_base64": base64.b64encode(b"hello\n").decode(), **changes}
    return wire.Collected(host_id=agent.host_id, epoch=agent.epoch, id=wish.id, placement_id=wish.placement_id, **body)  # type: ignore[arg-type]


@pytest.mark.parametrize("answers_at", [0, 1])
async def test_a_console_is_read_wherever_the_host_polls_and_answers(pair: Pair, answers_at: int) -> None:
    world, agent = pair
    sandbox = await made(world, agent)
    with world.through(1):
        polling = asyncio.ensure_future(wished(agent))
        await asyncio.sleep(0.3)
    reading = await reads(world, sandbox["id"])
    wish = await polling
    with world.through(answers_at):
        assert await agent._post("collected", answer_to(agent, wish)) == {}
    answer = await reading
    assert (answer.status_code, answer.text) == (200, "hello\n")
    for number in (0, 1):
        with world.through(number):
            assert (await agent.poll()).collect == [], "it is asked once"


async def test_a_host_between_two_polls_is_waited_for(pair: Pair) -> None:
    world, agent = pair
    sandbox = await made(world, agent)
    reading = await reads(world, sandbox["id"])
    await asyncio.sleep(0.2)
    with world.through(1):
        wish = await wished(agent)
        await agent._post("collected", answer_to(agent, wish))
    assert (await reading).text == "hello\n"


async def test_a_host_that_is_nowhere_is_not_waited_for_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    world, agent = pair
    monkeypatch.setattr(consoles, "_PATIENCE_S", 0.7)
    sandbox = await made(world, agent)
    assert (await (await reads(world, sandbox["id"]))).json()["error"]["code"] == "OUTCOME_UNKNOWN"
    asked = len(world.lines.calls)
    await asyncio.sleep(0.7)
    assert len(world.lines.calls) == asked, "who has given up asks nobody any more"


async def test_a_layer_comes_to_where_it_is_waited_for(pair: Pair) -> None:
    world, agent = pair
    await made(world, agent)
    placement_id = agent.commands[0].placement_id
    captures = world.controls[0].captures
    assert captures is not None
    with world.through(1):
        polling = asyncio.ensure_future(wished(agent))
        await asyncio.sleep(0.1)
        taking = asyncio.ensure_future(captures.take(host_id=agent.host_id, placement_id=placement_id))
        wish = await polling
        content = layer("changed")
        assert await send(agent, wish.id, content, entries="3") == (204, "")
    taken = await taking
    assert (taken.digest, taken.size, taken.entries) == (f"sha256:{hashlib.sha256(content).hexdigest()}", len(content), 3)
    assert (captures.store / "blobs" / "sha256" / hashlib.sha256(content).hexdigest()).read_bytes() == content
    with world.through(0):
        assert (await agent.poll()).collect == [], "this run of the agent has been asked, by the other replica"


async def test_a_layer_that_cannot_be_had_is_told_to_who_waits(pair: Pair) -> None:
    world, agent = pair
    await made(world, agent)
    captures = world.controls[0].captures
    assert captures is not None
    with world.through(1):
        polling = asyncio.ensure_future(wished(agent))
        await asyncio.sleep(0.1)
        taking = asyncio.ensure_future(captures.take(host_id=agent.host_id, placement_id=agent.commands[0].placement_id))
        wish = await polling
        await agent._post("collected", answer_to(agent, wish, console_base64="", code="HOST_DISK_FULL", message="the disk says no"))
    with pytest.raises(Refused, match="the disk says no") as refused:
        await taking
    assert refused.value.code is Code.HOST_DISK_FULL


async def test_a_layer_that_nobody_waits_for_is_not_kept(pair: Pair) -> None:
    world, agent = pair
    await made(world, agent)
    with world.through(1):
        assert await send(agent, "dlv_00000000000000000000", layer("x")) == (400, "INVALID_REQUEST")
    assert not list(world.path.glob("images-*/blobs/sha256/*"))


async def test_an_altered_layer_is_not_taken(pair: Pair) -> None:
    world, agent = pair
    await made(world, agent)
    here, there = world.controls[0].captures, world.controls[1].captures
    assert here is not None
    assert there is not None
    keep = there._keep

    async def altered(wish_id: str, parts: AsyncIterator[bytes], *, digest: str | None = None) -> tuple[str, int]:
        found, size = await keep(wish_id, parts, digest=digest)
        (there.store / "blobs" / "sha256" / found).write_bytes(b"something else")
        return found, size

    there._keep = altered  # type: ignore[method-assign]
    with world.through(1):
        polling = asyncio.ensure_future(wished(agent))
        await asyncio.sleep(0.1)
        taking = asyncio.ensure_future(here.take(host_id=agent.host_id, placement_id=agent.commands[0].placement_id))
        wish = await polling
        assert await send(agent, wish.id, layer("changed")) == (503, "CONTROL_UNAVAILABLE")
    assert not taking.done(), "its host may send it again"
    assert not (here.store / "blobs").exists()
    taking.cancel()


async def test_only_replicas_are_heard(pair: Pair) -> None:
    world, agent = pair
    peers = world.controls[0].peers
    assert peers is not None
    content = Wish(host_id=agent.host_id, collect=wire.Collect(id="dlv_1", placement_id="plc_1")).model_dump_json().encode()
    path = f"{PREFIX}wish"
    now = world.controls[1].peers.clock.now()  # type: ignore[union-attr]
    old, far = int(now - 1), int(now + 10 * LIFE_S)
    signatures = {
        "nothing": "",
        "nonsense": "1.2.3",
        "another path": peers._sign("POST", f"{PREFIX}came", content),
        "another body": peers._sign("POST", path, content + b" "),
        "an old one": f"{old}.{peers.tokens.replica(peers._said('POST', path, content, old))}",
        "one for ever": f"{far}.{peers.tokens.replica(peers._said('POST', path, content, far))}",
    }
    for what, signature in signatures.items():
        status, body = await world.lines.post(f"http://replica-1{path}", content, {SIGNATURE: signature})
        assert (status, b"UNAUTHENTICATED" in body) == (401, True), what
    status, body = await world.lines.post(f"http://replica-1{path}", content, {SIGNATURE: peers._sign("POST", path, content)})
    assert b"HOST_NOT_FOUND" in body, "no poll of the host is there"
    with pytest.raises(Refused):
        peers.fetch("http://somewhere.else", "sha256:" + "0" * 64)


async def test_wishes_have_a_limit(pair: Pair) -> None:
    world, agent = pair
    peers = world.controls[1].peers
    assert peers is not None
    peers.parked = lambda _host_id: "ep_1"
    wish = Wish(host_id=agent.host_id, collect=wire.Collect(id="dlv_1", placement_id="plc_1"))
    for _ in range(256):
        peers.give(wish)
    with pytest.raises(Exception, match="too much") as refused:
        peers.give(wish)
    assert not isinstance(refused.value, OutcomeUnknown)
