"""Deployment documents on record: one revision after another, whoever races."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from atoll.base.errors import Code, Refused
from atoll.domain.deployment import Deployment, WorkloadClass
from atoll.store import configurations
from atoll.store.configurations import Configuration
from atoll.store.engine import Store
from tests.builders import NOW


def document(revision: int, text: str = "a", **changes: object) -> Configuration:
    return Configuration(revision, text, f"digest of {text}", Deployment(**changes), NOW, "cli_ours")  # type: ignore[arg-type]


async def test_nothing_is_revision_nought(store: Store) -> None:
    assert await store.read(configurations.newest) == 0
    assert await store.read(lambda conn: configurations.get(conn, 0)) is None
    assert await store.read(lambda conn: configurations.history(conn, before=None, limit=10)) == []


async def test_what_was_applied_is_read_back_whole(store: Store) -> None:
    made = document(1, classes={"ci": WorkloadClass(name="ci", labels=(("a", "b"),), regions=("eu",))}, default_class="ci")
    await store.write(lambda conn: configurations.add(conn, made))
    assert await store.read(lambda conn: configurations.get(conn, 1)) == made


async def test_only_the_next_revision_is_taken(store: Store) -> None:
    await store.write(lambda conn: configurations.add(conn, document(1)))
    for wrong in (1, 3):
        with pytest.raises(Refused) as refused:
            await store.write(lambda conn, wrong=wrong: configurations.add(conn, document(wrong, "b")))
        assert refused.value.code is Code.CONFIG_CONFLICT
    assert await store.read(configurations.newest) == 1


async def test_the_same_document_sent_again_is_the_same_revision(store: Store) -> None:
    first = await store.write(lambda conn: configurations.add(conn, document(1)))
    assert await store.write(lambda conn: configurations.add(conn, document(1))) == first
    await store.write(lambda conn: configurations.add(conn, document(2, "b")))
    with pytest.raises(Refused):
        await store.write(lambda conn: configurations.add(conn, document(1)))


async def test_of_twenty_that_apply_at_once_one_is_first(store: Store) -> None:
    async def apply(number: int) -> str:
        try:
            await store.write(lambda conn: configurations.add(conn, document(1, f"by {number}")))
        except (Refused, sa.exc.IntegrityError):
            return "conflict"
        return "applied"

    outcomes = await asyncio.gather(*(apply(n) for n in range(20)))
    assert outcomes.count("applied") == 1
    assert await store.read(configurations.newest) == 1


async def test_the_history_has_pages_and_forgets_nothing(store: Store) -> None:
    for revision in range(1, 6):
        await store.write(lambda conn, revision=revision: configurations.add(conn, document(revision, f"number {revision}")))
    newest = await store.read(lambda conn: configurations.history(conn, before=None, limit=3))
    assert [one.revision for one in newest] == [5, 4, 3]
    older = await store.read(lambda conn: configurations.history(conn, before=3, limit=3))
    assert [one.document for one in older] == ["number 2", "number 1"]


async def test_a_later_release_reads_what_an_earlier_one_has_applied(store: Store) -> None:
    """Settings that it does not know are ignored, those that are missing are as it brings them."""
    await store.write(lambda conn: configurations.add(conn, document(1)))

    def age(conn: sa.Connection) -> None:
        row = conn.execute(sa.select(configurations.CONFIGURATIONS.c.settings)).scalar_one()
        row["of_the_future"] = {"x": 1}
        del row["classes"]["default"]["attempts_max"]
        conn.execute(sa.update(configurations.CONFIGURATIONS).values(settings=row))

    await store.write(age)
    found = await store.read(lambda conn: configurations.get(conn, 1))
    assert found is not None
    assert found.deployment == Deployment()
