"""The commits of a sandbox: state, holding and event in one, fenced by revision; capacity granted by the host's record alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import sqlalchemy as sa

from atoll.base.errors import Unavailable
from atoll.base.ids import HostId, Prefix
from atoll.base.units import ZERO, Vector
from atoll.domain.command import Kind
from atoll.domain.host import Admin, Host
from atoll.domain.placement import Holding, Observed, Placement, Report
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.tenancy import Team
from atoll.planning.stimuli import Heard, NoRoom, ReleaseRequested, Stimulus, Tick
from atoll.store import facts, hosts, payloads, rows, tenancy
from atoll.store.engine import Stale, Store
from atoll.store.payloads import Sealed
from atoll.store.tables import EVENTS, PAYLOADS, PLACEMENTS, SANDBOXES
from tests.builders import NOW, fresh, host, placement, sandbox, spec, team

Put = Callable[..., Awaitable[Sandbox]]


def ids() -> str:
    return fresh(Prefix.EVENT)


async def reserve(store: Store, of: Sandbox, on: Host, *, now: float = NOW, made: Placement | None = None) -> facts.Committed:
    asked = made or placement(of, host_id=on.id)
    done = await store.write(lambda conn: facts.reserve(conn, of.id, asked, now=now, ids=ids))
    assert done is not None
    return done


async def hear(store: Store, done: facts.Committed, observed: Observed, *, now: float = NOW, **changes: object) -> facts.Committed:
    assert done.placement is not None
    report = Report(done.placement.seq + 1, observed, done.placement.generation, **changes)  # type: ignore[arg-type]
    heard = await store.write(
        lambda conn: facts.advance_sandbox(conn, done.sandbox.id, Heard(report, ended_by="command"), now=now, ids=ids)
    )
    assert heard is not None
    return heard


async def test_accepting_writes_sandbox_payload_and_event_in_one_commit(store: Store, ours: Team) -> None:
    made = sandbox(team_id=ours.id, request_id="r1", request_digest="d1", metadata={"a": "ü"}, deadline_at=NOW)
    await store.write(lambda conn: facts.accept(conn, made, payload=Sealed(b"sealed"), event_id=ids()))
    loaded = await store.read(lambda conn: facts.load(conn, made.id))
    assert loaded is not None
    assert loaded.sandbox == made
    assert loaded.placement is None
    assert await store.read(lambda conn: payloads.get(conn, made.id)) == Sealed(b"sealed", exposes=True)
    kinds = await store.read(lambda conn: conn.execute(sa.select(EVENTS.c.type, EVENTS.c.state)).all())
    assert kinds == [("sandbox.accepted", "pending")]


async def test_a_second_sandbox_of_one_request_leaves_nothing(store: Store, put: Put, ours: Team) -> None:
    await put(request_id="r1")
    again = sandbox(team_id=ours.id, request_id="r1")
    with pytest.raises(sa.exc.IntegrityError):
        await store.write(lambda conn: facts.accept(conn, again, payload=Sealed(b"sealed"), event_id=ids()))
    assert await store.read(lambda conn: facts.load(conn, again.id)) is None
    assert await store.read(lambda conn: conn.execute(sa.select(sa.func.count()).select_from(PAYLOADS)).scalar_one()) == 0
    assert await store.read(lambda conn: conn.execute(sa.select(sa.func.count()).select_from(EVENTS)).scalar_one()) == 1


async def test_two_teams_may_use_one_request_id(store: Store, put: Put) -> None:
    theirs = team()
    await store.write(lambda conn: tenancy.add_team(conn, theirs, now=NOW))
    await put(request_id="r1")
    await put(request_id="r1", team_id=theirs.id)


async def test_a_reservation_places_and_holds(store: Store, put: Put, machine: Host) -> None:
    made = await put()
    done = await reserve(store, made, machine)
    assert done.changed
    assert done.capacity_changed
    assert done.sandbox.state is State.PROVISIONING
    assert done.sandbox.revision == made.revision + 1
    assert await store.read(lambda conn: facts.used(conn, machine.id)) == Vector(1000, 512, 2048, 1)
    loaded = await store.read(lambda conn: facts.load(conn, made.id))
    assert loaded is not None
    assert (loaded.sandbox, loaded.placement) == (done.sandbox, done.placement)


async def test_a_repeated_reservation_changes_nothing(store: Store, put: Put, machine: Host) -> None:
    made = await put()
    first = await reserve(store, made, machine)
    second = await reserve(store, made, machine)
    assert not second.changed
    assert second.placement == first.placement
    assert await store.read(lambda conn: facts.used(conn, machine.id)) == Vector(1000, 512, 2048, 1)


async def test_one_room_is_granted_once_to_a_hundred_racers(store: Store, put: Put) -> None:
    small = host(capacity=Vector(16_000, 8192, 65_536, 1))
    await store.write(lambda conn: hosts.add(conn, small, now=NOW))
    racers = [await put() for _ in range(100)]
    results = await asyncio.gather(*(reserve(store, racer, small) for racer in racers))
    granted = [done for done in results if done.sandbox.state is State.PROVISIONING]
    refused = [done for done in results if done.sandbox.state is State.RESERVING]
    assert len(granted) == 1
    assert len(refused) == 99
    assert all(done.sandbox.tried_hosts == (small.id,) for done in refused)
    assert await store.read(lambda conn: facts.used(conn, small.id)) == Vector(1000, 512, 2048, 1)
    told = await store.read(lambda conn: conn.execute(sa.select(EVENTS.c.data).where(EVENTS.c.type == "sandbox.host_refused")).all())
    assert {row[0]["code"] for row in told} == {"INSUFFICIENT_SLOTS"}


async def test_one_sandbox_gets_one_of_a_hundred_hosts(store: Store, put: Put) -> None:
    made = await put()
    many = [host() for _ in range(100)]
    for one in many:
        await store.write(lambda conn, one=one: hosts.add(conn, one, now=NOW))  # type: ignore[misc]
    results = await asyncio.gather(*(reserve(store, made, one) for one in many))
    assert sum(done.changed for done in results) == 1
    assert await store.read(lambda conn: conn.execute(sa.select(sa.func.count()).select_from(PLACEMENTS)).scalar_one()) == 1


@pytest.mark.parametrize("admin", [Admin.DRAINING, Admin.DISABLED])
async def test_a_host_that_is_not_active_refuses(store: Store, put: Put, admin: Admin) -> None:
    closed = host(admin=admin)
    await store.write(lambda conn: hosts.add(conn, closed, now=NOW))
    done = await reserve(store, await put(), closed)
    assert done.sandbox.state is State.RESERVING
    assert await store.read(lambda conn: facts.used(conn, closed.id)) == ZERO


async def test_a_host_that_is_gone_refuses(store: Store, put: Put) -> None:
    done = await reserve(store, await put(), host(id=HostId("hst_gone")))
    assert done.sandbox.tried_hosts == ("hst_gone",)


async def test_capacity_comes_back_with_absence_and_not_before(store: Store, put: Put, machine: Host) -> None:
    placed = await reserve(store, await put(), machine)
    ready = await hear(store, placed, Observed.RUNNING, ready=True, applied_revision=1)
    assert ready.sandbox.state is State.READY
    ending = await store.write(lambda conn: facts.advance_sandbox(conn, ready.sandbox.id, ReleaseRequested(), now=NOW, ids=ids))
    assert ending is not None
    assert ending.placement is not None
    assert ending.placement.desired is Kind.ENSURE_ABSENT
    assert await store.read(lambda conn: facts.used(conn, machine.id)) == Vector(1000, 512, 2048, 1)
    late = await store.write(lambda conn: facts.advance_sandbox(conn, ready.sandbox.id, Tick(), now=NOW + 1e6, ids=ids))
    assert late is not None
    assert await store.read(lambda conn: facts.used(conn, machine.id)) == Vector(1000, 512, 2048, 1), "time alone gave it back"
    gone = await hear(store, late, Observed.ABSENT)
    assert gone.sandbox.state is State.RELEASED
    assert gone.capacity_changed
    assert await store.read(lambda conn: facts.used(conn, machine.id)) == ZERO


async def test_the_payload_goes_with_the_end(store: Store, ours: Team) -> None:
    made = sandbox(team_id=ours.id)
    await store.write(lambda conn: facts.accept(conn, made, payload=Sealed(b"sealed"), event_id=ids()))
    await store.write(lambda conn: facts.advance_sandbox(conn, made.id, ReleaseRequested(), now=NOW, ids=ids))
    assert await store.read(lambda conn: payloads.get(conn, made.id)) is None


async def test_a_stale_revision_changes_nothing(store: Store, put: Put) -> None:
    """The fence: whoever decided on an older row is refused, with all that he wanted to write beside it."""
    made = await put()
    stale = await store.read(lambda conn: facts.load(conn, made.id))
    assert stale is not None
    await store.write(lambda conn: facts.advance_sandbox(conn, made.id, NoRoom("none"), now=NOW, ids=ids))

    def commit_stale(conn: sa.Connection) -> None:
        outcome = facts.advance(stale, ReleaseRequested(), now=NOW)
        assert outcome is not None
        facts.commit(conn, stale, outcome, now=NOW, ids=ids)

    with pytest.raises((Stale, Unavailable)):
        await store.write(commit_stale)
    loaded = await store.read(lambda conn: facts.load(conn, made.id))
    assert loaded is not None
    assert loaded.sandbox.state is State.PENDING
    assert loaded.sandbox.revision == made.revision + 1
    kinds = await store.read(lambda conn: list(conn.execute(sa.select(EVENTS.c.type)).scalars()))
    assert kinds == ["sandbox.accepted", "sandbox.no_eligible_host"]


async def test_every_commit_raises_the_revision_by_one(store: Store, put: Put, machine: Host) -> None:
    placed = await reserve(store, await put(), machine)
    ready = await hear(store, placed, Observed.RUNNING, applied_revision=1, ready=True)
    ending = await store.write(lambda conn: facts.advance_sandbox(conn, ready.sandbox.id, ReleaseRequested(), now=NOW, ids=ids))
    assert ending is not None
    gone = await hear(store, ending, Observed.ABSENT)
    assert [done.sandbox.revision for done in (placed, ready, ending, gone)] == [2, 3, 4, 5]


async def test_concurrent_stimuli_are_decided_one_after_another(store: Store, put: Put, machine: Host) -> None:
    """A release, a ready and an absence at once: some order, one end, the capacity given back once."""
    for _ in range(20):
        placed = await reserve(store, await put(spec=spec(cpu_millis=50, memory_mib=32)), machine)
        assert placed.placement is not None
        generation, sandbox_id = placed.placement.generation, placed.sandbox.id
        stimuli: list[Stimulus] = [
            ReleaseRequested(),
            Heard(Report(1, Observed.RUNNING, generation, applied_revision=1, ready=True)),
            Heard(Report(2, Observed.ABSENT, generation), ended_by="exit"),
            ReleaseRequested(failing=True),
        ]
        loaded = await apply_at_once(store, sandbox_id, stimuli)
        assert loaded is not None
        assert loaded.sandbox.state in (State.RELEASED, State.FAILED)
        # An absence before the guest was ready leaves a sandbox without placement for the release that comes after it.
        assert loaded.placement is None or loaded.placement.holding is Holding.NONE
    assert await store.read(lambda conn: facts.used(conn, machine.id)) == ZERO


async def apply_at_once(store: Store, sandbox_id: str, stimuli: list[Stimulus]) -> facts.Facts | None:
    def apply(stimulus: Stimulus) -> Callable[[sa.Connection], object]:
        return lambda conn: facts.advance_sandbox(conn, sandbox_id, stimulus, now=NOW, ids=ids)

    await asyncio.gather(*(store.write(apply(stimulus)) for stimulus in stimuli))
    return await store.read(lambda conn: facts.load(conn, sandbox_id))


async def test_an_unknown_sandbox_is_none_everywhere(store: Store, machine: Host) -> None:
    ghost = sandbox()
    assert await store.read(lambda conn: facts.load(conn, ghost.id)) is None
    assert await store.write(lambda conn: facts.advance_sandbox(conn, ghost.id, Tick(), now=NOW, ids=ids)) is None
    asked = placement(ghost, host_id=machine.id)
    assert await store.write(lambda conn: facts.reserve(conn, ghost.id, asked, now=NOW, ids=ids)) is None
    assert await store.read(lambda conn: facts.used(conn, machine.id)) == ZERO


async def test_a_long_detail_is_cut_not_refused(store: Store, put: Put) -> None:
    made = await put()
    await store.write(
        lambda conn: facts.advance_sandbox(conn, made.id, ReleaseRequested("START_FAILED", detail="x" * 50_000), now=NOW, ids=ids)
    )
    kept = await store.read(lambda conn: conn.execute(sa.select(sa.func.length(SANDBOXES.c.detail))).scalar_one())
    assert kept == 2000


async def test_paused_holdings_count_less(store: Store, put: Put, machine: Host) -> None:
    placed = await reserve(store, await put(), machine)
    assert placed.placement is not None
    paused = replace(placed.placement, holding=Holding.PAUSED)
    await store.write(
        lambda conn: conn.execute(sa.update(PLACEMENTS).where(PLACEMENTS.c.id == paused.id).values(rows.placement_values(paused)))
    )
    assert await store.read(lambda conn: facts.used(conn, machine.id)) == Vector(0, 512, 2048, 1)
