"""What an instance decides for its virtual machines, and what all of them have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

QEMU: Final = Path("/usr/bin/qemu-system-x86_64")
FIRMWARE: Final = Path("/usr/share/qemu")
MODULES: Final = Path("/usr/lib/x86_64-linux-gnu/qemu")
MKFS: Final = Path("/usr/bin/mkfs.erofs")


class Accelerator(StrEnum):
    """What runs a machine's instructions."""

    KVM = "kvm"
    TCG = "tcg"
    """QEMU itself translates them: some fifteen times slower."""


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """The programs and files of virtual machines. *Units*: MiB, seconds."""

    cache: Path
    """Where the kernel is: `images/kernels.py`."""
    emulated: bool = False
    """The operator has said that machines may run here without hardware virtualization."""
    qemu: Path = QEMU
    firmware: Path = FIRMWARE
    modules: Path = MODULES
    mkfs: Path = MKFS
    boot_s: dict[Accelerator, float] = field(default_factory=lambda: {Accelerator.KVM: 3.0, Accelerator.TCG: 45.0})
    """How long the self-check's guest may take until it answers."""


OVERHEAD_MIB: Final = {Accelerator.KVM: 96, Accelerator.TCG: 192}
"""What QEMU needs besides the guest's memory, which its control group lets it have; translated code, with TCG."""
THREADS_MAX: Final = 128
"""Of QEMU's own, on the host: one for each core, and those that read and write disks."""
UID_BASE: Final = 1_879_000_000
"""The users that machines run as: one for each slot of each subnet, known to no name service. Below the range of nobody's own (systemd's)."""


def user_of(address: str) -> int:
    """The user of the machine that has this slot address (10.(64+n).x.y)."""
    _, second, third, fourth = (int(part) for part in address.split("."))
    return UID_BASE + ((second - 64) << 16 | third << 8 | fourth)
