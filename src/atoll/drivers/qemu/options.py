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
TRANSLATED_MIB: Final = 32
"""What translated code may take. From its restore to the end of its first command a guest of 256 MiB needs 23 MiB (41,000 blocks of 337 bytes, seventeen
for each of the guest's; adr/0050), and what is used again and again must fit: QEMU forgets all of it when it is full. Measured with QEMU 7.2, ms for /bin/true again
and for a Python that imports asyncio, ssl and sqlite3: 32 MiB 36 and 1380, 24 MiB 56 and 1529, 20 MiB 93 and 2140, 16 MiB 234 and 2610, 8 MiB 456 and 8401.
"""
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
        # A restored machine's one neighbour is its host, which knows its address; to tell it five times takes 50 ms (adr/0050).
        "-global", "migration.announce-rounds=0",
        "-accel", f"tcg,tb-size={TRANSLATED_MIB}" if tcg else "kvm",
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
