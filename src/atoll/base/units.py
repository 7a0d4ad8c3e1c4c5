"""Capacity as a vector: what a host grants and what a placement holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vector:
    """An amount of each resource. *Units*: CPU millicores, MiB of memory and disk, network slots."""

    cpu_millis: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    slots: int = 0

    def __add__(self, other: Vector) -> Vector:
        return Vector(
            self.cpu_millis + other.cpu_millis,
            self.memory_mib + other.memory_mib,
            self.disk_mib + other.disk_mib,
            self.slots + other.slots,
        )

    def __sub__(self, other: Vector) -> Vector:
        return Vector(
            self.cpu_millis - other.cpu_millis,
            self.memory_mib - other.memory_mib,
            self.disk_mib - other.disk_mib,
            self.slots - other.slots,
        )

    def lacks(self, need: Vector) -> list[str]:
        """The resources of which `self` has less than `need`, by name; empty when it fits."""
        return [
            name
            for name, have, want in (
                ("CPU", self.cpu_millis, need.cpu_millis),
                ("MEMORY", self.memory_mib, need.memory_mib),
                ("DISK", self.disk_mib, need.disk_mib),
                ("SLOTS", self.slots, need.slots),
            )
            if want > have
        ]


ZERO = Vector()
