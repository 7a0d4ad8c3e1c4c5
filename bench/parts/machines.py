"""Machines: saved, restored and cloned by the driver, beside QEMU alone with what it has saved."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from atoll.base.ids import Prefix, new_id
from atoll.domain.spec import Origin, SaveMode
from atoll.drivers.machines.config import MKFS
from atoll.drivers.machines.roots import Roots
from atoll.drivers.machines.runtime import VM
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.oci.ruleset import Egress
from atoll.drivers.oci.saves import SAVED
from atoll.drivers.port import Order, Power, Seen
from atoll.drivers.qemu.machine import tsc_khz
from atoll.images import kernels
from atoll.programs.layout import bin_directory, cache_directory
from atoll.testing.conformance.qemu_stand import QemuStand, kind, missing
from bench import machines
from bench.findings import Finding, Verdict
from bench.product import CannotMeasure, pss_kib
from bench.stats import Sample, figure, paired
from bench.world import World

MEMORY_MIB: Final = 256
CLONES: Final = 8
ROUNDS: Final = 24
MORE_MS_MAX: Final = 30.0
PSS_MIB_MAX: Final = 40.0
HOLD: Final = "head -c 33554432 /dev/urandom >/dev/shm/held"
TRUE: Final = ["/bin/true"]


async def measure(world: World) -> Finding:
    """Save, restore until a first command has ended, snapshot and clones of a 256 MiB guest that holds 32 MiB of its own."""
    if lack := missing(bin_directory(), cache_directory()):
        raise CannotMeasure(f"it needs {lack}")
    finding = Finding(
        name="machines",
        title=f"Virtual machines by QEMU, {kind().value} (ms)",
        columns=["", "ours p50", "p95", "p99", "n", "bare p50", "more, pair by pair"],
        about=(
            "The driver alone, without control: a guest of 256 MiB that holds 32 MiB which cannot be compressed. Restored: until it has been initialised and "
            "has run /bin/true. Bare: the same QEMU with the same options and what the driver has saved, its network and its copy of the disk made "
            "ahead, as are its control group and how fast the clock counts; no jail. Each is the first of a pair as often as the other. "
            "PSS is of each clone of one moment while all of them stand beside each other, and each has run a command; "
            "what a machine has of the memory that it shares with the others, and the code that the emulator has translated, are parts of it."
        ),
    )
    home = Path(tempfile.mkdtemp(prefix="atoll-machines.", dir="/var/tmp"))
    stand = QemuStand(kind(), home, binaries=bin_directory(), cache=cache_directory())
    await stand.open()
    try:
        await _rest(world, stand, finding, home)
        await _clones(world, stand, finding)
    finally:
        await stand.close()
        shutil.rmtree(home)
    return finding


async def _rest(world: World, stand: QemuStand, finding: Finding, home: Path) -> None:
    save, ours, bare = Sample(), Sample(), Sample()
    for number in range(world.count(ROUNDS, 2)):
        order = stand.order(memory_mib=MEMORY_MIB)
        guest = await stand.guest(order, await stand.driver.start(order))
        await guest.run(["/bin/sh", "-c", HOLD], timeout_s=120.0)
        began = time.perf_counter()
        await stand.driver.save(order, SaveMode.FULL)
        save.add(time.perf_counter() - began)
        directory, place = home / f"aside-{number}", stand.config.state_dir / order.placement_id
        machines.aside(place / SAVED, place / VM, directory)
        # Each is the first of a pair as often as the other.
        if number % 2:
            bare.add(await _bare(stand, order, directory))
        began = time.perf_counter()
        seen = await stand.driver.restore(order)
        await (await stand.guest(order, seen)).run(TRUE)
        ours.add(time.perf_counter() - began)
        await stand.driver.remove(order.placement_id)
        if not number % 2:
            bare.add(await _bare(stand, order, directory))
        shutil.rmtree(directory)
    finding.rows.append(["save", *save.cells(), "–", "–"])
    more = paired(ours.values, bare.values) * 1e3
    finding.rows.append(["restore and a command", *ours.cells(), figure(bare.median * 1e3), figure(more)])
    for label, sample in (("save, ours", save), ("restore, ours", ours), ("restore, bare", bare)):
        finding.keep(label, sample)
    target = f"restore until a first command: bare + {MORE_MS_MAX:.0f} ms at most"
    finding.verdicts.append(Verdict(target, f"{more:+.1f} ms", f"{MORE_MS_MAX:.0f} ms", more <= MORE_MS_MAX))


async def _bare(stand: QemuStand, order: Order, directory: Path) -> float:
    """How long it took. *Units*: seconds."""
    slot = await stand.pool.reserve()
    await stand.pool.assign(slot, order.placement_id, Egress.of(internet=False, allow=(), deny=()))
    try:
        kernel = kernels.look_up(cache_directory())
        initrd = kernels.first_files(kernel, stand.config.guest_binary, stand.config.run_dir)
        moment = machines.Moment(directory, order, Roots(MKFS).of(stand.image().directory), kernel, initrd, stand.config.runtime, tsc_khz())
        name = f"{stand.names.cgroup}/bare"
        with machines.device(slot) as tap_fd, machines.group(name, order, stand.config.runtime) as groups:
            began = time.perf_counter()
            with machines.restored(moment, tap_fd, groups):
                await (await stand.guest(order, Seen(Power.RUNNING, address=slot.address))).run(TRUE)
                return time.perf_counter() - began
    finally:
        await stand.pool.give_back(slot.number, slot.address)


async def _clones(world: World, stand: QemuStand, finding: Finding) -> None:
    keep, fork, pss = Sample(), Sample(), Sample()
    parent = stand.order(memory_mib=MEMORY_MIB)
    guest = await stand.guest(parent, await stand.driver.start(parent))
    await guest.run(["/bin/sh", "-c", HOLD], timeout_s=120.0)
    count = world.count(CLONES, 3)
    snapshot_id = new_id(Prefix.SNAPSHOT, os.urandom)
    began = time.perf_counter()
    saved = await stand.driver.snapshot(parent, snapshot_id, SaveMode.FULL)
    keep.add(time.perf_counter() - began)
    spec = replace(parent.spec, origin=Origin(snapshot_id, saved.mode))
    orders = [replace(stand.order(), spec=spec) for _ in range(count)]
    began = time.perf_counter()
    seen = await asyncio.gather(*(stand.driver.start(one) for one in orders))
    guests = [await stand.guest(one, found) for one, found in zip(orders, seen, strict=True)]
    await asyncio.gather(*(one.run(TRUE) for one in guests))
    fork.add((time.perf_counter() - began) / count)
    pss.extend(pss_kib(found.pid or 0) / 1024 for found in seen)
    parts = {name: Sample() for name in ("memory", "code")}
    for found in seen:
        for name, kib in machines.parts_kib(found.pid or 0).items():
            parts[name].add(kib / 1024)
    for one in (parent, *orders):
        await stand.driver.remove(one.placement_id)
    await stand.driver.drop(snapshot_id)
    finding.rows.append(["snapshot of one that goes on", *keep.cells(), "–", "–"])
    finding.rows.append([f"each of {count} clones at once", *fork.cells(), "–", "–"])
    finding.rows.append(["PSS of a clone (MiB)", *pss.cells(scale=1.0), "–", "–"])
    finding.rows.append(["of that the guest's memory (MiB)", *parts["memory"].cells(scale=1.0), "–", "–"])
    if kind() is RuntimeKind.QEMU_EMULATED:
        finding.rows.append(["of that translated code (MiB)", *parts["code"].cells(scale=1.0), "–", "–"])
    for label, sample in (("snapshot", keep), ("clones", fork), ("PSS, MiB", pss), ("PSS of memory, MiB", parts["memory"])):
        finding.keep(label, sample)
    reached = pss.median <= PSS_MIB_MAX
    finding.verdicts.append(
        Verdict(f"a clone's own memory: {PSS_MIB_MAX:.0f} MiB at most", f"{pss.median:.1f} MiB", f"{PSS_MIB_MAX:.0f} MiB", reached)
    )
