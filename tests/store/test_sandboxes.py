"""Looking at sandboxes: pages, filters, order, counts, deadlines, history, retention."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import sqlalchemy as sa

from atoll.base.ids import Prefix
from atoll.domain.host import Host
from atoll.domain.placement import Observed, Report
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.tenancy import Team
from atoll.planning.admission import Usage
from atoll.planning.stimuli import Heard, ReleaseRequested
from atoll.store import facts, hosts, sandboxes, tallies, tenancy
from atoll.store.engine import SqliteStore, Store
from atoll.store.sandboxes import LIVING_STATES, VISIBLE, Filter
from atoll.store.tables import EVENTS, PLACEMENTS, SANDBOXES
from tests.builders import NOW, fresh, placement, spec, team

Put = Callable[..., Awaitable[Sandbox]]


def ids() -> str:
    return fresh(Prefix.EVENT)


async def ask(store: Store, of: Team, states: tuple[str, ...] = VISIBLE, **options: object) -> list[str]:
    wanted = Filter(team_id=of.id, states=states, **options)  # type: ignore[arg-type]
    return [found.id for found in await store.read(lambda conn: sandboxes.find(conn, wanted))]


async def test_what_is_visible() -> None:
    assert set(VISIBLE) == {"ready", "pausing", "paused", "suspending", "suspended", "stopping", "stopped", "resuming"}
    assert set(LIVING_STATES) == {state.value for state in State} - {"released", "failed"}


@pytest.mark.parametrize("ascending", [True, False])
async def test_pages_cover_everything_once_in_order(store: Store, put: Put, ours: Team, ascending: bool) -> None:
    """Also where many started in the same moment: the id decides."""
    made = [await put(state=State.READY, started_at=NOW + (n // 4)) for n in range(21)]
    expected = sorted(made, key=lambda s: (s.started_at or 0, s.id), reverse=not ascending)
    seen: list[str] = []
    after: tuple[float, str] | None = None
    while True:
        wanted = Filter(team_id=ours.id, states=VISIBLE, ascending=ascending, limit=5, after=after)
        page = list(await store.read(lambda conn, wanted=wanted: sandboxes.find(conn, wanted)))  # type: ignore[misc]
        assert len(page) <= 6
        seen += [found.id for found in page[:5]]
        if len(page) <= 5:
            break
        after = (page[4].started_at or 0.0, page[4].id)
    assert seen == [s.id for s in expected]


async def test_a_page_goes_on_where_it_ended_although_others_come_and_go(store: Store, put: Put, ours: Team) -> None:
    made = [await put(state=State.READY, started_at=NOW + n) for n in range(6)]
    first = await ask(store, ours, limit=3)
    assert first[:3] == [made[5].id, made[4].id, made[3].id]
    await put(state=State.READY, started_at=NOW + 99)
    await store.write(lambda conn: facts.advance_sandbox(conn, made[3].id, ReleaseRequested(), now=NOW, ids=ids))
    assert await ask(store, ours, limit=3, after=(NOW + 3, made[3].id)) == [made[2].id, made[1].id, made[0].id]


async def test_filters(store: Store, put: Put, ours: Team) -> None:
    a = await put(state=State.READY, started_at=NOW, metadata={"user": "ann", "app": "x"}, spec=spec(template_id="t1"))
    b = await put(state=State.PAUSED, started_at=NOW + 10, metadata={"user": "bob", "app": "x"})
    c = await put(state=State.READY, started_at=NOW + 20, metadata={"user": 'quo"te\\', "dotted.key": "1", "$": "dollar"})
    assert await ask(store, ours, metadata={"app": "x"}) == [b.id, a.id]
    assert await ask(store, ours, metadata={"app": "x", "user": "ann"}) == [a.id]
    assert await ask(store, ours, metadata={"user": 'quo"te\\'}) == [c.id]
    assert await ask(store, ours, metadata={"dotted.key": "1"}) == [c.id]
    assert await ask(store, ours, metadata={"$": "dollar"}) == [c.id]
    assert await ask(store, ours, metadata={"nobody": "has"}) == []
    assert await ask(store, ours, ("paused",)) == [b.id]
    assert await ask(store, ours, template_id="t1") == [a.id]
    assert await ask(store, ours, started_after=NOW + 10) == [c.id, b.id]
    assert await ask(store, ours, ()) == []


@pytest.mark.parametrize("key", ['a"b', "a'b", "a\\b", "ключ", "a b", "[0]", "a.b.c", "%", "x" * 300])
async def test_metadata_keys_of_any_kind_can_be_asked_for(store: Store, put: Put, ours: Team, key: str) -> None:
    made = await put(state=State.READY, started_at=NOW, metadata={key: "v"})
    await put(state=State.READY, started_at=NOW, metadata={key + "x": "v"})
    assert await ask(store, ours, metadata={key: "v"}) == [made.id]


async def test_a_team_sees_its_own(store: Store, put: Put, ours: Team) -> None:
    theirs = team()
    await store.write(lambda conn: tenancy.add_team(conn, theirs, now=NOW))
    mine = await put(state=State.READY, started_at=NOW)
    await put(state=State.READY, started_at=NOW, team_id=theirs.id, metadata={"a": "b"})
    assert await ask(store, ours) == [mine.id]
    assert await store.read(lambda conn: sandboxes.running(conn, sandboxes.Filter(ours.id, states=()))) == 1
    assert await store.read(lambda conn: sandboxes.by_request(conn, theirs.id, "r")) is None


async def test_running_ones_are_counted_by_the_filter(store: Store, put: Put, ours: Team) -> None:
    for number in range(3):
        await put(state=State.READY, started_at=NOW + number, metadata={"n": str(number % 2)})
    await put(state=State.PAUSED, started_at=NOW, metadata={"n": "0"})
    for changes, count in (({}, 3), ({"metadata": {"n": "0"}}, 2), ({"started_after": NOW + 2}, 1), ({"limit": 1, "after": (NOW, "i")}, 3)):
        wanted = sandboxes.Filter(ours.id, **{"states": [State.PAUSED.value], **changes})
        assert await store.read(lambda conn, wanted=wanted: sandboxes.running(conn, wanted)) == count


async def test_what_admission_counts(store: Store, put: Put, ours: Team) -> None:
    theirs = team()
    await store.write(lambda conn: tenancy.add_team(conn, theirs, now=NOW))
    for state in (State.PENDING, State.READY, State.RELEASING):
        await put(state=state)
    await put(state=State.READY, team_id=theirs.id)
    for state in (State.RELEASED, State.FAILED):
        await put(state=state, released_at=NOW)
    await put(state=State.READY, client_id="cli_second")
    assert await counted(store, ours) == Usage(4, 4, 6, 5, 7)


async def test_what_is_forgotten_is_counted_no_more(store: Store, put: Put, ours: Team) -> None:
    for number in range(20):
        await put(state=State.RELEASED, released_at=NOW - number)
    await put(state=State.READY)
    assert await counted(store, ours) == Usage(1, 1, 21, 1, 21)
    assert await store.write(lambda conn: sandboxes.prune(conn, released_before=NOW - 4)) == 15
    assert await counted(store, ours) == Usage(1, 1, 6, 1, 6)
    await store.write(tallies.recount)
    assert await counted(store, ours) == Usage(1, 1, 6, 1, 6), "what the rows say"


async def counted(store: Store, of: Team) -> Usage:
    return await store.read(lambda conn: tallies.usage(conn, team_id=of.id, client_id="cli_ours"))


async def test_deadlines_come_in_order(store: Store, put: Put) -> None:
    second = await put(state=State.PROVISIONING, deadline_at=NOW + 2)
    first = await put(state=State.PENDING, deadline_at=NOW + 1)
    await put(state=State.READY)
    await put(state=State.RELEASED, released_at=NOW)
    assert await store.read(sandboxes.next_deadline) == NOW + 1
    assert await store.read(lambda conn: sandboxes.due(conn, now=NOW)) == []
    assert await store.read(lambda conn: sandboxes.due(conn, now=NOW + 2)) == [first.id, second.id]
    assert await store.read(lambda conn: sandboxes.due(conn, now=NOW + 2, limit=1)) == [first.id]


async def test_no_deadline_at_all(store: Store, put: Put) -> None:
    await put(state=State.READY)
    assert await store.read(sandboxes.next_deadline) is None


@pytest.mark.parametrize("look", [sandboxes.next_deadline, lambda conn: sandboxes.due(conn, now=NOW)], ids=["next", "due"])
async def test_idle_sandboxes_are_not_read_to_find_a_deadline(sqlite: SqliteStore, look: Callable[[sa.Connection], object]) -> None:
    """50,000 of them would otherwise cost something at every tick."""
    statements: list[tuple[str, object]] = []
    sa.event.listen(
        sqlite._reader_engine, "before_cursor_execute", lambda c, cur, sql, parameters, *rest: statements.append((sql, parameters))
    )
    await sqlite.read(look)
    (sql, parameters), *_ = statements
    plan = await sqlite.read(lambda conn: [str(row[3]) for row in conn.exec_driver_sql(f"explain query plan {sql}", parameters)])
    assert len(plan) == 1, plan
    assert "USING COVERING INDEX ix_sandboxes_deadline_at" in plan[0] or "USING INDEX ix_sandboxes_deadline_at" in plan[0]


async def test_a_request_can_be_forgotten(store: Store, put: Put, ours: Team) -> None:
    made = await put(request_id="r1", request_digest="d")
    assert (await store.read(lambda conn: sandboxes.by_request(conn, ours.id, "r1"))) == made
    await store.write(lambda conn: sandboxes.forget_request(conn, made.id))
    assert await store.read(lambda conn: sandboxes.by_request(conn, ours.id, "r1")) is None
    await put(request_id="r1")


async def placed(store: Store, of: Sandbox, on: Host) -> str:
    asked = placement(of, host_id=on.id)
    await store.write(lambda conn: facts.reserve(conn, of.id, asked, now=NOW, ids=ids))
    return asked.id


async def test_what_traffic_can_reach(store: Store, put: Put, machine: Host) -> None:
    made, waiting = await put(), await put()
    first = await placed(store, made, machine)
    await placed(store, waiting, machine)
    ready = Heard(Report(1, Observed.RUNNING, 1, applied_revision=1, ready=True, address="10.64.0.2"))
    await store.write(lambda conn: facts.advance_sandbox(conn, made.id, ready, now=NOW, ids=ids))
    found = await store.read(sandboxes.reachable)
    assert [(s.id, p.id, p.address) for s, p in found] == [(made.id, first, "10.64.0.2")]


async def test_history_is_read_in_order_and_in_pages(store: Store, put: Put, machine: Host) -> None:
    made = await put()
    await placed(store, made, machine)
    await store.write(lambda conn: facts.advance_sandbox(conn, made.id, ReleaseRequested(), now=NOW, ids=ids))
    await put()
    events = await store.read(lambda conn: sandboxes.events_of(conn, made, after=0, limit=10))
    assert [e["type"] for e in events] == ["sandbox.accepted", "sandbox.placed", "sandbox.releasing"]
    rest = await store.read(lambda conn: sandboxes.events_of(conn, made, after=events[0]["seq"], limit=1))
    assert [e["type"] for e in rest] == ["sandbox.placed"]


async def test_retention_forgets_the_ended_and_nothing_else(store: Store, put: Put, machine: Host) -> None:
    old = await put()
    await placed(store, old, machine)
    for stimulus in (ReleaseRequested(), Heard(Report(1, Observed.ABSENT, 1), "command")):
        await store.write(lambda conn, s=stimulus: facts.advance_sandbox(conn, old.id, s, now=NOW, ids=ids))  # type: ignore[misc]
    await put(state=State.RELEASED, released_at=NOW + 100)
    living = await put(state=State.READY)
    assert await store.write(lambda conn: sandboxes.prune(conn, released_before=NOW)) == 0
    assert await store.write(lambda conn: sandboxes.prune(conn, released_before=NOW + 1)) == 1

    def rest(conn: sa.Connection) -> tuple[int, int, int]:
        return tuple(  # type: ignore[return-value]
            conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() for table in (SANDBOXES, PLACEMENTS, EVENTS)
        )

    assert await store.read(rest) == (2, 0, 2)
    assert await store.read(lambda conn: sandboxes.get(conn, old.id)) is None
    assert await store.read(lambda conn: sandboxes.get(conn, living.id)) is not None
    assert await store.read(lambda conn: hosts.placements_held(conn, machine.id)) == 0


async def test_retention_goes_in_small_steps(store: Store, put: Put) -> None:
    for n in range(5):
        await put(state=State.FAILED, released_at=NOW + n)
    steps = [await store.write(lambda conn: sandboxes.prune(conn, released_before=NOW + 99, limit=2)) for _ in range(4)]
    assert steps == [2, 2, 1, 0]
