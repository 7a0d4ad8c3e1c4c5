"""What an instance decides for its machines by QEMU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.drivers.machines.config import Accelerator, MachineConfig

QEMU: Final = Path("/usr/bin/qemu-system-x86_64")
FIRMWARE: Final = Path("/usr/share/qemu")
MODULES: Final = Path("/usr/lib/x86_64-linux-gnu/qemu")
OVERHEAD_MIB: Final = {Accelerator.KVM: 96, Accelerator.TCG: 192}
"""What QEMU needs besides the guest's memory; translated code, with TCG."""


@dataclass(frozen=True, slots=True)
class QemuConfig(MachineConfig):
    """The program and its files."""

    qemu: Path = QEMU
    firmware: Path = FIRMWARE
    modules: Path = MODULES
