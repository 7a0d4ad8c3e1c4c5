"""Quotas under racers: counted in the commit that makes the sandbox, nobody passes them, on either store."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import sqlalchemy as sa

from atoll.base.errors import Code, Refused
from atoll.domain.deployment import ClientLimits, DeploymentLimits, TeamLimits
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.tenancy import Team
from atoll.planning.admission import Limits, Usage
from atoll.planning.stimuli import ReleaseRequested
from atoll.store import facts, sandboxes, tallies, tenancy
from atoll.store.engine import Store
from tests.builders import NOW, sandbox, team

NONE = Limits(ClientLimits(None, None), TeamLimits(None, None, None), DeploymentLimits(None, None, None, None, None))


async def create(store: Store, one: Sandbox, limits: Limits) -> Code | None:
    """As a create does it: admitted and accepted in one commit; the code of the refusal."""

    def work(conn: sa.Connection) -> None:
        tallies.admit(conn, team_id=one.team_id, client_id=one.client_id, limits=limits)
        facts.accept(conn, one, payload=None, event_id=f"evt_{one.id}")

    try:
        await store.write(work)
    except Refused as refused:
        return refused.code
    return None


async def release(store: Store, sandbox_id: str) -> None:
    """It was nowhere yet, so that its end is confirmed at once."""
    numbers = iter(range(100))
    await store.write(
        lambda conn: facts.advance_sandbox(conn, sandbox_id, ReleaseRequested(), now=NOW, ids=lambda: f"{sandbox_id}{next(numbers)}")
    )


async def usage(store: Store, of: Team, client: str = "cli_ours") -> Usage:
    return await store.read(lambda conn: tallies.usage(conn, team_id=of.id, client_id=client))


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (replace(NONE, client=ClientLimits(None, 7)), Code.CLIENT_SANDBOX_QUOTA),
        (replace(NONE, team=TeamLimits(None, 7, None)), Code.TEAM_SANDBOX_QUOTA),
        (replace(NONE, team=TeamLimits(None, None, 7)), Code.RECORDS_QUOTA),
        (replace(NONE, deployment=DeploymentLimits(None, 7, None)), Code.DEPLOYMENT_SANDBOX_QUOTA),
        (replace(NONE, deployment=DeploymentLimits(None, None, 7)), Code.DEPLOYMENT_RECORDS_QUOTA),
    ],
    ids=lambda value: value if isinstance(value, Code) else "",
)
async def test_of_forty_racers_as_many_as_there_is_room_for(store: Store, ours: Team, limits: Limits, code: Code) -> None:
    outcomes = await asyncio.gather(*(create(store, sandbox(team_id=ours.id), limits) for _ in range(40)))
    assert (outcomes.count(None), outcomes.count(code)) == (7, 33)
    assert await usage(store, ours) == Usage(7, 7, 7, 7, 7)


async def test_racers_of_many_teams_and_one_deployment(store: Store) -> None:
    teams = [team() for _ in range(5)]
    for one in teams:
        await store.write(lambda conn, one=one: tenancy.add_team(conn, one, now=NOW))
    limits = replace(NONE, deployment=DeploymentLimits(None, 11, None), team=TeamLimits(None, 4, None))
    outcomes = await asyncio.gather(*(create(store, sandbox(team_id=one.id, client_id=f"cli_{one.id}"), limits) for one in teams * 8))
    assert outcomes.count(None) == 11
    for one in teams:
        assert (await usage(store, one)).team_living <= 4


async def test_an_end_makes_room_and_keeps_its_record(store: Store, ours: Team) -> None:
    limits = replace(NONE, team=TeamLimits(None, 1, 2))
    first, second = sandbox(team_id=ours.id), sandbox(team_id=ours.id)
    assert await create(store, first, limits) is None
    assert await create(store, second, limits) is Code.TEAM_SANDBOX_QUOTA
    await release(store, first.id)
    await release(store, first.id)
    assert await usage(store, ours) == Usage(0, 0, 1, 0, 1), "ended twice, counted once"
    assert await create(store, second, limits) is None
    await release(store, second.id)
    assert await create(store, sandbox(team_id=ours.id), limits) is Code.RECORDS_QUOTA
    assert await store.write(lambda conn: sandboxes.prune(conn, released_before=NOW + 1)) == 2
    assert await usage(store, ours) == Usage(0, 0, 0, 0, 0)
    assert await create(store, sandbox(team_id=ours.id), limits) is None


async def test_creates_and_ends_in_a_crowd_count_what_the_rows_say(store: Store, ours: Team) -> None:
    """Far from the limit, where nobody waits for anybody."""

    async def life(number: int) -> None:
        one = sandbox(team_id=ours.id, client_id=f"cli_{number % 3}")
        assert await create(store, one, Limits()) is None
        if number % 2:
            await release(store, one.id)

    await asyncio.gather(*(life(n) for n in range(40)))
    before = [await usage(store, ours, f"cli_{n}") for n in range(3)]
    await store.write(tallies.recount)
    assert [await usage(store, ours, f"cli_{n}") for n in range(3)] == before
    assert (before[0].team_living, before[0].team_records) == (20, 40)


async def test_a_refusal_leaves_no_record_and_no_trace_in_the_tally(store: Store, ours: Team) -> None:
    nothing = replace(NONE, team=TeamLimits(None, 0, None))
    assert await create(store, sandbox(team_id=ours.id, request_id="r"), nothing) is Code.TEAM_SANDBOX_QUOTA
    assert await usage(store, ours) == Usage(0, 0, 0, 0, 0)
    assert await store.read(lambda conn: sandboxes.by_request(conn, ours.id, "r")) is None


async def test_a_create_that_fails_later_is_not_counted(store: Store, ours: Team) -> None:
    one = sandbox(team_id=ours.id, request_id="r")
    assert await create(store, one, NONE) is None
    with pytest.raises(sa.exc.IntegrityError):
        await create(store, sandbox(team_id=ours.id, request_id="r"), NONE)
    assert (await usage(store, ours)).team_records == 1


async def test_one_that_is_on_record_as_ended_does_not_live(store: Store, ours: Team) -> None:
    assert await create(store, sandbox(team_id=ours.id, state=State.FAILED), NONE) is None
    assert await usage(store, ours) == Usage(0, 0, 1, 0, 1)
