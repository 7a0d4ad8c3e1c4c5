"""Teams, keys and templates: each team's own, and everybody's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from atoll.domain.tenancy import Team
from atoll.store import tenancy
from atoll.store.engine import Store
from tests.builders import NOW, client, team, template


async def test_a_key_is_found_by_its_digest_until_it_is_revoked(store: Store, ours: Team) -> None:
    made = client(ours)
    await store.write(lambda conn: tenancy.add_client(conn, made))
    assert await store.read(lambda conn: tenancy.by_key_digest(conn, made.key_digest)) == (ours, made)
    revoked = await store.write(lambda conn: tenancy.revoke(conn, ours.id, made.id, now=NOW + 1))
    assert revoked == replace(made, revoked_at=NOW + 1)
    assert await store.read(lambda conn: tenancy.by_key_digest(conn, made.key_digest)) is None
    again = await store.write(lambda conn: tenancy.revoke(conn, ours.id, made.id, now=NOW + 9))
    assert again == revoked, "the first time stays"


async def test_a_stranger_cannot_revoke(store: Store, ours: Team) -> None:
    theirs = team()
    made = client(ours)
    await store.write(lambda conn: tenancy.add_team(conn, theirs, now=NOW))
    await store.write(lambda conn: tenancy.add_client(conn, made))
    assert await store.write(lambda conn: tenancy.revoke(conn, theirs.id, made.id, now=NOW)) is None
    assert await store.read(lambda conn: tenancy.by_key_digest(conn, made.key_digest)) is not None
    assert list(await store.read(lambda conn: tenancy.clients_of(conn, theirs.id))) == []


async def test_team_names_are_unique(store: Store, ours: Team) -> None:
    assert await store.read(lambda conn: tenancy.team_by_name(conn, ours.name)) == ours
    assert await store.read(lambda conn: tenancy.team_by_name(conn, "nobody")) is None
    with pytest.raises(sa.exc.IntegrityError):
        await store.write(lambda conn: tenancy.add_team(conn, team(name=ours.name), now=NOW))


async def test_which_templates_a_team_may_use(store: Store, ours: Team) -> None:
    theirs = team()
    await store.write(lambda conn: tenancy.add_team(conn, theirs, now=NOW))
    rows = [
        template(name="a-everybody's", team_id=None, public=False),
        template(name="b-mine", team_id=ours.id, public=False),
        template(name="c-their-public", team_id=theirs.id, public=True),
        template(name="d-their-own", team_id=theirs.id, public=False),
    ]
    for row in rows:
        await store.write(lambda conn, row=row: tenancy.put_template(conn, row))  # type: ignore[misc]
    assert list(await store.read(lambda conn: tenancy.templates_for(conn, ours.id))) == rows[:3]


async def test_a_new_build_keeps_the_template_and_its_counts(store: Store) -> None:
    made = template()
    await store.write(lambda conn: tenancy.put_template(conn, made))
    await store.write(lambda conn: tenancy.spawned(conn, made.id, now=NOW + 5))
    await store.write(lambda conn: tenancy.put_template(conn, replace(made, image="sha256:new", updated_at=NOW + 9, created_at=NOW + 9)))
    (found,) = await store.read(lambda conn: tenancy.templates_for(conn, "anybody"))
    assert (found.image, found.created_at, found.updated_at) == ("sha256:new", NOW, NOW + 9)
    assert (found.spawn_count, found.last_spawned_at) == (1, NOW + 5)
