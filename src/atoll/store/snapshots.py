"""Snapshots: each commit `WHERE revision = read`, and told to whoever waits for its sandbox or has its host's poll."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from atoll.base.ids import ClientId, HostId, PlacementId, SandboxId, TeamId
from atoll.base.records import replace
from atoll.domain.sandbox import STARTING
from atoll.domain.snapshot import HELD, TERMINAL, Copy, Purpose, Snapshot, State, held_disk_mib
from atoll.domain.spec import SaveMode
from atoll.store import hints, rows
from atoll.store.engine import Stale
from atoll.store.prepared import Prepared
from atoll.store.sandboxes import VISIBLE
from atoll.store.tables import COPIES, SANDBOXES, SNAPSHOTS

_USING: Final = (*VISIBLE, *(state.value for state in STARTING))
"""Not those that are being released: nobody has them any more."""
_STARTING: Final = tuple(state.value for state in STARTING)
_ENDED: Final = tuple(state.value for state in TERMINAL)
_HELD: Final = tuple(state.value for state in HELD)
_SHOWN: Final = (SNAPSHOTS.c.state == State.READY.value, SNAPSHOTS.c.purpose == Purpose.KEPT.value)
# Each poll runs it.
_ORDERS: Final = Prepared(
    sa.select(SNAPSHOTS.c.id, SNAPSHOTS.c.state, SNAPSHOTS.c.placement_id, SNAPSHOTS.c.mode)
    .where(
        SNAPSHOTS.c.host_id == sa.bindparam("host_id"),
        sa.or_(
            SNAPSHOTS.c.state == State.TAKING.value,
            SNAPSHOTS.c.state == State.DELETING.value,
            sa.and_(SNAPSHOTS.c.state == State.READY.value, SNAPSHOTS.c.copy == Copy.LEAVING.value),
        ),
    )
    .order_by(SNAPSHOTS.c.created_at)
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What control wants of one snapshot of a host, narrow enough to read at each poll."""

    id: str
    state: str
    placement_id: str
    mode: str


def add(conn: sa.Connection, snapshot: Snapshot) -> None:
    """A new snapshot."""
    spec = rows.spec_values(snapshot.spec)
    conn.execute(sa.insert(SNAPSHOTS), {"id": snapshot.id, "revision": snapshot.revision, "spec": spec, **_values(snapshot)})
    _hint(conn, snapshot)


def commit(conn: sa.Connection, snapshot: Snapshot) -> Snapshot:
    """Record it as it is now. *Errors*: Stale when its row has moved on since it was read."""
    done = conn.execute(
        sa.update(SNAPSHOTS)
        .where(SNAPSHOTS.c.id == snapshot.id, SNAPSHOTS.c.revision == snapshot.revision)
        .values(revision=snapshot.revision + 1, **_values(snapshot))
    )
    if done.rowcount != 1:
        raise Stale(f"snapshot {snapshot.id}")
    _hint(conn, snapshot)
    return replace(snapshot, revision=snapshot.revision + 1)


def get(conn: sa.Connection, snapshot_id: str, *, lock: bool = False) -> Snapshot | None:
    """One snapshot, whoever's; with `lock` nobody else changes it until the transaction's end."""
    query = sa.select(SNAPSHOTS).where(SNAPSHOTS.c.id == snapshot_id)
    row = conn.execute(query.with_for_update() if lock else query).mappings().first()
    return _snapshot(row) if row else None


def newest(conn: sa.Connection, team_id: str, name: str, tag: str) -> Snapshot | None:
    """The newest of a team's ready snapshots of this name and tag."""
    query = sa.select(SNAPSHOTS).where(SNAPSHOTS.c.team_id == team_id, SNAPSHOTS.c.name == name, SNAPSHOTS.c.tag == tag, *_SHOWN)
    row = conn.execute(query.order_by(SNAPSHOTS.c.version.desc()).limit(1)).mappings().first()
    return _snapshot(row) if row else None


def next_version(conn: sa.Connection, team_id: str, name: str, tag: str) -> int:
    """What the next snapshot of this name and tag is numbered."""
    its = (SNAPSHOTS.c.team_id == team_id, SNAPSHOTS.c.name == name, SNAPSHOTS.c.tag == tag)
    last = conn.execute(sa.select(sa.func.max(SNAPSHOTS.c.version)).where(*its)).scalar_one()
    return int(last or 0) + 1


def find(
    conn: sa.Connection, team_id: str, *, sandbox_id: str | None, name: str | None, limit: int, after: tuple[float, str] | None
) -> Sequence[Snapshot]:
    """A team's ready snapshots, newest first, one more than `limit` where there are more. `after`: creation and id of the last one seen."""
    query = sa.select(SNAPSHOTS).where(SNAPSHOTS.c.team_id == team_id, *_SHOWN)
    if sandbox_id is not None:
        query = query.where(SNAPSHOTS.c.sandbox_id == sandbox_id)
    if name is not None:
        query = query.where(SNAPSHOTS.c.name == name)
    if after is not None:
        at, last = after
        query = query.where(sa.or_(SNAPSHOTS.c.created_at < at, sa.and_(SNAPSHOTS.c.created_at == at, SNAPSHOTS.c.id > last)))
    found = conn.execute(query.order_by(SNAPSHOTS.c.created_at.desc(), SNAPSHOTS.c.id).limit(limit + 1))
    return [_snapshot(row) for row in found.mappings()]


def count_held(conn: sa.Connection, team_id: str) -> int:
    """How many of a team's snapshots have not ended."""
    its = (SNAPSHOTS.c.team_id == team_id, SNAPSHOTS.c.state.in_(_HELD))
    return int(conn.execute(sa.select(sa.func.count()).select_from(SNAPSHOTS).where(*its)).scalar_one())


def wanted(conn: sa.Connection, host_id: str, *, has: Sequence[str] = ()) -> Sequence[Wanted]:
    """What is to be kept, or to go, on the host that it is of. `has`: what that says that it has; what of it has ended is to go as well: it was given up
    while its host was away.
    """
    ordered = [Wanted(*row.values()) for row in _ORDERS.all(conn, {"host_id": host_id})]
    if not has:
        return ordered
    columns = (SNAPSHOTS.c.id, SNAPSHOTS.c.placement_id, SNAPSHOTS.c.mode)
    ended = conn.execute(sa.select(*columns).where(SNAPSHOTS.c.id.in_(has), SNAPSHOTS.c.state.in_(_ENDED)))
    return [*ordered, *(Wanted(row.id, State.DELETING.value, row.placement_id, row.mode) for row in ended)]


def held_on(conn: sa.Connection, host_id: str) -> Sequence[Snapshot]:
    """Every snapshot of a host that has not ended."""
    query = sa.select(SNAPSHOTS).where(SNAPSHOTS.c.host_id == host_id, SNAPSHOTS.c.state.in_(_HELD))
    return [_snapshot(row) for row in conn.execute(query).mappings()]


def due(conn: sa.Connection, *, now: float, limit: int = 100) -> Sequence[str]:
    """Snapshots whose deadline has come."""
    query = sa.select(SNAPSHOTS.c.id).where(SNAPSHOTS.c.deadline_at <= now).order_by(SNAPSHOTS.c.deadline_at).limit(limit)
    return list(conn.execute(query).scalars())


def next_deadline(conn: sa.Connection) -> float | None:
    """When the next deadline comes; None when there is none."""
    first: float | None = conn.execute(sa.select(sa.func.min(SNAPSHOTS.c.deadline_at))).scalar_one()
    return first


def users(conn: sa.Connection, snapshot: Snapshot) -> int:
    """How many sandboxes need it: of one that is kept those that began from it and live, of others those that have not begun yet."""
    states = _USING if snapshot.purpose is Purpose.KEPT else _STARTING
    query = sa.select(sa.func.count()).where(
        SANDBOXES.c.spec["origin"]["snapshot_id"].as_string() == snapshot.id, SANDBOXES.c.state.in_(states)
    )
    return int(conn.execute(query).scalar_one())


def head_start(conn: sa.Connection, team_id: str, client_id: str) -> Snapshot | None:
    """The newest ready one of a build, which is known by its client."""
    its = (SNAPSHOTS.c.team_id == team_id, SNAPSHOTS.c.state == State.READY.value, SNAPSHOTS.c.client_id == client_id)
    query = sa.select(SNAPSHOTS).where(*its, SNAPSHOTS.c.purpose == Purpose.TEMPLATE.value).order_by(SNAPSHOTS.c.created_at.desc())
    row = conn.execute(query.limit(1)).mappings().first()
    return _snapshot(row) if row else None


def head_starts(conn: sa.Connection) -> Sequence[tuple[str, str]]:
    """(snapshot id, client id) of every build's that is kept or being taken, newest first."""
    living = (SNAPSHOTS.c.state.in_((State.TAKING.value, State.READY.value)), SNAPSHOTS.c.purpose == Purpose.TEMPLATE.value)
    query = sa.select(SNAPSHOTS.c.id, SNAPSHOTS.c.client_id).where(*living).order_by(SNAPSHOTS.c.created_at.desc(), SNAPSHOTS.c.id)
    return [(row.id, row.client_id) for row in conn.execute(query)]


def images_wanted(conn: sa.Connection) -> set[str]:
    """Digests of the images that snapshots stand on."""
    return set(conn.execute(sa.select(SNAPSHOTS.c.spec["image"].as_string()).where(SNAPSHOTS.c.state.in_(_HELD))).scalars())


def oldest_ended(conn: sa.Connection) -> float | None:
    """When the one ended that ended first; None when none has."""
    first: float | None = conn.execute(sa.select(sa.func.min(SNAPSHOTS.c.ended_at))).scalar_one()
    return first


def prune(conn: sa.Connection, *, ended_before: float, limit: int = 500) -> int:
    """Forget some of those that ended before a moment; how many. One of which a host still has a copy is needed to order that away."""
    old = (
        sa.select(SNAPSHOTS.c.id)
        .where(SNAPSHOTS.c.ended_at < ended_before, SNAPSHOTS.c.id.not_in(sa.select(COPIES.c.snapshot_id)))
        .limit(limit)
    )
    return conn.execute(sa.delete(SNAPSHOTS).where(SNAPSHOTS.c.id.in_(old))).rowcount


def _hint(conn: sa.Connection, snapshot: Snapshot) -> None:
    hints.sandbox(conn, snapshot.sandbox_id)
    hints.host(conn, snapshot.host_id)


def _values(one: Snapshot) -> rows.Values:
    return {
        "team_id": one.team_id,
        "client_id": one.client_id,
        "sandbox_id": one.sandbox_id,
        "placement_id": one.placement_id,
        "host_id": one.host_id,
        "state": one.state.value,
        "purpose": one.purpose.value,
        "mode": one.mode.value,
        "name": one.name,
        "tag": one.tag,
        "version": one.version,
        "env": dict(one.env),
        "size_bytes": one.size_bytes,
        "held_disk_mib": held_disk_mib(one),
        "created_at": one.created_at,
        "taken_at": one.taken_at,
        "ended_at": one.ended_at,
        "deadline_at": one.deadline_at,
        "code": one.code,
        "message": one.message,
        **rows.moment_values(one.moment),
        "copy": one.copy.value,
    }


def _snapshot(row: sa.RowMapping) -> Snapshot:
    return Snapshot(
        id=row["id"],
        revision=row["revision"],
        team_id=TeamId(row["team_id"]),
        client_id=ClientId(row["client_id"]),
        sandbox_id=SandboxId(row["sandbox_id"]),
        placement_id=PlacementId(row["placement_id"]),
        host_id=HostId(row["host_id"]),
        state=State(row["state"]),
        purpose=Purpose(row["purpose"]),
        mode=SaveMode(row["mode"]),
        spec=rows.spec(row["spec"]),
        created_at=row["created_at"],
        name=row["name"],
        tag=row["tag"],
        version=row["version"],
        env=tuple(sorted(row["env"].items())),
        size_bytes=row["size_bytes"],
        taken_at=row["taken_at"],
        ended_at=row["ended_at"],
        deadline_at=row["deadline_at"],
        code=row["code"],
        message=row["message"],
        moment=rows.moment(row),
        copy=Copy(row["copy"]),
    )
