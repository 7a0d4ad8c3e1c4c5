"""QEMU as a runtime: how a machine is started, saved and brought back. What differs from containers; the rest is `drivers/oci`'s.

Theory of operation. A machine's directory `vm` holds its disk, its memory's file and the small disk that tells it what it is; in `vm/run` QEMU has its
sockets. It may write these files and make others in `run` alone, and nothing that it makes there is followed or believed. A save
halts users' processes (the guest does that), then the machine; QEMU writes the devices' state, without memory, in milliseconds; what the machine has
written of its memory since the last save is gathered into its file (`memory.py`); the files get a second name in what is saved. A restore maps
that memory privately and copies the disk, so what is saved stays as it was until it is discarded, and whatever clones share stays shared. The guest
gets clock and chance of its own before its users' processes go on. The host never reads a file system that a guest has written.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci.crun import SpareDisks
from atoll.drivers.oci.runtime import CONSOLE, PID_FILE, KeepsNothing, Launch, last_words, read_pid, run
from atoll.drivers.qemu import jail, line, memory, options, qmp, tap
from atoll.drivers.qemu.config import OVERHEAD_MIB, THREADS_MAX, Accelerator, MachineConfig, user_of
from atoll.hostops import cgroups, loopdisk, namespaces, processes
from atoll.hostops.cgroups import Layout, Limits
from atoll.images import kernels

VM: Final = "vm"
MOMENT: Final = "moment.json"
SAVED_DISK: Final = "disk"
FORMAT: Final = 1
THERE_S: Final = 15.0
LOADED_S: Final = 60.0
REST_S: Final = 5.0
SYNC_S: Final = 60.0
WAKE_S: Final = 20.0
END_S: Final = 2.0
DEVICES_BYTES_MAX: Final = 16 << 20
_LOOK_EVERY_S: Final = 0.002
ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
"""All that QEMU is told of the agent's."""
KVM_DEVICE: Final = "c 10:232 rwm"


class Machines(KeepsNothing):
    """The runtime of virtual machines."""

    saves = SaveMode.FULL
    captures_running = False

    def __init__(self, config: MachineConfig, state_dir: Path, run_dir: Path, guest: Path, layout: Layout, *, spare_disks: int = 2) -> None:
        self._config = config
        self._state_dir = state_dir
        self._run_dir = run_dir
        self._guest = guest
        self._layout = layout
        self._disks = SpareDisks(run_dir / "disks", spare_disks, journal=True)
        self._tree: Path | None = None
        self._kernel: kernels.Kernel | None = None
        self._initrd: Path | None = None
        self._tsc_khz = 0
        self._version = ""
        self.accelerator = Accelerator.TCG
        """What the next machines run on; the driver decides it."""

    @property
    def binary(self) -> Path:
        return self._config.qemu

    def open(self) -> None:
        """What a machine needs may be missing: then starts say so, and machines that run can be looked after all the same."""
        self._run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._disks.open()

    def close(self) -> None:
        self._disks.close()

    def ready(self) -> tuple[Path, kernels.Kernel, Path]:
        """Jail, kernel and first file system, made when first needed. *Errors*: Refused RUNTIME_MISSING, IMAGE_UNAVAILABLE, IMAGE_CORRUPT."""
        if self._tree is None or self._kernel is None or self._initrd is None:
            self._tree = jail.tree(self._config, self._run_dir)
            self._kernel = kernels.look_up(self._config.cache)
            self._initrd = kernels.first_files(self._kernel, self._guest, self._run_dir)
            self._tsc_khz = tsc_khz()
            self._version = self._ask_version()
        return self._tree, self._kernel, self._initrd

    # -- files

    def vm(self, container_id: str) -> Path:
        """A machine's own directory."""
        return self._state_dir / container_id / VM

    def make_disk(self, directory: Path, disk_mib: int) -> None:
        (directory / VM).mkdir(exist_ok=True)
        # Its own user opens what is in it and can replace none of it.
        (directory / VM).chmod(0o711)
        if not (directory / VM / options.DISK).exists():
            self._disks.take(directory / VM / options.DISK, disk_mib)

    def rootfs(self, directory: Path, image: Path) -> Path:  # noqa: ARG002 - the port's
        return image

    # -- start

    def start(self, launch: Launch) -> int:
        vm = launch.directory / VM
        if (vm / options.DISK).stat().st_nlink > 1:
            # What is saved has it, too, and stays as it is.
            loopdisk.copy(vm / options.DISK, vm / options.DISK)
        self._fresh_memory(vm, launch.order.spec.memory_mib)
        return self._spawn(launch, None)

    def _fresh_memory(self, vm: Path, memory_mib: int) -> None:
        file = vm / options.MEMORY
        file.unlink(missing_ok=True)
        with file.open("wb") as made:
            made.truncate(memory_mib << 20)

    def _spawn(self, launch: Launch, state: Path | None) -> int:
        """Start QEMU; its process, once it has its monitor. *Errors*: Refused START_FAILED with its last words, RUNTIME_MISSING; OSError."""
        tree, kernel, initrd = self.ready()
        slot, spec = launch.slot, launch.order.spec
        assert slot is not None
        vm = launch.directory / VM
        cell = jail.Cell(tree, vm, launch.rootfs, kernel.image, initrd, user_of(slot.address), self.accelerator)
        shutil.rmtree(vm / options.RUN, ignore_errors=True)
        (vm / options.RUN).mkdir(mode=0o700)
        for name in (options.RUN, options.DISK, options.CONFIG, options.MEMORY):
            os.chown(vm / name, cell.user, cell.user, follow_symlinks=False)
        kvm = (KVM_DEVICE,) if self.accelerator is Accelerator.KVM else ()
        limits = Limits(spec.memory_mib + OVERHEAD_MIB[self.accelerator], spec.cpu_millis, THREADS_MAX, devices=True, more_devices=kvm)
        cgroups.make(self._layout, launch.group, limits)
        console = launch.directory / CONSOLE
        before = console.stat().st_size if console.exists() else 0
        namespaces.in_fresh_thread(lambda: self._spawn_in_thread(launch, cell, state))
        pid = read_pid(launch.directory)
        if pid is None or not qmp.wait_until_there(vm / options.RUN, pid, timeout_s=THERE_S):
            raise Refused(Code.START_FAILED, f"{self.binary.name} ended or has no monitor: {last_words(console, before)}")
        return pid

    def _spawn_in_thread(self, launch: Launch, cell: jail.Cell, state: Path | None) -> None:
        slot, spec = launch.slot, launch.order.spec
        assert slot is not None
        # Opened outside of the jail, which has neither.
        given = [] if state is None else [os.open(state, os.O_RDONLY | os.O_CLOEXEC)]
        try:
            jail.enter(cell, slot.namespace_fd)
            given.append(tap.make(slot.address))
            shape = options.Shape(
                name=launch.container_id,
                accelerator=self.accelerator,
                memory_mib=spec.memory_mib,
                cpus=options.cpus(self.accelerator, spec.cpu_millis),
                tap=given[-1],
                tsc_khz=self._tsc_khz,
                state=None if state is None else given[0],
            )
            groups = cgroups.directories(self._layout, launch.group)
            command = jail.command(cell, groups, launch.directory / PID_FILE, options.arguments(shape))
            run(command, console=launch.directory / CONSOLE, environment=ENVIRONMENT, pass_fds=given)
        finally:
            for fd in given:
                os.close(fd)

    def settle(self, pid: int) -> None:
        """Nothing waits: the limits were there before the guest was."""

    # -- save and restore

    def save(self, launch: Launch, target: Path, mode: SaveMode) -> None:
        vm = launch.directory / VM
        full = mode is SaveMode.FULL
        rested = line.rest(vm / options.RUN, sync=not full, timeout_s=REST_S if full else SYNC_S)
        if not rested and not full:
            raise Refused(Code.SAVE_FAILED, "the guest does not answer, so what it has not written to its disk yet cannot be saved")
        with qmp.Qmp(vm / options.RUN, code=Code.SAVE_FAILED) as monitor:
            monitor.ask("stop")
            if full:
                monitor.ask("xen-save-devices-state", filename=f"{jail.INNER_VM}/{options.RUN}/{options.DEVICES}", live=True)
        if full:
            self._save_memory(launch, vm, target)
        os.link(vm / options.DISK, target / SAVED_DISK)
        (target / MOMENT).write_text(json.dumps(self._moment(launch, rested=rested)))

    def _save_memory(self, launch: Launch, vm: Path, target: Path) -> None:
        pid = read_pid(launch.directory)
        if pid is None or not self.is_guest(pid, launch.container_id):
            raise Refused(Code.SAVE_FAILED, "the machine has ended")
        memory.gather(pid, vm / options.MEMORY)
        os.link(vm / options.MEMORY, target / options.MEMORY)
        _take(vm / options.RUN / options.DEVICES, target / options.DEVICES)

    def _moment(self, launch: Launch, *, rested: bool) -> dict[str, Any]:
        spec = launch.order.spec
        return {
            "format": FORMAT,
            "rested": rested,
            "machine": [self.accelerator, spec.memory_mib, options.cpus(self.accelerator, spec.cpu_millis), self.version()],
        }

    def version(self) -> str:
        """Of the QEMU that machines are started with; a machine's state is understood by the version that wrote it."""
        self.ready()
        return self._version

    def _ask_version(self) -> str:
        try:
            done = subprocess.run([str(self.binary), "--version"], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise Refused(Code.RUNTIME_MISSING, f"{self.binary} cannot be run: {error}") from error
        return done.stdout.splitlines()[0].strip()

    def go_on(self, container_id: str) -> None:
        run_dir = self.vm(container_id) / options.RUN
        with qmp.Qmp(run_dir, code=Code.SAVE_FAILED) as monitor:
            if monitor.status() != "running":
                monitor.ask("cont")
        line.wake(run_dir, timeout_s=REST_S, code=Code.SAVE_FAILED)

    def restore(self, launch: Launch, source: Path, mode: SaveMode) -> int:
        vm = launch.directory / VM
        loopdisk.copy(source / SAVED_DISK, vm / options.DISK)
        if mode is not SaveMode.FULL:
            self._fresh_memory(vm, launch.order.spec.memory_mib)
            return self._spawn(launch, None)
        moment = self._moment_of(launch, source)
        (vm / options.MEMORY).unlink(missing_ok=True)
        os.link(source / options.MEMORY, vm / options.MEMORY)
        pid = self._spawn(launch, source / options.DEVICES)
        self._wait_until_loaded(launch, vm)
        if moment["rested"] and not line.wake(vm / options.RUN, timeout_s=WAKE_S):
            raise Refused(Code.RESUME_FAILED, "the guest does not answer after its restore")
        return pid

    def _moment_of(self, launch: Launch, source: Path) -> dict[str, Any]:
        try:
            moment: dict[str, Any] = json.loads((source / MOMENT).read_text())
            saved = moment["machine"]
            rested = moment["rested"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refused(Code.RESUME_FAILED, f"what was saved does not say what machine it is of: {error!r}") from error
        now = self._moment(launch, rested=bool(rested))
        if (moment.get("format"), saved) != (now["format"], now["machine"]):
            raise Refused(
                Code.RESUME_FAILED,
                f"it was saved of another machine: {saved}, and here it is {now['machine']}",
                hint="Its files can be had all the same: resume it without its memory.",
            )
        return moment

    def _wait_until_loaded(self, launch: Launch, vm: Path) -> None:
        deadline = time.monotonic() + LOADED_S
        with qmp.Qmp(vm / options.RUN, code=Code.RESUME_FAILED) as monitor:
            while (status := monitor.status()) != "running":
                if status not in ("inmigrate", "prelaunch", "paused", "finish-migrate") or time.monotonic() > deadline:
                    raise Refused(Code.RESUME_FAILED, f"the machine is {status}: {last_words(launch.directory / CONSOLE, 0)}")
                time.sleep(_LOOK_EVERY_S)

    # -- end and look

    def let_go(self, container_id: str) -> None:
        """Nothing is left to be done when `start` returns."""

    def ask_to_end(self, container_id: str, pid: int) -> None:  # noqa: ARG002 - the port's
        line.end(self.vm(container_id) / options.RUN, timeout_s=END_S)

    def capture(self, directory: Path, container_id: str, packer: Sequence[str]) -> bytes:  # noqa: ARG002 - the port's
        raise Refused(Code.NOT_SUPPORTED, "no layers are made of virtual machines: the host reads no file system that a guest has written")

    def state_paths(self, container_id: str) -> list[Path]:  # noqa: ARG002 - the port's
        return []

    def containers(self) -> set[str]:
        return set()

    def is_guest(self, pid: int, container_id: str) -> bool:
        """The command line: `.../qemu-system-x86_64 -name ID ...`."""
        words = processes.arguments(pid)
        return len(words) > 2 and Path(words[0]).name == self.binary.name and words[1:3] == ["-name", container_id]


def _take(source: Path, target: Path) -> None:
    """Have the content of a file that QEMU has written. It may have put anything there. *Errors*: OSError; Refused SAVE_FAILED."""
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or not 0 < about.st_size <= DEVICES_BYTES_MAX:
            raise Refused(
                Code.SAVE_FAILED, f"QEMU has written no state of its devices: {about.st_size} bytes of kind {stat.S_IFMT(about.st_mode):o}"
            )
        target.write_bytes(file.read(DEVICES_BYTES_MAX))
    source.unlink()


def tsc_khz(wait_s: float = 0.05, clock: Callable[[], int] = time.monotonic_ns) -> int:
    """How fast the processor's time stamp counter counts. *Units*: kHz.

    The kernel tells nobody, so it is read: by six bytes of machine code, twice.
    """
    # A page that may be written and executed, for as long as this takes.
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        # rdtsc; shl rdx, 32; or rax, rdx; ret
        page.write(bytes.fromhex("0f3148c1e2204809d0c3"))
        view = ctypes.c_char.from_buffer(page)
        read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(view))
        first, began = read(), clock()
        time.sleep(wait_s)
        second, ended = read(), clock()
        del read, view
    return int((second - first) * 1e6 / (ended - began))
