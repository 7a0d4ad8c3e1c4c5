"""Bring a database to the newest schema version, and know which deployment it is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from atoll.store.tables import DEPLOYMENT


def migrate(conn: sa.Connection) -> None:
    """Run every step that this database lacks. *Idempotency*: nothing to do changes nothing."""
    config = Config()
    config.set_main_option("script_location", "atoll.store:migrations")
    config.attributes["connection"] = conn
    command.upgrade(config, "head")


def deployment(conn: sa.Connection, *, install_id: str, incarnation: str, now: float) -> tuple[str, str]:
    """(install id, incarnation) of this database; the given ones when it is new."""
    row = conn.execute(sa.select(DEPLOYMENT.c.install_id, DEPLOYMENT.c.incarnation)).first()
    if row is not None:
        return row[0], row[1]
    conn.execute(sa.insert(DEPLOYMENT), {"id": 1, "install_id": install_id, "incarnation": incarnation, "created_at": now})
    return install_id, incarnation
