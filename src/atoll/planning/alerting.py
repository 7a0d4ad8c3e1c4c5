"""Alerting: what is wrong now, from what is on record. Facts in, alerts out; the loop keeps the rows (`control/loops/alerts.py`).

Theory of operation. One alert says one thing for one subject: a host, a class of workload, a control process. Sandboxes in trouble are
counted under the host or class that they share, so that a thousand of them that wait for one lost host are one alert. What is wrong with
hosts follows from their rows and the time, what is wrong with sandboxes from a query over the few that are not at rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.domain.host import Admin, Health, Host, health
from atoll.domain.operations import Alert, Raised, Severity
from atoll.domain.sandbox import Condition, State

QUARANTINE: Final = "inventory.quarantine"
CAPACITY: Final = "host.capacity"
"""What ids of checks begin with that say that a host has less than it has registered."""
REFUSED_S: Final = 900.0
"""For so long an image that was refused is told."""
OVERDUE_S: Final = 300.0
"""A release that takes longer than this is not only late."""
SLOW_S: Final = 0.5
"""A commit on a disk that works takes a thousandth of this."""
SLOW_COMMITS: Final = 3
"""So many between two looks are no hiccup."""
SHORT_S: Final = 30.0
"""For so long there may be fewer guests made ahead than a policy says."""
EXAMPLES: Final = 3
DETAIL_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class HostFacts:
    """A host and how many placements of it hold something."""

    host: Host
    held: int


@dataclass(frozen=True, slots=True)
class Troubled:
    """A sandbox that is not at rest."""

    id: str
    state: State
    class_name: str
    host_id: str | None
    conditions: frozenset[Condition]
    release_requested_at: float | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class RefusedImage:
    """A version of a template that hosts did not start, because it is not what was signed: how often of late."""

    template_id: str
    name: str
    reason: str
    count: int
    example: str
    """A sandbox that failed by it."""
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class WarmShort:
    """A policy of which fewer guests are ready than it says. *Units*: wall seconds."""

    template_id: str
    name: str
    count: int
    since: float
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What this control process has met at its store since the last look. *Units*: seconds."""

    process: str
    slowest_s: float = 0.0
    slow: int = 0
    """Commits that took longer than SLOW_S."""
    refused: str | None = None
    """The code of the last refusal that was not followed by a success."""


def wrong(
    hosts: Sequence[HostFacts],
    sandboxes: Iterable[Troubled],
    store: StoreFacts,
    *,
    now: float,
    refused: Iterable[RefusedImage] = (),
    short: Iterable[WarmShort] = (),
) -> list[Raised]:
    """Everything that is wrong, each once. *Units*: wall seconds."""
    found = [
        *(raised for one in hosts for raised in _of_host(one, now=now)),
        *_of_deployment(hosts, now=now),
        *_of_sandboxes(sandboxes, {one.host.id: one.host.name for one in hosts}, now=now),
        *_of_images(refused),
        *_of_warm(short, now=now),
        *_of_store(store),
    ]
    return sorted(found, key=lambda raised: (raised.kind, raised.subject))


def _raised(kind: Alert, subject: str, severity: Severity, detail: str) -> Raised:
    return Raised(kind, subject, severity, detail[:DETAIL_MAX])


def _of_host(one: HostFacts, *, now: float) -> Iterator[Raised]:
    host = one.host
    if host.admin is Admin.DISABLED:
        severity = Severity.WARNING if one.held else Severity.INFO
        yield _raised(Alert.HOST_DISABLED, host.id, severity, f"host {host.name} is fenced and still counts {one.held} placement(s)")
        return
    if health(host, now=now) is Health.LOST:
        yield _raised(Alert.HOST_LOST, host.id, Severity.CRITICAL, f"host {host.name} is not heard of; {one.held} placement(s) are on it")
    capacity = [problem for problem in host.problems if problem.startswith(CAPACITY)]
    others = [problem for problem in host.problems if problem != QUARANTINE and problem not in capacity]
    if QUARANTINE in host.problems:
        detail = f"host {host.name} holds things that nobody can explain, and takes nothing new"
        yield _raised(Alert.HOST_QUARANTINE, host.id, Severity.WARNING, detail)
    if capacity:
        detail = f"host {host.name} has less than it has registered ({', '.join(capacity)}), and takes nothing new"
        yield _raised(Alert.HOST_CAPACITY_MISMATCH, host.id, Severity.WARNING, detail)
    if others:
        detail = f"host {host.name} fails {', '.join(others)}, and takes nothing new"
        yield _raised(Alert.HOST_CHECK_FAILED, host.id, Severity.WARNING, detail)


def _of_deployment(hosts: Sequence[HostFacts], *, now: float) -> Iterator[Raised]:
    enrolled = [one.host for one in hosts if one.host.admin is not Admin.DISABLED]
    takes = [host for host in enrolled if host.admin is Admin.ACTIVE and not host.problems and health(host, now=now) is Health.HEALTHY]
    if enrolled and not takes:
        yield _raised(Alert.DEPLOYMENT_NO_HOST, "deployment", Severity.CRITICAL, f"none of {len(enrolled)} host(s) takes new sandboxes")


def _of_sandboxes(sandboxes: Iterable[Troubled], names: dict[str, str], *, now: float) -> Iterator[Raised]:
    groups: defaultdict[tuple[Alert, str], list[Troubled]] = defaultdict(list)
    for one in sandboxes:
        if Condition.NO_ELIGIBLE_HOST in one.conditions:
            groups[Alert.SANDBOX_NO_ELIGIBLE_HOST, one.class_name].append(one)
        if Condition.REPLACEMENT_BLOCKED in one.conditions:
            groups[Alert.SANDBOX_REPLACEMENT_BLOCKED, one.host_id or one.class_name].append(one)
        if one.state is State.RELEASING:
            subject = one.host_id or "none"
            overdue = one.release_requested_at is not None and now - one.release_requested_at > OVERDUE_S
            if overdue:
                groups[Alert.RELEASE_OVERDUE, subject].append(one)
            elif Condition.CLEANUP_PENDING in one.conditions:
                groups[Alert.SANDBOX_CLEANUP_PENDING, subject].append(one)
    for (kind, subject), members in groups.items():
        yield _raised(kind, subject, _SEVERITIES[kind], _told(kind, names.get(subject, subject), members))


_SEVERITIES: Final = {
    Alert.SANDBOX_NO_ELIGIBLE_HOST: Severity.WARNING,
    Alert.SANDBOX_REPLACEMENT_BLOCKED: Severity.WARNING,
    Alert.SANDBOX_CLEANUP_PENDING: Severity.WARNING,
    Alert.RELEASE_OVERDUE: Severity.CRITICAL,
}
_WORDS: Final = {
    Alert.SANDBOX_NO_ELIGIBLE_HOST: "of class {} find no host",
    Alert.SANDBOX_REPLACEMENT_BLOCKED: "of host {} may not be replaced without somebody's word",
    Alert.SANDBOX_CLEANUP_PENDING: "on host {} are ending and not gone in time",
    Alert.RELEASE_OVERDUE: f"on host {{}} are ending for more than {OVERDUE_S:g} s",
}


def _told(kind: Alert, name: str, members: Sequence[Troubled]) -> str:
    ordered = sorted(members, key=lambda one: one.id)
    examples = ", ".join(one.id for one in ordered[:EXAMPLES])
    why = next((one.detail for one in ordered if one.detail), None)
    return f"{len(members)} sandbox(es) {_WORDS[kind].format(name)}: {examples}" + (f" ({why})" if why else "")


def _of_images(refused: Iterable[RefusedImage]) -> Iterator[Raised]:
    worst: dict[str, RefusedImage] = {}
    for one in refused:
        if one.template_id not in worst or one.count > worst[one.template_id].count:
            worst[one.template_id] = one
    for template_id, one in worst.items():
        why = f" ({one.detail})" if one.detail else ""
        detail = f"template {one.name}: {one.count} sandbox(es) failed by {one.reason} of late, such as {one.example}{why}"
        yield _raised(Alert.IMAGE_REFUSED, template_id, Severity.CRITICAL, detail)


def _of_warm(short: Iterable[WarmShort], *, now: float) -> Iterator[Raised]:
    worst: dict[str, WarmShort] = {}
    for one in sorted(short, key=lambda one: one.since):
        if now - one.since >= SHORT_S:
            worst.setdefault(one.template_id, one)
    for template_id, one in worst.items():
        why = f" ({one.problem})" if one.problem else ""
        detail = f"template {one.name}: fewer than {one.count} guests are ready for more than {SHORT_S:g} s{why}"
        yield _raised(Alert.WARM_SHORT, template_id, Severity.WARNING, detail)


def _of_store(store: StoreFacts) -> Iterator[Raised]:
    if store.refused is not None:
        yield _raised(Alert.STORE_FULL, store.process, Severity.CRITICAL, f"the database refuses changes: {store.refused}")
    elif store.slow >= SLOW_COMMITS:
        detail = f"{store.slow} commits took up to {store.slowest_s:.2f} s; on a disk that works one takes about a millisecond"
        yield _raised(Alert.STORE_SLOW, store.process, Severity.WARNING, detail)
