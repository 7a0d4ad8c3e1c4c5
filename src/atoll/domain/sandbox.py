"""Sandbox: what a client asks for and keeps by id, over all its generations.

Theory of operation. Only `control`'s reconcile function moves `state`, one event at a time, each move committed with its event
record `WHERE revision = read`. `releasing` can be entered from every living state, and wins; it ends only in `released` or `failed`,
and only when its placement is *observed* absent or fenced. Conditions are apart from the state: they say what is wrong while it
stays. What is not in this table: capacity (placement.py), leases (host.py), the reason of an end, which is data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from atoll.base.ids import ClientId, HostId, PlacementId, SandboxId, TeamId
from atoll.domain import machine
from atoll.domain.moment import Moment
from atoll.domain.spec import SaveMode, Spec


class State(StrEnum):
    """Where a sandbox is. The words of other systems are mapped at the edge that speaks them."""

    PENDING = "pending"
    RESERVING = "reserving"
    PROVISIONING = "provisioning"
    READY = "ready"
    PAUSING = "pausing"
    PAUSED = "paused"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    STOPPING = "stopping"
    STOPPED = "stopped"
    RESUMING = "resuming"
    RELEASING = "releasing"
    RELEASED = "released"
    FAILED = "failed"


class Event(StrEnum):
    """What can happen to a sandbox."""

    HOST_REFUSED = "host_refused"
    NO_ROOM = "no_room"
    PLACED = "placed"
    GUEST_READY = "guest_ready"
    GUEST_STOPPED = "guest_stopped"
    """It has ended by itself and is kept: begun again where it is, or stopped, where it was at rest."""
    REPLACED = "replaced"
    CLAIMED = "claimed"
    """A create has taken it over, ready as it was made ahead: it is that create's from here on."""
    PAUSE = "pause"
    PAUSE_SEEN = "pause_seen"
    SUSPEND = "suspend"
    SUSPEND_SEEN = "suspend_seen"
    SAVE_FAILED = "save_failed"
    PAUSE_FAILED = "pause_failed"
    STOP_FAILED = "stop_failed"
    STOP = "stop"
    STOP_SEEN = "stop_seen"
    RESUME = "resume"
    FROZEN_STILL = "frozen_still"
    """A resume was refused: it stays as it was."""
    SAVED_STILL = "saved_still"
    STOPPED_STILL = "stopped_still"
    FOUND = "found"
    """After a restore from a backup: no host has it, and the artifact store does, from since then."""
    RELEASE = "release"
    ABSENCE_CONFIRMED = "absence_confirmed"
    FAILURE_CONFIRMED = "failure_confirmed"


class Condition(StrEnum):
    """What is wrong while the state stays as it is."""

    CLEANUP_PENDING = "CLEANUP_PENDING"
    UNREACHABLE = "UNREACHABLE"
    REPLACEMENT_BLOCKED = "REPLACEMENT_BLOCKED"
    NO_ELIGIBLE_HOST = "NO_ELIGIBLE_HOST"
    DEADLINE_MISSED = "DEADLINE_MISSED"
    HOSTS_UNSETTLED = "HOSTS_UNSETTLED"
    """It rests in the artifact store, as a backup knows it, and a host that has not said what it has may have it: it cannot be resumed yet."""


TERMINAL: Final = frozenset({State.RELEASED, State.FAILED})
LIVING: Final = frozenset(State) - TERMINAL
STARTING: Final = frozenset({State.PENDING, State.RESERVING, State.PROVISIONING})
"""Not shown to E2B clients: 404 and not listed."""

_PLACED: Final = (
    State.PROVISIONING,
    State.READY,
    State.PAUSING,
    State.PAUSED,
    State.SUSPENDING,
    State.STOPPING,
    State.STOPPED,
    State.RESUMING,
)
"""A placement holds something; it may be lost."""

_BASE: Final[Mapping[tuple[State, Event], State]] = {
    (State.PENDING, Event.HOST_REFUSED): State.RESERVING,
    (State.RESERVING, Event.HOST_REFUSED): State.RESERVING,
    (State.RESERVING, Event.NO_ROOM): State.PENDING,
    (State.PENDING, Event.NO_ROOM): State.PENDING,
    (State.PENDING, Event.PLACED): State.PROVISIONING,
    (State.RESERVING, Event.PLACED): State.PROVISIONING,
    (State.PROVISIONING, Event.GUEST_READY): State.READY,
    (State.READY, Event.CLAIMED): State.PROVISIONING,
    **{(state, Event.REPLACED): State.PENDING for state in _PLACED},
    (State.READY, Event.PAUSE): State.PAUSING,
    (State.PAUSING, Event.PAUSE_SEEN): State.PAUSED,
    (State.PAUSING, Event.PAUSE_FAILED): State.READY,
    (State.PAUSING, Event.GUEST_STOPPED): State.STOPPED,
    (State.PAUSED, Event.GUEST_STOPPED): State.STOPPED,
    (State.READY, Event.SUSPEND): State.SUSPENDING,
    (State.PAUSED, Event.SUSPEND): State.SUSPENDING,
    (State.SUSPENDING, Event.SUSPEND_SEEN): State.SUSPENDED,
    (State.READY, Event.SUSPEND_SEEN): State.SUSPENDED,
    (State.READY, Event.PAUSE_SEEN): State.PAUSED,
    (State.SUSPENDING, Event.SAVE_FAILED): State.READY,
    (State.READY, Event.STOP): State.STOPPING,
    (State.STOPPING, Event.STOP_SEEN): State.STOPPED,
    (State.STOPPING, Event.STOP_FAILED): State.READY,
    (State.PAUSED, Event.RESUME): State.RESUMING,
    (State.SUSPENDED, Event.RESUME): State.RESUMING,
    (State.STOPPED, Event.RESUME): State.RESUMING,
    (State.READY, Event.GUEST_STOPPED): State.RESUMING,
    (State.RESUMING, Event.GUEST_STOPPED): State.RESUMING,
    (State.RESUMING, Event.GUEST_READY): State.READY,
    (State.RESUMING, Event.FROZEN_STILL): State.PAUSED,
    (State.RESUMING, Event.SAVED_STILL): State.SUSPENDED,
    (State.RESUMING, Event.STOPPED_STILL): State.STOPPED,
    **{(state, Event.FOUND): State.SUSPENDED for state in (*_PLACED, State.SUSPENDED)},
    (State.RELEASING, Event.ABSENCE_CONFIRMED): State.RELEASED,
    (State.RELEASING, Event.FAILURE_CONFIRMED): State.FAILED,
}

MOVES: Final[Mapping[tuple[State, Event], State]] = {
    **_BASE,
    **{(state, Event.RELEASE): State.RELEASING for state in LIVING},
}


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long a state may last, for people: what is enforced is in `planning.reconcile`."""

    state: State
    during: str
    timeouts: tuple[str, ...]
    """Of the deployment document's `timeouts`; several are added. `start` counts where there is a start command."""
    at_zero: str


TIMEOUTS: Final[Mapping[str, str]] = {
    "reserve": "reserve_s",
    "image": "image_s",
    "guest_ready": "guest_ready_s",
    "start": "start_s",
    "bootstrap": "bootstrap_s",
    "release": "release_s",
    "no_capacity": "no_capacity_s",
    "patience": "create_patience_s",
    "pause": "pause_s",
    "resume": "resume_s",
    "save": "save_s",
    "local": "local_s",
}
"""Names of the document's timeouts, and of the fields of a spec that they become."""
DEADLINES: Final = (
    Deadline(State.PENDING, "no host has room, since it was made or replaced", ("no_capacity",), "fails with `NO_CAPACITY`"),
    Deadline(State.RESERVING, "the last host that was asked has refused", ("reserve",), "the next host is asked"),
    Deadline(
        State.PROVISIONING,
        "its guest was not seen coming",
        ("image", "guest_ready", "start", "bootstrap"),
        "`START_TIMEOUT` or `IMAGE_TIMEOUT`: it is removed, and placed again",
    ),
    Deadline(
        State.PROVISIONING,
        "its guest was seen coming",
        ("guest_ready", "start", "bootstrap"),
        "`GUEST_BOOT_TIMEOUT`: it is removed, and placed again; `START_COMMAND_FAILED`, where that is what it waits for: it ends",
    ),
    Deadline(
        State.PROVISIONING,
        "its guest was made ahead, and has not taken what the create brings",
        ("reserve",),
        "`GUEST_BOOT_TIMEOUT`: it is removed, and placed again",
    ),
    Deadline(State.PAUSING, "it was not seen frozen", ("pause",), "`PAUSE_TIMEOUT`: it goes on"),
    Deadline(State.SUSPENDING, "it was not seen saved", ("save",), "`SAVE_TIMEOUT`: it goes on"),
    Deadline(
        State.SUSPENDED, "what is saved is in the artifact store", ("local",), "its host gives its copy up; it rests in the store alone"
    ),
    Deadline(State.STOPPING, "it was not seen stopped", ("pause",), "`PAUSE_TIMEOUT`: it goes on"),
    Deadline(
        State.RESUMING,
        "its guest has not answered, where it was paused, suspended or stopped",
        ("resume",),
        "`RESUME_TIMEOUT`: it stays as it was",
    ),
    Deadline(State.RELEASING, "something of it may be left", ("release",), "`CLEANUP_PENDING`, and another look"),
    Deadline(
        State.PENDING,
        "somebody waits for a create's answer, until it is ready",
        ("patience",),
        "released; the answer says what was missing",
    ),
)


def step(state: State, event: Event) -> State:
    """The state after `event`. *Errors*: machine.IllegalMove; terminal states take no event."""
    return machine.step(MOVES, state, event)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox's row. Times are wall seconds (records and answers only: what is enforced is counted by the agent)."""

    id: SandboxId
    revision: int
    """Raised by each commit; the fencing token of every change."""
    team_id: TeamId
    client_id: ClientId
    state: State
    spec: Spec
    generation: int
    created_at: float
    end_at: float | None
    """When it ends by itself; None for boxes."""
    end_revision: int
    request_id: str | None = None
    request_digest: str | None = None
    alias: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    payload_digest: str | None = None
    started_at: float | None = None
    """First ready; what E2B calls startedAt."""
    released_at: float | None = None
    host_id: HostId | None = None
    placement_id: PlacementId | None = None
    reason: str | None = None
    """Why it ends or ended: a Code."""
    detail: str | None = None
    release_requested_at: float | None = None
    failing: bool = False
    """The end that is under way counts as a failure."""
    conditions: frozenset[Condition] = frozenset()
    deadline_at: float | None = None
    """When the present state must have been left, or looked at again."""
    tried_hosts: tuple[str, ...] = ()
    attempts: int = 0
    bootstrap_exposed: bool = False
    secured: bool = True
    """The guest demands the sandbox's access token."""
    waiting_since: float | None = None
    """Since when it waits for a host: its creation, or its last replacement."""
    rested: State | None = None
    """What it was before the resume that is under way, or that was the last one: where it stays when that fails. None: it was none of them."""
    life_s: float | None = None
    """How long it lives from when a resume has made it ready; None: as its spec says."""
    save_mode: SaveMode | None = None
    """What of it is saved, or was asked to be, last."""
    unresponsive: bool = False
    """Its guest did not answer when it was saved."""
    moment: Moment | None = None
    """What is saved of it, once it is in the artifact store: the newest save, never an earlier one. The past as soon as it is ready again."""
    saved_on: HostId | None = None
    """Of one that rests in the store alone: where it was saved, and is preferably resumed."""
    claimable: str | None = None
    """Made ahead, and for which creates: the pool that it is of (`planning/claiming.py`). None: somebody's, or it was never for anybody to take."""
    unseen: int = 0
    """Earlier placements that were neither seen gone nor fenced yet, and hold what they held."""

    @property
    def rests_in_store(self) -> bool:
        """Whether no host has it, and any that fits can go on from what is saved."""
        return self.state is State.SUSPENDED and self.placement_id is None and self.moment is not None

    @property
    def since(self) -> float:
        """Since when it waits, where it does. *Units*: wall seconds."""
        return self.created_at if self.waiting_since is None else self.waiting_since
