"""What an instance decides for its virtual machines, whatever program runs them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

MKFS: Final = Path("/usr/bin/mkfs.erofs")
KVM_BOOT_S: Final = 3.0
"""Within it a guest boots with KVM, or there is none."""
TCG_BOOT_S: Final = 45.0


class Accelerator(StrEnum):
    """What runs a machine's instructions."""

    KVM = "kvm"
    TCG = "tcg"
    """QEMU itself translates them: some fifteen times slower."""


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """*Units*: seconds."""

    cache: Path
    """Where the kernel is: `images/kernels.py`."""
    mkfs: Path = MKFS
    boot_s: float | None = None
    """How long the self-check's guest may take until it answers; None: what is usual for what runs it."""

    def boot_limit_s(self, accelerator: Accelerator) -> float:
        usual = KVM_BOOT_S if accelerator is Accelerator.KVM else TCG_BOOT_S
        return usual if self.boot_s is None else self.boot_s


THREADS_MAX: Final = 128
"""Of a machine's program, on the host: one for each core, and those that read and write disks."""
UID_BASE: Final = 1_879_000_000
"""The users that machines run as: one for each slot of each subnet, known to no name service. Below the range of nobody's own (systemd's)."""


def user_of(address: str) -> int:
    """The user of the machine that has this slot address (10.(64+n).x.y)."""
    _, second, third, fourth = (int(part) for part in address.split("."))
    return UID_BASE + ((second - 64) << 16 | third << 8 | fourth)
