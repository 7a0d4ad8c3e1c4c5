"""Hosts as this replica remembers them: a hint for whom to ask first, never the answer.

Refreshed from the rows at start, at each session or health change, after each commit that moved a holding, after each refusal, and on a
shared database every few seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from atoll.base.records import replace
from atoll.base.units import ZERO, Vector
from atoll.domain.host import SUSPECT_AFTER_S, Admin, Host
from atoll.domain.spec import Isolation, Spec
from atoll.planning import placing, relieving
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
        self.on_room: Callable[[bool], None] = lambda _elsewhere: None
        """Told when there is more room than before; whether another replica has committed that."""
        self.on_pressure: Callable[[], None] = _nothing
        """Told when a host has come to want relief (`planning/relieving.py`)."""

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

    def choose_by(self, ways: Sequence[Spec], *, sandbox_id: str, now: float, excluded: Collection[str] = ()) -> tuple[Spec, str | None]:
        """The first of these specs for which there is a host, and that host; the last one and None where there is none for any."""
        for spec in ways:
            chosen = self.choose(spec, sandbox_id=sandbox_id, now=now, excluded=excluded)
            if chosen is not None:
                return spec, chosen
        return ways[-1], None

    def on_its_rung(self, spec: Spec, rungs: Sequence[Isolation], *, now: float) -> Spec:
        """The spec with the first of these isolations that there is for such a one."""
        isolation = self._fleet.rung(spec, rungs, now=now)
        return spec if isolation is spec.isolation else replace(spec, isolation=isolation)

    def shortage(self, spec: Spec, *, now: float) -> Shortage:
        """Why no host fits; at most a second old."""
        key = (spec.vector(), spec.arch, spec.regions, spec.labels, spec.isolation, spec.require_host, placing.fetched_kind(spec))
        known = self._summed.get(key)
        if known is not None and 0 <= now - known[0] < SUMMED_S:
            return known[1]
        if len(self._summed) >= _SUMS_MAX:
            self._summed.clear()
        removed = self._fleet.removed(spec, now=now)
        shortage = Shortage(placing.summary(len(self._fleet), removed), removed)
        self._summed[key] = (now, shortage)
        return shortage

    def has_several(self) -> bool:
        """Whether what one host has could be wanted on another."""
        enabled = (advert for advert in self._fleet.adverts() if advert.host.admin is not Admin.DISABLED)
        return next(enabled, None) is not None and next(enabled, None) is not None

    def load(self, conn: sa.Connection) -> None:
        """Read everything anew; a store function."""
        used = facts.used_by_host(conn)
        before = {advert.host.id: advert for advert in self._fleet.adverts()}
        self._fleet.load(Advert(host, used.get(host.id, ZERO)) for host in hosts.all_hosts(conn))
        if any(more_room(before.get(advert.host.id), advert) for advert in self._fleet.adverts()):
            self.on_room(True)

    def put(self, host: Host, *, used: Vector | None = None, elsewhere: bool = False) -> None:
        """A host's row has changed. `elsewhere`: by another replica."""
        known = self._fleet.get(host.id)
        self._put(known, Advert(host, used if used is not None else known.used if known else ZERO), elsewhere=elsewhere)

    def use(self, host_id: str, used: Vector, *, elsewhere: bool = False) -> None:
        """What is used of a host has changed."""
        known = self._fleet.get(host_id)
        if known is not None and known.used != used:
            self._put(known, Advert(known.host, used), elsewhere=elsewhere)

    def _put(self, known: Advert | None, advert: Advert, *, elsewhere: bool) -> None:
        self._fleet.put(advert)
        if more_room(known, advert):
            self.on_room(elsewhere)
        if relieving.wants_relief(advert) and (known is None or not relieving.wants_relief(known)):
            self.on_pressure()

    def remove(self, host_id: str) -> None:
        """A host is no more."""
        self._fleet.remove(host_id)


def _nothing() -> None:
    """Where nobody wants to know."""


def more_room(before: Advert | None, after: Advert) -> bool:
    """Whether somebody may fit who did not before."""
    if before is None:
        return True
    if before is after:
        return False
    was, now = before.free, after.free
    if now.cpu_millis > was.cpu_millis or now.memory_mib > was.memory_mib or now.disk_mib > was.disk_mib or now.slots > was.slots:
        return True
    then, host = before.host, after.host
    if then is host:
        return False
    heard_again = host.seen_at is not None and (then.seen_at is None or host.seen_at - then.seen_at >= SUSPECT_AFTER_S)
    return heard_again or _kind(then) != _kind(host)


def _kind(host: Host) -> tuple[object, ...]:
    """What filters ask of a host, but for its room and its heartbeat."""
    return (
        host.admin,
        host.problems,
        host.isolations,
        host.moments,
        host.labels,
        host.region,
        host.arch,
        host.protocol_min,
        host.protocol_max,
    )
