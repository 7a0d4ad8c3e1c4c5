"""QEMU as a machine's program: how it is started, halted and brought back. The order of it all is `drivers/machines/runtime.py`'s.

QEMU writes the devices' state, without memory, in milliseconds; what the machine has written of its memory since it began is read from its
process (`memory.py`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.drivers.machines import birth, line, tap
from atoll.drivers.machines import cell as cells
from atoll.drivers.machines.cell import Cell
from atoll.drivers.machines.config import Accelerator
from atoll.drivers.machines.runtime import DEVICES, ENVIRONMENT, KVM_DEVICE, MEMORY, RUN, STARTING, VM, MachineRuntime, Parts
from atoll.drivers.oci.runtime import CONSOLE, Launch, last_words, read_pid, run
from atoll.drivers.qemu import jail, memory, options, qmp
from atoll.drivers.qemu.config import OVERHEAD_MIB, QemuConfig
from atoll.drivers.sockets import connect
from atoll.drivers.versions import version_of
from atoll.hostops import cgroups, processes
from atoll.hostops.cgroups import Layout
from atoll.images import kernels

LOADED_S: Final = 60.0
DEVICES_BYTES_MAX: Final = 16 << 20
_LOOK_EVERY_S: Final = 0.002
_TRIES: Final = 32


class Machines(MachineRuntime):
    """The runtime of virtual machines by QEMU."""

    def __init__(
        self, config: QemuConfig, accelerator: Accelerator, *, state_dir: Path, run_dir: Path, guest: Path, layout: Layout
    ) -> None:
        super().__init__(config, accelerator, state_dir=state_dir, run_dir=run_dir, guest=guest, layout=layout)
        self._config = config
        self._tree: Path | None = None
        self._tsc_khz = 0
        self._version = ""
        self.overhead_mib = OVERHEAD_MIB[accelerator]
        self.devices = (KVM_DEVICE,) if accelerator is Accelerator.KVM else ()

    @property
    def binary(self) -> Path:
        return self._config.qemu

    def ready(self) -> Parts:
        if self._tree is None:
            tree = jail.tree(self._config, self._run_dir)
            self._tsc_khz = tsc_khz()
            self._version = version_of(self.binary, self._run_dir)
            self._tree = tree
        return super().ready()

    def version(self) -> str:
        self.ready()
        return self._version

    def surroundings(self, rootfs: Path | None) -> dict[str, str]:
        self.ready()
        clock = {birth.CLOCK: str(self._tsc_khz)} if self.accelerator is Accelerator.TCG else {}
        return super().surroundings(rootfs) | clock

    def cpus(self, cpu_millis: int) -> int:
        return options.cpus(self.accelerator, cpu_millis)

    def _kernel(self, kernel: kernels.Kernel) -> Path:
        return kernel.image

    # -- start

    def _begin_in_thread(self, launch: Launch, cell: Cell, *, restored: bool) -> None:
        slot, spec = launch.slot, launch.order.spec
        assert slot is not None
        assert self._tree is not None
        # Opened outside of the jail, which has neither.
        given = [os.open(cell.vm / DEVICES, os.O_RDONLY | os.O_CLOEXEC)] if restored else []
        try:
            cells.enter(slot.namespace_fd)
            jail.furnish(self._tree, cell, self.accelerator)
            given.append(tap.make(slot.address))
            shape = options.Shape(
                name=launch.container_id,
                accelerator=self.accelerator,
                memory_mib=spec.memory_mib,
                cpus=self.cpus(spec.cpu_millis),
                tap=given[-1],
                tsc_khz=self._tsc_khz,
                state=given[0] if restored else None,
            )
            groups = cgroups.directories(self._layout, launch.group)
            program = jail.program(self._tree, cell.user, options.arguments(shape))
            command = cells.starting(groups, launch.directory / STARTING, program)
            run(command, console=launch.directory / CONSOLE, environment=ENVIRONMENT, pass_fds=given)
        finally:
            for fd in given:
                os.close(fd)

    def _is_there(self, launch: Launch, pid: int, *, timeout_s: float) -> bool:
        return qmp.wait_until_there(launch.directory / VM / RUN, pid, timeout_s=timeout_s)

    def _set_going(self, launch: Launch, *, restored: bool) -> None:
        """A fresh one runs at once; one that is restored does so when it has loaded its state."""
        if not restored:
            return
        deadline = time.monotonic() + LOADED_S
        with qmp.Qmp(launch.directory / VM / RUN, code=Code.RESUME_FAILED) as monitor:
            while (status := monitor.status()) != "running":
                if status not in ("inmigrate", "prelaunch", "paused", "finish-migrate") or time.monotonic() > deadline:
                    raise Refused(Code.RESUME_FAILED, f"the machine is {status}: {last_words(launch.directory / CONSOLE, 0)}")
                time.sleep(_LOOK_EVERY_S)

    # -- save

    def _halt(self, launch: Launch, *, devices: Path | None) -> None:
        run_dir = launch.directory / VM / RUN
        with qmp.Qmp(run_dir, code=Code.SAVE_FAILED) as monitor:
            monitor.ask("stop")
            if devices is not None:
                monitor.ask("xen-save-devices-state", filename=f"{cells.INNER_VM}/{RUN}/{DEVICES}", live=True)
        if devices is not None:
            _take(run_dir / DEVICES, devices)

    def _gather(self, launch: Launch, memory_file: Path) -> None:
        pid = read_pid(launch.directory)
        if pid is None or not self.is_guest(pid, launch.container_id):
            raise Refused(Code.SAVE_FAILED, "the machine has ended")
        memory.gather(pid, launch.directory / VM / MEMORY, memory_file)

    def _let_run(self, container_id: str) -> None:
        with qmp.Qmp(self.vm(container_id) / RUN, code=Code.SAVE_FAILED) as monitor:
            if monitor.status() != "running":
                monitor.ask("cont")

    def reach(self, container_id: str) -> line.Reach:
        directory = self.vm(container_id) / RUN
        return lambda timeout_s: connect(directory, options.LINE_SOCKET, timeout_s=timeout_s)

    # -- look

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
        first, began = _at_once(read, clock)
        time.sleep(wait_s)
        second, ended = _at_once(read, clock)
        del read, view
    return int((second - first) * 1e6 / (ended - began))


def _at_once(read: Callable[[], int], clock: Callable[[], int]) -> tuple[int, int]:
    """Both counters at one moment: of some tries that between whose readings of the clock least time went by. On a busy host a process
    stands still for milliseconds, which would be as many percent of what guests take for a second.
    """
    tries = []
    for _ in range(_TRIES):
        before, ticks, after = clock(), read(), clock()
        tries.append((after - before, ticks, (before + after) // 2))
    _, ticks, at = min(tries)
    return ticks, at
