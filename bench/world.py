"""What every part is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from atoll.drivers.oci.config import RuntimeKind
from bench.bare import Bare
from bench.clients import Api

CLASS: Final = {RuntimeKind.RUNSC: "default", RuntimeKind.CRUN: "shared-kernel"}
"""The workload class whose sandboxes a runtime makes."""
SIZE: Final = {"cpu_millis": 1000, "memory_mib": 512, "disk_mib": 2048}
"""What `base` has unless asked otherwise."""
PIDS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class World:
    """A running product, the baseline beside it, and how much is wanted."""

    api: Api
    bare: Bare
    quick: bool
    say: Callable[[str], None]

    def count(self, full: int, quick: int) -> int:
        """How often something is measured."""
        return quick if self.quick else full
