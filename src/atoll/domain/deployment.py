"""Deployment: what the operator has decided, as one value: classes of workloads, and limits.

Theory of operation. An operator writes a document (`wire/deployment.py` reads it); this is what it means. It has a revision, which grows by
one with each applied document; 0 is what Atoll brings itself. A class is read when a sandbox is made and never again: what it says is
resolved into the sandbox's own spec, so that a changed or removed class touches only sandboxes that come later. Limits count from the
moment at which a replica has read them. None means without limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.domain.spec import LADDER, LOCAL_S, Ingress, Isolation, OnExit, OnLeaseExpiry, OnLoss, PlacementPolicy

BURST_S: Final = 5.0
"""A burst that nobody has named is what comes in this time."""


@dataclass(frozen=True, slots=True)
class Range:
    """What may be asked for, and what one gets who asks for nothing; None: what the template says."""

    min: int
    max: int
    default: int | None = None


@dataclass(frozen=True, slots=True)
class WorkloadClass:
    """The operator's policy for a kind of workload. *Units*: millicores, MiB, seconds."""

    name: str = "default"
    description: str = ""
    isolation: Isolation = Isolation.GVISOR
    or_stronger: bool = False
    """Whether a rung of the ladder above `isolation` is used instead, where a host's self-check has passed on it."""
    template: str | None = None
    """For requests that name none."""
    templates: tuple[str, ...] = ()
    """Which may be used, by name or id; empty: all that the team may."""
    cpu_millis: Range = Range(50, 8000)
    memory_mib: Range = Range(32, 16384)
    disk_mib: Range = Range(64, 65536)
    pids_max: int = 4096
    timeout_s_default: int = 300
    timeout_s_max: int = 24 * 3600
    on_lease_expiry: OnLeaseExpiry = OnLeaseExpiry.END
    on_exit: OnExit = OnExit.RELEASE
    on_loss: OnLoss = OnLoss.END
    attempts_max: int = 3
    """Placements of one sandbox that may fail before it does."""
    ingress: Ingress = Ingress.PUBLIC
    internet: bool = True
    """Whether a sandbox may have a way out."""
    arch: str = "x86_64"
    regions: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    placement_policy: PlacementPolicy = PlacementPolicy.PACK
    placement_choices: int = 2
    """Of `spread`: how many hosts are compared."""
    reserve_s: float = 10.0
    image_s: float = 600.0
    guest_ready_s: float = 60.0
    start_s: float = 45.0
    bootstrap_s: float = 30.0
    pause_s: float = 30.0
    resume_s: float = 60.0
    save_s: float = 300.0
    local_s: float = LOCAL_S
    release_s: float = 60.0
    no_capacity_s: float = 300.0
    create_patience_s: float = 50.0
    metadata_pairs_max: int = 64
    metadata_bytes_max: int = 16384
    env_pairs_max: int = 512
    env_bytes_max: int = 65536

    def rungs(self) -> tuple[Isolation, ...]:
        """Which isolations its sandboxes may have, the first choice first."""
        return LADDER[: LADDER.index(self.isolation) + 1] if self.or_stronger else (self.isolation,)


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests: so many a second on the long run, and so many at once."""

    per_s: float
    burst: float | None = None

    @property
    def at_once(self) -> float:
        """The size of the bucket; never less than one request."""
        return max(1.0, self.burst if self.burst is not None else self.per_s * BURST_S)

    def among(self, replicas: int) -> Rate:
        """One replica's part, where so many count it beside each other."""
        return self if replicas <= 1 else Rate(self.per_s / replicas, self.at_once / replicas)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Of one key."""

    requests: Rate | None = Rate(200.0)
    sandboxes: int | None = None


@dataclass(frozen=True, slots=True)
class TeamLimits:
    """Of one team. `records` are all of its sandboxes that are on record, living and ended. *Units*: MiB in the registry."""

    requests: Rate | None = Rate(2000.0)
    sandboxes: int | None = 1000
    records: int | None = 100_000
    registry_mib: int | None = 50 * 1024


@dataclass(frozen=True, slots=True)
class DeploymentLimits:
    """Over all teams."""

    requests: Rate | None = None
    sandboxes: int | None = 10_000
    records: int | None = 1_000_000
    registered_hosts: int | None = 10_000
    active_hosts: int | None = 10_000
    warm_guests: int | None = 1000
    """Kept ready, over all policies."""
    moment_mib: int | None = 64 * 1024
    """Of what is saved of one sandbox, or kept as one snapshot, that is sent to the artifact store; what is larger stays on its host."""


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """How long a template's build may take. *Units*: seconds."""

    whole_s: float = 3600.0
    """All of it, in one run: one that was cut off by the end of its control process begins its time anew."""
    step_s: float = 3600.0
    """One command of a step."""
    start_s: float = 600.0
    """What it has made, to be ready: the start command, once the guest has answered."""


DEFAULT_CLASSES: Final[Mapping[str, WorkloadClass]] = {
    "default": WorkloadClass(description="Untrusted code behind a kernel of its own, of a machine where there is one.", or_stronger=True),
    "shared-kernel": WorkloadClass(
        name="shared-kernel",
        description="Faster, and only for code that may share the host's kernel.",
        isolation=Isolation.SHARED_KERNEL,
    ),
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that the operator decides in the document."""

    classes: Mapping[str, WorkloadClass] = field(default_factory=lambda: dict(DEFAULT_CLASSES))
    default_class: str = "default"
    client: ClientLimits = field(default_factory=ClientLimits)
    team: TeamLimits = field(default_factory=TeamLimits)
    deployment: DeploymentLimits = field(default_factory=DeploymentLimits)
    builds: BuildLimits = field(default_factory=BuildLimits)
    teams: Mapping[str, TeamLimits] = field(default_factory=dict)
    """By name, whole: what is other than for every team is merged when the document is read."""
    public_repositories: tuple[str, ...] = ()
    """Of the registry, which anybody may pull: `TEAM/NAME`, or `TEAM/NAME/*` for all below it."""

    def of_team(self, name: str) -> TeamLimits:
        """The limits of the team of this name."""
        return self.teams.get(name, self.team)
