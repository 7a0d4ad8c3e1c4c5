"""Warming: which guests are made ahead, which are given up, and which go for a create that finds no room. Facts in, plan out; pure.

Theory of operation. What should be there follows from the policies, resolved as a create of theirs would be: so many guests of each pool.
What is there is counted by pool: an older build's guests are of a pool that nobody wants any more, and go. Guests on a host that is not
heard of do not count, since nobody can have them; when it is back there are too many for a moment, and the newest go. Where that is since
the store was taken back to a backup they may be somebody's, and none of them goes until the host has said so. A host that takes nothing new
keeps none. What is missing is made a few at a time, each on the host that has the fewest of its kind; nothing is made while a create waits
for room, or soon after a guest of the same pool has failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from atoll.base.errors import Code
from atoll.base.units import ZERO, Vector
from atoll.domain.host import UNSETTLED, Admin, Health, health
from atoll.domain.sandbox import STARTING, State
from atoll.domain.spec import Spec
from atoll.domain.warmth import WarmPolicy
from atoll.planning import placing
from atoll.planning.claiming import CLAIMS
from atoll.planning.placing import Advert

KEPT: Final = STARTING | {State.READY}
"""States in which a guest counts."""
LIFE_S: Final = 12 * 3600.0
"""Of a guest that nobody claims: then its agent ends it, whatever became of control."""
RENEW_S: Final = 900.0
"""So long before its end a guest is given up, and another one made."""
STARTING_PER_HOST: Final = 2
"""Guests that are made at once, for each host that takes any: creates come first."""
BACKOFF_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
"""After the first, second... failure in a row."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A guest that was made ahead. *Units*: wall seconds."""

    id: str
    pool: str
    state: State
    host_id: str | None
    vector: Vector
    created_at: float
    end_at: float | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A policy, resolved."""

    policy: WarmPolicy
    pool: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class Making:
    """One guest to make. `prefer_host`: where; `most`: how many of its pool there may be with it."""

    wanted: Wanted
    prefer_host: str
    most: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now."""

    make: tuple[Making, ...] = ()
    retire: tuple[tuple[str, Code], ...] = ()
    """Guests that go, and why."""
    short: Mapping[str, int] = field(default_factory=dict)
    """For each pool, how many are not ready."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """For each pool that cannot be kept, why."""
    beside: frozenset[str] = frozenset()
    """Hosts that are not heard of."""
    look_again_s: float | None = None
    """When a pool that is held off may be tried again."""


def plan(
    wanted: Sequence[Wanted],
    guests: Iterable[Guest],
    adverts: Iterable[Advert],
    *,
    now: float,
    failures: Mapping[str, tuple[int, float, str | None]],
    pressed: bool,
) -> Plan:
    """What to make and what to give up. `failures`: as store.warmth. `pressed`: creates wait for room, or have of late."""
    hosts: dict[str, Advert] = {advert.host.id: advert for advert in adverts}
    unheard = frozenset(name for name, one in hosts.items() if health(one.host, now=now) is not Health.HEALTHY)
    counts: Counter[str] = Counter()
    for one in wanted:
        counts[one.pool] += one.policy.count
    good, retire = _sorted_out(guests, counts, hosts, unheard, now=now)
    make, problems, waits = _makes(wanted, counts, good, _Making(hosts, good, unheard, now), now=now, failures=failures, pressed=pressed)
    short = {pool: count - sum(guest.state is State.READY for guest in good[pool]) for pool, count in counts.items()}
    return Plan(
        make=tuple(make),
        retire=tuple(retire),
        short=short,
        problems={pool: why for pool, why in problems.items() if short[pool] > 0},
        beside=unheard,
        look_again_s=min(waits, default=None),
    )


def _sorted_out(
    guests: Iterable[Guest], counts: Mapping[str, int], hosts: Mapping[str, Advert], unheard: Collection[str], *, now: float
) -> tuple[dict[str, list[Guest]], list[tuple[str, Code]]]:
    """Those that count, by pool, and those that go, with why."""
    good: dict[str, list[Guest]] = {pool: [] for pool in counts}
    retire: list[tuple[str, Code]] = []
    for guest in sorted(guests, key=lambda one: (one.state is not State.READY, one.created_at, one.id)):
        if guest.state is State.RELEASING or _may_be_somebodys(guest, hosts):
            continue
        why = _useless(guest, counts, hosts, now=now)
        counted = guest.host_id not in unheard
        if why is None and counted and len(good[guest.pool]) >= counts[guest.pool]:
            why = Code.WARM_SURPLUS
        if why is not None:
            retire.append((guest.id, why))
        elif counted:
            good[guest.pool].append(guest)
    return good, retire


def _makes(
    wanted: Sequence[Wanted],
    counts: Mapping[str, int],
    good: Mapping[str, Sequence[Guest]],
    making: _Making,
    *,
    now: float,
    failures: Mapping[str, tuple[int, float, str | None]],
    pressed: bool,
) -> tuple[list[Making], dict[str, str], list[float]]:
    """What is made, why some pools are not made full, and for how long those are held off that have failed."""
    make: list[Making] = []
    problems: dict[str, str] = {}
    waits: list[float] = []
    for one in wanted:
        missing = counts[one.pool] - len(good[one.pool])
        wait_s = _held_off_s(failures.get(one.pool), now=now)
        if missing > 0 and wait_s > 0:
            waits.append(wait_s)
        why_not = _why_not(failures.get(one.pool), wait_s, pressed=pressed)
        for _ in range(missing if why_not is None else 0):
            if making.full:
                break
            host_id = making.host_for(one)
            if host_id is None:
                why_not = f"{Code.NO_CAPACITY}: no host that suits has room for another one"
                break
            make.append(Making(one, host_id, counts[one.pool]))
        if why_not is not None:
            problems[one.pool] = why_not
    return make, problems, waits


def _may_be_somebodys(guest: Guest, hosts: Mapping[str, Advert]) -> bool:
    """Whether its host has not said what it has since the store was taken back to a backup: then it may have been claimed since that."""
    advert = hosts.get(guest.host_id) if guest.host_id is not None else None
    return advert is not None and (advert.host.seen_at is None or UNSETTLED in advert.host.problems)


def _useless(guest: Guest, counts: Mapping[str, int], hosts: Mapping[str, Advert], *, now: float) -> Code | None:
    """Why nobody will have this guest."""
    if guest.pool not in counts or guest.state not in KEPT:
        # One that came to rest is nothing that a create could take.
        return Code.WARM_OUTDATED
    advert = hosts.get(guest.host_id) if guest.host_id is not None else None
    if advert is not None and advert.host.admin is not Admin.ACTIVE:
        return Code.HOST_NOT_ACTIVE
    if guest.state is State.READY and guest.end_at is not None and guest.end_at < now + RENEW_S:
        return Code.WARM_OUTDATED
    return None


def _held_off_s(failed: tuple[int, float, str | None] | None, *, now: float) -> float:
    if failed is None:
        return 0.0
    count, at, _ = failed
    return max(0.0, at + BACKOFF_S[min(count, len(BACKOFF_S)) - 1] - now)


def _why_not(failed: tuple[int, float, str | None] | None, wait_s: float, *, pressed: bool) -> str | None:
    if pressed:
        return f"{Code.NO_CAPACITY}: sandboxes that somebody wants come first, and wait for room"
    if wait_s > 0 and failed is not None:
        return f"the last one failed with {failed[2] or Code.START_FAILED}"
    return None


class _Making:
    """Where the next ones of a plan go: what those before them take is taken."""

    def __init__(self, hosts: Mapping[str, Advert], good: Mapping[str, list[Guest]], unheard: Collection[str], now: float) -> None:
        self._adverts = [
            one
            for name, one in sorted(hosts.items())
            if name not in unheard and one.host.admin is Admin.ACTIVE and CLAIMS in one.host.facts
        ]
        self._now = now
        self._taken: dict[str, Vector] = {}
        self._per_host: Counter[tuple[str, str]] = Counter()
        starting = 0
        for pool, there in good.items():
            for guest in there:
                starting += guest.state is not State.READY
                if guest.host_id is not None:
                    self._per_host[pool, guest.host_id] += 1
        self._room = STARTING_PER_HOST * len(self._adverts) - starting

    @property
    def full(self) -> bool:
        """Whether as many are under way as may be at once."""
        return bool(self._adverts) and self._room <= 0

    def host_for(self, wanted: Wanted) -> str | None:
        need = wanted.spec.vector()
        best: tuple[int, int, str] | None = None
        for advert in self._adverts:
            used = advert.used + self._taken.get(advert.host.id, ZERO)
            if placing.objections(Advert(advert.host, used), wanted.spec, now=self._now):
                continue
            rank = (self._per_host[wanted.pool, advert.host.id], -(advert.host.capacity - used).memory_mib, advert.host.id)
            best = rank if best is None or rank < best else best
        if best is None:
            return None
        host_id = best[2]
        self._taken[host_id] = self._taken.get(host_id, ZERO) + need
        self._per_host[wanted.pool, host_id] += 1
        self._room -= 1
        return host_id


def give_up(spec: Spec, guests: Iterable[Guest], adverts: Iterable[Advert], *, now: float, need: Vector | None = None) -> tuple[str, ...]:
    """The fewest guests of one host that must go so that a sandbox of this spec finds room there; none where that is not enough, or where
    what is going already is. `need`: what it takes there, where that is less than all of it.
    """
    by_host: dict[str, list[Guest]] = {}
    for guest in guests:
        if guest.host_id is not None:
            by_host.setdefault(guest.host_id, []).append(guest)
    need = spec.vector() if need is None else need
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for advert in adverts:
        there = by_host.get(advert.host.id, [])
        if not there or any(objection.filter not in _OF_ROOM for objection in placing.objections(advert, spec, now=now)):
            continue
        free = advert.free
        for guest in there:
            if guest.state not in KEPT:
                free = free + guest.vector
        gone: list[str] = []
        # What has not begun yet costs least; of what is ready, the newest.
        for guest in sorted(
            (one for one in there if one.state in KEPT), key=lambda one: (one.state is State.READY, -one.created_at, one.id)
        ):
            if not any(True for _ in placing.room(free, need)):
                break
            free = free + guest.vector
            gone.append(guest.id)
        if not any(True for _ in placing.room(free, need)):
            found.append((len(gone), advert.host.id, tuple(gone)))
    return min(found, default=(0, "", ()))[2]


def could_fit(spec: Spec, adverts: Iterable[Advert], *, now: float) -> bool:
    """Whether a sandbox of this spec fits on some host once enough of what is there has ended. What never fits need not be waited for."""
    need = spec.vector()
    for advert in adverts:
        against = placing.objections(advert, spec, now=now)
        if all(one.filter in _OF_ROOM for one in against) and not any(True for _ in placing.room(advert.host.capacity, need)):
            return True
    return False


_OF_ROOM: Final = frozenset(
    {
        placing.Filter.INSUFFICIENT_CPU,
        placing.Filter.INSUFFICIENT_MEMORY,
        placing.Filter.INSUFFICIENT_DISK,
        placing.Filter.INSUFFICIENT_SLOTS,
    }
)
