"""What every state machine shares: a table, one way to step, an error that changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from atoll.base.errors import Bug, Code

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class IllegalMove(Bug):
    """An event met a state that has no row for it; nothing changed."""


def step(moves: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after `event`.

    *Errors*: IllegalMove (INTERNAL) when the table has no such row.
    """
    try:
        return moves[state, event]
    except KeyError:
        raise IllegalMove(Code.INTERNAL, f"no move from {state} on {event}") from None
