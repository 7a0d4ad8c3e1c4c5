"""A driver of virtual machines: the port's verbs, for any program that runs machines.

Theory of operation. Directories, slots, control groups, images, killing, looking, freezing and the order of a save are the same as for containers,
so this is `drivers/oci`'s driver with another runtime (`runtime.py`) and another kind of root: the image's tree as one file (`roots.py`). Whether
machines can run here is found by trying it: one boots within its limit or none does, whatever devices say. A driver never claims more than that: one
with hardware virtualization and one without are two drivers, of two isolations.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.domain.spec import Isolation, SaveMode, Spec
from atoll.drivers.machines import birth, tap
from atoll.drivers.machines.config import Accelerator, MachineConfig
from atoll.drivers.machines.roots import Roots
from atoll.drivers.machines.runtime import BEGUN, CONFIG, VM, MachineRuntime, born_of
from atoll.drivers.machines.telling import guest_disk
from atoll.drivers.oci import probes, saves, selftest
from atoll.drivers.oci.config import OciConfig
from atoll.drivers.oci.driver import OciDriver, no_step
from atoll.drivers.oci.images import BASE_NAME, Blocking, Images
from atoll.drivers.oci.moving import Needs, instructions
from atoll.drivers.oci.programs import Programs
from atoll.drivers.oci.runtime import Launch
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.oci.slotworks import Slot
from atoll.drivers.port import Capabilities, MomentFacts, OnExit, Order, Probe
from atoll.hostops import cgroups

KVM: Final = Path("/dev/kvm")
VERSION_MAX: Final = 128
"""Of what a program calls itself, in a kind of moments."""
FOUND: Final = "tried.json"
"""What a trial found, until the host or the program is another."""


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


class MachineDriver(OciDriver):
    """Virtual machines on this host. Give it the same pool as the instance's other drivers."""

    def __init__(
        self,
        config: OciConfig,
        machines: MachineConfig,
        runtime: MachineRuntime,
        pool: SlotPool,
        *,
        on_step: Callable[[str], None] = no_step,
    ) -> None:
        self._machines = machines
        self._machine = runtime
        self._roots = Roots(machines.mkfs)
        self._lacks: Refused | None = Refused(Code.RUNTIME_MISSING, "the driver is not open")
        """Why no machine can be started; None: one can."""
        super().__init__(config, pool, runtime, on_step=on_step)

    def _make_images(self) -> Images:
        return MachineImages(self._config, self._blocking, self._roots)

    def _declare(self) -> Capabilities:
        kvm = self._machine.accelerator is Accelerator.KVM
        return Capabilities(
            name=self._config.runtime.value,
            isolation=Isolation.VM if kvm else Isolation.VM_EMULATED,
            arch=os.uname().machine,
            stop_keeps_disk=True,
            pauses=cgroups.freezes(self._layout),
            saves=self._machine.saves,
            snapshots=True,
            portable=True,
            metered=True,
        )

    async def open(self, on_exit: OnExit) -> None:
        await super().open(on_exit)
        with contextlib.suppress(AtollError, OSError):
            # Machines that run are looked after all the same; the self-check says what is missing.
            await self._choose()

    # -- whether they run

    async def _choose(self) -> None:
        """Find whether machines run. *Errors*: Refused RUNTIME_MISSING, RUNTIME_UNTRUSTED, IMAGE_UNAVAILABLE, IMAGE_CORRUPT."""
        try:
            await self._blocking(self._machine.ready)
            works = self._machine.accelerator is Accelerator.TCG or await self._was_tried()
        except (AtollError, OSError) as error:
            self._lacks = error if isinstance(error, Refused) else Refused(Code.RUNTIME_MISSING, str(error))
            raise
        self._lacks = None if works else Refused(Code.RUNTIME_MISSING, f"no machine starts by {self._machine.binary.name} with KVM here")

    async def _was_tried(self) -> bool:
        """Whether a guest boots with KVM: found once for each start of the host and each version of what it takes."""
        key = await self._blocking(self._key)
        note = self._config.run_dir / FOUND
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = json.loads(await self._blocking(note.read_text))
            if known["key"] == key:
                return bool(known["kvm"])
        before, self._lacks = self._lacks, None
        try:
            works = (await self._probe_boot()).ok
        finally:
            self._lacks = before
        await self._blocking(lambda: note.write_text(json.dumps({"key": key, "kvm": works})))
        return works

    def _key(self) -> list[str]:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kvm = f"{KVM.stat().st_rdev:x} {KVM.stat().st_mode:o}" if KVM.exists() else "none"
        return [boot, kvm, self._machine.version(), self._machine.ready().kernel.version]

    def _boot_s(self) -> float:
        return self._machines.boot_limit_s(self._machine.accelerator)

    # -- where containers differ

    def _kept_programs(self) -> Sequence[Programs]:
        # A machine's guest program is in its memory, and in what it boots from.
        return ()

    async def _prepare(self, order: Order, rootfs: Path) -> None:
        if self._lacks is not None:
            raise Refused(self._lacks.code, self._lacks.message)
        await super()._prepare(order, rootfs)

    def _write_what_it_is(self, order: Order, slot: Slot, rootfs: Path) -> None:  # noqa: ARG002 - the same for all kinds
        content = guest_disk(order, resolver=self.gateway_address, tmpfs_percent=self._config.tmpfs_percent)
        directory = self._view.directory(order.placement_id)
        (directory / VM / CONFIG).write_bytes(content)
        # That it can be told by the line whose it is: those that an earlier release has started cannot.
        (directory / saves.SHOWN).mkdir(exist_ok=True)

    async def _beginning(self, order: Order) -> Callable[[Launch], int]:
        begun = self._view.directory(order.placement_id) / VM / BEGUN
        if order.spec.origin is None or await self._blocking(begun.exists):
            return self._machine.start
        origin = await self._blocking(lambda: self._origin(order))
        assert origin is not None

        def begin(launch: Launch) -> int:
            pid = self._machine.restore(launch, origin.directory, origin.mode)
            begun.touch()
            return pid

        return begin

    async def _files_of(self, order: Order, rootfs: Path, save: saves.Save) -> saves.Save:
        """Where its memory fits, what the guest has not written to its disk yet is had, too; else its disk as a power cut would leave it."""
        launch = replace(self._launch(order, rootfs), rootfs=rootfs)
        if await self._blocking(lambda: self._machine.fits(launch, save.directory)):
            return await super()._files_of(order, rootfs, save)
        return await self._abide(order.placement_id, lambda: self._keep_files_alone(order.placement_id, save))

    def _keep_files_alone(self, placement_id: str, save: saves.Save) -> saves.Save:
        directory = self._view.directory(placement_id)
        free, draft = self._free(), saves.begin(directory)
        try:
            self._machine.files_alone(save.directory, draft)
            return saves.publish(directory, SaveMode.FILES)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise self._not_saved(error, free, placement_id) from error

    # -- elsewhere

    def _needs_of(self, save: saves.Save) -> Needs:
        if save.mode is not SaveMode.FULL:
            # A disk, which any kernel mounts.
            return Needs()
        kvm = self._machine.accelerator is Accelerator.KVM
        # What emulates a processor has the same one everywhere.
        return Needs(self._machine.version()[:VERSION_MAX], instructions() if kvm else (), tuple(sorted(born_of(save.directory).items())))

    def _versions(self) -> Sequence[str]:
        return [self._machine.version()[:VERSION_MAX], ""] if self._lacks is None else []

    def _misfit(self, facts: MomentFacts) -> str:
        if facts.mode is not SaveMode.FULL:
            return ""
        return super()._misfit(facts) or birth.differs(dict(facts.notes), self._machine.surroundings(self._disk_if_there(facts.image)))

    def _disk_if_there(self, digest: str) -> Path | None:
        """An image's disk, made of its tree if need be; None where this host has not got that yet: then a restore finds out."""
        try:
            return self._roots.of(self._images.cache.look_up(digest, BASE_NAME).directory)
        except (Refused, OSError):
            return None

    def _empty_root(self) -> Path:
        place = self._config.run_dir / "empty"
        (place / "rootfs" / "etc").mkdir(parents=True, exist_ok=True)
        return self._roots.of(place)

    # -- look

    @abstractmethod
    def _probe_program(self) -> Probe:
        """That the program is there, and is the one that it should be. Blocking."""

    async def probe(self) -> Sequence[Probe]:
        config = self._config
        network = probes.network(await self._pool.checks())
        with contextlib.suppress(AtollError, OSError):
            await self._choose()
        found = await self._blocking(
            lambda: [
                self._probe_program(),
                self._probe_kernel(),
                self._probe_accelerator(),
                probes.guest(config),
                probes.controllers(self._layout),
                *network,
                probes.disk(config),
                probes.images(self._images.cache),
            ]
        )
        boot = f"runtime.{config.runtime}.boot"
        return [*found, await self._probe_boot() if self._lacks is None else Probe(boot, False, self._lacks.message, selftest.FIX)]

    def _probe_kernel(self) -> Probe:
        name, fix = f"runtime.{self._config.runtime}.kernel", "scripts/setup.py --only machines fetches it"
        try:
            kernel = self._machine.ready().kernel
        except (AtollError, OSError) as error:
            return Probe(name, ok=False, detail=str(error), fix=fix)
        missing = [str(path) for path in (self._machines.mkfs, tap.DEVICE) if not path.exists()]
        missing += [name for name in ("setpriv", "chroot") if shutil.which(name) is None]
        return Probe(name, ok=not missing, detail=f"missing: {', '.join(missing)}" if missing else kernel.version, fix=fix)

    def _probe_accelerator(self) -> Probe:
        """Said, so that nobody takes an emulated machine for a fast one."""
        kvm = self._machine.accelerator is Accelerator.KVM
        detail = "machines run with KVM" if kvm else "machines are emulated, some fifteen times slower than with KVM"
        fix = 'let this host have hardware virtualization, or allow emulated machines (`machines = "emulated"`)'
        return Probe(
            f"runtime.{self._config.runtime}.accelerator",
            ok=self._lacks is None,
            detail=detail if self._lacks is None else self._lacks.message,
            fix=fix,
        )
