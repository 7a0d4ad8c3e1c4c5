"""What one host has saved goes on at another: two drivers with slots, directories and marks of their own, and a store between them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.base.ids import Prefix, new_id
from atoll.domain.spec import Isolation, Origin, SaveMode
from atoll.drivers.oci import bundle, moving, programs, saves
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Power
from atoll.testing.conformance.oci_stand import OciStand, missing
from atoll.testing.conformance.saving import COUNTER
from atoll.testing.conformance.stand import refusal, shell
from tests.conformance.conftest import BINARIES, CACHE
from tests.conformance.pairs import Pair, moved, pair_of

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=[RuntimeKind.RUNSC, RuntimeKind.CRUN], ids=str)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair_of(OciStand, request.param, tmp_path, missing(request.param, BINARIES, CACHE)) as made:
        yield made


@pytest.fixture
async def gvisor(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair_of(OciStand, RuntimeKind.RUNSC, tmp_path, missing(RuntimeKind.RUNSC, BINARIES, CACHE)) as made:
        yield made


async def test_a_sandbox_goes_on_at_another_host(pair: Pair) -> None:
    one, other = pair.one, pair.other
    order = one.order()
    seen = await one.driver.start(order)
    guest = await one.guest(order, seen)
    await shell(guest, f"({COUNTER}) >/dev/null 2>&1 & head -c 8000000 /dev/urandom >/kept; sync")
    before = (await shell(guest, "md5sum /kept; cat /proc/sys/kernel/random/boot_id; tail -n 1 /count")).out.split()
    saved = await one.driver.save(order, SaveMode.FULL)
    stored, what = await pair.send(order.placement_id)
    assert what.size_bytes > 0
    assert what.facts.kind in await other.driver.kinds()
    await one.driver.remove(order.placement_id)
    assert not one.traces(order), "its host has given it up"

    there = moved(order)
    await pair.bring(there, stored.digest)
    assert (await other.driver.inspect(there.placement_id)).power is Power.SAVED
    back = await other.driver.restore(there)
    assert back.address != seen.address, "another host, another slot"
    guest = await other.guest(there, back)
    await other.driver.discard(there.placement_id)
    after = (await shell(guest, "md5sum /kept; cat /proc/sys/kernel/random/boot_id; tail -n 1 /count")).out.split()
    assert after[0] == before[0], "not a byte is another"
    if saved.mode is SaveMode.FULL:
        await asyncio.sleep(0.3)
        later = (await shell(guest, "tail -n 1 /count")).out
        assert after[2] == before[2], "it was not booted anew"
        assert int(before[3]) <= int(after[3]) < int(later), "what counted goes on where it was"
    # And from there on to the first one again, with what it has written since.
    await shell(guest, "echo since >/since; sync")
    await other.driver.save(there, SaveMode.FULL)
    second = await pair.store.upload(there.placement_id, await other.driver.pack_list(there.placement_id), bases=[stored.digest])
    await other.driver.remove(there.placement_id)
    assert not other.traces(there)
    pair.one, pair.other = other, one
    home = moved(there)
    await pair.bring(home, second.digest)
    guest = await one.guest(home, await one.driver.restore(home))
    assert (await shell(guest, "cat /since; md5sum /kept")).out.split()[:2] == ["since", before[0]]
    await one.driver.remove(home.placement_id)
    assert not one.traces(home)


async def test_a_snapshot_begins_others_at_another_host(pair: Pair) -> None:
    one, other = pair.one, pair.other
    order = one.order()
    guest = await one.guest(order, await one.driver.start(order))
    await shell(guest, "echo kept >/kept; sync")
    name = new_id(Prefix.SNAPSHOT, os.urandom)
    mode = (await one.driver.snapshot(order, name, SaveMode.FULL)).mode
    stored, _ = await pair.send(name)
    await one.driver.drop(name)
    await one.driver.remove(order.placement_id)

    clone = other.order(origin=Origin(name, mode))
    await pair.bring(clone, stored.digest, name)
    assert name in await other.driver.snapshots()
    guest = await other.guest(clone, await other.driver.start(clone))
    assert (await shell(guest, "cat /kept")).out == "kept\n"
    assert (await refusal(other.driver.pack_list(name))).code is Code.ILLEGAL_STATE, "it is in the store already"
    await other.driver.remove(clone.placement_id)
    await other.driver.drop(name)
    assert await other.driver.snapshots() == []


async def test_what_is_cut_off_on_its_way_begins_nothing(pair: Pair) -> None:
    one, other = pair.one, pair.other
    order = one.order()
    guest = await one.guest(order, await one.driver.start(order))
    await shell(guest, "echo kept >/kept; sync")
    await one.driver.save(order, SaveMode.FULL)
    stored, _ = await pair.send(order.placement_id)
    there = moved(order)
    for step in ("receiving", "disk received", "received"):
        pair.steps = {step: KeyboardInterrupt(step)}
        with pytest.raises(KeyboardInterrupt):
            await pair.bring(there, stored.digest)
        await other.reopen()
        found = await other.driver.adopt(there.placement_id)
        assert found.power in ((Power.SAVED,) if step == "received" else (Power.PREPARED,)), step
        assert [held.placement_id for held in await other.driver.held()] == [there.placement_id], "it is known whose it is"
        if step == "receiving":
            assert (await refusal(other.driver.restore(there))).code is Code.RESUME_FAILED
        assert not any(other.config.state_dir.glob(f"{moving.INBOX}/*"))
    guest = await other.guest(there, await other.driver.restore(there))
    assert (await shell(guest, "cat /kept")).out == "kept\n"
    await other.driver.remove(there.placement_id)
    assert not other.traces(there)
    # One that never comes is removed like any other.
    pair.steps = {"receiving": KeyboardInterrupt("receiving")}
    with pytest.raises(KeyboardInterrupt):
        await pair.bring(there, stored.digest)
    await other.driver.remove(there.placement_id)
    assert not other.traces(there)


async def test_what_another_version_has_set_up_otherwise_goes_on(gvisor: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as it was: an upgrade must not lose what is suspended."""
    one, other = gvisor.one, gvisor.other
    order = one.order()
    monkeypatch.setattr(bundle, "NOFILE_SOFT", 4096)
    monkeypatch.setattr(bundle, "READ_ONLY", (*bundle.READ_ONLY, "/proc/scsi"))
    monkeypatch.setattr(bundle, "PATH", "/usr/bin:/bin")
    guest = await one.guest(order, await one.driver.start(order))
    await shell(guest, "echo kept >/kept")
    await one.driver.save(order, SaveMode.FULL)
    stored, _ = await gvisor.send(order.placement_id)
    monkeypatch.undo()
    upgraded(other)
    there = moved(order)
    await gvisor.bring(there, stored.digest)
    guest = await other.guest(there, await other.driver.restore(there))
    assert (await shell(guest, "cat /kept; ulimit -Sn")).out.split() == ["kept", "4096"]
    await other.driver.remove(there.placement_id)
    await one.driver.remove(order.placement_id)


def upgraded(stand: OciStand) -> None:
    """New guests get another program from now on; it is none of ours, so that whoever runs it is found out."""
    stand.driver._guests = programs.Programs(programs.GUEST, BINARIES / "atoll-io", stand.driver._config.state_dir)
    stand.driver._guests.open()


async def test_memory_goes_on_in_the_program_that_it_is_of(gvisor: Pair) -> None:
    """Whatever new guests get by then: what was suspended, what begins from a snapshot, and what that is saved as."""
    one = gvisor.one
    order, kept = one.order(), new_id(Prefix.SNAPSHOT, os.urandom)
    guest = await one.guest(order, await one.driver.start(order))
    await shell(guest, f"({COUNTER}) >/dev/null 2>&1 & echo kept >/kept")
    await one.driver.snapshot(order, kept, SaveMode.FULL)
    await one.driver.save(order, SaveMode.FULL)
    upgraded(one)
    assert len(one.driver._guests.copies()) == 2, "the earlier one is still of use"
    guest = await one.guest(order, await one.driver.restore(order))
    assert (await shell(guest, "cat /kept; test $(tail -n 1 /count | cut -d' ' -f1) -gt 0 && echo counts")).out.split() == [
        "kept",
        "counts",
    ]
    await one.driver.discard(order.placement_id)
    fork = one.order()
    fork = replace(fork, spec=replace(fork.spec, origin=Origin(kept, SaveMode.FULL)))
    guest = await one.guest(fork, await one.driver.start(fork))
    assert (await shell(guest, "cat /kept")).out == "kept\n"
    await one.driver.save(fork, SaveMode.FULL)
    guest = await one.guest(fork, await one.driver.restore(fork))
    assert (await shell(guest, "cat /kept")).out == "kept\n"
    for placement in (order, fork):
        await one.driver.remove(placement.placement_id)
    await one.driver.drop(kept)
    one.driver._guests.open()
    assert len(one.driver._guests.copies()) == 1, "nobody has the earlier one any more"


LATER = """#!/bin/sh
[ "$1" = --version ] || exit 3
echo "runsc version later"
"""


async def test_what_is_saved_goes_on_under_the_runtime_that_has_saved_it(gvisor: Pair, tmp_path: Path) -> None:
    """At its host, and at another that has had it: new guests get a later one there by then."""
    later = tmp_path / "later"
    later.write_text(LATER)
    later.chmod(0o755)
    one, other = gvisor.one, gvisor.other
    order = one.order()
    guest = await one.guest(order, await one.driver.start(order))
    await shell(guest, "echo kept >/kept")
    await one.driver.save(order, SaveMode.FULL)
    for stand in (one, other):
        stand.driver._runtimes = programs.Programs(programs.RUNTIME, later, stand.driver._config.state_dir, spare=1)
        stand.driver._runtimes.open()
        stand.driver._runtime.binary = later
    fresh = one.order()
    assert (await refusal(one.driver.start(fresh))).code is Code.START_FAILED, "new guests get the later one"
    await one.driver.remove(fresh.placement_id)

    guest = await one.guest(order, await one.driver.restore(order))
    assert (await shell(guest, "cat /kept; echo since >>/kept")).out == "kept\n"
    await one.driver.discard(order.placement_id)
    await one.driver.save(order, SaveMode.FULL)
    stored, what = await gvisor.send(order.placement_id)
    assert what.facts.runtime != "runsc later"
    kinds = await other.driver.kinds()
    assert kinds[0].endswith("runsc later")
    assert what.facts.kind in kinds, "it has had that one"
    await one.driver.remove(order.placement_id)
    there = moved(order)
    await gvisor.bring(there, stored.digest)
    guest = await other.guest(there, await other.driver.restore(there))
    assert (await shell(guest, "cat /kept")).out == "kept\nsince\n"
    # Files alone are had of it, too.
    await other.driver.discard(there.placement_id)
    await other.driver.save(there, SaveMode.FULL)
    guest = await other.guest(there, await other.driver.restore(there, reboot=True))
    assert (await shell(guest, "cat /kept")).out == "kept\nsince\n"
    await other.driver.remove(there.placement_id)
    assert not other.traces(there)


async def test_a_host_that_cannot_go_on_from_it_says_so(gvisor: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = gvisor.one, gvisor.other
    order = one.order()
    await one.guest(order, await one.driver.start(order))
    await one.driver.save(order, SaveMode.FULL)
    stored, what = await gvisor.send(order.placement_id)
    assert "sse2" in what.facts.cpu or what.facts.arch != "x86_64"
    assert what.facts.runtime.startswith("runsc ")
    for facts in (
        replace(what.facts, runtime="runsc release-20200101.0"),
        replace(what.facts, isolation=Isolation.SHARED_KERNEL),
        replace(what.facts, arch="riscv64"),
        replace(what.facts, cpu=(*what.facts.cpu, "avx1024")),
    ):
        assert (await refusal(other.driver.suits(facts))).code is Code.MOMENT_UNSUITABLE
    there = moved(order)
    inbox = other.driver.inbox(there.placement_id)
    await gvisor.store.fetch(stored.digest, inbox)
    another = replace(what.facts, image="sha256:" + "0" * 64)
    assert (await refusal(other.driver.receive(there, another, inbox))).code is Code.MOMENT_CORRUPT
    assert (await other.driver.inspect(there.placement_id)).power is Power.ABSENT
    monkeypatch.setattr(moving, "instructions", lambda: ("sse2",))
    assert (await refusal(gvisor.bring(there, stored.digest))).code is Code.MOMENT_UNSUITABLE


async def test_a_save_that_was_not_on_the_disk_is_none_after_the_host_lost_power(
    gvisor: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = gvisor.one
    order = one.order()
    await one.guest(order, await one.driver.start(order))
    await one.driver.save(order, SaveMode.FULL)
    await one.driver.pack_list(order.placement_id)
    place = one.config.state_dir / order.placement_id / saves.SAVED
    assert (place / saves.DURABLE).exists(), "what is sent was on the disk before"
    another_boot = tmp_path / "boot_id"
    another_boot.write_text("another\n")
    monkeypatch.setattr(saves, "BOOT_ID", another_boot)
    assert saves.read(place).mode is SaveMode.FULL
    (place / saves.DURABLE).unlink()
    with pytest.raises(Refused) as told:
        saves.read(place)
    assert told.value.code is Code.RESUME_FAILED
    assert (await refusal(one.driver.pack_list(order.placement_id))).code is Code.RESUME_FAILED
