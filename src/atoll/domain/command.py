"""Command: what control asks of an agent about one placement.

Theory of operation. A placement has one current command: the state that it should be in, with a revision that each new wish raises. A wish
moves the desired state by the table below; what is ordered away stays so. The agent carries out the newest that it has accepted and says
how far it got (`applied_revision`). What is not in this table: whether it was carried out, which is the agent's word, and the capacity that
is held meanwhile (placement.py).

The id is `{placement}:{generation}:{desired_revision}`, so that the same intent has the same id wherever it is computed; the digest
covers everything but epoch and lease. An agent that gets one id with two digests refuses (`COMMAND_CONFLICT`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from atoll.domain import machine


class Kind(StrEnum):
    """The state that a placement should be in. `ENSURE_RUNNING` implies present."""

    ENSURE_PRESENT = "ensure_present"
    ENSURE_RUNNING = "ensure_running"
    ENSURE_PAUSED = "ensure_paused"
    ENSURE_SUSPENDED = "ensure_suspended"
    ENSURE_STOPPED = "ensure_stopped"
    ENSURE_ABSENT = "ensure_absent"


class Wish(StrEnum):
    """What control can want next."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    SUSPEND = "suspend"
    STOP = "stop"
    RESTART = "restart"
    """What has stopped begins again, with the disk that it had."""
    CLAIM = "claim"
    """What runs for nobody gets what a create has brought, and goes on as that create's."""
    REMOVE = "remove"
    """From every state, and for good."""


MOVES: Final[Mapping[tuple[Kind, Wish], Kind]] = {
    (Kind.ENSURE_PRESENT, Wish.START): Kind.ENSURE_RUNNING,
    (Kind.ENSURE_RUNNING, Wish.PAUSE): Kind.ENSURE_PAUSED,
    (Kind.ENSURE_PAUSED, Wish.RESUME): Kind.ENSURE_RUNNING,
    (Kind.ENSURE_RUNNING, Wish.SUSPEND): Kind.ENSURE_SUSPENDED,
    (Kind.ENSURE_PAUSED, Wish.SUSPEND): Kind.ENSURE_SUSPENDED,
    (Kind.ENSURE_SUSPENDED, Wish.RESUME): Kind.ENSURE_RUNNING,
    (Kind.ENSURE_RUNNING, Wish.STOP): Kind.ENSURE_STOPPED,
    (Kind.ENSURE_PAUSED, Wish.STOP): Kind.ENSURE_STOPPED,
    (Kind.ENSURE_STOPPED, Wish.RESTART): Kind.ENSURE_RUNNING,
    (Kind.ENSURE_RUNNING, Wish.RESTART): Kind.ENSURE_RUNNING,
    (Kind.ENSURE_RUNNING, Wish.CLAIM): Kind.ENSURE_RUNNING,
    **{(kind, Wish.REMOVE): Kind.ENSURE_ABSENT for kind in Kind},
}


def step(kind: Kind, wish: Wish) -> Kind:
    """The desired state after a wish. *Errors*: machine.IllegalMove; nothing is wanted of what is ordered away but that it goes."""
    return machine.step(MOVES, kind, wish)


def command_id(placement_id: str, generation: int, desired_revision: int) -> str:
    """The deterministic id of one desired state of one placement."""
    return f"{placement_id}:{generation}:{desired_revision}"


_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the canonical JSON of what the command says."""
    return hashlib.sha256(_CANONICAL.encode(content).encode()).hexdigest()
