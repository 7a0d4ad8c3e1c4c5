"""Resting: what of the notes that lie beside moments in the artifact store is still true."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from atoll.domain.sandbox import TERMINAL, State
from atoll.planning.restoring import Left
from atoll.store.tables import PLACEMENTS, SANDBOXES

_GOES_ON: Final = frozenset(
    {State.READY.value, State.PAUSED.value, State.STOPPED.value, State.RELEASING.value, *(state.value for state in TERMINAL)}
)
"""What a sandbox is whose memory on record is not what was saved of it any more."""


def whose(conn: sa.Connection, placement_id: str) -> tuple[str, int] | None:
    """Sandbox and generation of a placement."""
    row = conn.execute(sa.select(PLACEMENTS.c.sandbox_id, PLACEMENTS.c.generation).where(PLACEMENTS.c.id == placement_id)).first()
    return None if row is None else (row.sandbox_id, row.generation)


def is_past(conn: sa.Connection, left: Left) -> bool:
    """Whether its sandbox is no more, or has gone on from there, or from somewhere else."""
    columns = (SANDBOXES.c.state, SANDBOXES.c.generation)
    row = conn.execute(sa.select(*columns).where(SANDBOXES.c.id == left.sandbox_id)).first()
    return row is None or row.state in _GOES_ON or row.generation > left.generation
