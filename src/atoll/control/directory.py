"""Hosts as this replica remembers them: a hint for whom to ask first, never the answer.

Refreshed from the rows at start, at each session or health change, after each commit that moved a holding, after each refusal, and on a
shared database every few seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from atoll.base.units import ZERO, Vector
from atoll.domain.host import Host
from atoll.domain.spec import Spec
from atoll.planning import placing
from atoll.planning.fleet import Fleet
from atoll.planning.placing import Advert, Filter
from atoll.store import facts, hosts

SUMMED_S = 1.0
"""Why no host fits is summed up anew after this; while a deployment is full, many ask at once."""
_SUMS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why no host fits."""

    text: str
    """In one line, for people."""
    removed: Mapping[Filter, int]
    """How many hosts each filter removes."""


class Directory:
    """In memory, by host id."""

    def __init__(self) -> None:
        self._fleet = Fleet()
        self._summed: dict[tuple[object, ...], tuple[float, Shortage]] = {}

    def adverts(self) -> Iterable[Advert]:
        """Every host that is known."""
        return self._fleet.adverts()

    def host(self, host_id: str) -> Host | None:
        """One host's row as last read."""
        advert = self._fleet.get(host_id)
        return advert.host if advert else None

    def choose(self, spec: Spec, *, sandbox_id: str, now: float, excluded: Collection[str] = ()) -> str | None:
        """The host to ask first; None when no host fits."""
        return self._fleet.choose(spec, sandbox_id=sandbox_id, now=now, excluded=excluded)

    def shortage(self, spec: Spec, *, now: float) -> Shortage:
        """Why no host fits; at most a second old."""
        key = (spec.vector(), spec.arch, spec.regions, spec.labels, spec.isolation, spec.require_host)
        known = self._summed.get(key)
        if known is not None and 0 <= now - known[0] < SUMMED_S:
            return known[1]
        if len(self._summed) >= _SUMS_MAX:
            self._summed.clear()
        removed = self._fleet.removed(spec, now=now)
        shortage = Shortage(placing.summary(len(self._fleet), removed), removed)
        self._summed[key] = (now, shortage)
        return shortage

    def load(self, conn: sa.Connection) -> None:
        """Read everything anew; a store function."""
        used = facts.used_by_host(conn)
        self._fleet.load(Advert(host, used.get(host.id, ZERO)) for host in hosts.all_hosts(conn))

    def put(self, host: Host, *, used: Vector | None = None) -> None:
        """A host's row has changed."""
        known = self._fleet.get(host.id)
        self._fleet.put(Advert(host, used if used is not None else known.used if known else ZERO))

    def use(self, host_id: str, used: Vector) -> None:
        """What is used of a host has changed."""
        known = self._fleet.get(host_id)
        if known is not None and known.used != used:
            self._fleet.put(Advert(known.host, used))

    def remove(self, host_id: str) -> None:
        """A host is no more."""
        self._fleet.remove(host_id)
