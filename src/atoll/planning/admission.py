"""Admission: whether a request may begin at all. Refused: no record exists afterwards.

Theory of operation. Two kinds of limit. A *rate* is counted in memory by token buckets, by each of the replicas that are heard of for its own
part of it (docs/adr/0019): what is asked for is weighed before anything is read. A *quota* is counted in the database, in the commit that makes the record (`store/tallies.py`), so that no
race passes it. The narrowest scope speaks first: client, team, deployment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.base.errors import Code, Refused, Unavailable
from atoll.domain.deployment import ClientLimits, Deployment, DeploymentLimits, Rate, TeamLimits


@dataclass(frozen=True, slots=True)
class Usage:
    """How many sandboxes live, and how many are on record, living and ended."""

    client_living: int
    team_living: int
    team_records: int
    deployment_living: int
    deployment_records: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What applies to one client."""

    client: ClientLimits = field(default_factory=ClientLimits)
    team: TeamLimits = field(default_factory=TeamLimits)
    deployment: DeploymentLimits = field(default_factory=DeploymentLimits)

    @classmethod
    def of(cls, deployment: Deployment, *, team: str) -> Limits:
        """The limits of a client of the team of this name."""
        return cls(deployment.client, deployment.of_team(team), deployment.deployment)


def admit(usage: Usage, limits: Limits) -> None:
    """Whether one more sandbox may be made.

    *Errors*: Refused CLIENT_SANDBOX_QUOTA, TEAM_SANDBOX_QUOTA, RECORDS_QUOTA, DEPLOYMENT_SANDBOX_QUOTA, DEPLOYMENT_RECORDS_QUOTA.
    """
    for code, whose, what, count, limit in _quotas(usage, limits):
        if limit is not None and count >= limit:
            raise Refused(code, f"{whose} has {count} {what} of at most {limit}", limit=limit)


def near(usage: Usage, limits: Limits, *, margin: int) -> bool:
    """Whether a quota could be reached by `margin` more: then they must be counted one after another."""
    return any(limit is not None and count + margin >= limit for _, _, _, count, limit in _quotas(usage, limits))


def _quotas(usage: Usage, limits: Limits) -> tuple[tuple[Code, str, str, int, int | None], ...]:
    team, deployment = limits.team, limits.deployment
    return (
        (Code.CLIENT_SANDBOX_QUOTA, "this key", "sandboxes", usage.client_living, limits.client.sandboxes),
        (Code.TEAM_SANDBOX_QUOTA, "this team", "sandboxes", usage.team_living, team.sandboxes),
        (Code.RECORDS_QUOTA, "this team", "records of sandboxes", usage.team_records, team.records),
        (Code.DEPLOYMENT_SANDBOX_QUOTA, "the deployment", "sandboxes", usage.deployment_living, deployment.sandboxes),
        (Code.DEPLOYMENT_RECORDS_QUOTA, "the deployment", "records of sandboxes", usage.deployment_records, deployment.records),
    )


def admit_host(registered: int, limits: DeploymentLimits) -> None:
    """Whether one more host may be registered; a disabled one is not. *Errors*: Refused HOST_QUOTA."""
    if limits.registered_hosts is not None and registered >= limits.registered_hosts:
        raise Refused(
            Code.HOST_QUOTA, f"{registered} hosts are registered of at most {limits.registered_hosts}", limit=limits.registered_hosts
        )


def admit_active_host(active: int, limits: DeploymentLimits) -> None:
    """Whether one more host may be active. *Errors*: Refused ACTIVE_HOST_QUOTA."""
    if limits.active_hosts is not None and active >= limits.active_hosts:
        raise Refused(Code.ACTIVE_HOST_QUOTA, f"{active} hosts are active of at most {limits.active_hosts}", limit=limits.active_hosts)


@dataclass(slots=True)
class Bucket:
    """A token bucket: `rate_per_s` on the long run, `burst` at once. *Units*: seconds of CLOCK_BOOTTIME."""

    rate_per_s: float
    burst: float
    level: float
    at: float

    @classmethod
    def full(cls, rate: Rate, *, boot: float) -> Bucket:
        """A new one."""
        return cls(rate.per_s, rate.at_once, rate.at_once, boot)

    def become(self, rate: Rate) -> None:
        """Another rate from now on; what is in it stays, as far as it fits."""
        self.rate_per_s, self.burst = rate.per_s, rate.at_once
        self.level = min(self.level, self.burst)

    def wait_s(self, *, boot: float) -> float:
        """How long until there is one to take; 0: now. *Units*: seconds."""
        self.level = min(self.burst, self.level + max(0.0, boot - self.at) * self.rate_per_s)
        self.at = boot
        return 0.0 if self.level >= 1 else (1 - self.level) / self.rate_per_s

    def take(self, *, boot: float) -> None:
        """Take one. *Errors*: Unavailable RATE_LIMITED with the time until the next one."""
        wait_s = self.wait_s(boot=boot)
        if wait_s > 0:
            raise Unavailable(Code.RATE_LIMITED, "too many requests", retry_after_s=max(1.0, wait_s))
        self.level -= 1


@dataclass(slots=True)
class Buckets:
    """The buckets of every client, of every team and of the deployment, in one replica.

    A bucket that nobody takes from for long is full, and a full one need not be kept: so what is kept is bounded by who is active.
    """

    kept_max: int = 20_000
    _kept: dict[tuple[str, str], Bucket] = field(default_factory=dict)

    def take(self, limits: Limits, *, client: str, team: str, boot: float, replicas: int = 1) -> None:
        """One request of this client: it takes from each bucket, or from none. `replicas`: among how many the rates are divided.

        *Errors*: Unavailable RATE_LIMITED, with the longest of the waits, and whose rate it is.
        """
        wanted = (
            ("client", client, limits.client.requests),
            ("team", team, limits.team.requests),
            ("deployment", "", limits.deployment.requests),
        )
        found = [(scope, self._bucket(scope, name, rate.among(replicas), boot)) for scope, name, rate in wanted if rate is not None]
        wait_s, scope = max(((bucket.wait_s(boot=boot), scope) for scope, bucket in found), default=(0.0, ""))
        if wait_s > 0:
            raise Unavailable(Code.RATE_LIMITED, f"too many requests of this {scope}", retry_after_s=max(1.0, wait_s), scope=scope)
        for _, bucket in found:
            bucket.level -= 1

    def _bucket(self, scope: str, name: str, rate: Rate, boot: float) -> Bucket:
        known = self._kept.get((scope, name))
        if known is None:
            if len(self._kept) >= self.kept_max:
                self._forget_full(boot)
            known = self._kept[scope, name] = Bucket.full(rate, boot=boot)
        elif (known.rate_per_s, known.burst) != (rate.per_s, rate.at_once):
            known.become(rate)
        return known

    def _forget_full(self, boot: float) -> None:
        self._kept = {
            key: bucket for key, bucket in self._kept.items() if bucket.level + (boot - bucket.at) * bucket.rate_per_s < bucket.burst
        }
