"""Cases about keeping one moment of a guest that goes on, and beginning others from it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from atoll.base.errors import Code
from atoll.base.ids import Prefix, new_id
from atoll.domain.spec import Origin, SaveMode
from atoll.drivers.port import Order, Power, Saved
from atoll.testing.conformance.guest import GuestClient
from atoll.testing.conformance.saving import COUNTER
from atoll.testing.conformance.stand import Stand, refusal, shell

CLONES = 4


def _id() -> str:
    return new_id(Prefix.SNAPSHOT, os.urandom)


def _from(stand: Stand, parent: Order, snapshot_id: str, saved: Saved) -> Order:
    """The order of another sandbox that begins from it."""
    other = stand.order()
    return replace(other, spec=replace(parent.spec, origin=Origin(snapshot_id, saved.mode)), hostname=other.sandbox_id)


async def _all_gone(stand: Stand, *orders: Order) -> None:
    for snapshot_id in await stand.driver.snapshots():
        await stand.driver.drop(snapshot_id)
    for order in orders:
        await stand.driver.remove(order.placement_id)
        assert (await stand.driver.inspect(order.placement_id)).power is Power.ABSENT
        assert not stand.traces(order), f"left on the machine: {stand.traces(order)}"


async def a_guest_goes_on_while_it_is_kept(stand: Stand) -> None:
    order, snapshot_id = stand.order(), _id()
    seen = await stand.driver.start(order)
    saved = await stand.driver.snapshot(order, snapshot_id, SaveMode.FULL)
    assert saved.mode is stand.driver.capabilities.saves, "what cannot be done is said"
    assert saved.size_bytes > 0
    found = await stand.driver.inspect(order.placement_id)
    assert (found.power, found.pid) == (Power.RUNNING, seen.pid)
    assert await stand.driver.snapshots() == [snapshot_id]
    assert await stand.driver.snapshot(order, snapshot_id, SaveMode.FULL) == saved, "asked again, the same"
    await stand.driver.drop(snapshot_id)
    await stand.driver.drop(snapshot_id)
    assert not await stand.driver.snapshots()
    await _all_gone(stand, order)
    assert stand.exits == []


async def what_is_kept_outlives_its_guest_and_its_driver(stand: Stand) -> None:
    order, snapshot_id = stand.order(), _id()
    await stand.driver.start(order)
    saved = await stand.driver.snapshot(order, snapshot_id, SaveMode.FULL)
    await stand.driver.remove(order.placement_id)
    assert not stand.traces(order)
    driver = await stand.reopen()
    assert await driver.snapshots() == [snapshot_id]
    assert not await driver.held(), "what is kept is no placement"
    clone = _from(stand, order, snapshot_id, saved)
    assert (await driver.start(clone)).power is Power.RUNNING
    await driver.drop(snapshot_id)
    assert (await driver.inspect(clone.placement_id)).power is Power.RUNNING, "who has begun from it does not need it any more"
    await _all_gone(stand, clone)


async def who_has_begun_comes_back_without_what_it_began_from(stand: Stand) -> None:
    order, snapshot_id = stand.order(), _id()
    await stand.driver.start(order)
    saved = await stand.driver.snapshot(order, snapshot_id, SaveMode.FULL)
    clone = _from(stand, order, snapshot_id, saved)
    await stand.driver.start(clone)
    await stand.driver.drop(snapshot_id)
    await stand.driver.save(clone, SaveMode.FULL)
    driver = await stand.reopen()
    assert (await driver.adopt(clone.placement_id)).power is Power.SAVED
    assert (await driver.restore(clone)).power is Power.RUNNING
    await driver.discard(clone.placement_id)
    if driver.capabilities.stop_keeps_disk:
        await driver.stop(clone.placement_id)
        assert (await driver.start(clone)).power is Power.RUNNING
    await _all_gone(stand, order, clone)


async def two_at_once_and_a_removal_meanwhile_are_borne(stand: Stand) -> None:
    order, ids = stand.order(), [_id() for _ in range(3)]
    await stand.driver.start(order)
    await asyncio.gather(*(stand.driver.snapshot(order, one, SaveMode.FULL) for one in ids[:2]))
    assert await stand.driver.snapshots() == sorted(ids[:2])
    keeping = asyncio.create_task(stand.driver.snapshot(order, ids[2], SaveMode.FULL))
    await asyncio.sleep(0.01)
    await stand.driver.remove(order.placement_id)
    await asyncio.gather(keeping, return_exceptions=True)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.ABSENT, "nothing of it comes back"
    await _all_gone(stand, order)


async def what_is_not_kept_begins_nothing(stand: Stand) -> None:
    order = stand.order()
    assert (await refusal(stand.driver.snapshot(order, _id(), SaveMode.FULL))).code is Code.PLACEMENT_LOST
    clone = _from(stand, order, _id(), Saved(SaveMode.FULL, 1))
    assert (await refusal(stand.driver.start(clone))).code is Code.SNAPSHOT_UNAVAILABLE
    await _all_gone(stand, order, clone)


async def what_is_frozen_or_saved_is_not_kept(stand: Stand) -> None:
    order, snapshot_id = stand.order(), _id()
    await stand.driver.start(order)
    await stand.driver.pause(order.placement_id)
    assert (await refusal(stand.driver.snapshot(order, snapshot_id, SaveMode.FULL))).code is Code.ILLEGAL_STATE
    await stand.driver.resume(order.placement_id)
    await stand.driver.save(order, SaveMode.FULL)
    assert (await refusal(stand.driver.snapshot(order, snapshot_id, SaveMode.FULL))).code is Code.PLACEMENT_LOST
    assert not await stand.driver.snapshots()
    await _all_gone(stand, order)


async def _facts(guest: GuestClient) -> dict[str, str]:
    script = "hostname; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '; cat /proc/sys/kernel/random/boot_id; md5sum </kept; date +%s"
    names = ("hostname", "chance", "boot", "kept", "clock")
    lines = (await shell(guest, script)).out.split("\n")
    return dict(zip(names, lines, strict=False))


async def clones_have_the_files_and_a_name_of_their_own(stand: Stand) -> None:
    order, snapshot_id = stand.order(), _id()
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, "head -c 3000000 /dev/urandom >/kept")
    saved = await stand.driver.snapshot(order, snapshot_id, SaveMode.FULL)
    await shell(guest, "echo later >/later")
    clones = [_from(stand, order, snapshot_id, saved) for _ in range(CLONES)]
    # At once: one moment, many beginnings.
    seen = await asyncio.gather(*(stand.driver.start(one) for one in clones))
    guests = [await stand.guest(one, found) for one, found in zip(clones, seen, strict=True)]
    parent = await _facts(guest)
    found = [await _facts(one) for one in guests]
    assert {one["kept"] for one in found} == {parent["kept"]}
    assert len({parent["chance"], *(one["chance"] for one in found)}) == CLONES + 1, "two drew the same"
    assert [one["hostname"] for one in found] == [one.hostname for one in clones]
    assert {one["boot"] for one in found} == {parent["boot"]}, "its memory is of that boot; a shared kernel has only one"
    assert all(abs(int(one["clock"]) - int(parent["clock"])) < 60 for one in found)
    for one in guests:
        assert (await shell(one, "test -e /later || echo none")).out == "none\n", "it is of an earlier moment"
        await shell(one, "echo mine >/kept")
    assert (await shell(guest, "md5sum </kept")).out.split("\n")[0] == parent["kept"], "they write to disks of their own"
    assert await guests[0].refuses(order), "it still answers to its parent's name"
    await _all_gone(stand, order, *clones)


async def clones_go_on_where_their_parent_was(stand: Stand) -> None:
    order, snapshot_id = stand.order(), _id()
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, f"({COUNTER}) >/dev/null 2>&1 & (sleep 1; echo fired >/timer) >/dev/null 2>&1 & sleep 0.3")
    saved = await stand.driver.snapshot(order, snapshot_id, SaveMode.FULL)
    at = int((await shell(guest, "tail -n 1 /count")).out)
    await asyncio.sleep(1.0)
    clone = _from(stand, order, snapshot_id, saved)
    other = await stand.guest(clone, await stand.driver.start(clone))
    first = int((await shell(other, "sleep 0.3; tail -n 1 /count")).out)
    later = int((await shell(guest, "tail -n 1 /count")).out)
    second = int((await shell(other, "sleep 0.3; tail -n 1 /count")).out)
    assert first < second, "what counted goes on"
    assert at <= later, "the parent counts on, too"
    assert (await shell(other, "sleep 1; cat /timer")).out == "fired\n", "a timer that is overdue fires"
    assert "sleep 0.02" in (await shell(other, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).out
    again = _id()
    second_saved = await stand.driver.snapshot(clone, again, SaveMode.FULL)
    grandchild = _from(stand, clone, again, second_saved)
    third = await stand.guest(grandchild, await stand.driver.start(grandchild))
    assert int((await shell(third, "sleep 0.2; tail -n 1 /count")).out) >= second, "a clone can be kept as its parent was"
    await stand.driver.save(clone, SaveMode.FULL)
    found = await stand.driver.restore(clone)
    await stand.guest(clone, found)
    await stand.driver.discard(clone.placement_id)
    await _all_gone(stand, order, clone, grandchild)


async def files_alone_can_be_kept(stand: Stand) -> None:
    order, snapshot_id = stand.order(), _id()
    guest = await stand.guest(order, await stand.driver.start(order))
    await shell(guest, f"echo here >/kept; ({COUNTER}) >/dev/null 2>&1 &")
    saved = await stand.driver.snapshot(order, snapshot_id, SaveMode.FILES)
    assert saved.mode is SaveMode.FILES
    clone = _from(stand, order, snapshot_id, saved)
    other = await stand.guest(clone, await stand.driver.start(clone))
    assert (await shell(other, "cat /kept")).out == "here\n"
    boots = [(await shell(one, "cat /proc/sys/kernel/random/boot_id")).out for one in (guest, other)]
    assert not stand.driver.capabilities.saves_memory or boots[0] != boots[1], "it was booted anew"
    assert "sleep 0.02" not in (await shell(other, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).out
    await _all_gone(stand, order, clone)
