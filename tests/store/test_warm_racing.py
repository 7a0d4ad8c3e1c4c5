"""Two replicas with a pool of connections each race for the same warm guests on PostgreSQL, and for making them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import sqlalchemy as sa

from atoll.base.ids import Prefix, TemplateId
from atoll.domain.placement import Holding, Observed
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.tenancy import Team
from atoll.domain.warmth import OWN_CLIENT, OWN_TEAM, WarmPolicy
from atoll.planning.claiming import pool_of
from atoll.store import facts, hosts, payloads, rows, tenancy, warmth
from atoll.store.payloads import Sealed
from atoll.store.postgres import PostgresStore
from atoll.store.tables import PLACEMENTS, SANDBOXES
from tests.builders import NOW, fresh, host, placement, sandbox, spec, team

RACERS = 100
GUESTS = 7
SPEC = spec()
POOL = pool_of(SPEC)
POLICY = WarmPolicy(TemplateId(SPEC.template_id), SPEC.class_name, SPEC.cpu_millis, SPEC.memory_mib, SPEC.disk_mib, GUESTS, updated_at=NOW)


@pytest.fixture
async def ours(replicas: tuple[PostgresStore, PostgresStore]) -> Team:
    made = team()

    def work(conn: sa.Connection) -> None:
        tenancy.add_team(conn, made, now=NOW)
        warmth.put_policy(conn, POLICY)

    await replicas[0].write(work)
    return made


def ids() -> str:
    return fresh(Prefix.EVENT)


def ahead(**changes: object) -> Sandbox:
    return replace(sandbox(team_id=OWN_TEAM, spec=SPEC), client_id=OWN_CLIENT, claimable=POOL, **changes)  # type: ignore[arg-type]


async def made_ahead(store: PostgresStore) -> list[str]:
    """Guests that are ready, on one host."""
    machine = host()

    def work(conn: sa.Connection) -> list[str]:
        hosts.add(conn, machine, now=NOW)
        found: list[str] = []
        for _ in range(GUESTS):
            one = ahead(state=State.READY, started_at=NOW, end_at=NOW + 9999)
            facts.accept(conn, one, payload=Sealed(b"ahead", exposes=False), event_id=ids())
            place = replace(
                placement(one, host_id=machine.id),
                holding=Holding.ACTIVE,
                observed=Observed.RUNNING,
                ready=True,
                seq=1,
                applied_revision=1,
            )
            conn.execute(sa.insert(PLACEMENTS), rows.new_placement_values(place))
            conn.execute(sa.update(SANDBOXES).where(SANDBOXES.c.id == one.id).values(placement_id=place.id, host_id=machine.id))
            found.append(one.id)
        return found

    return await store.write(work)


async def test_a_hundred_creates_and_seven_guests(replicas: tuple[PostgresStore, PostgresStore], ours: Team) -> None:
    there = await made_ahead(replicas[0])

    async def create(number: int) -> str | None:
        wanted = sandbox(team_id=ours.id, spec=SPEC)
        among = there[number % GUESTS :] + there[: number % GUESTS]

        def work(conn: sa.Connection) -> facts.Committed | None:
            return warmth.claim(
                conn, wanted, among, payload=lambda _: (Sealed(f"of {number}".encode()), "d"), admit=lambda *_: None, now=NOW, ids=ids
            )

        done = await replicas[number % 2].write(work)
        return None if done is None else done.sandbox.id

    won = [one for one in await asyncio.gather(*map(create, range(RACERS))) if one is not None]
    assert sorted(won) == sorted(set(won)), "nobody gets what somebody else has"
    assert len(won) == GUESTS

    def look(conn: sa.Connection) -> tuple[set[str], set[int], set[bytes]]:
        found = conn.execute(sa.select(SANDBOXES.c.team_id, SANDBOXES.c.claimable).where(SANDBOXES.c.id.in_(there))).all()
        assert {row[1] for row in found} == {None}
        revisions = conn.execute(sa.select(PLACEMENTS.c.desired_revision)).scalars()
        kept = [payloads.get(conn, one) for one in there]
        return {row[0] for row in found}, set(revisions), {one.content for one in kept if one is not None}

    teams, revisions, contents = await replicas[1].read(look)
    assert teams == {ours.id}
    assert revisions == {2}
    assert len(contents) == GUESTS
    assert b"ahead" not in contents


async def test_replicas_that_make_guests_beside_each_other_make_no_more_than_are_wanted(
    replicas: tuple[PostgresStore, PostgresStore], ours: Team
) -> None:
    assert ours.id != OWN_TEAM

    async def make(number: int) -> bool:
        one = ahead()

        def work(conn: sa.Connection) -> bool:
            return warmth.accept(conn, one, policy, payload=Sealed(b"x", exposes=False), most=GUESTS, beside=(), event_id=ids())

        return await replicas[number % 2].write(work)

    (policy,) = await replicas[0].read(warmth.policies)
    made = await asyncio.gather(*map(make, range(40)))
    assert sum(made) == GUESTS
    assert len(await replicas[1].read(warmth.guests)) == GUESTS
    changed = await replicas[0].write(lambda conn: warmth.put_policy(conn, replace(POLICY, count=50)))
    assert changed.revision == 2
    assert not await make(0), "what was decided by an older policy is made no more"
