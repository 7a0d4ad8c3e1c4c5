"""A machine as a runtime: its files, and the order of its start, save and restore. What a program does in its own way is its runtime's.

Theory of operation. A machine's directory `vm` holds its disk, its memory's file and the small disk that tells it what it is; in `vm/run` its program
has its sockets. It may write these files and make others in `run` alone, and nothing that it makes there is followed or believed. A save
halts users' processes (the guest does that), then the machine; its program writes the devices' state; what the machine has written of its
memory is gathered into its file; the files get a second name in what is saved. A restore maps that memory privately and copies the disk, so what is
saved stays as it was until it is discarded, and whatever clones share stays shared. The guest gets clock and chance of its own before its
users' processes go on. The host never reads a file system that a guest has written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.machines import birth, line
from atoll.drivers.machines.cell import Cell
from atoll.drivers.machines.config import THREADS_MAX, Accelerator, MachineConfig, user_of
from atoll.drivers.machines.roots import fingerprint_of
from atoll.drivers.oci import saves
from atoll.drivers.oci.crun import SpareDisks
from atoll.drivers.oci.runtime import CONSOLE, PID_FILE, Launch, last_words
from atoll.drivers.sockets import is_ending
from atoll.hostops import cgroups, loopdisk, namespaces
from atoll.hostops.cgroups import Layout, Limits
from atoll.images import kernels
from atoll.wire.guest import PlacementFile

VM: Final = "vm"
DISK: Final = "disk.img"
CONFIG: Final = "config.img"
MEMORY: Final = "memory"
DEVICES: Final = "devices"
BEGUN: Final = "begun"
"""There: it has begun from its origin, and needs that no more."""
BORN: Final = "born.json"
"""What it has known since it booted (`birth.py`), wherever that was."""
RUN: Final = "run"
"""The only directory in which a machine's program may make or replace anything."""
STARTING: Final = "starting.pid"
"""Beside the process's own note (PID_FILE), whose name it gets when the machine goes: one that was left half begun is nobody's guest."""
MOMENT: Final = "moment.json"
SAVED_DISK: Final = "disk"
FORMAT: Final = 1
THERE_S: Final = 15.0
REST_S: Final = 5.0
SYNC_S: Final = 60.0
WAKE_S: Final = 20.0
BOOTED_S: Final = 60.0
END_S: Final = 2.0
ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
"""All that a machine's program is told of the agent's."""
FILES_HINT: Final = "Its files can be had all the same: resume it without its memory."
KVM_DEVICE: Final = "c 10:232 rwm"
_LOOK_EVERY_S: Final = 0.003
_AGAIN_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Parts:
    """What every machine of this instance boots by."""

    kernel: kernels.Kernel
    initrd: Path


class MachineRuntime(ABC):
    """A runtime of virtual machines."""

    saves = SaveMode.FULL
    disk_file: str | None = None
    captures_running = False
    overhead_mib: int
    """What a machine's program needs besides the guest's memory; its control group lets it have that."""
    there_s = THERE_S
    """How long its program may take until it answers."""
    devices: tuple[str, ...] = ()
    """Which devices its program may open besides the usual ones, as control groups have them."""

    def __init__(
        self,
        config: MachineConfig,
        accelerator: Accelerator,
        *,
        state_dir: Path,
        run_dir: Path,
        guest: Path,
        layout: Layout,
        spare_disks: int = 2,
    ) -> None:
        self.accelerator = accelerator
        self._machines = config
        self._state_dir = state_dir
        self._run_dir = run_dir
        self._guest = guest
        self._layout = layout
        self._disks = SpareDisks(run_dir / "disks", spare_disks, journal=True)
        self._parts: Parts | None = None

    # What differs between programs.

    @property
    @abstractmethod
    def binary(self) -> Path:
        """The program."""

    @abstractmethod
    def version(self) -> str:
        """Of the program: what one has saved, the same version understands. *Errors*: as `ready`."""

    @abstractmethod
    def cpus(self, cpu_millis: int) -> int:
        """How many cores a machine has."""

    @abstractmethod
    def _kernel(self, kernel: kernels.Kernel) -> Path:
        """The form of the kernel that it boots."""

    @abstractmethod
    def _begin_in_thread(self, launch: Launch, cell: Cell, *, restored: bool) -> None:
        """Start the program, in a thread of its own that ends with it, and note its process (STARTING). *Errors*: as `start`."""

    @abstractmethod
    def _is_there(self, launch: Launch, pid: int, *, timeout_s: float) -> bool:
        """Whether the program answers; False once it has ended."""

    @abstractmethod
    def _set_going(self, launch: Launch, *, restored: bool) -> None:
        """What has to be said until the machine runs. *Errors*: Refused START_FAILED, RESUME_FAILED."""

    @abstractmethod
    def _halt(self, launch: Launch, *, devices: Path | None) -> None:
        """Halt the machine; write the devices' state to a file. *Errors*: Refused SAVE_FAILED; OSError."""

    @abstractmethod
    def _gather(self, launch: Launch, memory: Path) -> None:
        """Bring a copy of what the machine began with, a file, to what its memory is now. It is halted. *Errors*: Refused SAVE_FAILED; OSError."""

    @abstractmethod
    def _let_run(self, container_id: str) -> None:
        """Let a machine run that `_halt` has halted; one that runs is left alone. *Errors*: Refused SAVE_FAILED."""

    @abstractmethod
    def reach(self, container_id: str) -> line.Reach:
        """The way to its guest."""

    # What all have in common.

    def open(self) -> None:
        """What a machine needs may be missing: then starts say so, and machines that run can be looked after all the same."""
        self._run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._disks.open()

    def close(self) -> None:
        self._disks.close()

    def ready(self) -> Parts:
        """Made when first needed. *Errors*: Refused RUNTIME_MISSING, RUNTIME_UNTRUSTED, IMAGE_UNAVAILABLE, IMAGE_CORRUPT."""
        if self._parts is None:
            kernel = kernels.look_up(self._machines.cache)
            self._parts = Parts(kernel, kernels.first_files(kernel, self._guest, self._run_dir))
        return self._parts

    # -- files

    def vm(self, container_id: str) -> Path:
        """A machine's own directory."""
        return self._state_dir / container_id / VM

    def make_disk(self, directory: Path, disk_mib: int) -> None:
        self._make_place(directory)
        if not (directory / VM / DISK).exists():
            self._disks.take(directory / VM / DISK, disk_mib)

    def _make_place(self, directory: Path) -> None:
        (directory / VM).mkdir(exist_ok=True)
        # Its own user opens what is in it and can replace none of it.
        (directory / VM).chmod(0o711)

    def rootfs(self, directory: Path, image: Path) -> Path:  # noqa: ARG002 - the port's
        return image

    # -- start

    def start(self, launch: Launch) -> int:
        vm = launch.directory / VM
        if (vm / DISK).stat().st_nlink > 1:
            # What is saved has it, too, and stays as it is.
            loopdisk.copy(vm / DISK, vm / DISK)
        return self._boot(launch)

    def _boot(self, launch: Launch) -> int:
        vm = launch.directory / VM
        file = vm / MEMORY
        file.unlink(missing_ok=True)
        with file.open("wb") as made:
            made.truncate(launch.order.spec.memory_mib << 20)
        self._note_birth(vm, self.surroundings(launch.rootfs))
        return _gone(launch, self._start(launch, restored=False))

    def surroundings(self, rootfs: Path | None) -> dict[str, str]:
        """What a machine that boots here will know (`birth.py`). `rootfs`: its image's disk, where it is known. *Errors*: as `ready`."""
        known = {} if rootfs is None else {birth.ROOT: fingerprint_of(rootfs)}
        return known if self.accelerator is Accelerator.TCG else {**known, birth.PROCESSOR: birth.processor()}

    def _note_birth(self, vm: Path, born: Mapping[str, str]) -> None:
        (vm / BORN).write_text(json.dumps({name: value for name, value in born.items() if value}))

    def _start(self, launch: Launch, *, restored: bool) -> int:
        """Start the program, and the machine; its process. *Errors*: Refused START_FAILED with its last words, RUNTIME_MISSING; OSError."""
        parts, slot, spec = self.ready(), launch.slot, launch.order.spec
        assert slot is not None
        vm = launch.directory / VM
        cell = Cell(vm, launch.rootfs, self._kernel(parts.kernel), parts.initrd, user_of(slot.address))
        shutil.rmtree(vm / RUN, ignore_errors=True)
        (vm / RUN).mkdir(mode=0o700)
        for name in self._its_own(restored=restored):
            _hand_over(vm / name, cell.user)
        memory_mib = spec.memory_mib + self.overhead_mib
        cgroups.make(self._layout, launch.group, Limits(memory_mib, spec.cpu_millis, THREADS_MAX, devices=True, more_devices=self.devices))
        console = launch.directory / CONSOLE
        before = console.stat().st_size if console.exists() else 0
        # Of one that was ended before it went: that number may be another process's by now.
        (launch.directory / STARTING).unlink(missing_ok=True)
        namespaces.in_fresh_thread(lambda: self._begin_in_thread(launch, cell, restored=restored))
        pid = starting_pid(launch)
        if pid is None or not self._is_there(launch, pid, timeout_s=self.there_s):
            raise Refused(Code.START_FAILED, f"{self.binary.name} ended or does not answer: {last_words(console, before)}")
        self._set_going(launch, restored=restored)
        return pid

    def _its_own(self, *, restored: bool) -> Sequence[str]:  # noqa: ARG002 - for those that differ
        """What in its directory its user opens, of which it may write all but the names."""
        return (RUN, DISK, CONFIG, MEMORY)

    def settle(self, pid: int) -> None:  # noqa: B027 - most have nothing to do here
        """Nothing waits: the limits were there before the guest was."""

    # -- save and restore

    def save(self, launch: Launch, target: Path, mode: SaveMode) -> None:
        vm = launch.directory / VM
        full = mode is SaveMode.FULL
        rested = self._rest(launch, full=full)
        self._halt(launch, devices=target / DEVICES if full else None)
        if full:
            if (vm / MEMORY).stat().st_nlink > 1:
                # Others began from it, too.
                loopdisk.copy(vm / MEMORY, target / MEMORY)
            else:
                os.link(vm / MEMORY, target / MEMORY)
            self._gather(launch, target / MEMORY)
        os.link(vm / DISK, target / SAVED_DISK)
        self._write_moment(launch, target, rested=rested)

    def _rest(self, launch: Launch, *, full: bool) -> bool:
        rested = line.rest(self.reach(launch.container_id), sync=not full, timeout_s=REST_S if full else SYNC_S)
        if not rested and not full:
            raise Refused(Code.SAVE_FAILED, "the guest does not answer, so what it has not written to its disk yet cannot be saved")
        return rested

    def _write_moment(self, launch: Launch, target: Path, *, rested: bool) -> None:
        (target / MOMENT).write_text(json.dumps(self._moment(launch, rested=rested)))

    def _moment(self, launch: Launch, *, rested: bool) -> dict[str, Any]:
        spec = launch.order.spec
        machine = [self.accelerator, spec.memory_mib, self.cpus(spec.cpu_millis), self.version()]
        born = _read_facts(launch.directory / VM / BORN)
        return {"format": FORMAT, "rested": rested, "machine": machine, "placement": launch.container_id, "born": born}

    halts_to_keep = False

    def keep(self, launch: Launch, guest: int, target: Path, mode: SaveMode) -> None:  # noqa: ARG002 - the port's
        """Beside the machine, which stands still while its devices, what it has changed of its memory, and its disk are written."""
        vm, full = launch.directory / VM, mode is SaveMode.FULL
        if full:
            # Nobody writes what it began with: that is copied while it runs.
            loopdisk.copy(vm / MEMORY, target / MEMORY)
        try:
            rested = self._rest(launch, full=full)
            self._halt(launch, devices=target / DEVICES if full else None)
            if full:
                self._gather(launch, target / MEMORY)
            loopdisk.copy(vm / DISK, target / SAVED_DISK)
            self._write_moment(launch, target, rested=rested)
        finally:
            self.go_on(launch.container_id)

    def seed_disk(self, directory: Path, disk_mib: int, source: Callable[[], Path]) -> None:  # noqa: ARG002 - the port's
        """Its disk comes when it begins (`restore`). One that was saved has begun, here or elsewhere."""
        self._make_place(directory)
        if not (directory / VM / DISK).exists() and not saves.exists(directory):
            source()

    def distrust(self, directory: Path) -> None:  # noqa: B027 - the port's
        """The host reads no file system of a guest's, wherever it was written: its own kernel looks through it."""

    def go_on(self, container_id: str) -> None:
        self._let_run(container_id)
        line.wake(self.reach(container_id), timeout_s=REST_S, code=Code.SAVE_FAILED)

    def restore(self, launch: Launch, source: Path, mode: SaveMode) -> int:
        vm = launch.directory / VM
        if source.parent == launch.directory:
            # What was saved of itself: wherever that was, it began from its origin long ago.
            (vm / BEGUN).touch()
        loopdisk.copy(source / SAVED_DISK, vm / DISK)
        if mode is not SaveMode.FULL:
            return self._boot(launch)
        moment = self._moment_of(launch, source)
        self._note_birth(vm, born_of(source))
        for name in (MEMORY, DEVICES):
            (vm / name).unlink(missing_ok=True)
        os.link(source / MEMORY, vm / MEMORY)
        shutil.copyfile(source / DEVICES, vm / DEVICES)
        pid = self._start(launch, restored=True)
        (vm / DEVICES).unlink()
        another = moment.get("placement") != launch.container_id
        if moment["rested"]:
            self._wake(launch, WAKE_S, another=another)
        elif another:
            # It was still booting, and takes itself for another.
            self._wake(launch, BOOTED_S, another=True)
        return _gone(launch, pid)

    def _wake(self, launch: Launch, patience_s: float, *, another: bool) -> None:
        """`another`: it was saved as another placement's guest, and is told whose it is now. Its slot went with its save, and all that the host
        knew of its connections (adr/0044).
        """
        order, deadline = launch.order, time.monotonic() + patience_s
        who = PlacementFile(sandbox_id=order.sandbox_id, placement_id=order.placement_id, generation=order.generation, nonce=order.nonce)
        while not line.wake(self.reach(launch.container_id), timeout_s=WAKE_S, placement=who if another else None, cut=True):
            pid = starting_pid(launch)
            if time.monotonic() > deadline or pid is None or is_ending(pid):
                raise Refused(Code.RESUME_FAILED, "the guest does not answer after its restore")
            time.sleep(_AGAIN_S)

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
                hint=FILES_HINT,
            )
        if problem := birth.differs(born_of(source), self.surroundings(launch.rootfs)):
            raise Refused(Code.RESUME_FAILED, problem, hint=FILES_HINT)
        return moment

    def fits(self, launch: Launch, source: Path) -> bool:
        """Whether a machine of this launch can have the memory that was saved."""
        try:
            self._moment_of(launch, source)
        except Refused:
            return False
        return True

    def files_alone(self, source: Path, target: Path) -> None:
        """Of what was saved whole, what can be had without its memory: its disk, as a power cut would have left it. *Errors*: OSError."""
        os.link(source / SAVED_DISK, target / SAVED_DISK)
        shutil.copyfile(source / MOMENT, target / MOMENT)

    # -- end and look

    def let_go(self, container_id: str) -> None:  # noqa: B027 - as above
        """Nothing is left to be done when `start` returns."""

    def ask_to_end(self, container_id: str, pid: int) -> None:  # noqa: ARG002 - the port's
        line.end(self.reach(container_id), timeout_s=END_S)

    def capture(self, directory: Path, container_id: str, packer: Sequence[str]) -> bytes:  # noqa: ARG002 - the port's
        raise Refused(Code.NOT_SUPPORTED, "no layers are made of virtual machines: the host reads no file system that a guest has written")

    def state_paths(self, container_id: str) -> list[Path]:  # noqa: ARG002 - the port's
        return []

    def containers(self) -> set[str]:
        return set()

    @abstractmethod
    def is_guest(self, pid: int, container_id: str) -> bool: ...


def born_of(source: Path) -> dict[str, str]:
    """What the machine of a moment has known since it booted; nothing of one that an earlier release has saved. Never raises."""
    try:
        said = json.loads((source / MOMENT).read_text())
    except (OSError, ValueError):
        return {}
    return _facts(said.get("born")) if isinstance(said, dict) else {}


def _read_facts(file: Path) -> dict[str, str]:
    try:
        return _facts(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def _facts(said: object) -> dict[str, str]:
    return {str(name): str(value) for name, value in said.items()} if isinstance(said, dict) else {}


def starting_pid(launch: Launch) -> int | None:
    """The process that was started last, while its machine does not go yet."""
    try:
        return int((launch.directory / STARTING).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _hand_over(file: Path, user: int) -> None:
    """Let this user open a file of its machine's, whoever else has it by another name: clones begin at once from one memory."""
    if file.is_file() and file.stat().st_nlink > 1:
        # Only within a jail is there a way to it.
        file.chmod(0o666)
    else:
        os.chown(file, user, user, follow_symlinks=False)


def _gone(launch: Launch, pid: int) -> int:
    """The machine goes: from here on its process is a guest, for whoever looks."""
    (launch.directory / STARTING).replace(launch.directory / PID_FILE)
    return pid


def wait_for(there: Callable[[], bool], ended: Callable[[], bool], *, timeout_s: float) -> bool:
    """Wait until something is there; False when what it would come from has ended, or time has. `there` may raise OSError: not yet."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if there():
                return True
        if ended():
            return False
        time.sleep(_LOOK_EVERY_S)
    return False
