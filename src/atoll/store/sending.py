"""Sending: whose moments a host may send to the artifact store."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from atoll.domain.snapshot import HELD
from atoll.store.tables import HOLDS, PLACEMENTS, SNAPSHOTS

_PART: int = 500
"""Names in one question: both databases have a limit."""


def held(conn: sa.Connection, names: Collection[str], *, host_id: str | None = None) -> set[str]:
    """Of these placements and snapshots, by id: those that a host still holds, or this one does."""
    found: set[str] = set()
    ordered = sorted(names)
    for first in range(0, len(ordered), _PART):
        some = ordered[first : first + _PART]
        for table, is_held in (
            (PLACEMENTS, HOLDS),
            (SNAPSHOTS, SNAPSHOTS.c.state.in_([state.value for state in HELD])),
        ):
            query = sa.select(table.c.id).where(table.c.id.in_(some), is_held)
            if host_id is not None:
                query = query.where(table.c.host_id == host_id)
            found.update(conn.execute(query).scalars())
    return found
