"""Prepared statements say what `Connection.execute` says, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from atoll.store import facts, hosts
from atoll.store.engine import SqliteStore, Store
from atoll.store.prepared import Prepared
from atoll.store.tables import AUDIT, TEAMS

ENTRY: dict[str, Any] = {"at": 1.5, "action": "key.create", "subject": "ü", "result": "done", "data": {"a": [1, None, "ß"]}}
ADD = Prepared(sa.insert(AUDIT))
OF_SUBJECT = Prepared(sa.select(AUDIT).where(AUDIT.c.subject == sa.bindparam("subject")).order_by(AUDIT.c.seq))
CHANGE = Prepared(sa.update(AUDIT).where(AUDIT.c.subject == sa.bindparam("of_subject")))


async def test_what_is_written_is_read_and_is_what_others_read(store: Store) -> None:
    assert await store.write(lambda conn: ADD.run(conn, ENTRY)) == 1
    prepared = await store.read(lambda conn: OF_SUBJECT.first(conn, {"subject": "ü"}))
    plain = await store.read(lambda conn: conn.execute(sa.select(AUDIT)).mappings().one())
    assert prepared is not None
    assert dict(prepared) == dict(plain)
    assert (prepared["data"], prepared["team_id"]) == (ENTRY["data"], None)


async def test_each_set_of_names_is_a_statement_of_its_own(store: Store) -> None:
    await store.write(lambda conn: ADD.run_many(conn, [ENTRY, {**ENTRY, "subject": "other"}]))
    assert await store.write(lambda conn: CHANGE.run(conn, {"of_subject": "ü", "result": "REFUSED"})) == 1
    assert await store.write(lambda conn: CHANGE.run(conn, {"of_subject": "ü", "data": {"b": 2}, "team_id": "tea_1"})) == 1
    assert await store.write(lambda conn: CHANGE.run(conn, {"of_subject": "nobody", "data": {}})) == 0
    found = await store.read(lambda conn: OF_SUBJECT.all(conn, {"subject": "ü"}))
    assert [(row["result"], row["data"], row["team_id"]) for row in found] == [("REFUSED", {"b": 2}, "tea_1")]
    assert [row["result"] for row in await store.read(lambda conn: OF_SUBJECT.all(conn, {"subject": "other"}))] == ["done"]
    assert await store.read(lambda conn: OF_SUBJECT.first(conn, {"subject": "nobody"})) is None


async def test_errors_are_those_of_the_library_and_name_no_value(store: Store) -> None:
    add = Prepared(sa.insert(TEAMS))
    team = {"id": "tea_x", "name": "a-secret-name", "created_at": 1.0}
    await store.write(lambda conn: add.run(conn, team))
    with pytest.raises(sa.exc.IntegrityError) as refused:
        await store.write(lambda conn: add.run(conn, {**team, "id": "tea_y"}))
    if isinstance(store, SqliteStore):
        assert "a-secret-name" not in str(refused.value)
    assert await store.read(lambda conn: conn.execute(sa.select(sa.func.count()).select_from(TEAMS)).scalar_one()) >= 1


async def test_a_function_that_failed_undoes_what_it_prepared(store: Store) -> None:
    def work(conn: sa.Connection) -> None:
        ADD.run(conn, ENTRY)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        await store.write(work)
    assert await store.read(lambda conn: OF_SUBJECT.all(conn, {"subject": "ü"})) == []


async def test_bytes_and_truths_stay_what_they_are(store: Store) -> None:
    table = sa.Table(
        "trial",
        sa.MetaData(),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("sealed", sa.LargeBinary),
        sa.Column("on", sa.Boolean),
    )
    sealed = bytes(range(256))
    await store.write(table.create)
    await store.write(lambda conn: Prepared(sa.insert(table)).run(conn, {"id": 1, "sealed": sealed, "on": True}))
    row = await store.read(lambda conn: Prepared(sa.select(table)).first(conn))
    assert row is not None
    assert (bytes(row["sealed"]), row["on"]) == (sealed, True)
    assert row["on"] is True


@pytest.mark.parametrize("statement", [facts._USED, hosts._WANTED])
async def test_what_a_host_holds_is_found_without_a_walk_through_what_has_ended(sqlite: SqliteStore, statement: Prepared) -> None:
    """Records of ended placements are kept for a day, and each decision sums."""

    def plan(conn: sa.Connection) -> str:
        statement.all(conn, {"host_id": "hst_1"})
        (compiled,) = statement._compiled.values()
        driver = conn.connection.driver_connection
        assert driver is not None
        return str(driver.execute("EXPLAIN QUERY PLAN " + compiled.sql, compiled.values({"host_id": "hst_1"})).fetchall())

    assert "(host_id=? AND holding=?)" in await sqlite.read(plan)
