"""A store brought to the newest schema: SQLite in a directory of its own, and PostgreSQL in a database of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.base.ids import Prefix
from atoll.domain.host import Host
from atoll.domain.sandbox import Sandbox
from atoll.domain.tenancy import Team
from atoll.store import facts, hosts, schema, tenancy
from atoll.store.engine import SqliteStore, Store
from atoll.store.postgres import PostgresStore
from tests.builders import NOW, fresh, host, sandbox, team
from tests.store import whole
from tests.store.server import Server

Filled = tuple[Team, Host]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """PostgreSQL on a socket of its own, for this test process."""
    started = Server.start(tmp_path_factory.mktemp("postgres"))
    yield started
    started.stop()


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """For what is SQLite's own."""
    await whole.sqlite(tmp_path / "atoll.db")
    opened = SqliteStore(tmp_path / "atoll.db")
    await opened.write(schema.migrate)
    yield opened
    await opened.close()


@pytest.fixture(params=["sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened: Store
    if request.param == "sqlite":
        await whole.sqlite(tmp_path / "atoll.db")
        opened = SqliteStore(tmp_path / "atoll.db")
    else:
        server: Server = request.getfixturevalue("server")
        opened = PostgresStore(await whole.postgres(server), dice=os.urandom)
    await opened.write(schema.migrate)
    yield opened
    await opened.close()


@pytest.fixture
async def ours(store: Store) -> Team:
    made = team()
    await store.write(lambda conn: tenancy.add_team(conn, made, now=NOW))
    return made


@pytest.fixture
async def machine(store: Store) -> Host:
    made = host()
    await store.write(lambda conn: hosts.add(conn, made, now=NOW))
    return made


@pytest.fixture
def put(store: Store, ours: Team) -> Callable[..., object]:
    """`await put(state=..., ...)` writes a sandbox of our team as it is."""

    async def add(**changes: object) -> Sandbox:
        made = sandbox(**{"team_id": ours.id, **changes})
        await store.write(lambda conn: facts.accept(conn, made, payload=None, event_id=fresh(Prefix.EVENT)))
        return made

    return add


def count(conn: sa.Connection, table: sa.Table) -> int:
    return conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


@pytest.fixture
async def replicas(server: Server) -> AsyncIterator[tuple[PostgresStore, PostgresStore]]:
    """Two of one database, as of two control processes."""
    url = await whole.postgres(server)
    both = (PostgresStore(url, dice=os.urandom), PostgresStore(url, dice=os.urandom))
    await both[0].write(schema.migrate)
    yield both
    for store in both:
        await store.close()
