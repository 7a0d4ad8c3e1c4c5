"""A watched guest's end is told once, with how it ended."""

import asyncio
import subprocess

import pytest

from atoll.drivers.oci.watching import Watches


@pytest.fixture
async def ends():
    found = asyncio.Queue()
    watches = Watches(lambda placement_id, how: found.put_nowait((placement_id, how)))
    yield watches, found
    watches.close()


async def first(found):
    async with asyncio.timeout(5):
        return await found.get()


async def test_an_end_is_told_once(ends):
    watches, found = ends
    process = subprocess.Popen(["sh", "-c", "sleep 0.05; exit 3"])
    watches.watch("plc_1", process.pid)
    watches.watch("plc_1", process.pid)
    assert "plc_1" in watches
    assert await first(found) == ("plc_1", "exit 3")
    assert "plc_1" not in watches
    process.wait()
    await asyncio.sleep(0.02)
    assert found.empty()


async def test_what_nobody_wants_to_know_any_more_is_not_told(ends):
    watches, found = ends
    process = subprocess.Popen(["sleep", "60"])
    watches.watch("plc_1", process.pid)
    watches.unwatch("plc_1")
    watches.unwatch("plc_1")
    process.kill()
    process.wait()
    await asyncio.sleep(0.05)
    assert found.empty()


async def test_who_has_ended_before_is_told_at_once(ends):
    watches, found = ends
    process = subprocess.Popen(["true"])
    process.wait()
    watches.watch("plc_1", process.pid)
    assert await first(found) == ("plc_1", None)
