from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from atoll.programs.corking import AT_ONCE_BYTES, Corked, CorkedHttp


class Wire:
    """Records what a transport is told."""

    def __init__(self) -> None:
        self.said: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.said.append(data)

    def close(self) -> None:
        self.said.append("close")

    def is_closing(self) -> bool:
        return "close" in self.said


@pytest.fixture
async def corked() -> tuple[Wire, Corked]:
    wire = Wire()
    return wire, Corked(wire, asyncio.get_running_loop())  # type: ignore[arg-type]


async def test_what_is_written_in_one_turn_leaves_together(corked: tuple[Wire, Corked]) -> None:
    wire, transport = corked
    for data in (b"head", b"", b"body"):
        transport.write(data)
    assert wire.said == []
    await asyncio.sleep(0)
    assert wire.said == [b"headbody"]
    transport.write(b"more")
    await asyncio.sleep(0)
    assert wire.said == [b"headbody", b"more"]
    await asyncio.sleep(0)
    assert len(wire.said) == 2


async def test_closing_sends_first(corked: tuple[Wire, Corked]) -> None:
    wire, transport = corked
    transport.write(b"last words")
    assert not transport.is_closing()
    transport.close()
    assert wire.said == [b"last words", "close"]
    assert transport.is_closing()
    await asyncio.sleep(0)
    assert wire.said == [b"last words", "close"]


async def test_bulk_is_not_kept(corked: tuple[Wire, Corked]) -> None:
    wire, transport = corked
    transport.write(b"head")
    transport.write(b"x" * AT_ONCE_BYTES)
    assert wire.said == [b"head" + b"x" * AT_ONCE_BYTES]
    await asyncio.sleep(0)
    assert len(wire.said) == 1


async def test_a_server_answers_in_one_piece() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": scope["path"].encode()[:4]})

    config = uvicorn.Config(app, port=0, http=CorkedHttp, lifespan="off", log_config=None, date_header=False, server_header=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for path in (b"/one", b"/two"):
            writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: here\r\n\r\n")
            assert await reader.read(65536) == b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n" + path
        writer.close()
    finally:
        server.should_exit = True
        await serving
