"""Cases about life and look: every verb twice, in odd orders, and across a lost driver."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from atoll.base.errors import Code, Refused
from atoll.drivers.port import Driver, Metered, Order, Power
from atoll.testing.conformance.stand import Stand, refusal

PARALLEL = 6


async def _gone(stand: Stand, order: Order) -> None:
    """The driver says absent, holds nothing of it, and the machine agrees."""
    seen = await stand.driver.inspect(order.placement_id)
    assert seen.power is Power.ABSENT, f"{seen}"
    assert order.placement_id not in [held.placement_id for held in await stand.driver.held()]
    traces = stand.traces(order)
    assert not traces, f"left on the machine: {traces}"


async def _until(driver: Driver, order: Order, power: Power) -> None:
    for _ in range(200):
        if (await driver.inspect(order.placement_id)).power is power:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it never became {power}: {await driver.inspect(order.placement_id)}")


async def nothing_is_absent(stand: Stand) -> None:
    order = stand.order()
    await _gone(stand, order)
    await stand.driver.remove(order.placement_id)
    await stand.driver.stop(order.placement_id)
    await _gone(stand, order)


async def prepare_can_be_repeated_and_removed(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.prepare(order)
    await stand.driver.prepare(order)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.PREPARED
    held = {item.placement_id: item for item in await stand.driver.held()}
    assert held[order.placement_id].sandbox_id == order.sandbox_id
    assert held[order.placement_id].generation == order.generation
    assert held[order.placement_id].what
    await stand.driver.remove(order.placement_id)
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def start_says_where_and_can_be_repeated(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.prepare(order)
    first = await stand.driver.start(order)
    assert first.power is Power.RUNNING
    assert first.address
    again = await stand.driver.start(order)
    assert (again.power, again.address, again.pid) == (first.power, first.address, first.pid)
    looked = await stand.driver.inspect(order.placement_id)
    assert (looked.power, looked.address, looked.pid) == (Power.RUNNING, first.address, first.pid)
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def start_needs_no_prepare(stand: Stand) -> None:
    order = stand.order()
    assert (await stand.driver.start(order)).power is Power.RUNNING
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def stop_keeps_files_and_start_goes_on(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.start(order)
    await stand.driver.stop(order.placement_id)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.STOPPED
    await stand.driver.stop(order.placement_id)
    assert (await stand.driver.start(order)).power is Power.RUNNING
    await stand.driver.stop(order.placement_id, grace_s=0.5)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.STOPPED
    assert order.placement_id in [held.placement_id for held in await stand.driver.held()]
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)
    assert stand.exits == [], "an end that was asked for is no news"


async def an_end_by_itself_is_told_once(stand: Stand) -> None:
    order = stand.order()
    seen = await stand.driver.start(order)
    await stand.end_guest(order, seen)
    await _until(stand.driver, order, Power.STOPPED)
    for _ in range(100):
        if stand.exits:
            break
        await asyncio.sleep(0.02)
    assert [placement for placement, _ in stand.exits] == [order.placement_id]
    assert stand.exits[0][1], "a reason"
    assert (await stand.driver.inspect(order.placement_id)).reason == stand.exits[0][1]
    assert (await stand.driver.start(order)).power is Power.RUNNING, "it can be started again"
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)
    await asyncio.sleep(0.1)
    assert len(stand.exits) == 1


async def a_running_guest_survives_its_driver(stand: Stand) -> None:
    order = stand.order()
    before = await stand.driver.start(order)
    driver = await stand.reopen()
    assert order.placement_id in [held.placement_id for held in await driver.held()]
    adopted = await driver.adopt(order.placement_id)
    assert (adopted.power, adopted.address, adopted.pid) == (Power.RUNNING, before.address, before.pid)
    assert (await driver.start(order)).pid == before.pid
    await stand.end_guest(order, adopted)
    for _ in range(100):
        if stand.exits:
            break
        await asyncio.sleep(0.02)
    assert [placement for placement, _ in stand.exits] == [order.placement_id], "an adopted guest is watched"
    await driver.remove(order.placement_id)
    await _gone(stand, order)


async def a_running_guest_survives_a_close(stand: Stand) -> None:
    order = stand.order()
    before = await stand.driver.start(order)
    driver = await stand.close_driver()
    adopted = await driver.adopt(order.placement_id)
    assert (adopted.power, adopted.address, adopted.pid) == (Power.RUNNING, before.address, before.pid)
    await driver.remove(order.placement_id)
    await _gone(stand, order)


async def what_was_prepared_can_be_started_by_another(stand: Stand) -> None:
    prepared, unwanted = stand.order(), stand.order()
    await stand.driver.prepare(prepared)
    await stand.driver.prepare(unwanted)
    driver = await stand.reopen()
    assert {prepared.placement_id, unwanted.placement_id} <= {held.placement_id for held in await driver.held()}
    await driver.remove(unwanted.placement_id)
    await _gone(stand, unwanted)
    await driver.prepare(prepared)
    assert (await driver.start(prepared)).power is Power.RUNNING
    await driver.remove(prepared.placement_id)
    await _gone(stand, prepared)


async def an_unknown_image_is_refused(stand: Stand) -> None:
    order = stand.order(image="sha256:" + "f" * 64, image_name="no-such-template")
    refused = await refusal(stand.driver.prepare(order))
    assert isinstance(refused, Refused)
    assert refused.code is Code.IMAGE_UNAVAILABLE
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def a_damaged_image_is_refused(stand: Stand) -> None:
    async with stand.damage_image() as order:
        refused = await refusal(stand.driver.prepare(order))
        assert refused.code is Code.IMAGE_CORRUPT
        assert order.spec.image not in [image.digest for image in await stand.driver.images()]
        await stand.driver.remove(order.placement_id)
        await _gone(stand, order)


async def another_hosts_things_are_not_seen(stand: Stand) -> None:
    order = stand.order()
    await stand.driver.prepare(order)
    stranger = await stand.stranger()
    assert order.placement_id not in [held.placement_id for held in await stranger.held()]
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def self_checks_pass_and_say_what_to_do(stand: Stand) -> None:
    probes = await stand.driver.probe()
    assert len({probe.id for probe in probes}) == len(probes) > 0
    failed = [probe for probe in probes if not probe.ok]
    assert not failed, f"{failed}"
    assert any(probe.id.endswith(".boot") for probe in probes), "one of them starts a real guest"
    assert not await stand.driver.held(), "a self-check leaves nothing"


async def images_are_listed(stand: Stand) -> None:
    order = stand.order()
    found = {image.digest: image for image in await stand.driver.images()}
    assert found[order.spec.image].name == order.spec.image_name


async def many_at_once(stand: Stand) -> None:
    orders = [stand.order() for _ in range(PARALLEL)]
    async with asyncio.TaskGroup() as group:
        for order in orders:
            group.create_task(stand.driver.start(order))
    seen = [await stand.driver.inspect(order.placement_id) for order in orders]
    assert [item.power for item in seen] == [Power.RUNNING] * PARALLEL
    if stand.driver.capabilities.network_slots:
        assert len({item.address for item in seen}) == PARALLEL, "each has an address of its own"
    async with asyncio.TaskGroup() as group:
        for order in orders:
            group.create_task(stand.driver.remove(order.placement_id))
    for order in orders:
        await _gone(stand, order)


async def the_guest_is_who_was_ordered(stand: Stand) -> None:
    order = stand.order()
    seen = await stand.driver.start(order)
    guest = await stand.guest(order, seen)
    hello = await guest.hello(patience_s=5.0)
    assert (hello.sandbox_id, hello.placement_id, hello.generation, hello.nonce) == (
        order.sandbox_id,
        order.placement_id,
        order.generation,
        order.nonce,
    )
    other = replace(order, nonce="another-nonce")
    assert other.nonce != hello.nonce
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def the_console_is_kept(stand: Stand) -> None:
    order = stand.order()
    assert await stand.driver.console(order.placement_id) == b""
    seen = await stand.driver.start(order)
    if stand.driver.capabilities.guest_handshake:
        guest = await stand.guest(order, seen)
        await guest.run(["/bin/sh", "-c", "echo written to the console >/proc/1/fd/1"])
        for _ in range(50):
            if b"written to the console" in await stand.driver.console(order.placement_id):
                break
            await asyncio.sleep(0.05)
        assert b"written to the console" in await stand.driver.console(order.placement_id)
        assert len(await stand.driver.console(order.placement_id, bytes_max=10)) == 10
    else:
        assert await stand.driver.console(order.placement_id)
    await stand.driver.remove(order.placement_id)
    assert await stand.driver.console(order.placement_id) == b""


async def a_kept_disk_is_found_again(stand: Stand) -> None:
    order = stand.order()
    guest = await stand.guest(order, await stand.driver.start(order))
    assert (await guest.run(["/bin/sh", "-c", "echo kept >/kept && sync"])).status == 0
    await stand.driver.stop(order.placement_id)
    guest = await stand.guest(order, await stand.driver.start(order))
    result = await guest.run(["/bin/cat", "/kept"])
    assert result.out == "kept\n", result.text
    await stand.driver.remove(order.placement_id)
    await _gone(stand, order)


async def what_runs_is_measured_and_nothing_else(stand: Stand) -> None:
    driver: object = stand.driver
    assert isinstance(driver, Metered), "it declares that it can measure"
    order, never = stand.order(), stand.order()
    assert await driver.usage([]) == {}
    assert await driver.usage([never.placement_id]) == {}
    await stand.driver.start(order)
    await _until(stand.driver, order, Power.RUNNING)
    first = (await driver.usage([order.placement_id, never.placement_id]))[order.placement_id]
    assert 0 < first.memory_bytes <= order.spec.memory_mib << 20, f"{first}"
    assert 0 <= first.disk_bytes <= order.spec.disk_mib << 20, f"{first}"
    await asyncio.sleep(0.1)
    second = (await driver.usage([order.placement_id]))[order.placement_id]
    assert second.cpu_s >= first.cpu_s >= 0, "CPU time never goes back"
    await stand.driver.remove(order.placement_id)
    assert await driver.usage([order.placement_id]) == {}
