"""Bring a database to the newest schema version, and know which deployment it is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import Code, Refused
from atoll.store.tables import DEPLOYMENT

VERSIONS: Final = "alembic_version"
_ALONE: Final = 0x61746F6C6C
"""Of PostgreSQL's advisory locks: the letters of the name."""
_STEPS: Final = Path(__file__).parent / "migrations" / "versions"


def newest() -> str:
    """The last step, by the names of the files: whoever finds it in a database need not load alembic, which takes 10 MiB."""
    return steps()[-1]


def version(conn: sa.Connection) -> str | None:
    """The step that this database is at; None for an empty one."""
    if not sa.inspect(conn).has_table(VERSIONS):
        return None
    found: str | None = conn.exec_driver_sql(f"SELECT version_num FROM {VERSIONS}").scalar_one_or_none()  # noqa: S608 - a constant
    return found


def steps() -> list[str]:
    """Every step that this program knows, in order."""
    return sorted(path.name.partition("_")[0] for path in _STEPS.glob("[0-9]*_*.py"))


def alone(conn: sa.Connection) -> None:
    """From here to the end of the transaction no other replica is in such a part: for what is made once, when a deployment begins."""
    if conn.dialect.name == "postgresql":
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_ALONE)))


def migrate(conn: sa.Connection) -> None:
    """Run every step that this database lacks. *Idempotency*: nothing to do changes nothing.

    *Errors*: Refused STORE_NEWER when a later release has taken it further: what that one writes, this one may misread.
    """
    alone(conn)
    found = version(conn)
    if found == newest():
        return
    if found is not None and found not in steps():
        raise Refused(Code.STORE_NEWER, f"the database is at schema {found}, and this program knows it up to {newest()}")
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "atoll.store:migrations")
    config.attributes["connection"] = conn
    command.upgrade(config, "head")


def deployment(conn: sa.Connection, *, install_id: str, incarnation: str, now: float) -> tuple[str, str]:
    """(install id, incarnation) of this database; the given ones when it is new."""
    alone(conn)
    row = conn.execute(sa.select(DEPLOYMENT.c.install_id, DEPLOYMENT.c.incarnation)).first()
    if row is not None:
        return row[0], row[1]
    conn.execute(sa.insert(DEPLOYMENT), {"id": 1, "install_id": install_id, "incarnation": incarnation, "created_at": now})
    return install_id, incarnation
