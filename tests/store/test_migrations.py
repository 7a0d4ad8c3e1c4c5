"""Forward only, from every released schema, with what that release wrote in it, on both databases; and never from a later one."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

from atoll.base.errors import Code, Refused
from atoll.domain.sandbox import LIVING
from atoll.store import facts, hosts, sandboxes, schema, tenancy
from atoll.store.engine import SqliteStore, Store
from atoll.store.postgres import PostgresStore
from atoll.store.tables import METADATA, SANDBOXES, TEAMS
from tests.sim.world import World
from tests.store.record import DIRECTORY
from tests.store.server import Server

RECORDED = sorted(path.stem for path in DIRECTORY.glob("*.json"))


def record(step: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DIRECTORY / f"{step}.json").read_text())
    return found


def upgrade(conn: sa.Connection, step: str) -> None:
    config = Config()
    config.set_main_option("script_location", "atoll.store:migrations")
    config.attributes["connection"] = conn
    # Alembic ends only transactions that it has begun, and takes one that has seen a statement for ours.
    conn.exec_driver_sql("SELECT 1")
    command.upgrade(config, step)


def fill(conn: sa.Connection, tables: dict[str, Any]) -> None:
    """The rows of a record instead of any that the steps have made, in an order that foreign keys allow."""
    found = sa.MetaData()
    found.reflect(conn)
    for table in reversed(found.sorted_tables):
        if table.name != schema.VERSIONS:
            conn.execute(sa.delete(table))
    for table in found.sorted_tables:
        if table.name == schema.VERSIONS or table.name not in tables:
            continue
        for row in tables[table.name]["rows"]:
            values = {name: _value(value, table.c[name]) for name, value in row.items()}
            conn.execute(sa.insert(table), values)


def _value(value: Any, column: sa.Column[Any]) -> Any:
    if isinstance(value, dict) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"])
    return bool(value) if isinstance(column.type, sa.Boolean) and value is not None else value


@pytest.fixture(params=["sqlite", "postgres"])
async def empty(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """No schema yet."""
    opened: Store
    if request.param == "sqlite":
        opened = SqliteStore(tmp_path / "atoll.db")
    else:
        server: Server = request.getfixturevalue("server")
        opened = PostgresStore(await server.database(), dice=os.urandom)
    yield opened
    await opened.close()


def test_the_step_before_the_newest_is_on_record() -> None:
    """The newest is being made: `python -m tests.store.record` before the next one is begun. Steps that came out together need one."""
    assert schema.steps()[-2] in RECORDED


@pytest.mark.parametrize("step", RECORDED)
async def test_a_step_is_still_what_was_released(tmp_path: Path, step: str) -> None:
    """A step that somebody edits afterwards is another schema than the one that is out there."""
    store = SqliteStore(tmp_path / "atoll.db")
    try:
        await store.write(lambda conn: upgrade(conn, step))

        def columns(conn: sa.Connection) -> dict[str, list[list[Any]]]:
            found = sa.MetaData()
            found.reflect(conn)
            return {table.name: [[c.name, str(c.type), bool(c.nullable)] for c in table.columns] for table in found.sorted_tables}

        assert await store.read(columns) == {name: table["columns"] for name, table in record(step).items()}
    finally:
        await store.close()


@pytest.mark.parametrize("step", RECORDED)
async def test_from_what_a_release_wrote_to_the_newest(empty: Store, step: str) -> None:
    written = record(step)

    def begin(conn: sa.Connection) -> None:
        upgrade(conn, step)
        fill(conn, written)

    await empty.write(begin)
    assert await empty.read(schema.version) == step
    await empty.write(schema.migrate)
    assert await empty.read(schema.version) == schema.newest()
    assert await empty.write(lambda conn: list(compare_metadata(MigrationContext.configure(conn), METADATA))) == []

    def read_all(conn: sa.Connection) -> tuple[int, int, int]:
        ids = [row[0] for row in conn.execute(sa.select(SANDBOXES.c.id))]
        whole = [facts.load(conn, sandbox_id) for sandbox_id in ids]
        for team_id in conn.execute(sa.select(TEAMS.c.id)).scalars():
            assert tenancy.clients_of(conn, team_id)
        assert tenancy.templates_for(conn, "")
        return sum(one is not None for one in whole), len(hosts.all_hosts(conn)), len(sandboxes.reachable(conn))

    assert await empty.read(read_all) == (len(written["sandboxes"]["rows"]), len(written["hosts"]["rows"]), 1)
    for table in ("events", "placements", "payloads", "enrollments", "clients", "host_epochs"):
        count = await empty.read(lambda conn, table=table: conn.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())  # type: ignore[misc]
        assert count == len(written[table]["rows"]), table


@pytest.mark.parametrize("step", RECORDED)
async def test_control_goes_on_from_what_a_release_wrote(tmp_path: Path, step: str) -> None:
    written = record(step)
    (install,) = written["deployment"]["rows"]
    world = World(tmp_path, install_id=install["install_id"])
    world.write_files()
    store = SqliteStore(world.database)

    def begin(conn: sa.Connection) -> None:
        upgrade(conn, step)
        fill(conn, written)

    await store.write(begin)
    await store.close()
    await world.start()
    try:
        states = {row["id"]: row["state"] for row in written["sandboxes"]["rows"]}
        for sandbox_id, state in states.items():
            if state in {one.value for one in LIVING} - {"releasing"}:
                answer = await world.call("DELETE", f"/v1/sandboxes/{sandbox_id}")
                # One that waited for room when it was recorded has waited too long by now, and may have ended by itself.
                assert answer.status_code in ((200, 202, 404) if state == "pending" else (200, 202)), answer.text
        left = await world.store.read(lambda conn: set(conn.execute(sa.select(SANDBOXES.c.state)).scalars()))
        assert left <= {"releasing", "released", "failed"}
        assert len((await world.call("GET", "/v1/hosts")).json()["items"]) == len(written["hosts"]["rows"])
    finally:
        await world.stop()


async def test_step_by_step_and_at_once_are_the_same(empty: Store) -> None:
    for step in schema.steps():
        await empty.write(lambda conn, step=step: upgrade(conn, step))  # type: ignore[misc]
        assert await empty.read(schema.version) == step
    assert await empty.write(lambda conn: list(compare_metadata(MigrationContext.configure(conn), METADATA))) == []


async def test_a_database_of_a_later_release_is_refused(empty: Store) -> None:
    await empty.write(schema.migrate)
    await empty.write(lambda conn: conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(Refused) as refused:
        await empty.write(schema.migrate)
    assert refused.value.code is Code.STORE_NEWER
    assert "9999" in refused.value.message
    assert await empty.read(schema.version) == "9999"


async def test_control_does_not_begin_on_a_database_of_a_later_release(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start()
    await world.store.write(lambda conn: conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))
    await world.stop()
    with pytest.raises(Refused) as refused:
        await world.start()
    assert refused.value.code is Code.STORE_NEWER
    world.control = None
