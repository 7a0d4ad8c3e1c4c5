"""Snapshot: one moment of a sandbox that went on, kept on the host where it was.

Theory of operation. Control writes every field, from what the host's agent says. A snapshot is TAKING from the commit that wants it until
the host has it whole (READY), or says why it has not (FAILED). It holds disk on its host from the first of these until it is *seen* gone:
DELETING ends only with the agent's word, or with its host (LOST), of which nothing comes back but what is in the artifact store:
a snapshot whose moment is there stays READY, and only its copy on the host is gone (`copy`), which may also be ordered away. One that takes too long is deleted, since
nobody knows what the host has of it. What is not in this table: whether sandboxes still need it, which is asked in the commit that deletes.
A fork is a snapshot that is kept for as long as its clones are begun from it; a head start, for as long as its build is named by anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.base.ids import ClientId, HostId, PlacementId, SandboxId, TeamId
from atoll.domain import machine
from atoll.domain.moment import Moment
from atoll.domain.spec import SaveMode, Spec

DEFAULT_TAG: Final = "default"


class State(StrEnum):
    """Where a snapshot is."""

    TAKING = "taking"
    READY = "ready"
    DELETING = "deleting"
    DELETED = "deleted"
    FAILED = "failed"


class Event(StrEnum):
    """What moves it."""

    TAKEN = "taken"
    BROKE = "broke"
    LATE = "late"
    DELETE = "delete"
    ABSENCE_CONFIRMED = "absence_confirmed"
    LOST = "lost"
    """Its host is fenced."""


MOVES: Final[Mapping[tuple[State, Event], State]] = {
    (State.TAKING, Event.TAKEN): State.READY,
    (State.TAKING, Event.BROKE): State.FAILED,
    (State.TAKING, Event.LATE): State.DELETING,
    (State.TAKING, Event.DELETE): State.DELETING,
    (State.TAKING, Event.LOST): State.FAILED,
    (State.READY, Event.DELETE): State.DELETING,
    (State.READY, Event.LOST): State.FAILED,
    (State.DELETING, Event.ABSENCE_CONFIRMED): State.DELETED,
    (State.DELETING, Event.LOST): State.DELETED,
}
TERMINAL: Final = frozenset({State.DELETED, State.FAILED})
HELD: Final = frozenset(State) - TERMINAL


class Purpose(StrEnum):
    """What it is for."""

    KEPT = "kept"
    FORK = "fork"
    """For clones that begin from it at once; no list shows it."""
    TEMPLATE = "template"
    """A build's, whose start command is ready in it: sandboxes of that build begin from it where they can. No list shows it; its client is the build."""


class Copy(StrEnum):
    """What its host has of a snapshot that is ready."""

    HERE = "here"
    LEAVING = "leaving"
    """It is in the artifact store, and its host is to give its copy up."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot's row. *Units*: wall seconds, bytes."""

    id: str
    revision: int
    team_id: TeamId
    client_id: ClientId
    sandbox_id: SandboxId
    """Whose moment it is. That sandbox may have ended since."""
    placement_id: PlacementId
    host_id: HostId
    state: State
    purpose: Purpose
    mode: SaveMode
    """What was asked for, and once it is ready, what is kept."""
    spec: Spec
    """Its sandbox's."""
    created_at: float
    name: str | None = None
    tag: str = DEFAULT_TAG
    version: int = 0
    """Of this name and tag, from 1; the newest is meant."""
    env: tuple[tuple[str, str], ...] = ()
    """Of its sandbox's template: what sandboxes that begin from it have below their own."""
    size_bytes: int = 0
    taken_at: float | None = None
    ended_at: float | None = None
    deadline_at: float | None = None
    """When its present state must have been left; of a fork that is ready: when nobody needs it any more."""
    code: str | None = None
    message: str | None = None
    moment: Moment | None = None
    """What is kept, once it is in the artifact store: then it outlives its host, and others begin from it as well."""
    copy: Copy = Copy.HERE

    @property
    def reference(self) -> str:
        """What names it for those who may use it."""
        return self.id if self.name is None else f"{self.name}:{self.tag}"


def step(state: State, event: Event) -> State:
    """The state after `event`. *Errors*: machine.IllegalMove."""
    return machine.step(MOVES, state, event)


def held_disk_mib(snapshot: Snapshot) -> int:
    """What it counts for of its host's disk. *Units*: MiB. Until its size is known, its sandbox's memory."""
    if snapshot.state in TERMINAL or snapshot.copy is Copy.NONE:
        return 0
    return -(-snapshot.size_bytes >> 20) if snapshot.size_bytes else snapshot.spec.memory_mib
