"""Placement: which hosts may hold a sandbox, in which order they are asked, and why the others may not.

Theory of operation. `explain` gives every host's reasons against it; a host without any is a candidate. `candidates` orders them by the
score of DESIGN: origin host first, image held, least memory left, least CPU left, then a stable hash, so that racing sandboxes spread
their ties. What a candidate has free is a hint: only the reservation on the host's record grants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.base.errors import Code
from atoll.base.units import Vector
from atoll.domain.host import Admin, Health, Host, health
from atoll.domain.spec import Spec


@dataclass(frozen=True, slots=True)
class Advert:
    """A host as the directory knows it: its row and what its placements held when it was read."""

    host: Host
    used: Vector


@dataclass(frozen=True, slots=True)
class Candidate:
    """A host that may be asked."""

    host_id: str
    score: tuple[int, int, int, int, str]


def objections(advert: Advert, spec: Spec, *, now: float, protocol: int = 1) -> list[str]:
    """Why this host may not hold it: stable codes and filter names; empty when it may."""
    host = advert.host
    reasons: list[str] = []
    if host.admin is not Admin.ACTIVE:
        reasons.append(Code.HOST_NOT_ACTIVE)
    if health(host, now=now) is not Health.HEALTHY:
        reasons.append("HOST_NOT_HEALTHY")
    if host.problems:
        reasons.append("HOST_CHECK_FAILED:" + ",".join(host.problems))
    if host.arch != spec.arch:
        reasons.append("ARCH_MISMATCH")
    if spec.regions and host.region not in spec.regions:
        reasons.append("REGION_MISMATCH")
    if any(host.labels.get(name) != value for name, value in spec.labels):
        reasons.append("LABEL_MISMATCH")
    if not host.protocol_min <= protocol <= host.protocol_max:
        reasons.append(Code.PROTOCOL_UNSUPPORTED)
    if spec.isolation.value not in host.isolations:
        reasons.append("ISOLATION_UNAVAILABLE")
    if spec.require_host is not None and spec.require_host not in (host.id, host.name):
        reasons.append("OTHER_HOST_REQUIRED")
    reasons.extend(f"INSUFFICIENT_{name}" for name in (host.capacity - advert.used).lacks(spec.vector()))
    return reasons


def candidates(
    adverts: Iterable[Advert], spec: Spec, *, sandbox_id: str, now: float, excluded: Sequence[str] = (), origin: str | None = None
) -> list[Candidate]:
    """Hosts to ask, best first (policy `pack`)."""
    need = spec.vector()
    found: list[Candidate] = []
    for advert in adverts:
        host = advert.host
        if host.id in excluded or objections(advert, spec, now=now):
            continue
        left = host.capacity - advert.used - need
        tie = hashlib.blake2s(f"{sandbox_id}{host.id}".encode(), digest_size=8).hexdigest()
        found.append(
            Candidate(
                host.id,
                (0 if host.id == origin else 1, 0 if spec.image in host.images else 1, left.memory_mib, left.cpu_millis, tie),
            )
        )
    return sorted(found, key=lambda c: c.score)


def explain(adverts: Iterable[Advert], spec: Spec, *, now: float) -> dict[str, list[str]]:
    """Every host's objections, by host id."""
    return {advert.host.id: objections(advert, spec, now=now) for advert in adverts}


def summary(reasons: dict[str, list[str]]) -> str:
    """One line for people: how many hosts, and how often each reason."""
    if not reasons:
        return "no host is registered"
    counts: dict[str, int] = {}
    for of_host in reasons.values():
        for reason in of_host:
            counts[reason] = counts.get(reason, 0) + 1
    listed = ", ".join(f"{reason} x{n}" for reason, n in sorted(counts.items()))
    return f"{len(reasons)} host(s): {listed or 'all refused at reservation'}"


def refusal(host: Host, *, used: Vector, need: Vector) -> Code | None:
    """What the host's own record says to a reservation; None grants it. Read with the row locked."""
    if host.admin is not Admin.ACTIVE:
        return Code.HOST_NOT_ACTIVE
    lacking = (host.capacity - used).lacks(need)
    return Code(f"INSUFFICIENT_{lacking[0]}") if lacking else None
