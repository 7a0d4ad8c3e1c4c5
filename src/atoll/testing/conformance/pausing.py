"""Cases about freezing a guest where it is: it does nothing, it loses nothing, and it can be taken away at any moment."""

from __future__ import annotations

import asyncio

from atoll.base.errors import Code
from atoll.drivers.port import Order, Power
from atoll.testing.conformance.stand import Stand, refusal, shell

COUNTER = "i=0; while :; do i=$((i+1)); echo $i >>/count; sleep 0.02; done"
"""Its last line is the count: a file that is written anew is empty for a moment."""
IDLE_S = 1.0
CPU_S_MAX = 0.05


async def _gone(stand: Stand, order: Order) -> None:
    assert (await stand.driver.inspect(order.placement_id)).power is Power.ABSENT
    assert not stand.traces(order), f"left on the machine: {stand.traces(order)}"


async def pause_and_resume_can_be_repeated(stand: Stand) -> None:
    order = stand.order()
    running = await stand.driver.start(order)
    for _ in range(2):
        frozen = await stand.driver.pause(order.placement_id)
        assert (frozen.power, frozen.address, frozen.pid) == (Power.FROZEN, running.address, running.pid)
        assert (await stand.driver.inspect(order.placement_id)).power is Power.FROZEN
    for _ in range(2):
        again = await stand.driver.resume(order.placement_id)
        assert (again.power, again.address, again.pid) == (Power.RUNNING, running.address, running.pid)
        assert (await stand.driver.inspect(order.placement_id)).power is Power.RUNNING
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)
    assert stand.exits == []


async def a_frozen_guest_is_removed_at_once(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.start(order)
    await stand.driver.pause(order.placement_id)
    async with asyncio.timeout(5.0):
        await stand.driver.remove(order.placement_id)
    await _gone(stand, order)
    assert stand.exits == [], "an end that was asked for is no news"


async def a_frozen_guest_is_stopped_at_once(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.start(order)
    await stand.driver.pause(order.placement_id)
    async with asyncio.timeout(5.0):
        await stand.driver.stop(order.placement_id, grace_s=20.0)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.STOPPED
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def a_start_leaves_a_frozen_guest_as_it_is(stand: Stand) -> None:
    order = stand.order()
    before = await stand.driver.start(order)
    await stand.driver.pause(order.placement_id)
    seen = await stand.driver.start(order)
    assert (seen.power, seen.pid) == (Power.FROZEN, before.pid)
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def what_is_not_there_cannot_be_paused(stand: Stand) -> None:
    order = stand.order()
    assert (await refusal(stand.driver.pause(order.placement_id))).code is Code.PLACEMENT_LOST
    assert (await refusal(stand.driver.resume(order.placement_id))).code is Code.PLACEMENT_LOST
    await stand.driver.prepare(order)
    assert (await refusal(stand.driver.pause(order.placement_id))).code is Code.PLACEMENT_LOST
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def a_frozen_guest_survives_its_driver(stand: Stand) -> None:
    order = stand.order()
    before = await stand.driver.start(order)
    await stand.driver.pause(order.placement_id)
    driver = await stand.reopen()
    adopted = await driver.adopt(order.placement_id)
    assert (adopted.power, adopted.address, adopted.pid) == (Power.FROZEN, before.address, before.pid)
    assert (await driver.resume(order.placement_id)).power is Power.RUNNING
    await driver.pause(order.placement_id)
    await stand.end_guest(order, adopted)
    # A frozen process of the older kind of control groups dies when it goes on.
    await driver.remove(order.placement_id)
    await _gone(stand, order)


async def a_frozen_guest_does_nothing_and_then_goes_on(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, f"({COUNTER}) >/dev/null 2>&1 &")
    await asyncio.sleep(0.3)
    second = 0
    for _ in range(3):
        await stand.driver.pause(order.placement_id)
        await asyncio.sleep(IDLE_S)
        await stand.driver.resume(order.placement_id)
        first = int((await shell(guest, "tail -n 1 /count")).out)
        await asyncio.sleep(0.5)
        second = int((await shell(guest, "tail -n 1 /count")).out)
        assert 0 < first < second, f"{first} {second}: it goes on counting where it was"
    assert second < 400, f"{second}: nothing was counted while it was frozen"
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def a_frozen_guest_uses_no_cpu(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, "(while :; do :; done) >/dev/null 2>&1 &")
    await stand.driver.pause(order.placement_id)
    before = stand.cpu_used_s(order)
    await asyncio.sleep(IDLE_S)
    used = stand.cpu_used_s(order) - before
    assert used < CPU_S_MAX, f"{used} s of CPU while it was frozen"
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def connections_outlast_a_pause(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    command = asyncio.create_task(guest.run(["/bin/sh", "-c", "echo begun; sleep 1; echo ended"], user="root", timeout_s=20.0))
    await asyncio.sleep(0.4)
    await stand.driver.pause(order.placement_id)
    await asyncio.sleep(IDLE_S)
    assert not command.done(), "the stream waits"
    await stand.driver.resume(order.placement_id)
    result = await command
    assert result.out == "begun\nended\n", result.text
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)
