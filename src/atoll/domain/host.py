"""Host: everything that can hold a sandbox; its record alone grants its capacity.

Theory of operation. Operators write `admin`; the agent's polls write the session fields; health is derived from the age of the last
poll and never stored. `disabled` is a fence: the credential is cleared, its version raised, and everything on the host counts as
gone once the last lease has run out. Nobody enrols such a host again before an operator has reset its identity, which is refused while
anything still counts as being there. The credential itself is never stored, only its digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from atoll.base.ids import EpochId, HostId
from atoll.base.units import Vector
from atoll.domain import machine
from atoll.domain.inventory import Inventory, Registered, inventory_of


class Admin(StrEnum):
    """What the operator wants of the host."""

    ACTIVE = "active"
    DRAINING = "draining"
    DISABLED = "disabled"


class AdminEvent(StrEnum):
    """What an operator can say."""

    ACTIVATE = "activate"
    DRAIN = "drain"
    DISABLE = "disable"
    RESET = "reset"
    """A disabled machine may come back: it drains, without a credential, until it has enrolled anew."""


MOVES: Final[Mapping[tuple[Admin, AdminEvent], Admin]] = {
    (Admin.ACTIVE, AdminEvent.ACTIVATE): Admin.ACTIVE,
    (Admin.DRAINING, AdminEvent.ACTIVATE): Admin.ACTIVE,
    (Admin.ACTIVE, AdminEvent.DRAIN): Admin.DRAINING,
    (Admin.DRAINING, AdminEvent.DRAIN): Admin.DRAINING,
    (Admin.ACTIVE, AdminEvent.DISABLE): Admin.DISABLED,
    (Admin.DRAINING, AdminEvent.DISABLE): Admin.DISABLED,
    (Admin.DISABLED, AdminEvent.DISABLE): Admin.DISABLED,
    (Admin.DISABLED, AdminEvent.RESET): Admin.DRAINING,
}


class Health(StrEnum):
    """How fresh the host's word is."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    LOST = "lost"


UNSETTLED: Final = "store.restored"
"""The problem of a host that has not yet said what it has since the store was taken back to a backup."""
SUSPECT_AFTER_S: Final = 30.0
LOST_AFTER_S: Final = 90.0
LEASE_S: Final = 300.0
"""How long a host may act unheard: one lease for all that it holds, renewed by each poll."""


DRIVER_FACT: Final = "driver"
"""`driver.ISOLATION` of a host's facts: what gives it this isolation, and what a suspend keeps (`full`, `filesystem`)."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host's row. `capacity` is what it registered, overcommit already applied."""

    id: HostId
    revision: int
    name: str
    admin: Admin
    capacity: Vector
    arch: str
    region: str
    labels: Mapping[str, str] = field(default_factory=dict)
    credential_digest: str | None = None
    credential_version: int = 1
    epoch: EpochId | None = None
    poll_seq: int = 0
    seen_at: float | None = None
    lease_until: float | None = None
    agent_version: str | None = None
    protocol_min: int = 1
    protocol_max: int = 1
    isolations: frozenset[str] = frozenset()
    """The isolations whose self-test passed on this host."""
    moments: frozenset[str] = frozenset()
    """Kinds of moments (`domain.moment.kind`) that it can go on from when they are fetched from the artifact store."""
    images: frozenset[str] = frozenset()
    """Digests that it holds ready."""
    problems: tuple[str, ...] = ()
    """Ids of failed checks; any makes the host unschedulable."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What the agent last said of the machine."""
    registered: Registered | None = None
    """What the capacity was reckoned from."""

    @property
    def reported(self) -> Inventory | None:
        """What the machine has now, by its agent's word; None before the first."""
        return inventory_of(self.facts)


def step(state: Admin, event: AdminEvent) -> Admin:
    """The admin state after an operator's word. *Errors*: machine.IllegalMove (a disabled host is reset, then enrolled again)."""
    return machine.step(MOVES, state, event)


def health(host: Host, *, now: float) -> Health:
    """Health from the age of the last poll. *Units*: wall seconds."""
    if host.seen_at is None:
        return Health.UNKNOWN
    age_s = now - host.seen_at
    if age_s < SUSPECT_AFTER_S:
        return Health.HEALTHY
    return Health.SUSPECT if age_s < LOST_AFTER_S else Health.LOST
