"""How replicas reach each other, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from atoll.base.errors import Code, Unavailable
from atoll.programs.peering import HttpLine


@pytest.fixture
async def line() -> AsyncIterator[HttpLine]:
    made = HttpLine()
    yield made
    await made.close()


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=202, body=await request.read(), headers={"x-said": request.headers.get("atoll-replica", "")})

    async def away(_request: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/elsewhere")

    async def large(_request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (3 << 20))

    async def cut(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-length": "1000"})
        await answer.prepare(request)
        await answer.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return answer

    app = web.Application()
    app.add_routes([web.post("/echo", echo), web.post("/away", away), web.get("/large", large), web.get("/cut", cut)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


async def test_a_call_is_answered(line: HttpLine, url: str) -> None:
    assert await line.post(f"{url}/echo", b"said", {"atoll-replica": "signed"}) == (202, b"said")


async def test_a_call_follows_nobody_elsewhere(line: HttpLine, url: str) -> None:
    status, _ = await line.post(f"{url}/away", b"", {})
    assert status == 302


async def test_a_layer_comes_in_parts(line: HttpLine, url: str) -> None:
    async with line.get(f"{url}/large", {}) as (status, parts):
        sizes = [len(part) async for part in parts]
    assert (status, sum(sizes)) == (200, 3 << 20)
    assert max(sizes) <= 1 << 20


async def test_a_replica_that_is_not_there_is_unavailable(line: HttpLine, url: str) -> None:
    for what in (line.post("http://127.0.0.1:1/x", b"", {}), _read(line, "http://127.0.0.1:1/x"), _read(line, f"{url}/cut")):
        with pytest.raises(Unavailable) as refused:
            await what
        assert refused.value.code is Code.CONTROL_UNAVAILABLE


async def _read(line: HttpLine, url: str) -> None:
    async with line.get(url, {}) as (_, parts):
        async for _part in parts:
            pass
