"""The schema from nothing, and what may never be in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from atoll.store import schema
from atoll.store.engine import SqliteStore, Store
from atoll.store.tables import METADATA
from tests.builders import NOW


async def test_every_step_from_an_empty_file_gives_the_tables_of_the_code(store: Store) -> None:
    def differences(conn: sa.Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(conn), METADATA))

    assert await store.write(differences) == []


async def test_migrating_again_changes_nothing(sqlite: SqliteStore) -> None:
    def dump(conn: sa.Connection) -> list[tuple[object, ...]]:
        return [tuple(row) for row in conn.exec_driver_sql("select type, name, sql from sqlite_master order by name")]

    before = await sqlite.read(dump)
    await sqlite.write(schema.migrate)
    assert await sqlite.read(dump) == before
    assert len(before) > 10


async def test_a_migration_that_fails_leaves_no_half_of_it(sqlite: SqliteStore) -> None:
    def fails(conn: sa.Connection) -> None:
        schema.migrate(conn)
        conn.exec_driver_sql("create table half (id integer)")
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        await sqlite.write(fails)
    assert await sqlite.read(lambda conn: conn.exec_driver_sql("select count(*) from sqlite_master where name = 'half'").scalar_one()) == 0


async def test_the_newest_step_is_the_last_one(store: Store) -> None:
    config = Config()
    config.set_main_option("script_location", "atoll.store:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == schema.newest()
    assert await store.read(schema.version) == schema.newest()


async def test_an_empty_database_is_at_no_step(tmp_path: Path) -> None:
    opened = SqliteStore(tmp_path / "empty.db")
    try:
        assert await opened.read(schema.version) is None
    finally:
        await opened.close()


async def test_the_database_knows_whose_it_is(store: Store) -> None:
    async def ask(install_id: str, incarnation: str) -> tuple[str, str]:
        return await store.write(lambda conn: schema.deployment(conn, install_id=install_id, incarnation=incarnation, now=NOW))

    assert await ask("ins_one", "first") == ("ins_one", "first")
    assert await ask("ins_two", "second") == ("ins_one", "first")


async def test_secrets_have_only_digest_and_sealed_columns(store: Store) -> None:
    """A column for a token, key, credential or environment value in clear must not come back by the side door."""
    suspicious = ("token", "key", "credential", "password", "secret", "env", "payload")
    allowed = {"token_digest", "key_digest", "key_hint", "credential_digest", "credential_version", "payload_digest"}
    found = {f"{table.name}.{column.name}" for table in METADATA.sorted_tables for column in table.columns if column.name not in allowed}
    found -= {"templates.env", "snapshots.env"}  # an image's own, which its configuration, a blob beside the database, holds in clear
    found -= {"template_steps.key", "template_step_locks.key"}  # by which the result of a step is found again: a digest
    assert not [name for name in found if any(word in name.partition(".")[2] for word in suspicious)]
    assert [c.name for c in METADATA.tables["payloads"].columns] == [
        "sandbox_id",
        "sealed",
        "exposes",
        "delivery",
        "delivered_to",
        "receipt",
    ]
