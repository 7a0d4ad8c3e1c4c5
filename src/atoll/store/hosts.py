"""Hosts, their enrolment and epochs, and what is on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from atoll.domain.host import Admin, Host
from atoll.domain.placement import Holding, Placement
from atoll.domain.sandbox import Sandbox
from atoll.store import hints, rows, schema
from atoll.store.engine import Stale
from atoll.store.prepared import Prepared, Row
from atoll.store.tables import DEPLOYMENT, ENROLLMENTS, HOLDS, HOST_EPOCHS, HOSTS, PLACEMENTS, REVOKED_CREDENTIALS, SANDBOXES

# A poll runs most of them.
_BY_ID: Final = sa.select(HOSTS).where(HOSTS.c.id == sa.bindparam("of_id"))
_BY_CREDENTIAL: Final = Prepared(sa.select(HOSTS).where(HOSTS.c.credential_digest == sa.bindparam("digest")))
_LIFE: Final = sa.select(DEPLOYMENT.c.incarnation).scalar_subquery().label("incarnation")
_SESSION: Final = Prepared(
    sa.select(HOSTS.c.epoch, HOSTS.c.poll_seq, HOSTS.c.credential_version, _LIFE).where(HOSTS.c.id == sa.bindparam("of_id"))
)
_POLLED: Final = Prepared(
    sa.update(HOSTS).where(
        HOSTS.c.id == sa.bindparam("of_id"),
        HOSTS.c.epoch == sa.bindparam("of_epoch"),
        HOSTS.c.credential_version == sa.bindparam("of_version"),
        HOSTS.c.poll_seq <= sa.bindparam("of_seq"),
    )
)
_WANTED: Final = Prepared(
    sa.select(PLACEMENTS.c.id, PLACEMENTS.c.sandbox_id, PLACEMENTS.c.desired_revision, SANDBOXES.c.end_revision)
    .join(SANDBOXES, SANDBOXES.c.id == PLACEMENTS.c.sandbox_id)
    .where(PLACEMENTS.c.host_id == sa.bindparam("host_id"), HOLDS)
    .order_by(PLACEMENTS.c.created_at)
)
_WANTED_OF: Final = Prepared(
    sa.select(PLACEMENTS.c.id, PLACEMENTS.c.sandbox_id, PLACEMENTS.c.desired_revision, SANDBOXES.c.end_revision)
    .join(SANDBOXES, SANDBOXES.c.id == PLACEMENTS.c.sandbox_id)
    .where(PLACEMENTS.c.id == sa.bindparam("of_id"), PLACEMENTS.c.host_id == sa.bindparam("host_id"), HOLDS)
)
_MANY: Final = tuple(f"id{number}" for number in range(16))
"""As many at once as an answer has commands; prepared statements have no lists."""
_PLACEMENTS: Final = Prepared(sa.select(PLACEMENTS).where(PLACEMENTS.c.id.in_([sa.bindparam(name) for name in _MANY])))
_HELD: Final = Prepared(
    sa.select(PLACEMENTS.c.id, PLACEMENTS.c.host_id, PLACEMENTS.c.holding, PLACEMENTS.c.desired_revision).where(
        PLACEMENTS.c.id.in_([sa.bindparam(name) for name in _MANY])
    )
)
_SANDBOXES: Final = Prepared(sa.select(SANDBOXES).where(SANDBOXES.c.id.in_([sa.bindparam(name) for name in _MANY])), unread=["spec"])
_HOLDINGS: Final = sa.select(PLACEMENTS.c.id, PLACEMENTS.c.holding).where(
    PLACEMENTS.c.id.in_(sa.bindparam("ids", expanding=True)), PLACEMENTS.c.host_id == sa.bindparam("host_id")
)
_REVOKED: Final = sa.insert(REVOKED_CREDENTIALS).from_select(
    ["credential_digest", "host_id"],
    sa.select(HOSTS.c.credential_digest, HOSTS.c.id).where(
        HOSTS.c.id == sa.bindparam("of_id"), HOSTS.c.credential_digest.is_not(None), HOSTS.c.credential_digest != sa.bindparam("kept")
    ),
)


def all_hosts(conn: sa.Connection) -> Sequence[Host]:
    """Every host, by name."""
    return [rows.host(row) for row in conn.execute(sa.select(HOSTS).order_by(HOSTS.c.name)).mappings()]


def by_id(conn: sa.Connection, host_id: str) -> Host | None:
    """A host by id."""
    row = conn.execute(_BY_ID, {"of_id": host_id}).mappings().first()
    return rows.host(row) if row else None


def locked(conn: sa.Connection, host_id: str) -> Host | None:
    """A host by id, with its row locked: until the transaction's end nobody else reserves on it."""
    row = conn.execute(_BY_ID.with_for_update(), {"of_id": host_id}).mappings().first()
    return rows.host(row) if row else None


def by_name(conn: sa.Connection, name: str) -> Host | None:
    """A host by its unique name."""
    row = conn.execute(sa.select(HOSTS).where(HOSTS.c.name == name)).mappings().first()
    return rows.host(row) if row else None


def by_credential(conn: sa.Connection, digest: str) -> Host | None:
    """The host with this credential digest."""
    row = _BY_CREDENTIAL.first(conn, {"digest": digest})
    return rows.host(row) if row else None


@dataclass(frozen=True, slots=True)
class HostCount:
    """How many hosts there are: registered are those that are not disabled."""

    registered: int
    active: int


def with_slots(conn: sa.Connection, slots: str) -> Sequence[Host]:
    """Hosts that have registered this range of addresses."""
    found = conn.execute(sa.select(HOSTS).where(HOSTS.c.registered["slots"].as_string() == slots).order_by(HOSTS.c.name))
    return [rows.host(row) for row in found.mappings()]


def count(conn: sa.Connection) -> HostCount:
    """To be held against a limit: until the transaction's end nobody else counts."""
    if conn.dialect.name != "sqlite":
        conn.execute(sa.select(DEPLOYMENT.c.id).with_for_update())
    found = {row[0]: row[1] for row in conn.execute(sa.select(HOSTS.c.admin, sa.func.count()).group_by(HOSTS.c.admin))}
    disabled, active = found.get(Admin.DISABLED.value, 0), found.get(Admin.ACTIVE.value, 0)
    return HostCount(sum(found.values()) - disabled, active)


@dataclass(frozen=True, slots=True)
class Session:
    """Who may speak for a host now: the agent run that holds it (None: none does), its newest committed poll, and the credential's version.

    `incarnation`: which life of the store says so.
    """

    epoch: str | None
    poll_seq: int
    credential_version: int
    incarnation: str


def session(conn: sa.Connection, host_id: str) -> Session:
    """As of this transaction; of a host that is gone, nobody's."""
    row = _SESSION.first(conn, {"of_id": host_id})
    return Session(**row) if row is not None else Session(None, 0, 0, "")


def is_revoked(conn: sa.Connection, digest: str) -> bool:
    """Whether a host had this credential, and has it no more."""
    found = conn.execute(sa.select(REVOKED_CREDENTIALS.c.host_id).where(REVOKED_CREDENTIALS.c.credential_digest == digest)).first()
    return found is not None


def add(conn: sa.Connection, host: Host, *, now: float) -> None:
    """A new host. *Errors*: IntegrityError when id, name or credential is taken."""
    conn.execute(sa.insert(HOSTS), {"id": host.id, "revision": host.revision, "created_at": now, **rows.host_values(host)})
    hints.host(conn, host.id)


def save(conn: sa.Connection, host: Host, *, read: Host) -> None:
    """Write what is other than in `read`, `WHERE revision = read`; a credential that it has no more stays known as a revoked one.

    Nothing else is written: a poll, which raises no revision, may have moved heartbeat, lease and number since. Whoever decides over those
    reads the row `locked`. *Errors*: Stale when it is another.
    """
    conn.execute(_REVOKED, {"of_id": host.id, "kept": host.credential_digest or ""})
    before = rows.host_values(read)
    decided = {name: value for name, value in rows.host_values(host).items() if before[name] != value}
    done = conn.execute(
        sa.update(HOSTS).where(HOSTS.c.id == host.id, HOSTS.c.revision == read.revision).values(revision=read.revision + 1, **decided)
    )
    if done.rowcount != 1:
        raise Stale(f"host {host.id}")
    hints.host(conn, host.id)


def polled(conn: sa.Connection, host: Host, *, poll_seq: int, seen_at: float, lease_until: float) -> None:
    """Renew lease and heartbeat: the hot path of a poll; raises no revision, since it decides nothing.

    *Errors*: Stale when the host was fenced or taken over since `host` was read, or a newer poll was heard by another replica.
    """
    read = {"of_id": host.id, "of_epoch": host.epoch, "of_version": host.credential_version, "of_seq": poll_seq}
    if _POLLED.run(conn, {**read, "poll_seq": poll_seq, "seen_at": seen_at, "lease_until": lease_until}) != 1:
        raise Stale(f"session of host {host.id}")


def end_epoch(conn: sa.Connection, host_id: str, epoch: str, *, now: float) -> None:
    """Remember an epoch that was taken over; its late messages are stale for ever."""
    known = conn.execute(sa.select(HOST_EPOCHS.c.epoch).where(HOST_EPOCHS.c.host_id == host_id, HOST_EPOCHS.c.epoch == epoch)).first()
    if known is None:
        conn.execute(sa.insert(HOST_EPOCHS), {"host_id": host_id, "epoch": epoch, "ended_at": now})


def restart_sequences(conn: sa.Connection, host_id: str) -> None:
    """Take observations of what this host has from their beginning on: its agent counts anew, and what is older is of an ended epoch."""
    conn.execute(sa.update(PLACEMENTS).where(PLACEMENTS.c.host_id == host_id, HOLDS).values(seq=0))


def epoch_ended(conn: sa.Connection, host_id: str, epoch: str) -> bool:
    """Whether this epoch of the host was taken over."""
    found = conn.execute(sa.select(HOST_EPOCHS.c.epoch).where(HOST_EPOCHS.c.host_id == host_id, HOST_EPOCHS.c.epoch == epoch)).first()
    return found is not None


@dataclass(frozen=True, slots=True)
class Enrollment:
    """A one-use token's record; the token itself is not kept."""

    id: str
    token_digest: str
    host_name: str
    created_at: float
    expires_at: float
    used_at: float | None = None
    host_id: str | None = None
    form_digest: str | None = None
    """Of what was registered with it."""


def add_enrollment(conn: sa.Connection, enrollment: Enrollment) -> bool:
    """A new token's record; False when the digest is known already."""
    schema.alone(conn)
    if enrollment_by_digest(conn, enrollment.token_digest) is not None:
        return False
    conn.execute(
        sa.insert(ENROLLMENTS),
        {
            "id": enrollment.id,
            "token_digest": enrollment.token_digest,
            "host_name": enrollment.host_name,
            "created_at": enrollment.created_at,
            "expires_at": enrollment.expires_at,
        },
    )
    return True


def enrollment_by_digest(conn: sa.Connection, digest: str) -> Enrollment | None:
    """The record of a token; locked, since only one may use it."""
    row = conn.execute(sa.select(ENROLLMENTS).where(ENROLLMENTS.c.token_digest == digest).with_for_update()).mappings().first()
    return Enrollment(**row) if row else None


def use_enrollment(conn: sa.Connection, enrollment_id: str, *, host_id: str, form_digest: str, now: float) -> None:
    """Consume a token. *Errors*: Stale when somebody else has."""
    unused = (ENROLLMENTS.c.id == enrollment_id, ENROLLMENTS.c.used_at.is_(None))
    done = conn.execute(sa.update(ENROLLMENTS).where(*unused).values(used_at=now, host_id=host_id, form_digest=form_digest))
    if done.rowcount != 1:
        raise Stale(f"enrolment {enrollment_id}")


@dataclass(frozen=True, slots=True)
class OnHost:
    """What control wants of one placement, narrow enough to read for all of a host at each poll."""

    placement_id: str
    sandbox_id: str
    desired_revision: int
    end_revision: int


def wanted(conn: sa.Connection, host_id: str) -> Sequence[OnHost]:
    """Every placement of the host that still holds something."""
    return [OnHost(*row.values()) for row in _WANTED.all(conn, {"host_id": host_id})]


def wanted_of(conn: sa.Connection, host_id: str, placement_ids: Sequence[str]) -> Sequence[OnHost]:
    """As `wanted`, of these placements."""
    found = (_WANTED_OF.first(conn, {"of_id": placement_id, "host_id": host_id}) for placement_id in placement_ids)
    return [OnHost(*row.values()) for row in found if row is not None]


def load_many(conn: sa.Connection, placement_ids: Sequence[str]) -> Sequence[tuple[Placement, Sandbox]]:
    """Placements with their sandboxes, whole."""
    if not placement_ids:
        return []
    places = {row["id"]: rows.placement(row) for row in _many(conn, _PLACEMENTS, placement_ids)}
    wanted = list(dict.fromkeys(p.sandbox_id for p in places.values()))
    sandboxes = {row["id"]: rows.sandbox(row) for row in _many(conn, _SANDBOXES, wanted)}
    return [(places[p], sandboxes[places[p].sandbox_id]) for p in placement_ids if p in places]


def _many(conn: sa.Connection, statement: Prepared, ids: Sequence[str]) -> Iterator[Row]:
    size = len(_MANY)
    for first in range(0, len(ids), size):
        some = ids[first : first + size]
        # No id is empty: what is left of the places finds nothing.
        yield from statement.all(conn, dict(zip(_MANY, [*some, *[""] * (size - len(some))], strict=True)))


def gone_or_unknown(conn: sa.Connection, host_id: str, placement_ids: Sequence[str]) -> tuple[dict[str, int], set[str]]:
    """Of these ids: which hold nothing any more, with their desired revision, and which this host never had."""
    if not placement_ids:
        return {}, set()
    found = {row["id"]: (row["holding"], row["desired_revision"]) for row in _many(conn, _HELD, placement_ids) if row["host_id"] == host_id}
    gone = {p: revision for p, (holding, revision) in found.items() if holding == Holding.NONE.value}
    return gone, {p for p in placement_ids if p not in found}


def placements_held(conn: sa.Connection, host_id: str) -> int:
    """How many placements of the host hold something."""
    return conn.execute(sa.select(sa.func.count()).select_from(PLACEMENTS).where(PLACEMENTS.c.host_id == host_id, HOLDS)).scalar_one()
