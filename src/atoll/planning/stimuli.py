"""Stimuli: what reconcile is asked about, and what it answers. Values only; `reconcile.advance` is what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.base.errors import Code
from atoll.domain.placement import Placement, Report
from atoll.domain.sandbox import Sandbox
from atoll.domain.spec import SaveMode


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known, read in the transaction that commits the answer."""

    sandbox: Sandbox
    placement: Placement | None
    older: tuple[Placement, ...] = ()
    """Earlier placements that still hold something, where there are any (`Sandbox.unseen`)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing new but time: look whether a deadline has passed."""


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """Somebody wants it gone. `failing`: its end counts as a failure."""

    reason: str = Code.RELEASE_REQUESTED
    failing: bool = False
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A host's record has granted this placement."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class HostRefused:
    """A host's record has refused."""

    host_id: str
    code: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Every candidate has refused, or there was none."""

    detail: str


@dataclass(frozen=True, slots=True)
class Heard:
    """The agent has said something about a placement; None: the current one."""

    report: Report
    ended_by: str | None = None
    placement_id: str | None = None


@dataclass(frozen=True, slots=True)
class EndMoved:
    """Its end is another. *Units*: wall seconds."""

    end_at: float


@dataclass(frozen=True, slots=True)
class Fenced:
    """A placement's host is fenced and the last lease has run out: what it held is gone. None: the current one's."""

    placement_id: str | None = None


@dataclass(frozen=True, slots=True)
class HostHeard:
    """Whether its host is heard of. A word about the host, not about the sandbox: it frees nothing and ends nothing."""

    lost: bool
    host_id: str | None = None
    """None: its host's, whichever that is."""


@dataclass(frozen=True, slots=True)
class ReplacementAuthorized:
    """The client certifies that what the guest of this generation was given is revoked outside."""

    generation: int
    by: str
    statement: str = ""


@dataclass(frozen=True, slots=True)
class BootstrapExposed:
    """What the create brought for its guest is about to leave for this placement's host."""

    placement_id: str


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Freeze it where it is."""


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    """Save it, and let its host have its memory back."""

    mode: SaveMode = SaveMode.FULL
    strict: bool = False
    """Only if its guest answers."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Let it go on. *Units*: seconds."""

    life_s: float | None = None
    """How long it lives from when it is ready; None: as its spec says."""
    reboot: bool = False
    """From its files alone, though its memory is saved, too."""
    placement: Placement | None = None
    """Where it comes back that no host has any more, as a host's record has granted it."""


@dataclass(frozen=True, slots=True)
class CopyUnwanted:
    """What its host has saved of it is in the artifact store, and is to be had from there alone."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A create takes it over. `wanted`: the sandbox that this create would have made, but for its id."""

    wanted: Sandbox
    payload_digest: str | None


Stimulus = (
    BootstrapExposed
    | Claimed
    | Tick
    | ReleaseRequested
    | Placed
    | HostRefused
    | NoRoom
    | Heard
    | EndMoved
    | Fenced
    | HostHeard
    | ReplacementAuthorized
    | PauseRequested
    | SuspendRequested
    | ResumeRequested
    | CopyUnwanted
)


@dataclass(frozen=True, slots=True)
class Note:
    """An event to record in the same commit."""

    type: str
    data: Mapping[str, str | int | float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What sandbox and placement are afterwards. A `placement` that is new is one that `Placed` brought."""

    sandbox: Sandbox
    placement: Placement | None
    notes: tuple[Note, ...]
    older: tuple[Placement, ...] = ()
    """Earlier placements that have changed."""
