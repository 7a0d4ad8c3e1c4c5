"""Moments: which of those in the artifact store are still needed, and what is known of one.

What is not needed may be collected, once it is old enough that no host can still be sending what stands on it. It is needed by who rests there,
by a snapshot that is ready, and by a placement that may still have to fetch it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa

from atoll.domain.placement import Holding
from atoll.domain.sandbox import LIVING
from atoll.domain.snapshot import HELD, Copy, State
from atoll.planning.relieving import LocalCopy
from atoll.store.tables import HOLDS, PLACEMENTS, SANDBOXES, SNAPSHOTS

_LIVING: Final = [state.value for state in LIVING]
_HELD: Final = [state.value for state in HELD]


def needed(conn: sa.Connection) -> set[str]:
    """Digests of the manifests of all moments that somebody may have to go on from."""
    found: set[str] = set()
    for query in (
        sa.select(SANDBOXES.c.moment).where(SANDBOXES.c.moment.is_not(None), SANDBOXES.c.state.in_(_LIVING)),
        sa.select(SNAPSHOTS.c.moment).where(SNAPSHOTS.c.moment.is_not(None), SNAPSHOTS.c.state.in_(_HELD)),
        sa.select(PLACEMENTS.c.moment).where(PLACEMENTS.c.moment.is_not(None), HOLDS),
        sa.select(PLACEMENTS.c.origin_moment).where(PLACEMENTS.c.origin_moment.is_not(None), HOLDS),
    ):
        found.update(conn.execute(query).scalars())
    return found


def fetchable(conn: sa.Connection, host_id: str) -> set[str]:
    """Digests of the moments that this host was told to go on from."""
    mine = (PLACEMENTS.c.host_id == host_id, HOLDS)
    found = set(conn.execute(sa.select(PLACEMENTS.c.moment).where(PLACEMENTS.c.moment.is_not(None), *mine)).scalars())
    return found | set(conn.execute(sa.select(PLACEMENTS.c.origin_moment).where(PLACEMENTS.c.origin_moment.is_not(None), *mine)).scalars())


def kept_locally(conn: sa.Connection, host_id: str) -> Sequence[LocalCopy]:
    """What a host keeps a copy of that is in the store as well, the oldest first."""
    saved = (
        sa.select(SANDBOXES.c.id, PLACEMENTS.c.held_disk_mib, PLACEMENTS.c.created_at)
        .join(PLACEMENTS, PLACEMENTS.c.id == SANDBOXES.c.placement_id)
        .where(PLACEMENTS.c.host_id == host_id, PLACEMENTS.c.holding == Holding.SAVED.value, SANDBOXES.c.moment.is_not(None))
    )
    here = (SNAPSHOTS.c.host_id == host_id, SNAPSHOTS.c.state == State.READY.value, SNAPSHOTS.c.copy == Copy.HERE.value)
    kept = sa.select(SNAPSHOTS.c.id, SNAPSHOTS.c.held_disk_mib, SNAPSHOTS.c.created_at).where(*here, SNAPSHOTS.c.moment.is_not(None))
    found = [LocalCopy(is_kept, *row) for is_kept, query in ((False, saved), (True, kept)) for row in conn.execute(query)]
    return sorted(found, key=lambda one: (one.since, one.id))
