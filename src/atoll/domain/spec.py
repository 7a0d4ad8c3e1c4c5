"""The spec: what one pure `resolve(request)` makes of class, template, size and overrides.

Stored with the sandbox and sent to the agent as it is, so it holds no secret: environment values and tokens travel as a sealed
payload (`Sandbox.payload_digest`). Unknown fields of a stored older spec are ignored, missing ones take these defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from atoll.base.units import Vector

LOCAL_S: Final = 60.0


class Isolation(StrEnum):
    """What separates the guest from the host. Never claim more than is true."""

    VM = "vm"
    """A kernel of its own, by hardware virtualization."""
    VM_EMULATED = "vm-emulated"
    """A machine whose instructions a program translates: slow, and that program's faults are what separates it."""
    GVISOR = "gvisor"
    SHARED_KERNEL = "shared-kernel"


LADDER: Final = (Isolation.VM, Isolation.GVISOR, Isolation.SHARED_KERNEL, Isolation.VM_EMULATED)
"""From the first choice to the last. What comes after gVisor is used only where an operator says so."""
OVERHEAD_MIB: Final = {Isolation.VM: 96, Isolation.VM_EMULATED: 192}
"""What runs a machine takes of its host's memory beside the guest's own; a driver may take no more (ADR 0035). *Units*: MiB."""


class OnExit(StrEnum):
    """What happens when the guest ends by itself."""

    RELEASE = "release"
    RESTART = "restart"


class OnLeaseExpiry(StrEnum):
    """What the agent does with a sandbox when its host's lease runs out."""

    END = "end"
    SUSPEND = "suspend"
    """Saved, or frozen where its driver cannot save; it goes on when somebody resumes it."""
    KEEP = "keep"


class SaveMode(StrEnum):
    """What of a sandbox is saved when it is suspended."""

    FULL = "full"
    """Memory and files of one moment: what ran goes on."""
    FILES = "filesystem"
    """Files alone: it is booted anew from them."""


class OnLoss(StrEnum):
    """What becomes of a sandbox that was ready when its placement is lost. Before it was ready it is always replaced."""

    END = "end"
    REPLACE = "replace"
    """By a new one with the same id, once its host is fenced or the client says that the old one may no longer act."""


class PlacementPolicy(StrEnum):
    """In which order hosts are asked."""

    PACK = "pack"
    """Full ones first, so that large holes stay for large sandboxes."""
    SPREAD = "spread"
    """The emptiest of a few."""


class Ingress(StrEnum):
    """Who reaches a sandbox's ports."""

    PUBLIC = "public"
    """Everybody, unless the request says otherwise."""
    TOKEN = "token"  # noqa: S105 - a word, not a secret
    """Who has the sandbox's traffic token, whatever the request says."""


class OnEnd(StrEnum):
    """What the agent does at `end_at`."""

    KILL = "kill"
    SUSPEND = "suspend"


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """Egress and ingress. `allow_out` wins over `deny_out`; private ranges are closed whatever these say."""

    internet: bool = True
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    public_traffic: bool = True
    mask_request_host: str | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """The saved moment of another sandbox that a guest begins from, in place of a boot."""

    snapshot_id: str
    mode: SaveMode
    or_boot: bool = False
    """A head start, and no more than that: where the host does not have it whole the guest boots, and that is said."""
    pinned: bool = False
    """`require_host` is where the snapshot is, because it is there alone; nobody has asked for that host."""
    moment: str | None = None
    """Digest of the moment that a host fetches which has no copy of the snapshot. Added on the way to a host: what is in the store changes."""
    kind: str = ""
    """Which hosts can go on from it (`domain.moment.kind`)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One sandbox's resolved shape. *Units*: millicores, MiB, seconds."""

    class_name: str
    template_id: str
    image: str
    """Digest of the template build's image (`sha256:...`)."""
    image_name: str
    """The template's name, for logs and for hosts that hold images by name."""
    isolation: Isolation
    cpu_millis: int
    memory_mib: int
    disk_mib: int
    pids_max: int
    timeout_s: int
    on_end: OnEnd = OnEnd.KILL
    auto_resume: bool = False
    """Whether traffic for its ports resumes it."""
    end_mode: SaveMode = SaveMode.FULL
    """What is saved where it is suspended at its end."""
    on_exit: OnExit = OnExit.RELEASE
    on_lease_expiry: OnLeaseExpiry = OnLeaseExpiry.END
    default_user: str = "user"
    default_workdir: str | None = None
    command: tuple[str, ...] = ()
    """The start command; empty: none."""
    command_user: str = ""
    """Whom the start and the ready command run as; empty: root."""
    ready_command: tuple[str, ...] = ()
    """The sandbox is ready once this has ended well; empty: as soon as the start command runs."""
    start_s: float = 45.0
    """How long that may take, once the guest has answered. Less than a create's patience, so that its failure is told in time."""
    network: NetworkSpec = field(default_factory=NetworkSpec)
    tmp_on_disk: bool = False
    """The guest's `tmp` is a directory like any other, kept with the rest: for steps of builds, which leave things there for each other."""
    arch: str = "x86_64"
    regions: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    require_host: str | None = None
    prefer_host: str | None = None
    """By id or name: the one to ask first where it fits, for instance where an earlier sandbox of the same work has left its caches."""
    reserve_s: float = 10.0
    image_s: float = 600.0
    guest_ready_s: float = 60.0
    release_s: float = 60.0
    no_capacity_s: float = 300.0
    create_patience_s: float = 50.0
    bootstrap_s: float = 30.0
    pause_s: float = 30.0
    resume_s: float = 60.0
    save_s: float = 300.0
    local_s: float = LOCAL_S
    """How long what is saved stays on its host once it is in the artifact store, so that it is back soon."""
    timeout_s_max: int = 24 * 3600
    """How far its end may be moved."""
    on_loss: OnLoss = OnLoss.END
    attempts_max: int = 3
    placement_policy: PlacementPolicy = PlacementPolicy.PACK
    placement_choices: int = 2
    manifest: str = ""
    """Digest of the signed manifest that the image is started by; empty: a ready-made image, which hosts have by a recipe of their own."""

    origin: Origin | None = None
    """Only hosts that have this snapshot can begin it, unless it is a head start."""

    @property
    def starts(self) -> bool:
        """Whether a sandbox is of use only when its start command says so."""
        return bool(self.command or self.ready_command)

    @property
    def ready_s(self) -> float:
        """How long a guest may take until it is ready, with its start command where it has one. *Units*: seconds."""
        return self.guest_ready_s + (self.start_s if self.starts else 0.0)

    def vector(self) -> Vector:
        """What a running placement of this spec holds on its host."""
        return Vector(self.cpu_millis, self.memory_mib + OVERHEAD_MIB.get(self.isolation, 0), self.disk_mib, 1)
