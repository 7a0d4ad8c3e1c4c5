"""Payloads: what a create brought for its guest, sealed, and to whom it was given.

Theory of operation. One row a sandbox, kept until that ends, since what is suspended needs it once more. What is in one may give its guest power outside, so it is
given once for each start (the id of a delivery is that of the start's command), and to one agent run: that is written down, with
`bootstrap_exposed`, before a byte leaves. The same run may ask again, since its answer may have been lost. Any other run is refused: what
became of the first delivery is not known to it, unless the guest is one that was made ahead, which is the only one that its placement ever
has, and says that it has not got it. A guest that has what it needs says so in its handshake and is given nothing. That it is ready is the
receipt; after it nobody gets that delivery. A payload that gives no power outside (`exposes` is false) may be given as often as
it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import Code, Refused
from atoll.domain.command import command_id
from atoll.domain.placement import Placement
from atoll.domain.sandbox import Sandbox
from atoll.store.prepared import Prepared
from atoll.store.tables import PAYLOADS

_SEALED: Final = Prepared(sa.select(PAYLOADS.c.sealed, PAYLOADS.c.exposes).where(PAYLOADS.c.sandbox_id == sa.bindparam("of_id")))
_LOCKED: Final = Prepared(sa.select(PAYLOADS).where(PAYLOADS.c.sandbox_id == sa.bindparam("of_id")).with_for_update())
_NEW: Final = Prepared(sa.insert(PAYLOADS))
_DELIVERED: Final = Prepared(sa.update(PAYLOADS).where(PAYLOADS.c.sandbox_id == sa.bindparam("of_id")))
_DROPPED: Final = Prepared(sa.delete(PAYLOADS).where(PAYLOADS.c.sandbox_id == sa.bindparam("of_id")))


@dataclass(frozen=True, slots=True)
class Sealed:
    """A payload as it is at rest. `exposes`: whoever has it may have power outside."""

    content: bytes
    exposes: bool = True


def add(conn: sa.Connection, sandbox_id: str, payload: Sealed) -> None:
    """A new sandbox's payload."""
    _NEW.run(conn, {"sandbox_id": sandbox_id, "sealed": payload.content, "exposes": payload.exposes})


def replace(conn: sa.Connection, sandbox_id: str, payload: Sealed) -> None:
    """Another payload in place of the one that there was: of a sandbox that is somebody else's now. Nobody has been given it."""
    drop(conn, sandbox_id)
    add(conn, sandbox_id, payload)


def get(conn: sa.Connection, sandbox_id: str) -> Sealed | None:
    """A sandbox's payload; None when nobody will need it any more."""
    row = _SEALED.first(conn, {"of_id": sandbox_id})
    return None if row is None else Sealed(row["sealed"], row["exposes"])


def delivery_of(placement: Placement) -> str:
    """The id of the delivery to the placement's present start."""
    return command_id(placement.id, placement.generation, placement.desired_revision)


def deliver(conn: sa.Connection, placement: Placement, *, epoch: str, lacks: bool = False) -> Sealed:
    """Write down that this run of the host's agent gets the payload for this start. `lacks`: its one guest has said that it has not got it.

    *Errors*: Refused BOOTSTRAP_DELIVERED when another run has got it, or its guest has. *Idempotency*: the same run may ask again.
    """
    row = _LOCKED.first(conn, {"of_id": placement.sandbox_id})
    delivery = delivery_of(placement)
    if row is None or row["receipt"] == delivery:
        raise Refused(Code.BOOTSTRAP_DELIVERED, f"the guest of {delivery} has said that it has its payload")
    if row["delivery"] == delivery and row["delivered_to"] != epoch and not lacks:
        raise Refused(Code.BOOTSTRAP_DELIVERED, f"the payload of {delivery} was given to another run of the agent")
    if (row["delivery"], row["delivered_to"]) != (delivery, epoch):
        _DELIVERED.run(conn, {"of_id": placement.sandbox_id, "delivery": delivery, "delivered_to": epoch})
    return Sealed(row["sealed"], row["exposes"])


def received(conn: sa.Connection, sandbox: Sandbox, placement: Placement) -> None:
    """The guest of this placement has its payload. It is kept, sealed, for the sandbox's next start: a restart, or back from a suspend."""
    _DELIVERED.run(conn, {"of_id": sandbox.id, "receipt": delivery_of(placement)})


def drop(conn: sa.Connection, sandbox_id: str) -> None:
    """Nobody will need it any more. *Idempotency*: as for one that is gone."""
    _DROPPED.run(conn, {"of_id": sandbox_id})
