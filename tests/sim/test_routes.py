"""What edges are told: one snapshot, then every change; and how a signed file is found."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest

from atoll.control import routes
from atoll.domain.placement import Observed
from tests.sim.test_pausing import resting
from tests.sim.world import EDGE_TOKEN, Agent, World

PREFIX = "/internal/edge/v1"
AUTHORISED = {"Authorization": f"Bearer {EDGE_TOKEN}"}


class Stream:
    """One follower of the stream, line by line."""

    def __init__(self, world: World, headers: dict[str, str] | None = None) -> None:
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._hung_up = asyncio.Event()
        self._lines: list[dict[str, Any]] = []
        self._rest = b""
        pairs = [(name.lower().encode(), value.encode()) for name, value in (AUTHORISED if headers is None else headers).items()]
        scope = {"type": "http", "method": "GET", "path": f"{PREFIX}/routes/stream", "headers": pairs, "query_string": b"", "state": {}}
        self._asked = False
        self.task = asyncio.create_task(world.running.app(scope, self._receive, self._sent.put))

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def line(self) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while not self._lines:
                message = await self._sent.get()
                if message["type"] == "http.response.start":
                    assert message["status"] == 200
                    continue
                self._rest += message["body"]
                *whole, self._rest = self._rest.split(b"\n")
                self._lines += [json.loads(one) for one in whole]
                if not message.get("more_body"):
                    self._lines.append({"type": "end"})
        return self._lines.pop(0)

    async def hang_up(self) -> None:
        self._hung_up.set()
        async with asyncio.timeout(5):
            await self.task


@contextlib.asynccontextmanager
async def following(world: World) -> AsyncIterator[Stream]:
    stream = Stream(world)
    try:
        yield stream
    finally:
        await stream.hang_up()


async def ready(world: World, agent: Agent, **body: Any) -> tuple[str, str]:
    sandbox_id = await world.accept(**body)
    command = await agent.wanted()
    agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    await agent.observe()
    return sandbox_id, command.placement_id


async def test_a_stream_begins_with_everything_and_goes_on_with_changes(world: World, agent: Agent) -> None:
    first, first_placement = await ready(world, agent)
    async with following(world) as stream:
        snapshot = await stream.line()
        assert snapshot["type"] == "snapshot"
        assert [route["sandbox_id"] for route in snapshot["routes"]] == [first]
        second, placement = await ready(world, agent)
        line = await stream.line()
        assert (line["type"], line["route"]["sandbox_id"], line["route"]["placement_id"]) == ("route", second, placement)
        assert line["route"]["reach"] == {"kind": "direct", "ip": "10.64.0.2"}
        assert line["route"]["guest_port"] == 49983
        assert line["route"]["revision"] == (await world.facts(second)).sandbox.revision
        assert line["cursor"] > snapshot["cursor"]
        released = await world.release(first)
        gone = await stream.line()
        assert (gone["type"], gone["sandbox_id"], gone["reason"]) == ("gone", first, "RELEASE_REQUESTED")
        assert released["id"] == first
        assert gone["revision"] > snapshot["routes"][0]["revision"]
    assert first_placement


async def test_an_answer_that_changed_a_sandbox_says_up_to_where_an_edge_must_have_heard(world: World, agent: Agent) -> None:
    """Create, set_timeout and kill carry id and revision; the stream has said that revision, or gone, already."""
    async with following(world) as stream, agent.at_work():
        await stream.line()
        created = await world.call("POST", "/sandboxes", json={"templateID": "base"})
        sandbox_id, _, revision = created.headers["atoll-changed"].partition(":")
        assert sandbox_id == created.json()["sandboxID"]
        assert (await stream.line())["route"]["revision"] >= int(revision)
        moved = await world.call("POST", f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 600})
        assert int(moved.headers["atoll-changed"].split(":")[1]) > int(revision)
        killed = await world.call("DELETE", f"/sandboxes/{sandbox_id}")
        at_least = int(killed.headers["atoll-changed"].split(":")[1])
        while (line := await stream.line())["type"] != "gone":
            pass
        assert line["revision"] >= at_least


@pytest.mark.parametrize("verb", ["pause", "suspend"])
async def test_an_answer_that_says_it_rests_waits_for_no_word_that_never_comes(world: World, agent: Agent, verb: str) -> None:
    """Its route is gone when it begins to rest; edges hold the answer until they have heard of the revision in which it does."""
    agent.script = resting
    async with following(world) as stream, agent.at_work():
        await stream.line()
        sandbox_id = (await world.create(timeoutSeconds=600))["id"]
        rests = await world.call("POST", f"/v1/sandboxes/{sandbox_id}/{verb}", json={})
        assert rests.status_code == 200, rests.text
        said = int(rests.headers["atoll-changed"].split(":")[1])
        while (line := await stream.line())["type"] != "gone" or line["revision"] < said:
            pass
        back = await world.call("POST", f"/v1/sandboxes/{sandbox_id}/resume", json={})
        said = int(back.headers["atoll-changed"].split(":")[1])
        while (line := await stream.line())["type"] != "route":
            pass
        assert line["route"]["revision"] >= said


async def test_what_is_not_ready_has_no_route(world: World, agent: Agent) -> None:
    sandbox_id = await world.accept()
    command = await agent.wanted()
    assert (await world.call("GET", f"{PREFIX}/routes/{sandbox_id}", headers=AUTHORISED)).status_code == 404
    agent.see(command.placement_id, observed=Observed.RUNNING, address="10.64.0.2")
    await agent.observe()
    assert (await world.call("GET", f"{PREFIX}/routes/{sandbox_id}", headers=AUTHORISED)).status_code == 404
    await agent.obey(command)
    found = await world.call("GET", f"{PREFIX}/routes/{sandbox_id}", headers=AUTHORISED)
    assert found.json()["sandbox_id"] == sandbox_id


async def test_a_second_look_at_a_guest_does_not_take_its_route_away(world: World, agent: Agent) -> None:
    """A route that ended and came back under one revision would stay ended: edges take no older or equal word after an end."""
    sandbox_id, placement_id = await ready(world, agent)
    async with following(world) as stream:
        revision = (await stream.line())["routes"][0]["revision"]
        for is_ready in (False, True):
            agent.see(placement_id, observed=Observed.RUNNING, ready=is_ready, address="10.64.0.2")
            await agent.observe()
            line = await stream.line()
            assert (line["type"], line["route"]["revision"]) == ("route", revision)
    assert (await world.facts(sandbox_id)).sandbox.state == "ready"


async def test_a_guest_that_ended_by_itself_is_gone_at_once(world: World, agent: Agent) -> None:
    sandbox_id, placement_id = await ready(world, agent)
    async with following(world) as stream:
        await stream.line()
        agent.see(placement_id, observed=Observed.ABSENT, ended_by="exit", reason="GUEST_EXITED")
        await agent.observe()
        gone = await stream.line()
    assert (gone["type"], gone["sandbox_id"], gone["reason"]) == ("gone", sandbox_id, "GUEST_EXITED")


async def test_routes_are_known_in_the_first_moment_after_a_restart(world: World, agent: Agent) -> None:
    sandbox_id, placement_id = await ready(world, agent)
    before = (await world.call("GET", f"{PREFIX}/routes/{sandbox_id}", headers=AUTHORISED)).json()
    await world.restart()
    assert (await world.call("GET", f"{PREFIX}/routes/{sandbox_id}", headers=AUTHORISED)).json() == before
    async with following(world) as stream:
        assert [route["placement_id"] for route in (await stream.line())["routes"]] == [placement_id]


async def test_stopping_control_ends_the_streams(world: World, agent: Agent) -> None:
    stream = Stream(world)
    await stream.line()
    world.running._routes.close()
    assert await stream.line() == {"type": "end"}
    await asyncio.wait_for(stream.task, 30)


async def test_two_edges_hear_the_same(world: World, agent: Agent) -> None:
    async with following(world) as one, following(world) as two:
        assert (await one.line())["cursor"] == (await two.line())["cursor"]
        await ready(world, agent)
        assert await one.line() == await two.line()


async def test_an_edge_that_is_too_slow_is_cut_off_and_the_others_are_not(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_QUEUE_MAX", 2)
    gate = asyncio.Event()
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def hold(message: dict[str, Any]) -> None:
        await gate.wait()
        await sent.put(message)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        raise AssertionError

    headers = [(b"authorization", f"Bearer {EDGE_TOKEN}".encode())]
    scope = {"type": "http", "method": "GET", "path": f"{PREFIX}/routes/stream", "headers": headers, "query_string": b"", "state": {}}
    task = asyncio.create_task(world.running.app(scope, receive, hold))
    async with following(world) as quick:
        await quick.line()
        sandbox_id, _ = await ready(world, agent)
        await quick.line()
        for timeout in range(600, 606):
            await world.call("POST", f"/sandboxes/{sandbox_id}/timeout", json={"timeout": timeout})
            assert (await quick.line())["type"] == "route"
    gate.set()
    await asyncio.wait_for(task, 30)
    messages = [sent.get_nowait() for _ in range(sent.qsize())]
    assert messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {EDGE_TOKEN}"}])
async def test_only_edges_may_ask(world: World, headers: dict[str, str]) -> None:
    for method, path in (("GET", "routes/stream"), ("GET", "routes/i" + "0" * 20), ("POST", "locate")):
        answer = await world.call(method, f"{PREFIX}/{path}", headers=headers)
        assert answer.status_code == 401, path


async def test_a_connect_token_reaches_one_guest_and_does_not_command_it(world: World, agent: Agent) -> None:
    sandbox_id, placement_id = await ready(world, agent)
    route = (await world.call("GET", f"{PREFIX}/routes/{sandbox_id}", headers=AUTHORISED)).json()
    claims = jwt.decode(route["connect_token"], options={"verify_signature": False})
    assert (claims["sub"], claims["plc"], claims["scp"]) == (sandbox_id, placement_id, ["connect"])


async def test_a_private_port_s_token_travels_as_a_digest(world: World, agent: Agent) -> None:
    sandbox_id, _ = await ready(world, agent, network={"publicTraffic": False})
    route = (await world.call("GET", f"{PREFIX}/routes/{sandbox_id}", headers=AUTHORISED)).json()
    shown = await world.call("GET", f"/v1/sandboxes/{sandbox_id}")
    assert route["public_traffic"] is False
    assert len(route["traffic_token_sha256"]) == 64
    token = world.running.service.traffic_token((await world.facts(sandbox_id)).sandbox)
    assert token is not None
    assert hashlib.sha256(token.encode()).hexdigest() == route["traffic_token_sha256"]
    assert shown.status_code == 200


def signature(token: str, path: str, operation: str, username: str = "", expiration: int | None = None) -> str:
    """As E2B's clients make it."""
    text = f"{path}:{operation}:{username}:{token}" + (f":{expiration}" if expiration is not None else "")
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


async def test_a_signed_file_is_found_among_live_sandboxes(world: World, agent: Agent) -> None:
    sandbox_id, _ = await ready(world, agent)
    other, _ = await ready(world, agent)
    token = agent.payloads[sandbox_id].access_token
    assert token is not None
    body = {"path": "/home/user/a b.txt", "operation": "read", "username": "user", "expiration": 1_900_000_000}
    signed = {**body, "signature": signature(token, "/home/user/a b.txt", "read", "user", 1_900_000_000)}

    async def locate(content: dict[str, Any]) -> tuple[int, Any]:
        answer = await world.call("POST", f"{PREFIX}/locate", headers=AUTHORISED, json=content)
        return answer.status_code, answer.json().get("sandbox_id")

    assert await locate(signed) == (200, sandbox_id)
    for change in ({"path": "/home/user/b"}, {"operation": "write"}, {"username": "root"}, {"expiration": None}, {"signature": "v2_x"}):
        assert await locate({**signed, **change}) == (404, None), change
    await world.release(sandbox_id)
    assert await locate(signed) == (404, None)
    assert other != sandbox_id


async def test_an_unsecured_sandbox_signs_nothing(world: World, agent: Agent) -> None:
    sandbox_id, _ = await ready(world, agent, secured=False)
    tokens = world.running.sessions._orders._tokens
    signed = {"path": "/a", "operation": "read", "signature": signature(tokens.access(sandbox_id), "/a", "read")}
    assert (await world.call("POST", f"{PREFIX}/locate", headers=AUTHORISED, json=signed)).status_code == 404
