from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from atoll.programs import migration
from atoll.store.schema import newest


def _at(database: Path) -> list[tuple[str]]:
    with sqlite3.connect(database) as connection:
        return connection.execute("SELECT version_num FROM alembic_version").fetchall()


def test_a_new_database_is_brought_to_the_newest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "atoll.db"
    assert not migration.is_newest(database)
    assert not database.exists(), "looking makes nothing"
    migration.migrate_apart(database)
    assert _at(database) == [(newest(),)]
    assert migration.is_newest(database)
    monkeypatch.setattr("subprocess.run", lambda *_arguments, **_options: pytest.fail("there was nothing to do"))
    migration.migrate_apart(database)


def test_what_cannot_be_told_is_not_newest(tmp_path: Path) -> None:
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"not a database at all, but long enough to look like one" * 100)
    assert not migration.is_newest(broken)
    migration.migrate_apart(broken)
    assert broken.read_bytes().startswith(b"not a database"), "whoever opens it next says what is wrong"
