"""A store in a directory of its own, brought to the newest schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.base.ids import Prefix
from atoll.domain.host import Host
from atoll.domain.sandbox import Sandbox
from atoll.domain.tenancy import Team
from atoll.store import facts, hosts, schema, tenancy
from atoll.store.engine import SqliteStore
from tests.builders import NOW, fresh, host, sandbox, team

Filled = tuple[Team, Host]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(tmp_path / "atoll.db")
    await opened.write(schema.migrate)
    yield opened
    await opened.close()


@pytest.fixture
async def ours(store: SqliteStore) -> Team:
    made = team()
    await store.write(lambda conn: tenancy.add_team(conn, made, now=NOW))
    return made


@pytest.fixture
async def machine(store: SqliteStore) -> Host:
    made = host()
    await store.write(lambda conn: hosts.add(conn, made, now=NOW))
    return made


@pytest.fixture
def put(store: SqliteStore, ours: Team) -> Callable[..., object]:
    """`await put(state=..., ...)` writes a sandbox of our team as it is."""

    async def add(**changes: object) -> Sandbox:
        made = sandbox(**{"team_id": ours.id, **changes})
        await store.write(lambda conn: facts.accept(conn, made, payload=None, event_id=fresh(Prefix.EVENT)))
        return made

    return add


def count(conn: sa.Connection, table: sa.Table) -> int:
    return conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
