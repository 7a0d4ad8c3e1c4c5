"""Placement: which hosts may hold a sandbox, in which order they are asked, and why the others may not.

Theory of operation. A host that no filter objects to is a candidate. `candidates` orders them by the score of DESIGN: the preferred (origin) host first,
image held, then by policy (`pack`: least memory left, least CPU left; `spread`: of a few that are drawn, the most left), then by whose turn
it is: equal hosts lie in one order for everybody (`ring`), and each sandbox begins at another of them and goes on by a step of its own, so that
racing sandboxes spread their ties, and each equal host is as often the first. What a host has free is a hint here: only its own record
grants (`refusal`, read with its row locked). This module says what is right for any number of hosts; `fleet.py` gives the same answer
without looking at each of ten thousand.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from atoll.base.errors import Code
from atoll.base.units import Vector
from atoll.domain.host import Admin, Health, Host, health
from atoll.domain.spec import PlacementPolicy, Spec

PROTOCOL: Final = 1
"""Of agents and guests, as this control speaks it."""


class Filter(StrEnum):
    """Why a host may not hold a sandbox. Append only: clients see these words."""

    HOST_NOT_ACTIVE = "HOST_NOT_ACTIVE"
    HOST_NOT_HEALTHY = "HOST_NOT_HEALTHY"
    HOST_CHECK_FAILED = "HOST_CHECK_FAILED"
    ARCH_MISMATCH = "ARCH_MISMATCH"
    REGION_MISMATCH = "REGION_MISMATCH"
    LABEL_MISMATCH = "LABEL_MISMATCH"
    PROTOCOL_UNSUPPORTED = "PROTOCOL_UNSUPPORTED"
    ISOLATION_UNAVAILABLE = "ISOLATION_UNAVAILABLE"
    OTHER_HOST_REQUIRED = "OTHER_HOST_REQUIRED"
    INSUFFICIENT_CPU = "INSUFFICIENT_CPU"
    INSUFFICIENT_MEMORY = "INSUFFICIENT_MEMORY"
    INSUFFICIENT_DISK = "INSUFFICIENT_DISK"
    INSUFFICIENT_SLOTS = "INSUFFICIENT_SLOTS"
    MOMENT_UNSUPPORTED = "MOMENT_UNSUPPORTED"


@dataclass(frozen=True, slots=True)
class Objection:
    """One filter's word about one host, with what it compared."""

    filter: Filter
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Advert:
    """A host as the directory knows it: its row and what its placements held when it was read."""

    host: Host
    used: Vector

    @property
    def free(self) -> Vector:
        return self.host.capacity - self.used


@dataclass(frozen=True, slots=True)
class Candidate:
    """A host that may be asked."""

    host_id: str
    score: tuple[int, int, int, int, int]


def lasting(host: Host, spec: Spec, *, protocol: int = PROTOCOL) -> Iterator[Objection]:
    """What speaks against a host whatever time it is and whatever else it holds."""
    if host.admin is not Admin.ACTIVE:
        yield Objection(Filter.HOST_NOT_ACTIVE, host.admin.value)
    if host.problems:
        yield Objection(Filter.HOST_CHECK_FAILED, ", ".join(host.problems))
    if host.arch != spec.arch:
        yield Objection(Filter.ARCH_MISMATCH, f"{host.arch}, not {spec.arch}")
    if spec.regions and host.region not in spec.regions:
        yield Objection(Filter.REGION_MISMATCH, f"{host.region}, not {' or '.join(spec.regions)}")
    wrong = [f"{name}={host.labels.get(name, '(none)')}, not {value}" for name, value in spec.labels if host.labels.get(name) != value]
    if wrong:
        yield Objection(Filter.LABEL_MISMATCH, "; ".join(wrong))
    if not host.protocol_min <= protocol <= host.protocol_max:
        yield Objection(Filter.PROTOCOL_UNSUPPORTED, f"{host.protocol_min} to {host.protocol_max}, not {protocol}")
    if spec.isolation.value not in host.isolations:
        yield Objection(Filter.ISOLATION_UNAVAILABLE, f"{', '.join(sorted(host.isolations)) or 'none'}, not {spec.isolation.value}")
    wanted = fetched_kind(spec)
    if wanted is not None and wanted not in host.moments:
        yield Objection(Filter.MOMENT_UNSUPPORTED, f"{', '.join(sorted(host.moments)) or 'none'}, not {wanted}")


def fetched_kind(spec: Spec) -> str | None:
    """Of what kind the moment is that its host would have to fetch; None: it begins from none, or from one that is there alone."""
    return spec.origin.kind if spec.origin is not None and spec.origin.moment is not None else None


def room(free: Vector, need: Vector) -> Iterator[Objection]:
    """Of what a host has too little left."""
    for name, unit, have, want in (
        (Filter.INSUFFICIENT_CPU, "millicores", free.cpu_millis, need.cpu_millis),
        (Filter.INSUFFICIENT_MEMORY, "MiB", free.memory_mib, need.memory_mib),
        (Filter.INSUFFICIENT_DISK, "MiB", free.disk_mib, need.disk_mib),
        (Filter.INSUFFICIENT_SLOTS, "", free.slots, need.slots),
    ):
        if want > have:
            yield Objection(name, f"{max(0, have)} {unit}".rstrip() + f" free, {want} needed")


def objections(advert: Advert, spec: Spec, *, now: float, protocol: int = PROTOCOL) -> list[Objection]:
    """Why this host may not hold it; empty when it may."""
    host = advert.host
    reasons = list(lasting(host, spec, protocol=protocol))
    state = health(host, now=now)
    if state is not Health.HEALTHY:
        reasons.append(Objection(Filter.HOST_NOT_HEALTHY, state.value))
    if spec.require_host is not None and spec.require_host not in (host.id, host.name):
        reasons.append(Objection(Filter.OTHER_HOST_REQUIRED, spec.require_host))
    reasons.extend(room(advert.free, spec.vector()))
    return reasons


def ring(name: str) -> int:
    """Where a host or a sandbox lies on a circle of 2^64 places."""
    return int.from_bytes(hashlib.blake2s(name.encode(), digest_size=8).digest(), "big")


def candidates(
    adverts: Iterable[Advert],
    spec: Spec,
    *,
    sandbox_id: str,
    now: float,
    excluded: Collection[str] = (),
    draw: Callable[[Sequence[Advert]], Sequence[Advert]] | None = None,
) -> list[Candidate]:
    """Hosts to ask, best first. `draw` takes of all that fit those that `spread` compares beside the preferred one; None: all of them."""
    known = list(adverts)
    fit = [advert for advert in known if advert.host.id not in excluded and not objections(advert, spec, now=now)]
    if spec.placement_policy is PlacementPolicy.SPREAD and draw is not None:
        preferred = [advert for advert in fit if spec.prefer_host in (advert.host.id, advert.host.name)]
        fit = [*preferred, *(advert for advert in draw(fit) if advert not in preferred)]
        when: dict[str, int] = {advert.host.id: number for number, advert in enumerate(fit)}
    else:
        when = _turns(known, sandbox_id)
    found = [Candidate(advert.host.id, score(advert, spec, turn=when[advert.host.id])) for advert in fit]
    return sorted(found, key=lambda candidate: candidate.score)


def score(advert: Advert, spec: Spec, *, turn: int) -> tuple[int, int, int, int, int]:
    """What candidates are ordered by; the smallest is asked first. `turn`: among hosts with as much left."""
    host, left = advert.host, advert.free - spec.vector()
    sign = 1 if spec.placement_policy is PlacementPolicy.PACK else -1
    return (
        0 if spec.prefer_host in (host.id, host.name) else 1,
        0 if spec.image in host.images else 1,
        sign * left.memory_mib,
        sign * left.cpu_millis,
        turn,
    )


def _turns(adverts: Iterable[Advert], sandbox_id: str) -> dict[str, int]:
    """Each host's turn among all that have as much memory and CPU free as it has, whether they fit or not."""
    equals: defaultdict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for advert in adverts:
        equals[advert.free.memory_mib, advert.free.cpu_millis].append((ring(advert.host.id), advert.host.id))
    found: dict[str, int] = {}
    for group in equals.values():
        turn = turns(len(group), sandbox_id)
        found.update((host_id, turn(index)) for index, (_, host_id) in enumerate(sorted(group)))
    return found


def _walk(count: int, sandbox_id: str) -> tuple[int, int]:
    """Where a sandbox begins among so many, and how far it goes with each step: to each of them, once."""
    at = ring(sandbox_id)
    step = 1 + (at >> 32) % count
    while math.gcd(step, count) != 1:
        step += 1
    return at % count, step


def drawing(count: int, sandbox_id: str) -> Iterator[int]:
    """Numbers below `count`, each once, in an order of this sandbox's own."""
    if count <= 0:
        return
    first, step = _walk(count, sandbox_id)
    for number in range(count):
        yield (first + number * step) % count


def turns(count: int, sandbox_id: str) -> Callable[[int], int]:
    """For each number below `count`, when `drawing` gives it."""
    first, step = _walk(count, sandbox_id)
    back = pow(step, -1, count)
    return lambda number: (number - first) * back % count


# Why not here.


@dataclass(frozen=True, slots=True)
class Verdict:
    """One host's part in a decision: what speaks against it, or its rank among those that may be asked (1: the first)."""

    advert: Advert
    objections: tuple[Objection, ...]
    rank: int | None
    refused: bool
    """It was asked already for this sandbox, and its record said no."""
    image: bool
    """It holds the image."""


@dataclass(frozen=True, slots=True)
class Sum:
    """How many hosts a filter removes, and how many of them nothing else speaks against."""

    filter: Filter
    hosts: int
    alone: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision, for people: every host, the candidates in their order first."""

    verdicts: tuple[Verdict, ...]
    sums: tuple[Sum, ...]

    @property
    def candidates(self) -> int:
        return sum(verdict.rank is not None for verdict in self.verdicts)

    def __str__(self) -> str:
        return summary(len(self.verdicts), {one.filter: one.hosts for one in self.sums})


def explain(
    adverts: Iterable[Advert], spec: Spec, *, sandbox_id: str, now: float, excluded: Collection[str] = (), holds: str | None = None
) -> Explanation:
    """Every host's verdict. `holds`: the host that has it already, which is judged as if it had not."""
    judged: list[tuple[Advert, tuple[Objection, ...]]] = []
    for known in adverts:
        advert = replace(known, used=known.used - spec.vector()) if known.host.id == holds else known
        judged.append((advert, tuple(objections(advert, spec, now=now))))
    everyone = [advert for advert, _ in judged]
    ranks = {
        one.host_id: rank for rank, one in enumerate(candidates(everyone, spec, sandbox_id=sandbox_id, now=now, excluded=excluded), start=1)
    }
    verdicts = [
        Verdict(advert, against, ranks.get(advert.host.id), advert.host.id in excluded, spec.image in advert.host.images)
        for advert, against in judged
    ]
    verdicts.sort(key=lambda one: (one.rank is None, one.rank or 0, len(one.objections), one.advert.host.name))
    return Explanation(tuple(verdicts), _sums(against for _, against in judged))


def _sums(all_objections: Iterable[tuple[Objection, ...]]) -> tuple[Sum, ...]:
    hosts: Counter[Filter] = Counter()
    alone: Counter[Filter] = Counter()
    for against in all_objections:
        hosts.update(one.filter for one in against)
        if len(against) == 1:
            alone[against[0].filter] += 1
    return tuple(Sum(name, hosts[name], alone[name]) for name in Filter if hosts[name])


def summary(total: int, removed: dict[Filter, int]) -> str:
    """One line for people: how many hosts, and how many each filter removes."""
    if total == 0:
        return "no host is registered"
    listed = ", ".join(f"{name} x{count}" for name, count in sorted(removed.items()) if count)
    return f"{total} host(s): {listed or 'all refused at reservation'}"


# The host's own word.


def refusal(host: Host, spec: Spec, *, used: Vector) -> Code | None:
    """What the host's own record says to a reservation; None grants it. Read with the row locked.

    How long it was not heard of decides nothing here: its record grants, and its lease says what becomes of it.
    """
    need = spec.vector()
    if host.admin is not Admin.ACTIVE:
        return Code.HOST_NOT_ACTIVE
    if any(True for _ in lasting(host, spec)):
        return Code.HOST_UNSUITABLE
    return no_room(host, used=used, need=need)


def no_room(host: Host, *, used: Vector, need: Vector) -> Code | None:
    """Of what the host's own record has too little left for this; None: it has all. Also for what has been on it before, and needs more."""
    lacking = next(room(host.capacity - used, need), None)
    return Code(lacking.filter.value) if lacking is not None else None
