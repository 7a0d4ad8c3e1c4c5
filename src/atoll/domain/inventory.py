"""Inventory: what a machine has, what was registered of it, and when the two disagree.

Theory of operation. A host registers once: its inventory, what its operator keeps back (the reserve), and how many times the rest may be
promised (the overcommit). From these follows the most that it may grant; what it does grant is the capacity on its row. With each poll the
agent says again what the machine has. A difference never changes the capacity by itself: the host takes nothing new until an operator has
looked, and either mended the machine or had it counted anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from atoll.base.units import ZERO, Vector

CAPACITY: Final = "host.capacity"
"""The problem of a machine that has other than it was registered with."""
CLOCK: Final = "host.clock_skew"
"""The problem of a machine whose wall clock is not control's."""
TOLERANCE: Final = 0.02
"""Kernels of one machine differ in what they keep of its memory, file systems in what they count: less than this is no difference."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a machine has. *Units*: cores, MiB."""

    cpu_count: int
    memory_mib: int
    disk_mib: int


@dataclass(frozen=True, slots=True)
class Overcommit:
    """How many times the resource may be promised."""

    cpu: float = 1.0
    memory: float = 1.0
    disk: float = 1.0


@dataclass(frozen=True, slots=True)
class Registered:
    """What was registered of a host."""

    inventory: Inventory
    reserve: Vector = ZERO
    overcommit: Overcommit | None = None
    """None: the host has only said what it grants, and not how that was reckoned."""
    slots: str | None = None
    """The range of its sandboxes' addresses, as CIDR."""


def capacity(inventory: Inventory, *, reserve: Vector, overcommit: Overcommit, slots: int) -> Vector:
    """The most that such a machine may grant."""
    return Vector(
        cpu_millis=max(0, int((inventory.cpu_count * 1000 - reserve.cpu_millis) * overcommit.cpu)),
        memory_mib=max(0, int((inventory.memory_mib - reserve.memory_mib) * overcommit.memory)),
        disk_mib=max(0, int((inventory.disk_mib - reserve.disk_mib) * overcommit.disk)),
        slots=max(0, slots - reserve.slots),
    )


def differences(registered: Inventory, reported: Inventory) -> list[str]:
    """What the machine has other than it was registered with, in words; empty when it is the same machine still."""
    found = []
    if registered.cpu_count != reported.cpu_count:
        found.append(f"cores: {registered.cpu_count} registered, {reported.cpu_count} there")
    for name, said, seen in (
        ("memory", registered.memory_mib, reported.memory_mib),
        ("disk", registered.disk_mib, reported.disk_mib),
    ):
        if abs(seen - said) > said * TOLERANCE:
            found.append(f"{name}: {said} MiB registered, {seen} MiB there")
    return found


def conditions(
    problems: Iterable[str], *, registered: Registered | None, reported: Inventory | None, skew_s: str | None
) -> list[tuple[str, str]]:
    """What keeps a host from taking sandboxes, each with what is known about it; empty detail: only its agent knows more."""
    said = {}
    if registered is not None and reported is not None:
        said[CAPACITY] = "; ".join(differences(registered.inventory, reported))
    if skew_s is not None:
        said[CLOCK] = f"its clock is {skew_s} s ahead of control's"
    return [(problem, said.get(problem, "")) for problem in problems]


def to_json(value: Registered | None) -> dict[str, object]:
    """For a column; empty for None."""
    if value is None:
        return {}
    overcommit = value.overcommit
    return {
        "cpu_count": value.inventory.cpu_count,
        "memory_mib": value.inventory.memory_mib,
        "disk_mib": value.inventory.disk_mib,
        "reserve": [value.reserve.cpu_millis, value.reserve.memory_mib, value.reserve.disk_mib, value.reserve.slots],
        "overcommit": None if overcommit is None else [overcommit.cpu, overcommit.memory, overcommit.disk],
        "slots": value.slots,
    }


def from_json(raw: Mapping[str, object] | None) -> Registered | None:
    """The reverse of `to_json`."""
    if not raw:
        return None
    overcommit, slots = raw.get("overcommit"), raw.get("slots")
    return Registered(
        inventory_of(raw) or Inventory(0, 0, 0),
        Vector(*_numbers(raw.get("reserve"), int)),
        None if overcommit is None else Overcommit(*_numbers(overcommit, float)),
        None if slots is None else str(slots),
    )


def inventory_of(facts: Mapping[str, object]) -> Inventory | None:
    """Of a host's facts; None when it has not told."""
    try:
        return Inventory(*(int(str(facts[name])) for name in ("cpu_count", "memory_mib", "disk_mib")))
    except (KeyError, ValueError):
        return None


def _numbers(raw: object, kind: type) -> list[int]:
    return [kind(one) for one in raw] if isinstance(raw, list) else []
