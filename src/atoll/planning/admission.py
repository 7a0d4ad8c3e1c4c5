"""Admission: whether a request may begin at all. Refused: no record exists afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.errors import Code, Refused, Unavailable
from atoll.domain.tenancy import Team


@dataclass(frozen=True, slots=True)
class Usage:
    """How much there is of a team's and of the deployment's."""

    team_living: int
    team_retained: int
    deployment_living: int


@dataclass(frozen=True, slots=True)
class DeploymentLimits:
    """Limits over all teams."""

    max_sandboxes: int = 10_000


def admit(team: Team, usage: Usage, limits: DeploymentLimits) -> None:
    """*Errors*: Refused TEAM_SANDBOX_QUOTA, RECORDS_QUOTA, DEPLOYMENT_SANDBOX_QUOTA."""
    if usage.team_living >= team.max_sandboxes:
        raise Refused(Code.TEAM_SANDBOX_QUOTA, f"team {team.name} has {usage.team_living} sandboxes of at most {team.max_sandboxes}")
    if usage.team_retained >= team.max_records:
        raise Refused(Code.RECORDS_QUOTA, f"team {team.name} has {usage.team_retained} records of at most {team.max_records}")
    if usage.deployment_living >= limits.max_sandboxes:
        raise Refused(
            Code.DEPLOYMENT_SANDBOX_QUOTA, f"the deployment has {usage.deployment_living} sandboxes of at most {limits.max_sandboxes}"
        )


@dataclass(slots=True)
class Bucket:
    """A token bucket: `rate_per_s` on the long run, `burst` at once. *Units*: seconds of CLOCK_BOOTTIME."""

    rate_per_s: float
    burst: float
    level: float
    at: float

    def take(self, *, boot: float) -> None:
        """Take one. *Errors*: Unavailable RATE_LIMITED with the time until the next one."""
        self.level = min(self.burst, self.level + (boot - self.at) * self.rate_per_s)
        self.at = boot
        if self.level < 1:
            wait_s = (1 - self.level) / self.rate_per_s
            raise Unavailable(Code.RATE_LIMITED, "too many requests", retry_after_s=max(1.0, wait_s))
        self.level -= 1
