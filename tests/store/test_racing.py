"""Two replicas with a pool of connections each race for the same rows of PostgreSQL: capacity, order of locks, late writes.

Each race is one function, run as the program does it and once more with its protection taken away: there it must be seen to fail.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
import sqlalchemy as sa
from sqlalchemy.util import await_only

from atoll.base.errors import OutcomeUnknown, Unavailable
from atoll.base.ids import EpochId, Prefix
from atoll.base.units import ZERO, Vector
from atoll.domain.host import Admin, Host
from atoll.domain.operations import Alert, Raised, Severity
from atoll.domain.placement import Observed, Report
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.tenancy import Team
from atoll.planning.stimuli import Heard, ReleaseRequested
from atoll.store import facts, hosts, operations, postgres, schema, tenancy
from atoll.store.postgres import PostgresStore
from atoll.store.prepared import Prepared
from atoll.store.tables import EVENTS, HOSTS, PLACEMENTS
from tests.builders import NOW, fresh, host, placement, sandbox, spec, team
from tests.store.server import Server

RACERS = 100


@pytest.fixture
async def ours(replicas: tuple[PostgresStore, PostgresStore]) -> Team:
    made = team()
    await replicas[0].write(lambda conn: tenancy.add_team(conn, made, now=NOW))
    return made


def ids() -> str:
    return fresh(Prefix.EVENT)


async def waiting(store: PostgresStore, ours: Team, count: int) -> list[Sandbox]:
    made = [sandbox(team_id=ours.id, spec=spec()) for _ in range(count)]

    def work(conn: sa.Connection) -> None:
        for one in made:
            facts.accept(conn, one, payload=None, event_id=ids())

    await store.write(work)
    return made


async def race_for(replicas: tuple[PostgresStore, PostgresStore], ours: Team, machine: Host) -> Vector:
    """A hundred sandboxes ask one host, half through each replica, all at once; what it has granted in the end."""
    await replicas[0].write(lambda conn: hosts.add(conn, machine, now=NOW))
    racers = await waiting(replicas[0], ours, RACERS)

    async def ask(number: int, one: Sandbox) -> None:
        asked = placement(one, host_id=machine.id)
        await replicas[number % 2].write(lambda conn: facts.reserve(conn, one.id, asked, now=NOW, ids=ids))

    await asyncio.gather(*(ask(number, one) for number, one in enumerate(racers)))
    return await replicas[1].read(lambda conn: facts.used(conn, machine.id))


@pytest.mark.parametrize(
    ("capacity", "granted"),
    [
        (Vector(100_000, 100_000, 1_000_000, 1), 1),
        (Vector(100_000, 100_000, 1_000_000, 37), 37),
        (Vector(12_500, 100_000, 1_000_000, 64), 12),
        (Vector(100_000, 100_000, 1_000_000, 200), RACERS),
    ],
    ids=["one slot", "many slots", "cpu", "room for all"],
)
async def test_a_host_grants_what_it_has_and_no_more(
    replicas: tuple[PostgresStore, PostgresStore], ours: Team, capacity: Vector, granted: int
) -> None:
    used = await race_for(replicas, ours, host(capacity=capacity))
    assert used == Vector(1000 * granted, 512 * granted, 2048 * granted, granted)


async def test_without_the_lock_of_the_hosts_row_it_would_grant_more(
    replicas: tuple[PostgresStore, PostgresStore], ours: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write skew: each sees the last room, and takes it. That this is seen here shows that the test above can fail."""
    monkeypatch.setattr(facts, "_HOST_LOCKED", Prepared(sa.select(HOSTS).where(HOSTS.c.id == sa.bindparam("of_id"))))
    granted = []
    for _ in range(5):
        # On a busy machine one race may happen to be run one after another.
        granted.append((await race_for(replicas, ours, host(capacity=Vector(100_000, 100_000, 1_000_000, 1)))).slots)
        if granted[-1] > 1:
            return
    raise AssertionError(granted)


async def test_locks_are_taken_in_one_order(replicas: tuple[PostgresStore, PostgresStore], ours: Team) -> None:
    """Reservations, observations, releases and polls about the same host and sandboxes: no deadlock, and everything comes to its end."""
    machine = host(capacity=Vector(100_000, 100_000, 1_000_000, 20))
    await replicas[0].write(lambda conn: hosts.add(conn, machine, now=NOW))
    racers = await waiting(replicas[0], ours, 40)

    async def live(number: int, one: Sandbox) -> None:
        mine, other = replicas[number % 2], replicas[(number + 1) % 2]
        asked = placement(one, host_id=machine.id)
        done = await mine.write(lambda conn: facts.reserve(conn, one.id, asked, now=NOW, ids=ids))
        assert done is not None
        stimuli = [
            Heard(Report(1, Observed.RUNNING, 1, applied_revision=1, ready=True)),
            ReleaseRequested(),
            Heard(Report(2, Observed.ABSENT, 1), ended_by="exit"),
        ]
        await asyncio.gather(
            *(
                store.write(lambda conn, stimulus=stimulus: facts.advance_sandbox(conn, one.id, stimulus, now=NOW, ids=ids))  # type: ignore[misc]
                for stimulus in stimuli
                for store in (mine, other)
            ),
            mine.write(lambda conn: conn.execute(sa.update(HOSTS).where(HOSTS.c.id == machine.id).values(seen_at=NOW))),
        )

    await asyncio.gather(*(live(number, one) for number, one in enumerate(racers)))
    assert await replicas[0].read(lambda conn: facts.used(conn, machine.id)) == ZERO
    # The server's own count is told once a second.
    await asyncio.sleep(1.2)
    dead = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert await replicas[0].read(lambda conn: conn.exec_driver_sql(dead).scalar_one()) == 0


async def paused(replicas: tuple[PostgresStore, PostgresStore], ours: Team) -> tuple[facts.Committed, list[str]]:
    """A replica reads a placed sandbox to make it ready, stands still, and goes on after the other one has released it."""
    slow, quick = replicas
    machine = host()
    await slow.write(lambda conn: hosts.add(conn, machine, now=NOW))
    (one,) = await waiting(slow, ours, 1)
    asked = placement(one, host_id=machine.id)
    await slow.write(lambda conn: facts.reserve(conn, one.id, asked, now=NOW, ids=ids))
    read: list[int] = []

    def late(conn: sa.Connection) -> facts.Committed | None:
        known = facts.load(conn, one.id)
        assert known is not None
        read.append(known.sandbox.revision)
        if len(read) == 1:
            conn.exec_driver_sql("SELECT pg_sleep(0.4)")
        outcome = facts.advance(known, Heard(Report(1, Observed.RUNNING, 1, applied_revision=1, ready=True)), now=NOW)
        return None if outcome is None else facts.commit(conn, known, outcome, now=NOW, ids=ids)

    standing = asyncio.ensure_future(slow.write(late))
    while not read:
        await asyncio.sleep(0.01)
    await quick.write(lambda conn: facts.advance_sandbox(conn, one.id, ReleaseRequested(), now=NOW, ids=ids))
    await standing
    known = await quick.read(lambda conn: facts.load(conn, one.id))
    assert known is not None
    told = await quick.read(lambda conn: list(conn.execute(sa.select(EVENTS.c.type).order_by(EVENTS.c.seq)).scalars()))
    return facts.Committed(known.sandbox, known.placement, changed=False), told


async def test_a_late_write_of_a_replica_that_stood_still_applies_to_nothing(
    replicas: tuple[PostgresStore, PostgresStore], ours: Team
) -> None:
    now, told = await paused(replicas, ours)
    assert now.sandbox.state is State.RELEASING
    assert now.sandbox.started_at is None
    assert told == ["sandbox.accepted", "sandbox.placed", "sandbox.releasing"]


async def test_without_the_fence_the_late_write_would_win(
    replicas: tuple[PostgresStore, PostgresStore], ours: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the fences are for; and that the test above can fail."""
    by_id = facts.SANDBOXES.c.id == sa.bindparam("of_id")
    always = sa.bindparam("read", type_=sa.Integer) >= 0
    monkeypatch.setattr(facts, "_CHANGED_SANDBOX", Prepared(sa.update(facts.SANDBOXES).where(by_id, always)))
    unfenced = [sa.bindparam(name, type_=sa.Integer) >= 0 for name in ("of_seq", "of_desired")]
    unfenced.append(sa.bindparam("of_holding", type_=sa.Text) != "")
    monkeypatch.setattr(
        facts, "_CHANGED_PLACEMENT", Prepared(sa.update(PLACEMENTS).where(PLACEMENTS.c.id == sa.bindparam("of_id"), *unfenced))
    )
    now, told = await paused(replicas, ours)
    assert now.sandbox.state is State.READY
    assert told[-2:] == ["sandbox.releasing", "sandbox.ready"]


async def test_a_token_makes_one_host_whichever_replica_is_asked(replicas: tuple[PostgresStore, PostgresStore]) -> None:
    record = hosts.Enrollment("enr_1", "digest", "name", NOW, NOW + 60)
    await asyncio.gather(*(store.write(lambda conn: hosts.add_enrollment(conn, record)) for store in replicas * 10))

    def use(conn: sa.Connection) -> bool:
        token = hosts.enrollment_by_digest(conn, "digest")
        assert token is not None
        if token.used_at is not None:
            return False
        made = host(name="name")
        hosts.add(conn, made, now=NOW)
        hosts.use_enrollment(conn, token.id, host_id=made.id, form_digest="form", now=NOW)
        return True

    assert sum(await asyncio.gather(*(store.write(use) for store in replicas * 20))) == 1
    assert len(await replicas[0].read(hosts.all_hosts)) == 1


async def test_a_host_that_is_fenced_meanwhile_grants_nothing_more(replicas: tuple[PostgresStore, PostgresStore], ours: Team) -> None:
    a, b = replicas
    machine = host(capacity=Vector(100_000, 100_000, 1_000_000, 100))
    await a.write(lambda conn: hosts.add(conn, machine, now=NOW))
    racers = await waiting(a, ours, 30)

    def disable(conn: sa.Connection) -> None:
        current = hosts.by_id(conn, machine.id)
        assert current is not None
        hosts.save(conn, replace(current, admin=Admin.DISABLED), read=current)

    async def ask(number: int, one: Sandbox) -> None:
        if number == 15:
            await b.write(disable)
        asked = placement(one, host_id=machine.id)
        await replicas[number % 2].write(lambda conn: facts.reserve(conn, one.id, asked, now=NOW, ids=ids))

    await asyncio.gather(*(ask(number, one) for number, one in enumerate(racers)))
    granted = await a.read(lambda conn: facts.used(conn, machine.id))
    last = (await waiting(a, ours, 1))[0]
    done = await a.write(lambda conn: facts.reserve(conn, last.id, placement(last, host_id=machine.id), now=NOW, ids=ids))
    assert done is not None
    assert done.sandbox.state is State.RESERVING
    assert await b.read(lambda conn: facts.used(conn, machine.id)) == granted


async def test_polls_and_an_operator_s_words_lose_nothing_of_each_other(replicas: tuple[PostgresStore, PostgresStore]) -> None:
    """One replica hears polls, the other one drains and activates: in the end both have been written."""
    a, b = replicas
    machine = host(epoch=EpochId("epo_1"))
    await a.write(lambda conn: hosts.add(conn, machine, now=NOW))

    async def hear() -> None:
        for number in range(1, 61):
            await a.write(
                lambda conn, seq=number: hosts.polled(conn, machine, poll_seq=seq, seen_at=NOW + seq, lease_until=NOW + 300 + seq)
            )  # type: ignore[misc]

    def turn(conn: sa.Connection) -> None:
        current = hosts.by_id(conn, machine.id)
        assert current is not None
        other = Admin.DRAINING if current.admin is Admin.ACTIVE else Admin.ACTIVE
        conn.execute(sa.text("SELECT pg_sleep(0.002)"))
        hosts.save(conn, replace(current, admin=other), read=current)

    async def operate() -> None:
        for _ in range(31):
            await b.write(turn)

    await asyncio.gather(hear(), operate())
    found = await b.read(lambda conn: hosts.by_id(conn, machine.id))
    assert found is not None
    assert (found.admin, found.revision) == (Admin.DRAINING, 32)
    assert (found.poll_seq, found.seen_at, found.lease_until) == (60, NOW + 60, NOW + 360)


SLOW_COMMIT = """
CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON teams DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slowly()
"""


async def test_a_commit_whose_answer_is_lost_is_told_as_unknown(replicas: tuple[PostgresStore, PostgresStore]) -> None:
    """Neither "nothing was changed" nor "done" would be true."""
    a, b = replicas
    for statement in SLOW_COMMIT.split(";\n"):
        await a.write(lambda conn, statement=statement: conn.exec_driver_sql(statement))  # type: ignore[misc]
    made = team()
    pids: list[int] = []

    def work(conn: sa.Connection) -> None:
        pids.append(conn.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
        tenancy.add_team(conn, made, now=NOW)

    writing = asyncio.ensure_future(a.write(work))
    while not pids:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await b.read(lambda conn: conn.exec_driver_sql(f"SELECT pg_terminate_backend({pids[0]})").scalar_one())
    with pytest.raises(OutcomeUnknown):
        await writing
    # And the store goes on.
    assert await a.read(lambda conn: tenancy.team_by_name(conn, made.name)) is None


async def test_a_database_that_is_away_is_said_to_be(replicas: tuple[PostgresStore, PostgresStore]) -> None:
    a, b = replicas
    pids: list[int] = []

    def work(conn: sa.Connection) -> None:
        pids.append(conn.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
        conn.exec_driver_sql("SELECT pg_sleep(5)")

    writing = asyncio.ensure_future(a.write(work))
    while not pids:
        await asyncio.sleep(0.01)
    await b.read(lambda conn: conn.exec_driver_sql(f"SELECT pg_terminate_backend({pids[0]})").scalar_one())
    with pytest.raises(Unavailable):
        await writing
    assert await a.read(hosts.all_hosts) == []


async def test_a_caller_that_goes_away_cuts_off_no_decision(replicas: tuple[PostgresStore, PostgresStore]) -> None:
    a, b = replicas
    made = team()

    def work(conn: sa.Connection) -> None:
        tenancy.add_team(conn, made, now=NOW)
        conn.exec_driver_sql("SELECT pg_sleep(0.3)")

    writing = asyncio.ensure_future(a.write(work))
    await asyncio.sleep(0.1)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    async with asyncio.timeout(5):
        while await b.read(lambda conn: tenancy.team_by_name(conn, made.name)) is None:
            await asyncio.sleep(0.02)


async def test_an_alert_that_all_replicas_see_at_once_is_told_once(replicas: tuple[PostgresStore, PostgresStore]) -> None:
    wanted = [Raised(Alert.HOST_LOST, "hst_one", Severity.WARNING, "not heard of")]
    ready = asyncio.Barrier(2)

    async def look(store: PostgresStore, found: list[Raised]) -> tuple[int, int]:
        tries = 0

        def work(conn: sa.Connection) -> tuple[int, int]:
            nonlocal tries
            tries += 1
            operations.open_alerts(conn)
            if tries == 1:
                await_only(ready.wait())
            raised, cleared = operations.keep_alerts(conn, found, now=NOW, ids=lambda: fresh(Prefix.ALERT))
            if tries == 1:
                await_only(asyncio.sleep(0.1))
            return len(raised), len(cleared)

        return await store.write(work)

    assert sorted(await asyncio.gather(*(look(store, wanted) for store in replicas))) == [(0, 0), (1, 0)]
    assert sorted(await asyncio.gather(*(look(store, []) for store in replicas))) == [(0, 0), (0, 1)]


async def stands_still(server: Server, monkeypatch: pytest.MonkeyPatch, *, idle_s: float) -> tuple[bool, str]:
    """A replica is frozen between two statements, with a host's row locked: whether another one gets on, and what the first is told."""
    monkeypatch.setattr(postgres, "IDLE_S", idle_s)
    url = await server.database()
    frozen, other = PostgresStore(url, dice=os.urandom), PostgresStore(url, dice=os.urandom)
    try:
        await other.write(schema.migrate)
        machine = host()
        await other.write(lambda conn: hosts.add(conn, machine, now=NOW))

        def work(conn: sa.Connection) -> None:
            found = hosts.locked(conn, machine.id)
            assert found is not None
            await_only(asyncio.sleep(2.0))
            hosts.save(conn, replace(found, region="late"), read=found)

        freezing = asyncio.ensure_future(frozen.write(work))
        await asyncio.sleep(0.2)
        renewing = asyncio.ensure_future(other.write(lambda conn: hosts.save(conn, replace(machine, region="now"), read=machine)))
        done, _ = await asyncio.wait({renewing}, timeout=1.2)
        errors = await asyncio.gather(freezing, renewing, return_exceptions=True)
        told = str(getattr(errors[0], "code", "done"))
        kept = await other.read(lambda conn: hosts.by_id(conn, machine.id))
        assert kept is not None
        return bool(done), f"{told}, {kept.region}"
    finally:
        await frozen.close()
        await other.close()


async def test_a_frozen_replica_keeps_no_rows_from_the_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its late write applies to nothing."""
    assert await stands_still(server, monkeypatch, idle_s=0.4) == (True, "STORE_UNAVAILABLE, now")


async def test_without_that_limit_everybody_waits_for_a_frozen_replica(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    got_on, _ = await stands_still(server, monkeypatch, idle_s=60.0)
    assert not got_on
