"""Relieving: which copies a host gives up whose originals are in the artifact store, so that its disk serves what is nowhere else. Pure.

Theory of operation. A copy is only there to make the next start quicker. On a host that drains none is kept; on one whose disk is nearly all
granted, the oldest go until there is some room again, and no more than that. A sandbox that finds no room has what was fetched, and nothing begins
from, of one host go: as much as it needs, where that is enough. What is not in the store is never one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.base.units import Vector
from atoll.domain.host import Admin
from atoll.domain.spec import Spec
from atoll.planning.placing import Advert, Filter, objections, room

PRESSED: Final = 0.85
"""Of its disk: where more is granted than this, copies go..."""
RELIEVED: Final = 0.70
"""...until no more than this is."""


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """What a host keeps of something that is in the store as well. *Units*: MiB, wall seconds."""

    snapshot: bool
    """Of a snapshot; otherwise what is saved of a sandbox."""
    id: str
    disk_mib: int
    since: float
    fetched: bool = False
    """It came from the store, to begin guests from: its snapshot was made elsewhere."""


def wants_relief(advert: Advert) -> bool:
    """Whether any copy of this host should go."""
    if advert.host.admin is Admin.DRAINING:
        return True
    return advert.host.admin is Admin.ACTIVE and advert.used.disk_mib > PRESSED * advert.host.capacity.disk_mib


def given_up(advert: Advert, copies: Sequence[LocalCopy]) -> list[LocalCopy]:
    """Those that go, the oldest first."""
    if not wants_relief(advert):
        return []
    if advert.host.admin is Admin.DRAINING:
        return list(copies)
    over_mib = advert.used.disk_mib - RELIEVED * advert.host.capacity.disk_mib
    chosen: list[LocalCopy] = []
    for one in sorted(copies, key=lambda copy: (copy.since, copy.id)):
        if over_mib <= 0:
            break
        chosen.append(one)
        over_mib -= one.disk_mib
    return chosen


def for_room(
    spec: Spec, adverts: Sequence[Advert], idle: Mapping[str, Sequence[LocalCopy]], *, now: float
) -> tuple[str, tuple[LocalCopy, ...]] | None:
    """The host on which the fewest of these copies must go so that a sandbox of this spec finds room, and which; None where none can.

    `idle`: what hosts have fetched and nothing begins from, the one first that has been unused for longest.
    """
    found: list[tuple[int, str, tuple[LocalCopy, ...]]] = []
    for advert in adverts:
        copies = idle.get(advert.host.id, ())
        if not copies or {one.filter for one in objections(advert, spec, now=now)} != {Filter.INSUFFICIENT_DISK}:
            continue
        free, chosen = advert.free, list[LocalCopy]()
        for copy in copies:
            free, chosen = free + Vector(disk_mib=copy.disk_mib), [*chosen, copy]
            if next(room(free, spec.vector()), None) is None:
                found.append((len(chosen), advert.host.id, tuple(chosen)))
                break
    return min(found, key=lambda one: one[:2])[1:] if found else None
