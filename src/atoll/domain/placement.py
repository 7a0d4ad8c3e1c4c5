"""Placement: one generation of a sandbox on one host; the only thing that holds capacity.

Theory of operation. Two fields, two writers. Control writes `holding`; only the agent's observations move `observed`, each with a
sequence number, and only for this placement. A placement holds capacity from RESERVED until an observation says ABSENT or the host
is fenced: no clock moves it. What is at rest (paused, stopped, saved) needs no more to be removed than it holds. ABSENT absorbs: no late report revives a tombstone. What is not in this table: the host's lease
(host.py) and the reason of an error, which is data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.base.ids import HostId, PlacementId, SandboxId
from atoll.base.records import replace
from atoll.base.units import ZERO, Vector
from atoll.domain import machine
from atoll.domain.command import Kind
from atoll.domain.moment import Moment


class Holding(StrEnum):
    """What a placement keeps on its host, as control has granted it."""

    RESERVED = "reserved"
    ACTIVE = "active"
    PAUSED = "paused"
    STOPPED = "stopped"
    SAVED = "saved"
    CLEANUP_PENDING = "cleanup_pending"
    NONE = "none"


class Grant(StrEnum):
    """What moves a holding."""

    STARTED = "started"
    FROZEN = "frozen"
    THAWED = "thawed"
    STOPPED = "stopped"
    RESTARTED = "restarted"
    SAVED = "saved"
    RESTORED = "restored"
    ENDING = "ending"
    GONE = "gone"
    """Observed absent, or its host is fenced: the only way to NONE."""


_LIVE: Final = (Holding.RESERVED, Holding.ACTIVE, Holding.PAUSED, Holding.STOPPED, Holding.SAVED, Holding.CLEANUP_PENDING)

HOLDING_MOVES: Final[Mapping[tuple[Holding, Grant], Holding]] = {
    (Holding.RESERVED, Grant.STARTED): Holding.ACTIVE,
    (Holding.ACTIVE, Grant.STARTED): Holding.ACTIVE,
    (Holding.ACTIVE, Grant.FROZEN): Holding.PAUSED,
    (Holding.PAUSED, Grant.THAWED): Holding.ACTIVE,
    (Holding.ACTIVE, Grant.STOPPED): Holding.STOPPED,
    (Holding.STOPPED, Grant.RESTARTED): Holding.ACTIVE,
    (Holding.ACTIVE, Grant.SAVED): Holding.SAVED,
    # It was fetched, and its guest did not come back.
    (Holding.RESERVED, Grant.SAVED): Holding.SAVED,
    (Holding.PAUSED, Grant.SAVED): Holding.SAVED,
    (Holding.PAUSED, Grant.STOPPED): Holding.STOPPED,
    (Holding.SAVED, Grant.RESTORED): Holding.ACTIVE,
    **{(holding, Grant.ENDING): Holding.CLEANUP_PENDING for holding in _LIVE},
    **{(holding, Grant.ENDING): holding for holding in (Holding.PAUSED, Holding.STOPPED, Holding.SAVED)},
    **{(holding, Grant.GONE): Holding.NONE for holding in _LIVE},
}


class Observed(StrEnum):
    """What the agent saw last."""

    UNKNOWN = "unknown"
    ACCEPTED = "accepted"
    PREPARING = "preparing"
    PREPARED = "prepared"
    STARTING = "starting"
    RUNNING = "running"
    FROZEN = "frozen"
    SAVING = "saving"
    SAVED = "saved"
    STOPPED = "stopped"
    ABSENT = "absent"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Report:
    """One observation: the placement's whole state, not a difference, so a lost one is harmless."""

    seq: int
    observed: Observed
    generation: int
    applied_revision: int = 0
    """The highest `desired_revision` whose command the agent has carried out."""
    failed_revision: int = 0
    """The highest one that it has tried in vain, and will not try again."""
    address: str | None = None
    reason: str | None = None
    detail: str | None = None
    save_mode: str | None = None
    """Of what is saved: a SaveMode."""
    unresponsive: bool = False
    """The guest did not answer when it was saved."""
    moment: Moment | None = None
    """What is saved now, once it is in the artifact store."""
    ready: bool = False
    """The guest answered the handshake for this generation, and was initialised."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement's row."""

    id: PlacementId
    sandbox_id: SandboxId
    host_id: HostId
    generation: int
    holding: Holding
    vector: Vector
    nonce: str
    moment: str | None = None
    """Digest of the moment in the artifact store that it goes on from: of a sandbox that no host had any more."""
    origin_moment: str | None = None
    """The same of its spec's origin, for a host that has no copy of that snapshot."""
    desired: Kind = Kind.ENSURE_RUNNING
    """What control wants; with `desired_revision` it is the placement's one current command."""
    desired_revision: int = 1
    desired_reason: str | None = None
    observed: Observed = Observed.UNKNOWN
    seq: int = 0
    applied_revision: int = 0
    address: str | None = None
    reason: str | None = None
    detail: str | None = None
    ready: bool = False
    created_at: float = 0.0
    gone_at: float | None = None


class Stale(StrEnum):
    """Why a report changes nothing."""

    GENERATION = "generation"
    SEQUENCE = "sequence"
    TOMBSTONE = "tombstone"


def observe(placement: Placement, report: Report) -> Placement | Stale:
    """Apply one report of the agent, or say why it is stale.

    *Idempotency*: a report seen before, or older than the last sequence number, returns `Stale` and changes nothing.
    """
    if report.generation != placement.generation:
        return Stale.GENERATION
    if placement.observed is Observed.ABSENT:
        return Stale.TOMBSTONE
    if report.seq <= placement.seq:
        return Stale.SEQUENCE
    return replace(
        placement,
        observed=report.observed,
        seq=report.seq,
        applied_revision=max(placement.applied_revision, report.applied_revision),
        address=report.address or placement.address,
        reason=report.reason,
        detail=report.detail,
        ready=report.ready,
    )


def grant(placement: Placement, event: Grant) -> Placement:
    """Move what the placement holds. *Errors*: machine.IllegalMove; NONE is terminal."""
    holding = machine.step(HOLDING_MOVES, placement.holding, event)
    return replace(placement, holding=holding)


def held(placement: Placement) -> Vector:
    """What the placement counts for against its host's capacity now.

    *Units*: as Vector. Paused gives back CPU; stopped and saved keep the disk only; cleanup keeps everything until it is seen gone.
    """
    vector = placement.vector
    match placement.holding:
        case Holding.NONE:
            return ZERO
        case Holding.PAUSED:
            return replace(vector, cpu_millis=0)
        case Holding.STOPPED | Holding.SAVED:
            return Vector(disk_mib=vector.disk_mib)
        case _:
            return vector
