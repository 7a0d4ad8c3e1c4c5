"""QEMU's command line for one machine: pure, so that what a machine is can be read and tested here.

A `microvm`: no firmware to speak of, no PCI, devices on virtio-mmio; the kernel is booted directly. What is here of it must be the same for a
machine that is restored as for the one that was saved. *Source*: research/isolation.md C2 to C4, each line of which was needed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from atoll.drivers.machines import tap
from atoll.drivers.machines.cell import INNER_IMAGE, INNER_INITRD, INNER_KERNEL, INNER_VM
from atoll.drivers.machines.config import Accelerator
from atoll.drivers.machines.runtime import CONFIG, DISK, MEMORY, RUN
from atoll.drivers.machines.telling import KERNEL_WORDS
from atoll.drivers.qemu import qmp
from atoll.drivers.qemu.jail import INNER_FIRMWARE

LINE_SOCKET: Final = "line.sock"
LINE_PORT: Final = "atoll.guest"
"""What the guest finds its line by, on the machine's serial bus."""
SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a machine is made of. *Units*: MiB, kHz."""

    name: str
    accelerator: Accelerator
    memory_mib: int
    cpus: int
    tap: int
    """The descriptor of its network device."""
    tsc_khz: int = 0
    """How fast the host's clock counts, for a guest that cannot find out: without it boots hang when the host is busy."""
    state: int | None = None
    """The descriptor of the devices' state, for a machine that was saved."""


def cpus(accelerator: Accelerator, cpu_millis: int) -> int:
    """How many a machine has. TCG has one: more are slower, and none was ever saved with more."""
    return 1 if accelerator is Accelerator.TCG else max(1, -(-cpu_millis // 1000))


def kernel_line(shape: Shape) -> str:
    """What the kernel is told."""
    # The machine's end is a reset, which QEMU makes its own end.
    words = [*KERNEL_WORDS, "reboot=t"]
    if shape.accelerator is Accelerator.TCG:
        words += [f"tsc_early_khz={shape.tsc_khz}", "tsc=reliable", "no_timer_check", "mitigations=off"]
    return " ".join(words)


def arguments(shape: Shape) -> list[str]:
    """Everything after the program's name."""
    tcg = shape.accelerator is Accelerator.TCG
    words = [
        "-name", shape.name,
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-sandbox", SANDBOX,
        "-L", INNER_FIRMWARE,
        "-machine", "microvm,rtc=on,suppress-vmdesc=on,memory-backend=ram",
        "-global", "migration.send-configuration=off",
        "-accel", "tcg,tb-size=32" if tcg else "kvm",
        "-cpu", "max" if tcg else "host",
        "-smp", str(shape.cpus),
        "-m", str(shape.memory_mib),
        "-object", f"memory-backend-file,id=ram,size={shape.memory_mib}M,mem-path={INNER_VM}/{MEMORY},share=off",
        *_boot(shape),
        "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
        "-device", "virtio-serial-device,max_ports=2",
        "-chardev", f"socket,id=line,path={INNER_VM}/{RUN}/{LINE_SOCKET},server=on,wait=off",
        "-device", f"virtserialport,chardev=line,name={LINE_PORT}",
        *_disk("image", INNER_IMAGE, writable=False),
        *_disk("disk", f"{INNER_VM}/{DISK}", writable=True),
        *_disk("config", f"{INNER_VM}/{CONFIG}", writable=False),
        "-netdev", f"tap,id=net,fd={shape.tap}",
        "-device", f"virtio-net-device,netdev=net,mac={tap.GUEST_MAC}",
        "-qmp", f"unix:{INNER_VM}/{RUN}/{qmp.SOCKET},server=on,wait=off",
    ]  # fmt: skip
    return words if shape.state is None else [*words, "-incoming", f"fd:{shape.state}"]


def _boot(shape: Shape) -> list[str]:
    """What it boots. One that was saved has booted: its kernel is in its memory, and a copy of the file would be this process's alone (13 MiB)."""
    return [] if shape.state is not None else ["-kernel", INNER_KERNEL, "-initrd", INNER_INITRD, "-append", kernel_line(shape)]


def _disk(name: str, path: str, *, writable: bool) -> list[str]:
    rights = "" if writable else ",readonly=on"
    return ["-drive", f"if=none,id={name},file={path},format=raw{rights}", "-device", f"virtio-blk-device,drive={name}"]
