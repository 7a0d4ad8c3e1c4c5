"""What an instance decides for its machines by Firecracker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.drivers.machines.config import MachineConfig

OVERHEAD_MIB: Final = 48
"""What Firecracker needs besides the guest's memory: itself, a root in memory with a copy of it, page tables, queues."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What may pass: so much at once, and so much again each second. *Units*: bytes or operations."""

    per_s: int
    burst: int = 0
    """Once, before the limit counts."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Each machine's limits; None: none."""

    disk_bytes: Rate | None = None
    disk_operations: Rate | None = None
    network_bytes: Rate | None = None
    """In each direction."""
    network_packets: Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirecrackerConfig(MachineConfig):
    """Firecracker comes from no package: the operator puts two programs somewhere, and says which they are."""

    firecracker: Path
    firecracker_sha256: str
    jailer: Path
    jailer_sha256: str
    rates: Rates = Rates()
