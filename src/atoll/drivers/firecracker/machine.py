"""Firecracker as a machine's program: how it is started, halted and brought back. The order of it all is `drivers/machines/runtime.py`'s.

Theory of operation. The jailer starts a process that knows nothing; by its API it is told what machine it is (`shape.py`), or to load one. It
opens files by their names in its jail, as its own user: what it may write are files that are made for it. A machine that was restored
has its memory mapped from a file, and Firecracker knows what it has written since; so a save of one writes the difference, which is laid over
the file (`memory.py`). Each difference is told once: a note beside the memory says that file and difference are all there is, and without it
a save writes all of the memory.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.drivers.firecracker import api, jailer, memory, shape
from atoll.drivers.firecracker.config import OVERHEAD_MIB, FirecrackerConfig
from atoll.drivers.firecracker.programs import FIRECRACKER, Programs, have
from atoll.drivers.machines import cell as cells
from atoll.drivers.machines import line, tap
from atoll.drivers.machines.cell import Cell
from atoll.drivers.machines.config import Accelerator
from atoll.drivers.machines.runtime import (
    CONFIG,
    DEVICES,
    DISK,
    ENVIRONMENT,
    KVM_DEVICE,
    MEMORY,
    RUN,
    STARTING,
    VM,
    MachineRuntime,
    Parts,
    wait_for,
)
from atoll.drivers.oci.runtime import CONSOLE, Launch, run
from atoll.drivers.sockets import connect, is_ending
from atoll.hostops import cgroups, processes
from atoll.hostops.cgroups import Layout
from atoll.images import kernels

TUN_DEVICE: Final = "c 10:200 rwm"
FOLLOWED: Final = "memory.followed"
"""There: Firecracker knows of all that its memory's file lacks."""
WHOLE: Final = "changed.whole"
"""There: what is being written of the memory is all of it."""
LINE_PORT: Final = 1024
"""The vsock port where the guest listens: `native/internal/guest/hostline`."""
DEVICES_BYTES_MAX: Final = 16 << 20
_GREETING_BYTES_MAX: Final = 64


class Firecracker(MachineRuntime):
    """The runtime of virtual machines by Firecracker."""

    overhead_mib = OVERHEAD_MIB
    devices = (KVM_DEVICE, TUN_DEVICE)

    def __init__(self, config: FirecrackerConfig, *, state_dir: Path, run_dir: Path, guest: Path, layout: Layout) -> None:
        super().__init__(config, Accelerator.KVM, state_dir=state_dir, run_dir=run_dir, guest=guest, layout=layout)
        self._config = config
        self._programs: Programs | None = None

    @property
    def binary(self) -> Path:
        return self._config.firecracker

    def programs(self) -> Programs:
        """The pinned programs. *Errors*: Refused RUNTIME_MISSING, RUNTIME_UNTRUSTED."""
        if self._programs is None:
            self._programs = have(self._config, self._run_dir)
        return self._programs

    def ready(self) -> Parts:
        self.programs()
        parts = super().ready()
        if not parts.kernel.unpacked.exists():
            raise Refused(
                Code.IMAGE_UNAVAILABLE,
                f"{parts.kernel.directory} has no kernel in the form that Firecracker boots",
                hint="Run `scripts/setup.py --only machines`.",
            )
        return parts

    def version(self) -> str:
        return self.programs().version

    def cpus(self, cpu_millis: int) -> int:
        return shape.cpus(cpu_millis)

    def _kernel(self, kernel: kernels.Kernel) -> Path:
        return kernel.unpacked

    # -- start

    def _its_own(self, *, restored: bool) -> Sequence[str]:
        # Its memory it only reads: what it writes of it is a copy of its process's own.
        return (RUN, DISK, CONFIG, DEVICES) if restored else (RUN, DISK, CONFIG)

    def _begin_in_thread(self, launch: Launch, cell: Cell, *, restored: bool) -> None:
        slot, spec = launch.slot, launch.order.spec
        assert slot is not None
        largest = max(spec.disk_mib, spec.memory_mib) << 20
        jail = jailer.Jail(self.programs(), launch.directory, jailer.instance_id(launch.container_id), slot.path, largest)
        jail.base.mkdir(exist_ok=True, mode=0o700)
        if restored:
            # Several may begin from it, each as its own user. Nobody else comes to where it is.
            (cell.vm / MEMORY).chmod(0o444)
        cells.enter(slot.namespace_fd)
        jailer.furnish(jail, cell)
        tap.make_for(cell.user, slot.address)
        groups = cgroups.directories(self._layout, launch.group)
        command = cells.starting(groups, launch.directory / STARTING, jailer.program(jail, cell.user))
        run(command, console=launch.directory / CONSOLE, environment=ENVIRONMENT)

    def _is_there(self, launch: Launch, pid: int, *, timeout_s: float) -> bool:
        directory = launch.directory / VM / RUN
        return wait_for(lambda: api.answers(directory), lambda: is_ending(pid), timeout_s=timeout_s)

    def _set_going(self, launch: Launch, *, restored: bool) -> None:
        vm, spec = launch.directory / VM, launch.order.spec
        (vm / FOLLOWED).unlink(missing_ok=True)
        code = Code.RESUME_FAILED if restored else Code.START_FAILED
        machine = api.Api(vm / RUN, code=code)
        said = shape.Shape(spec.memory_mib, self.cpus(spec.cpu_millis), self._config.rates)
        for verb, path, body in shape.loaded() if restored else shape.fresh(said):
            (machine.put if verb == "PUT" else machine.patch)(path, body)
        if restored:
            (vm / FOLLOWED).touch()

    # -- save

    def _halt(self, launch: Launch, *, devices: Path | None) -> None:
        vm = launch.directory / VM
        machine = api.Api(vm / RUN, code=Code.SAVE_FAILED)
        if machine.state() != "Paused":
            _, path, body = shape.halted()
            machine.patch(path, body)
        if devices is None:
            return
        whole = not (vm / FOLLOWED).exists()
        # From here on the difference is told, whatever becomes of it.
        (vm / FOLLOWED).unlink(missing_ok=True)
        self._make_files_to_write(launch)
        if whole:
            (vm / WHOLE).touch()
        _, path, body = shape.snapshot(whole=whole)
        machine.put(path, body)
        size = (vm / DEVICES).stat().st_size
        if not 0 < size <= DEVICES_BYTES_MAX:
            raise Refused(Code.SAVE_FAILED, f"Firecracker has written no state of its devices: {size} bytes")
        (vm / DEVICES).rename(devices)

    def _make_files_to_write(self, launch: Launch) -> None:
        """Firecracker opens them by name and replaces none: nothing but these can be written."""
        vm = launch.directory / VM
        owner = (vm / DISK).stat()
        (vm / WHOLE).unlink(missing_ok=True)
        memory.blank(vm / DEVICES, 0)
        memory.blank(vm / shape.DIFF, launch.order.spec.memory_mib << 20)
        for name in (DEVICES, shape.DIFF):
            os.chown(vm / name, owner.st_uid, owner.st_gid, follow_symlinks=False)

    def _gather(self, launch: Launch, memory_file: Path) -> None:
        vm = launch.directory / VM
        changed, whole = vm / shape.DIFF, (vm / WHOLE).exists()
        try:
            (memory.in_place_of if whole else memory.lay_over)(changed, memory_file)
        finally:
            changed.unlink(missing_ok=True)
            (vm / WHOLE).unlink(missing_ok=True)

    def _let_run(self, container_id: str) -> None:
        machine = api.Api(self.vm(container_id) / RUN, code=Code.SAVE_FAILED)
        for name in (shape.DIFF, WHOLE, DEVICES):
            # Of a save that came to nothing.
            (self.vm(container_id) / name).unlink(missing_ok=True)
        if machine.state() == "Paused":
            _, path, body = shape.going()
            machine.patch(path, body)

    def reach(self, container_id: str) -> line.Reach:
        directory = self.vm(container_id) / RUN
        return lambda timeout_s: to_guest(directory, LINE_PORT, timeout_s=timeout_s)

    # -- look

    def is_guest(self, pid: int, container_id: str) -> bool:
        """The command line that the jailer gives it: `/firecracker --id ID ...`. Before that, for a moment, it is the jailer itself."""
        words = processes.arguments(pid)
        if not words or Path(words[0]).name not in (FIRECRACKER, "jailer") or "--id" not in words[:-1]:
            return False
        return words[words.index("--id") + 1] == jailer.instance_id(container_id)


def to_guest(directory: Path, port: int, *, timeout_s: float) -> socket.socket:
    """A connection to a vsock port of the guest. *Errors*: OSError when nobody listens there.

    Source: Firecracker's docs/vsock.md: a line `CONNECT PORT` is answered by a line `OK NUMBER`, or the connection ends.
    """
    made = connect(directory, Path(shape.VSOCK).name, timeout_s=timeout_s)
    try:
        made.sendall(f"CONNECT {port}\n".encode())
        said = _first_line(made)
    except BaseException:
        made.close()
        raise
    if not said.startswith(b"OK "):
        made.close()
        raise ConnectionRefusedError(f"nobody listens on the guest's port {port}: {said!r}")
    return made


def _first_line(peer: socket.socket) -> bytes:
    """Byte by byte: what follows is the guest's, and somebody else's to read."""
    said = b""
    while not said.endswith(b"\n") and len(said) < _GREETING_BYTES_MAX and (got := peer.recv(1)):
        said += got
    return said
