"""Copies: snapshots that hosts fetch from the artifact store, to begin guests from; each holds disk of its host until it is *seen* gone.

Theory of operation. A copy is on record from the commit that grants its host the first guest that begins from it: before anything is fetched, and
whether or not it ever is. It is wanted while something there has begun from it, and a head start for a while longer. Then it is `leaving`:
its host is told to drop it, and the record goes with the host's word that there is nothing. A grant meanwhile keeps it, and then that word, which is of
before, says nothing. What a snapshot's own host has of it is in the snapshot's row. Whoever changes a host's copies has the host's row locked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import sqlalchemy as sa

from atoll.domain.snapshot import TERMINAL, Copy, Purpose, Snapshot, State
from atoll.planning.relieving import LocalCopy
from atoll.store import hints, snapshots
from atoll.store.prepared import Prepared
from atoll.store.snapshots import Wanted
from atoll.store.tables import COPIES, HOLDS, PLACEMENTS, SNAPSHOTS

_ENDED: Final = [state.value for state in TERMINAL]
_ITS: Final = (COPIES.c.host_id == sa.bindparam("of_host"), COPIES.c.snapshot_id == sa.bindparam("of_snapshot"))
_FOUND: Final = Prepared(sa.select(COPIES.c.disk_mib).where(*_ITS))
_TAKEN: Final = Prepared(
    sa.text(
        "INSERT INTO copies (host_id, snapshot_id, disk_mib, used_at, leaving) VALUES (:host_id, :snapshot_id, :disk_mib, :used_at, false) "
        "ON CONFLICT (host_id, snapshot_id) DO UPDATE SET used_at = excluded.used_at, leaving = false"
    )
)
# Each poll runs it.
_LEAVING: Final = Prepared(
    sa.select(COPIES.c.snapshot_id, SNAPSHOTS.c.placement_id, SNAPSHOTS.c.mode)
    .join(SNAPSHOTS, SNAPSHOTS.c.id == COPIES.c.snapshot_id)
    .where(COPIES.c.host_id == sa.bindparam("host_id"), COPIES.c.leaving)
    .order_by(COPIES.c.snapshot_id)
)
_BEGUN: Final = (
    sa.select(PLACEMENTS.c.id)
    .where(PLACEMENTS.c.host_id == COPIES.c.host_id, PLACEMENTS.c.origin_moment == SNAPSHOTS.c.moment, HOLDS)
    .exists()
)
"""Whether something is there that has begun from it, or is about to."""


def size_mib(snapshot: Snapshot) -> int:
    """What a copy of it takes. *Units*: MiB."""
    return max(1, -(-snapshot.size_bytes >> 20))


def to_come(conn: sa.Connection, host_id: str, snapshot_id: str) -> Snapshot | None:
    """The snapshot, where a guest that begins from it makes this host fetch it; None: it is there, or counted there already, or gone."""
    if _FOUND.first(conn, {"of_host": host_id, "of_snapshot": snapshot_id}) is not None:
        return None
    snapshot = snapshots.get(conn, snapshot_id)
    return None if snapshot is None or _is_home(snapshot, host_id) else snapshot


def _is_home(snapshot: Snapshot, host_id: str) -> bool:
    return snapshot.host_id == host_id and snapshot.copy is Copy.HERE


def take(conn: sa.Connection, host_id: str, snapshot_id: str, *, disk_mib: int, now: float) -> None:
    """A guest that is granted this host begins from it. One that is on record keeps its size, and leaves no more."""
    _TAKEN.run(conn, {"host_id": host_id, "snapshot_id": snapshot_id, "disk_mib": disk_mib, "used_at": now})


def use(conn: sa.Connection, host_id: str, snapshot_id: str, *, now: float) -> None:
    """As `take`, of one that is on record; where it is not, its host has the snapshot itself."""
    if (row := _FOUND.first(conn, {"of_host": host_id, "of_snapshot": snapshot_id})) is not None:
        take(conn, host_id, snapshot_id, disk_mib=int(row["disk_mib"]), now=now)


def still_used(conn: sa.Connection, snapshot: Snapshot, *, now: float) -> None:
    """Its own host has given its copy up: what is about to begin from it there makes that host fetch it."""
    its = (PLACEMENTS.c.host_id == snapshot.host_id, PLACEMENTS.c.origin_moment == (snapshot.moment.digest if snapshot.moment else None))
    if conn.execute(sa.select(PLACEMENTS.c.id).where(*its, HOLDS).limit(1)).first() is not None:
        take(conn, snapshot.host_id, snapshot.id, disk_mib=size_mib(snapshot), now=now)


def unrecorded(conn: sa.Connection, host_id: str, has: Collection[str]) -> Sequence[Snapshot]:
    """Of what a host says that it has: what is nowhere counted for it, though its snapshot is known."""
    known = sa.select(COPIES.c.snapshot_id).where(COPIES.c.host_id == host_id)
    strange = sa.or_(SNAPSHOTS.c.host_id != host_id, SNAPSHOTS.c.copy == Copy.NONE.value)
    query = sa.select(SNAPSHOTS.c.id).where(SNAPSHOTS.c.id.in_(has), strange, SNAPSHOTS.c.id.not_in(known))
    found = (snapshots.get(conn, snapshot_id) for snapshot_id in conn.execute(query).scalars().all())
    return [one for one in found if one is not None]


def ordered_away(conn: sa.Connection, host_id: str) -> Sequence[Wanted]:
    """Those that a host is to drop."""
    rows = _LEAVING.all(conn, {"host_id": host_id})
    return [Wanted(row["snapshot_id"], State.DELETING.value, row["placement_id"], row["mode"]) for row in rows]


def unwanted(conn: sa.Connection, *, unused_since: float) -> Sequence[tuple[str, str]]:
    """(host, snapshot) of those that nothing needs any more. `unused_since`: from which head start nothing has begun since then goes as well."""
    lately = sa.and_(SNAPSHOTS.c.purpose == Purpose.TEMPLATE.value, SNAPSHOTS.c.state == State.READY.value, COPIES.c.used_at > unused_since)
    query = (
        sa.select(COPIES.c.host_id, COPIES.c.snapshot_id)
        .join(SNAPSHOTS, SNAPSHOTS.c.id == COPIES.c.snapshot_id)
        .where(~COPIES.c.leaving, sa.or_(SNAPSHOTS.c.state.in_(_ENDED), sa.and_(~_BEGUN, ~lately)))
        .order_by(COPIES.c.host_id, COPIES.c.snapshot_id)
    )
    return [(row.host_id, row.snapshot_id) for row in conn.execute(query)]


def idle(conn: sa.Connection, host_id: str) -> Sequence[LocalCopy]:
    """Those of a host from which nothing there has begun, the one first that has been unused for longest."""
    return idle_by_host(conn, host_id).get(host_id, [])


def idle_by_host(conn: sa.Connection, host_id: str | None = None) -> Mapping[str, Sequence[LocalCopy]]:
    """`idle` of every host that has any."""
    query = (
        sa.select(COPIES.c.host_id, COPIES.c.snapshot_id, COPIES.c.disk_mib, COPIES.c.used_at)
        .join(SNAPSHOTS, SNAPSHOTS.c.id == COPIES.c.snapshot_id)
        .where(~COPIES.c.leaving, ~_BEGUN)
        .order_by(COPIES.c.used_at, COPIES.c.snapshot_id)
    )
    found: dict[str, list[LocalCopy]] = {}
    for row in conn.execute(query if host_id is None else query.where(COPIES.c.host_id == host_id)):
        copy = LocalCopy(snapshot=True, id=row.snapshot_id, disk_mib=row.disk_mib, since=row.used_at, fetched=True)
        found.setdefault(row.host_id, []).append(copy)
    return found


def leave(conn: sa.Connection, host_id: str, snapshot_id: str) -> bool:
    """Have a host drop it; whether that is new. One from which something has begun meanwhile stays."""
    needed = (
        sa.select(PLACEMENTS.c.id)
        .join(SNAPSHOTS, SNAPSHOTS.c.moment == PLACEMENTS.c.origin_moment)
        .where(PLACEMENTS.c.host_id == host_id, SNAPSHOTS.c.id == snapshot_id, SNAPSHOTS.c.state.not_in(_ENDED), HOLDS)
    )
    if conn.execute(needed.limit(1)).first() is not None:
        return False
    its = (COPIES.c.host_id == host_id, COPIES.c.snapshot_id == snapshot_id, ~COPIES.c.leaving)
    if conn.execute(sa.update(COPIES).where(*its).values(leaving=True)).rowcount != 1:
        return False
    hints.host(conn, host_id)
    return True


def gone(conn: sa.Connection, host_id: str, snapshot_id: str) -> bool:
    """A host has looked, and has none; whether that gives room back. Of one that is wanted again it says nothing."""
    its = (COPIES.c.host_id == host_id, COPIES.c.snapshot_id == snapshot_id, COPIES.c.leaving)
    if conn.execute(sa.delete(COPIES).where(*its)).rowcount != 1:
        return False
    hints.host(conn, host_id)
    return True


def any_on(conn: sa.Connection, host_id: str) -> bool:
    """Whether a host holds any."""
    return conn.execute(sa.select(COPIES.c.snapshot_id).where(COPIES.c.host_id == host_id).limit(1)).first() is not None


def lost(conn: sa.Connection, host_id: str) -> None:
    """A host is fenced, and has none any more that counts."""
    if conn.execute(sa.delete(COPIES).where(COPIES.c.host_id == host_id)).rowcount:
        hints.host(conn, host_id)
