"""Teams, clients and templates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Final

import sqlalchemy as sa

from atoll.domain.template import Template
from atoll.domain.tenancy import Client, Team
from atoll.store import hints, rows
from atoll.store.prepared import Prepared
from atoll.store.tables import CLIENTS, TEAMS, TEMPLATES

# Every create runs them.
_TEMPLATES: Final = Prepared(
    sa.select(TEMPLATES)
    .where(sa.or_(TEMPLATES.c.team_id == sa.bindparam("of_team"), TEMPLATES.c.team_id.is_(None), TEMPLATES.c.public))
    .order_by(TEMPLATES.c.name)
)
_SPAWNED: Final = Prepared(
    sa.update(TEMPLATES)
    .where(TEMPLATES.c.id == sa.bindparam("of_id"))
    .values(spawn_count=TEMPLATES.c.spawn_count + 1, last_spawned_at=sa.bindparam("at"))
)


def team_by_name(conn: sa.Connection, name: str) -> Team | None:
    """A team by its unique name."""
    row = conn.execute(sa.select(TEAMS).where(TEAMS.c.name == name)).mappings().first()
    return rows.team(row) if row else None


def team(conn: sa.Connection, reference: str) -> Team | None:
    """A team by name, or else by id."""
    row = conn.execute(sa.select(TEAMS).where(sa.or_(TEAMS.c.name == reference, TEAMS.c.id == reference))).mappings().first()
    return rows.team(row) if row else None


def add_team(conn: sa.Connection, team: Team, *, now: float) -> None:
    """A new team. *Errors*: IntegrityError when the name is taken."""
    conn.execute(sa.insert(TEAMS), {**asdict(team), "created_at": now})


def add_client(conn: sa.Connection, client: Client) -> None:
    """A new credential. *Errors*: IntegrityError when the digest is known."""
    conn.execute(
        sa.insert(CLIENTS),
        {
            "id": client.id,
            "team_id": client.team_id,
            "name": client.name,
            "role": client.role.value,
            "key_digest": client.key_digest,
            "key_hint": client.key_hint,
            "created_at": client.created_at,
            "revoked_at": None,
        },
    )


def by_key_digest(conn: sa.Connection, digest: str) -> tuple[Team, Client] | None:
    """The living credential with this digest, and its team."""
    row = conn.execute(sa.select(CLIENTS).where(CLIENTS.c.key_digest == digest, CLIENTS.c.revoked_at.is_(None))).mappings().first()
    if row is None:
        return None
    team = conn.execute(sa.select(TEAMS).where(TEAMS.c.id == row["team_id"])).mappings().one()
    return rows.team(team), rows.client(row)


def lives(conn: sa.Connection, client_id: str) -> bool:
    """Whether this credential is not revoked."""
    known = sa.select(CLIENTS.c.id).where(CLIENTS.c.id == client_id, CLIENTS.c.revoked_at.is_(None))
    return conn.execute(known).first() is not None


def clients_of(conn: sa.Connection, team_id: str) -> Sequence[Client]:
    """A team's credentials, revoked ones too, oldest first."""
    found = conn.execute(sa.select(CLIENTS).where(CLIENTS.c.team_id == team_id).order_by(CLIENTS.c.created_at, CLIENTS.c.id))
    return [rows.client(row) for row in found.mappings()]


def revoke(conn: sa.Connection, team_id: str | None, client_id: str, *, now: float) -> Client | None:
    """End a credential of this team, or of any (None); None when there is no such one. *Idempotency*: the first time stays."""
    meant = [CLIENTS.c.id == client_id] if team_id is None else [CLIENTS.c.id == client_id, CLIENTS.c.team_id == team_id]
    conn.execute(sa.update(CLIENTS).where(*meant, CLIENTS.c.revoked_at.is_(None)).values(revoked_at=now))
    hints.client(conn, client_id)
    row = conn.execute(sa.select(CLIENTS).where(*meant)).mappings().first()
    return rows.client(row) if row else None


def templates_for(conn: sa.Connection, team_id: str) -> Sequence[Template]:
    """Templates that a team may use: its own, everybody's, and public ones."""
    return [rows.template(row) for row in _TEMPLATES.all(conn, {"of_team": team_id})]


def owned(conn: sa.Connection, team_id: str, template_ids: Collection[str]) -> frozenset[str]:
    """Which of these templates are the team's own."""
    mine = sa.select(TEMPLATES.c.id).where(TEMPLATES.c.team_id == team_id, TEMPLATES.c.id.in_(template_ids))
    return frozenset(conn.execute(mine).scalars())


def template(conn: sa.Connection, template_id: str) -> Template | None:
    """One template, whoever's."""
    row = conn.execute(sa.select(TEMPLATES).where(TEMPLATES.c.id == template_id)).mappings().first()
    return rows.template(row) if row else None


def team_name(conn: sa.Connection, team_id: str) -> str | None:
    """A team's name; None when there is no such team."""
    found: str | None = conn.execute(sa.select(TEAMS.c.name).where(TEAMS.c.id == team_id)).scalar_one_or_none()
    return found


def put_template(conn: sa.Connection, template: Template) -> None:
    """Insert, or replace the build of, a template by id."""
    values = {
        "team_id": template.team_id,
        "name": template.name,
        "aliases": list(template.aliases),
        "public": template.public,
        "build_id": template.build_id,
        "image": template.image,
        "cpu_millis": template.cpu_millis,
        "memory_mib": template.memory_mib,
        "disk_mib": template.disk_mib,
        "default_user": template.default_user,
        "default_workdir": template.default_workdir,
        "env": dict(template.env),
        "command": list(template.command),
        "command_user": template.command_user,
        "ready_command": list(template.ready_command),
        "source": template.source,
        "updated_at": template.updated_at,
    }
    done = conn.execute(sa.update(TEMPLATES).where(TEMPLATES.c.id == template.id).values(values))
    if done.rowcount == 0:
        conn.execute(sa.insert(TEMPLATES), {"id": template.id, "created_at": template.created_at, **values})


def spawned(conn: sa.Connection, template_id: str, *, now: float) -> None:
    """Count a use."""
    _SPAWNED.run(conn, {"of_id": template_id, "at": now})
