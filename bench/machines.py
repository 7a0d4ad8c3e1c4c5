"""The baseline of machines: QEMU alone, given what the driver has saved, with all that can be made ahead made ahead.

A bare restore has the same options, because the same code writes them; its network namespace with a device, and its copy of the disk, are ready. Measured
are QEMU from its start until the guest has been woken, has answered and has run a command. Its control group is made ahead, too, with the limits that
the driver's has: on a busy machine a process outside of all groups gets another share of the processors. No jail, no record, no image that is
looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base.errors import Code
from atoll.drivers.machines import line, tap
from atoll.drivers.machines.config import THREADS_MAX, Accelerator
from atoll.drivers.machines.runtime import CONFIG, DEVICES, DISK, MEMORY, RUN, SAVED_DISK
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.oci.slotworks import Slot
from atoll.drivers.port import Order
from atoll.drivers.qemu import jail, options, qmp
from atoll.drivers.qemu.config import OVERHEAD_MIB, QEMU
from atoll.drivers.sockets import connect
from atoll.hostops import cgroups, loopdisk, namespaces
from atoll.images import kernels
from bench.product import CannotMeasure

FIRMWARE: Final = ("-L", jail.INNER_FIRMWARE)
LOADED_S: Final = 60.0
_LOOK_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Moment:
    """What a machine was saved as, copied aside, and the files that it runs with."""

    directory: Path
    order: Order
    image: Path
    kernel: kernels.Kernel
    initrd: Path
    kind: RuntimeKind
    tsc_khz: int
    """How fast the clock counts, where it is emulated: found once, as by the driver, since finding it takes 50 ms."""


def aside(saved: Path, vm: Path, directory: Path) -> None:
    """Copy what was saved, and the disk that tells the guest who it is, to a directory of the baseline's own."""
    (directory / RUN).mkdir(parents=True)
    for name in (MEMORY, DEVICES):
        loopdisk.copy(saved / name, directory / name)
    loopdisk.copy(saved / SAVED_DISK, directory / DISK)
    shutil.copyfile(vm / CONFIG, directory / CONFIG)


@contextlib.contextmanager
def device(slot: Slot) -> Iterator[int]:
    """The network device in a slot, made ahead."""
    fd = namespaces.in_network_namespace(slot.namespace_fd, lambda: tap.make(slot.address))
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def group(name: str, order: Order, kind: RuntimeKind) -> Iterator[list[Path]]:
    """A control group as the driver's machines have, made ahead."""
    layout, spec = cgroups.detect(), order.spec
    overhead_mib = OVERHEAD_MIB[Accelerator.TCG if kind is RuntimeKind.QEMU_EMULATED else Accelerator.KVM]
    cgroups.make(layout, name, cgroups.Limits(spec.memory_mib + overhead_mib, spec.cpu_millis, THREADS_MAX))
    try:
        yield cgroups.directories(layout, name)
    finally:
        cgroups.remove(layout, name)


@contextlib.contextmanager
def restored(moment: Moment, tap_fd: int, groups: Sequence[Path]) -> Iterator[subprocess.Popen[bytes]]:
    """QEMU with what was saved; it goes on, and its users' processes do."""
    state = os.open(moment.directory / DEVICES, os.O_RDONLY)
    try:
        process = subprocess.Popen(
            [str(QEMU), *_arguments(moment, tap_fd, state)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(tap_fd, state),
        )
    finally:
        os.close(state)
    try:
        for directory in groups:
            (directory / "cgroup.procs").write_text(str(process.pid))
        _wait(moment.directory / RUN, process.pid)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _arguments(moment: Moment, tap_fd: int, state: int) -> list[str]:
    emulated = moment.kind is RuntimeKind.QEMU_EMULATED
    accelerator, spec = Accelerator.TCG if emulated else Accelerator.KVM, moment.order.spec
    shape = options.Shape(
        moment.order.placement_id,
        accelerator,
        spec.memory_mib,
        options.cpus(accelerator, spec.cpu_millis),
        tap_fd,
        moment.tsc_khz if emulated else 0,
        state,
    )
    places = {
        "/vm/": f"{moment.directory}/",
        "/image": str(moment.image),
        "/kernel": str(moment.kernel.image),
        "/initrd": str(moment.initrd),
    }
    words = []
    for word in options.arguments(shape):
        for inner, outer in places.items():
            if f"={inner}" in word or f":{inner}" in word or word == inner:
                word = word.replace(inner, outer)  # noqa: PLW2901 - the same word, with where it is outside of a jail
        words.append(word)
    at = words.index(FIRMWARE[0])
    return [*words[:at], *words[at + len(FIRMWARE) :]]


def parts_kib(pid: int) -> dict[str, int]:
    """Of a process of QEMU's: the PSS of the guest's memory, and of the code that was translated (the largest mapping that can be run and has no file)."""
    memory = code = 0
    fields: list[str] = []
    for text in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = text.split()
        if not words[0].endswith(":"):
            fields = words
        elif words[0] == "Pss:":
            if len(fields) > 5 and fields[5].endswith(f"/{MEMORY}"):
                memory += int(words[1])
            elif len(fields) == 5 and "x" in fields[1]:
                code = max(code, int(words[1]))
    return {"memory": memory, "code": code}


def _wait(run: Path, pid: int) -> None:
    if not qmp.wait_until_there(run, pid, timeout_s=LOADED_S):
        raise CannotMeasure("a bare QEMU ended")
    deadline = time.monotonic() + LOADED_S
    with qmp.Qmp(run, code=Code.RESUME_FAILED) as monitor:
        while (status := monitor.status()) != "running":
            if time.monotonic() > deadline:
                raise CannotMeasure(f"a bare machine is {status}")
            time.sleep(_LOOK_S)
    if not line.wake(lambda timeout_s: connect(run, options.LINE_SOCKET, timeout_s=timeout_s), timeout_s=LOADED_S):
        raise CannotMeasure("a bare machine's guest does not answer")
