"""The self-check waits for a guest's answer, and leaves nothing open of what was not answered in time."""

import asyncio
import gc

from atoll.drivers.oci import selftest


async def test_a_guest_that_answers_late_is_asked_again(monkeypatch):
    asked = 0

    async def answer(reader, writer):
        nonlocal asked
        asked += 1
        await reader.readline()
        if asked == 1:
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    monkeypatch.setattr(selftest, "GUEST_PORT", server.sockets[0].getsockname()[1])
    async with asyncio.timeout(10):
        assert await selftest.answers("127.0.0.1", ())
    assert asked == 2
    server.close()
    await asyncio.sleep(0)
    # What is not closed says so when it is collected, which is an error here.
    gc.collect()
