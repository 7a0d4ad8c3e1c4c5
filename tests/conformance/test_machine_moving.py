"""What one host has saved of a machine goes on at another: memory, devices and disk, with a name and an address of the new place."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.errors import Code
from atoll.base.ids import Prefix, new_id
from atoll.domain.spec import Origin, SaveMode
from atoll.drivers.machines import birth
from atoll.drivers.machines.runtime import MOMENT
from atoll.drivers.oci import saves
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Power
from atoll.testing.conformance import firecracker_stand, qemu_stand
from atoll.testing.conformance.saving import COUNTER
from atoll.testing.conformance.stand import refusal, shell
from tests.conformance.conftest import BINARIES, CACHE
from tests.conformance.pairs import Pair, moved, pair_of

pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(900)]
FACTS = "md5sum </kept; md5sum </dev/shm/kept; cat /proc/sys/kernel/random/boot_id; tail -n 1 /count"


# One monitor's journey and the other's moment belong to every run: what moves is written once for both (drivers/machines), and what
# each says of its memory and devices is in either test.
ON_ITS_WAY = pytest.mark.parametrize("pair", ["firecracker", pytest.param("qemu", marks=pytest.mark.long)], indirect=True)
FROM_A_MOMENT = pytest.mark.parametrize("pair", ["qemu", pytest.param("firecracker", marks=pytest.mark.long)], indirect=True)


@pytest.fixture
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    if request.param == "qemu":
        made = pair_of(qemu_stand.QemuStand, qemu_stand.kind(), tmp_path, qemu_stand.missing(BINARIES, CACHE))
    else:
        made = pair_of(firecracker_stand.FirecrackerStand, RuntimeKind.FIRECRACKER, tmp_path, firecracker_stand.missing(BINARIES, CACHE))
    async with made as opened:
        yield opened


@pytest.fixture
async def qemu(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair_of(qemu_stand.QemuStand, qemu_stand.kind(), tmp_path, qemu_stand.missing(BINARIES, CACHE)) as opened:
        yield opened


@ON_ITS_WAY
async def test_a_machine_goes_on_at_another_host_and_comes_home(pair: Pair) -> None:
    one, other = pair.one, pair.other
    order = one.order()
    seen = await one.driver.start(order)
    guest = await one.guest(order, seen)
    await shell(
        guest, f"({COUNTER}) >/dev/null 2>&1 & head -c 8000000 /dev/urandom >/kept; head -c 4000000 /dev/urandom >/dev/shm/kept; sleep 0.2"
    )
    before = (await shell(guest, FACTS)).out.split()
    await one.driver.save(order, SaveMode.FULL)
    stored, what = await pair.send(order.placement_id)
    assert what.facts.mode is SaveMode.FULL
    assert what.facts.kind in await other.driver.kinds()
    assert dict(what.facts.notes)[birth.ROOT]
    await one.driver.remove(order.placement_id)
    assert not one.traces(order), "its host has given it up"

    there = moved(order)
    await pair.bring(there, stored.digest)
    assert (await other.driver.inspect(there.placement_id)).power is Power.SAVED
    back = await other.driver.restore(there)
    assert back.address != seen.address, "another host, another slot"
    guest = await other.guest(there, back)
    await other.driver.discard(there.placement_id)
    after = (await shell(guest, FACTS)).out.split()
    assert [after[0], after[2], after[4]] == [before[0], before[2], before[4]], "not a byte of memory or disk is another; it was not booted"
    await asyncio.sleep(0.5)
    assert int(before[5]) <= int(after[5]) < int((await shell(guest, "tail -n 1 /count")).out), "what counted goes on where it was"

    # And from there home again, with what it has written since; only that is sent.
    await shell(guest, "echo since >/since; echo since >/dev/shm/since; sync")
    await other.driver.save(there, SaveMode.FULL)
    second = await pair.store.upload(there.placement_id, await other.driver.pack_list(there.placement_id), bases=[stored.digest])
    await other.driver.remove(there.placement_id)
    assert not other.traces(there)
    pair.one, pair.other = other, one
    home = moved(there)
    await pair.bring(home, second.digest)
    guest = await one.guest(home, await one.driver.restore(home))
    await one.driver.discard(home.placement_id)
    assert (await shell(guest, "cat /since /dev/shm/since; md5sum </kept; md5sum </dev/shm/kept")).out.split() == [
        "since", "since", before[0], "-", before[2], "-",
    ]  # fmt: skip
    # What was stopped there boots from its own disk, wherever it began.
    await one.driver.save(home, SaveMode.FILES)
    guest = await one.guest(home, await one.driver.restore(home))
    assert (await shell(guest, "cat /since; md5sum </kept")).out.split()[:2] == ["since", before[0]]
    await one.driver.remove(home.placement_id)
    assert not one.traces(home)


@FROM_A_MOMENT
async def test_a_moment_begins_machines_at_another_host(pair: Pair) -> None:
    one, other = pair.one, pair.other
    order = one.order()
    guest = await one.guest(order, await one.driver.start(order))
    await shell(guest, "echo disk >/kept; echo memory >/dev/shm/kept")
    name = new_id(Prefix.SNAPSHOT, os.urandom)
    mode = (await one.driver.snapshot(order, name, SaveMode.FULL)).mode
    stored, _ = await pair.send(name)
    await one.driver.drop(name)
    await one.driver.remove(order.placement_id)

    clone = other.order(origin=Origin(name, mode))
    await pair.bring(clone, stored.digest, name)
    assert name in await other.driver.snapshots()
    guest = await other.guest(clone, await other.driver.start(clone))
    assert (await shell(guest, "cat /kept /dev/shm/kept")).out == "disk\nmemory\n"
    assert (await refusal(other.driver.pack_list(name))).code is Code.ILLEGAL_STATE, "it is in the store already"
    # A clone that is moved needs its origin nowhere.
    await shell(guest, "echo own >/dev/shm/own")
    await other.driver.save(clone, SaveMode.FULL)
    second = await pair.store.upload(clone.placement_id, await other.driver.pack_list(clone.placement_id), bases=[stored.digest])
    await other.driver.remove(clone.placement_id)
    await other.driver.drop(name)
    pair.one, pair.other = other, one
    home = moved(clone)
    await pair.bring(home, second.digest)
    guest = await one.guest(home, await one.driver.restore(home))
    await one.driver.discard(home.placement_id)
    assert (await shell(guest, "cat /kept /dev/shm/kept /dev/shm/own; echo stays >/stays; sync")).out == "disk\nmemory\nown\n"
    await one.driver.stop(home.placement_id)
    guest = await one.guest(home, await one.driver.start(home))
    assert (await shell(guest, "cat /kept /stays")).out == "disk\nstays\n", "it does not begin again from what is gone"
    await one.driver.remove(home.placement_id)


async def test_what_is_cut_off_on_its_way_begins_nothing(qemu: Pair) -> None:
    one, other = qemu.one, qemu.other
    order = one.order()
    guest = await one.guest(order, await one.driver.start(order))
    await shell(guest, "echo kept >/kept")
    await one.driver.save(order, SaveMode.FULL)
    stored, _ = await qemu.send(order.placement_id)
    there = moved(order)
    for step in ("receiving", "disk received", "received"):
        qemu.steps = {step: KeyboardInterrupt(step)}
        with pytest.raises(KeyboardInterrupt):
            await qemu.bring(there, stored.digest)
        await other.reopen()
        found = await other.driver.adopt(there.placement_id)
        assert found.power in ((Power.SAVED,) if step == "received" else (Power.PREPARED,)), step
        assert [held.placement_id for held in await other.driver.held()] == [there.placement_id], "it is known whose it is"
        if step == "receiving":
            assert (await refusal(other.driver.restore(there))).code is Code.RESUME_FAILED
    guest = await other.guest(there, await other.driver.restore(there))
    assert (await shell(guest, "cat /kept")).out == "kept\n"
    await other.driver.remove(there.placement_id)
    assert not other.traces(there)


async def test_files_alone_go_where_memory_cannot(qemu: Pair) -> None:
    """A disk is any host's; memory is only of the same program, image and clock. What was saved whole boots from its disk all the same."""
    one, other = qemu.one, qemu.other
    order = one.order()
    guest = await one.guest(order, await one.driver.start(order))
    await shell(guest, "echo kept >/kept; sync")
    boot = (await shell(guest, "cat /proc/sys/kernel/random/boot_id")).out
    await one.driver.save(order, SaveMode.FULL)
    stored, what = await qemu.send(order.placement_id)
    facts, notes = what.facts, dict(what.facts.notes)
    emulated = qemu_stand.kind() is RuntimeKind.QEMU_EMULATED
    only_here = {birth.CLOCK: str(int(notes[birth.CLOCK]) * 11 // 10)} if emulated else {birth.PROCESSOR: "another"}
    for changed in (
        replace(facts, runtime="QEMU emulator version 1.0"),
        replace(facts, arch="riscv64"),
        replace(facts, driver="firecracker"),
        replace(facts, notes=tuple({**notes, birth.ROOT: "0" * 64}.items())),
        replace(facts, notes=tuple({**notes, **only_here}.items())),
    ):
        assert (await refusal(other.driver.suits(changed))).code is Code.MOMENT_UNSUITABLE, changed
    await other.driver.suits(replace(facts, notes=()))

    there = moved(order)
    await qemu.bring(there, stored.digest)
    place = other.config.state_dir / there.placement_id / saves.SAVED
    moment = json.loads((place / MOMENT).read_text())
    text = json.dumps({**moment, "born": {birth.ROOT: "0" * 64}})
    (place / MOMENT).write_text(text)
    said = json.loads((place / saves.LIST).read_text())
    said["files"][MOMENT] = len(text)
    (place / saves.LIST).write_text(json.dumps(said))
    refused = await refusal(other.driver.restore(there))
    assert refused.code is Code.RESUME_FAILED
    assert "without its memory" in refused.hint
    guest = await other.guest(there, await other.driver.restore(there, reboot=True))
    await other.driver.discard(there.placement_id)
    assert (await shell(guest, "cat /kept")).out == "kept\n", "what it had synced is there"
    assert (await shell(guest, "cat /proc/sys/kernel/random/boot_id")).out != boot
    await other.driver.save(there, SaveMode.FILES)
    files = await other.driver.pack_list(there.placement_id)
    assert (files.facts.mode, files.facts.runtime, files.facts.cpu) == (SaveMode.FILES, "", ())
    assert files.facts.kind in await one.driver.kinds()
    again = await qemu.store.upload(there.placement_id, files, bases=[stored.digest])
    await other.driver.remove(there.placement_id)
    await one.driver.remove(order.placement_id)
    qemu.one, qemu.other = other, one
    home = moved(there)
    await qemu.bring(home, again.digest)
    guest = await one.guest(home, await one.driver.restore(home))
    assert (await shell(guest, "cat /kept")).out == "kept\n"
    await one.driver.remove(home.placement_id)
