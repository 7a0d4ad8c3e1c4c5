"""The `qemu` driver: the port's verbs for virtual machines.

Theory of operation. Directories, slots, control groups, images, killing, looking, freezing and the order of a save are the same as for containers,
so this is `drivers/oci`'s driver with another runtime (`machine.py`) and another kind of root: the image's tree as one file (`roots.py`). What
machines run on is found by trying it: one boots with KVM within its limit or there is no KVM, whatever devices say. Without it machines
run only where the operator has said so.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.domain.spec import Isolation, Spec
from atoll.drivers.oci import probes, selftest
from atoll.drivers.oci.config import OciConfig
from atoll.drivers.oci.driver import OciDriver, no_step
from atoll.drivers.oci.images import Blocking, Images
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.oci.slotworks import Slot
from atoll.drivers.port import Capabilities, OnExit, Order, Probe
from atoll.drivers.qemu import options, tap
from atoll.drivers.qemu.config import Accelerator, MachineConfig
from atoll.drivers.qemu.machine import VM, Machines
from atoll.drivers.qemu.roots import Roots
from atoll.hostops import cgroups

KVM: Final = Path("/dev/kvm")
FOUND: Final = "accelerator.json"
"""What a trial found, until the host or QEMU is another."""


class MachineImages(Images):
    """An image's root as machines have it."""

    def __init__(self, config: OciConfig, blocking: Blocking, roots: Roots) -> None:
        super().__init__(config, blocking)
        self._roots = roots

    async def root_of(self, spec: Spec) -> Path:
        tree = await super().root_of(spec)
        return await self._blocking(lambda: self._roots.of(tree.parent))

    def ready_root(self, spec: Spec) -> Path:
        return self._roots.of(super().ready_root(spec).parent)


class QemuDriver(OciDriver):
    """Virtual machines on this host. Give it the same pool as the instance's other drivers."""

    def __init__(self, config: OciConfig, machines: MachineConfig, pool: SlotPool, *, on_step: Callable[[str], None] = no_step) -> None:
        self._machines = machines
        self._roots = Roots(machines.mkfs)
        self._machine = Machines(machines, config.state_dir, config.run_dir, config.guest_binary, cgroups.detect())
        self._lacks: str | None = "the driver is not open"
        """Why no machine can be started; None: one can."""
        super().__init__(config, pool, self._machine, on_step=on_step)

    def _make_images(self) -> Images:
        return MachineImages(self._config, self._blocking, self._roots)

    def _declare(self) -> Capabilities:
        return Capabilities(
            name="qemu",
            isolation=Isolation.VM,
            arch=os.uname().machine,
            stop_keeps_disk=True,
            pauses=cgroups.freezes(self._layout),
            saves=self._machine.saves,
            metered=True,
        )

    async def open(self, on_exit: OnExit) -> None:
        await super().open(on_exit)
        try:
            await self._choose()
        except (AtollError, OSError) as error:
            # Machines that run are looked after all the same; the self-check says what is missing.
            self._lacks = str(error)

    # -- what they run on

    async def _choose(self) -> None:
        """Find what machines run on. *Errors*: Refused RUNTIME_MISSING, IMAGE_UNAVAILABLE, IMAGE_CORRUPT."""
        await self._blocking(self._machine.ready)
        if await self._has_kvm():
            self._machine.accelerator, self._lacks = Accelerator.KVM, None
        elif self._machines.emulated:
            self._machine.accelerator, self._lacks = Accelerator.TCG, None
        else:
            self._lacks = "no machine starts with KVM here, and the operator has not allowed machines without it"

    async def _has_kvm(self) -> bool:
        """Whether a guest boots with KVM: found once for each start of the host and each QEMU."""
        key = await self._blocking(self._key)
        note = self._config.run_dir / FOUND
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = json.loads(await self._blocking(note.read_text))
            if known["key"] == key:
                return bool(known["kvm"])
        works = KVM.exists() and (await self._try(Accelerator.KVM)).ok
        await self._blocking(lambda: note.write_text(json.dumps({"key": key, "kvm": works})))
        return works

    def _key(self) -> list[str]:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kvm = f"{KVM.stat().st_rdev:x} {KVM.stat().st_mode:o}" if KVM.exists() else "none"
        return [boot, kvm, self._machine.version(), self._machine.ready()[1].version]

    async def _try(self, accelerator: Accelerator) -> Probe:
        """Boot a guest with this."""
        before, lacks = self._machine.accelerator, self._lacks
        self._machine.accelerator, self._lacks = accelerator, None
        try:
            return await self._probe_boot()
        finally:
            self._machine.accelerator, self._lacks = before, lacks

    def _boot_s(self) -> float:
        return self._machines.boot_s[self._machine.accelerator]

    # -- where containers differ

    async def _prepare(self, order: Order, rootfs: Path) -> None:
        if self._lacks is not None:
            raise Refused(Code.RUNTIME_MISSING, self._lacks)
        await super()._prepare(order, rootfs)

    def _write_what_it_is(self, order: Order, slot: Slot, rootfs: Path) -> None:  # noqa: ARG002 - the same for all kinds
        content = options.guest_disk(order, resolver=self.gateway_address, tmpfs_percent=self._config.tmpfs_percent)
        (self._view.directory(order.placement_id) / VM / options.CONFIG).write_bytes(content)

    def _empty_root(self) -> Path:
        place = self._config.run_dir / "empty"
        (place / "rootfs" / "etc").mkdir(parents=True, exist_ok=True)
        return self._roots.of(place)

    # -- look

    async def probe(self) -> Sequence[Probe]:
        config = self._config
        network = probes.network(await self._pool.checks())
        with contextlib.suppress(AtollError, OSError):
            await self._choose()
        found = await self._blocking(
            lambda: [
                probes.binary(config.runtime, self._runtime),
                self._probe_kernel(),
                self._probe_accelerator(),
                probes.guest(config),
                probes.controllers(self._layout),
                *network,
                probes.disk(config),
                probes.images(self._images.cache),
            ]
        )
        return [*found, await self._probe_boot() if self._lacks is None else Probe("runtime.qemu.boot", False, self._lacks, selftest.FIX)]

    def _probe_kernel(self) -> Probe:
        name, fix = "runtime.qemu.kernel", "scripts/setup.py --only machines fetches it"
        try:
            _, kernel, _ = self._machine.ready()
        except (AtollError, OSError) as error:
            return Probe(name, ok=False, detail=str(error), fix=fix)
        missing = [str(path) for path in (self._machines.mkfs, tap.DEVICE) if not path.exists()]
        missing += [name for name in ("setpriv", "chroot") if shutil.which(name) is None]
        return Probe(name, ok=not missing, detail=f"missing: {', '.join(missing)}" if missing else kernel.version, fix=fix)

    def _probe_accelerator(self) -> Probe:
        """Said, so that nobody takes an emulated machine for a fast one."""
        accelerator = self._machine.accelerator
        detail = (
            "machines run with KVM" if accelerator is Accelerator.KVM else "machines are emulated, some fifteen times slower than with KVM"
        )
        fix = 'let this host have hardware virtualization, or allow emulated machines (`machines = "emulated"`)'
        return Probe("runtime.qemu.accelerator", ok=self._lacks is None, detail=self._lacks or detail, fix=fix)
