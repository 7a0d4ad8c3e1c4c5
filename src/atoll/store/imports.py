"""Imports of templates."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from atoll.base.ids import Prefix, TeamId, TemplateId
from atoll.domain.importing import Import, State
from atoll.store import snapshots
from atoll.store.tables import SANDBOXES, TEMPLATE_IMPORTS, TEMPLATES


def add(conn: sa.Connection, one: Import) -> None:
    """A new import."""
    conn.execute(sa.insert(TEMPLATE_IMPORTS), {"id": one.id, **_values(one)})


def end(conn: sa.Connection, one: Import) -> bool:
    """Record how it ended, once. *Idempotency*: False, and nothing changes, when it has ended already."""
    done = conn.execute(
        sa.update(TEMPLATE_IMPORTS)
        .where(TEMPLATE_IMPORTS.c.id == one.id, TEMPLATE_IMPORTS.c.state == State.RUNNING.value)
        .values(_values(one))
    )
    return done.rowcount == 1


def of_team(conn: sa.Connection, team_id: str, *, limit: int = 100) -> Sequence[Import]:
    """A team's newest imports."""
    query = sa.select(TEMPLATE_IMPORTS).where(TEMPLATE_IMPORTS.c.team_id == team_id)
    found = conn.execute(query.order_by(TEMPLATE_IMPORTS.c.created_at.desc(), TEMPLATE_IMPORTS.c.id).limit(limit))
    return [_import(row) for row in found.mappings()]


def running(conn: sa.Connection) -> Sequence[Import]:
    """Those that nobody has ended."""
    found = conn.execute(sa.select(TEMPLATE_IMPORTS).where(TEMPLATE_IMPORTS.c.state == State.RUNNING.value))
    return [_import(row) for row in found.mappings()]


def forget(conn: sa.Connection, *, before: float) -> int:
    """Remove what ended before a moment."""
    return conn.execute(sa.delete(TEMPLATE_IMPORTS).where(TEMPLATE_IMPORTS.c.finished_at < before)).rowcount


def sandboxes_on(conn: sa.Connection, template_id: str) -> int:
    """How many sandboxes of a template have not ended; those of its builds do not count."""
    ended = SANDBOXES.c.state.in_(("released", "failed"))
    hidden = SANDBOXES.c.client_id.startswith(Prefix.BUILD, autoescape=True)
    query = sa.select(sa.func.count()).where(SANDBOXES.c.spec["template_id"].as_string() == template_id, sa.not_(ended), sa.not_(hidden))
    return int(conn.execute(query).scalar_one())


def remove_template(conn: sa.Connection, template_id: str) -> None:
    """A template goes. *Idempotency*: one that is gone stays gone."""
    conn.execute(sa.delete(TEMPLATES).where(TEMPLATES.c.id == template_id))


def images_wanted(conn: sa.Connection) -> set[str]:
    """Digests of the images that templates, living sandboxes or snapshots stand on."""
    ended = SANDBOXES.c.state.in_(("released", "failed"))
    specs = sa.select(SANDBOXES.c.spec["image"].as_string()).where(sa.not_(ended))
    kept = snapshots.images_wanted(conn)
    return {*conn.execute(sa.select(TEMPLATES.c.image)).scalars(), *conn.execute(specs).scalars(), *kept}


def _values(one: Import) -> dict[str, object]:
    return {
        "team_id": one.team_id,
        "name": one.name,
        "source": one.source,
        "state": one.state.value,
        "log": list(one.log),
        "code": one.code,
        "message": one.message,
        "template_id": one.template_id,
        "image": one.image,
        "created_at": one.created_at,
        "finished_at": one.finished_at,
    }


def _import(row: sa.RowMapping) -> Import:
    return Import(
        id=row["id"],
        team_id=TeamId(row["team_id"]),
        name=row["name"],
        source=row["source"],
        state=State(row["state"]),
        created_at=row["created_at"],
        log=tuple(row["log"]),
        code=row["code"],
        message=row["message"],
        template_id=TemplateId(row["template_id"]) if row["template_id"] else None,
        image=row["image"],
        finished_at=row["finished_at"],
    )
