"""Audit, alerts and the deployment's events, on both stores."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import sqlalchemy as sa

from atoll.domain.operations import Act, Action, Actor, Alert, Raised, Severity
from atoll.domain.sandbox import Condition, State
from atoll.store import operations
from atoll.store.engine import Store
from atoll.store.operations import AlertRow, AuditFilter, EventFilter, Told
from atoll.store.tables import ALERTS, AUDIT, EVENTS
from tests.builders import NOW
from tests.store.conftest import count

DRAINED = Told("host.drained", "draining", host_id="hst_one")
US = Actor("tea_ours", "cli_ours", "192.0.2.1", "r1")


def lost(subject: str = "hst_one", severity: Severity = Severity.CRITICAL, detail: str = "not heard of") -> Raised:
    return Raised(Alert.HOST_LOST, subject, severity, detail)


def numbered() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"alr_{next(numbers)}"


async def test_an_entry_keeps_who_did_what_from_where(store: Store) -> None:
    act = Act(US, Action.KEY_CREATE, "cli_new", data={"name": "ci", "role": "member"})
    await store.write(lambda conn: operations.audit(conn, act, at=NOW))
    (row,) = await store.read(lambda conn: operations.audited(conn, AuditFilter(), after=0, limit=10))
    assert {name: row[name] for name in ("action", "subject", "result", "team_id", "client_id", "address", "request_id", "at", "data")} == {
        "action": "key.create", "subject": "cli_new", "result": "done", "team_id": "tea_ours", "client_id": "cli_ours",
        "address": "192.0.2.1", "request_id": "r1", "at": NOW, "data": {"name": "ci", "role": "member"},
    }  # fmt: skip


async def test_entries_are_found_by_each_of_their_fields_and_in_pages(store: Store) -> None:
    def fill(conn: sa.Connection) -> None:
        for number in range(6):
            who = US if number % 2 else Actor("tea_theirs", "cli_theirs")
            act = Act(
                who, Action.HOST_DRAIN if number < 3 else Action.HOST_DISABLE, f"hst_{number}", "FORBIDDEN" if number == 5 else "done"
            )
            operations.audit(conn, act, at=NOW + number)

    await store.write(fill)

    async def subjects(wanted: AuditFilter, *, after: int = 0, limit: int = 10, newest: bool = False) -> list[str]:
        rows = await store.read(lambda conn: operations.audited(conn, wanted, after=after, limit=limit, newest=newest))
        return [row["subject"] for row in rows]

    assert await subjects(AuditFilter()) == [f"hst_{number}" for number in range(6)]
    assert await subjects(AuditFilter(), after=4, limit=1) == ["hst_4"]
    assert await subjects(AuditFilter(), limit=2, newest=True) == ["hst_4", "hst_5"]
    assert await subjects(AuditFilter(action="host.drain")) == ["hst_0", "hst_1", "hst_2"]
    assert await subjects(AuditFilter(team_id="tea_ours", action="host.drain")) == ["hst_1"]
    assert await subjects(AuditFilter(client_id="cli_theirs", result="done")) == ["hst_0", "hst_2", "hst_4"]
    assert await subjects(AuditFilter(subject="hst_5", result="FORBIDDEN")) == ["hst_5"]


async def test_the_same_trouble_is_one_alert_however_often_it_is_seen(store: Store) -> None:
    ids = numbered()
    first = await store.write(lambda conn: operations.keep_alerts(conn, [lost()], now=NOW, ids=ids))
    again = await store.write(lambda conn: operations.keep_alerts(conn, [lost(detail="still not")], now=NOW + 5, ids=ids))
    assert ([row.id for row in first[0]], first[1], again) == (["alr_0"], [], ([], []))
    (row,) = await store.read(operations.open_alerts)
    assert (row.raised_at, row.seen_at, row.detail, row.cleared_at) == (NOW, NOW + 5, "still not", None)


async def test_what_is_no_longer_wrong_is_cleared_and_raised_anew(store: Store) -> None:
    ids = numbered()
    await store.write(lambda conn: operations.keep_alerts(conn, [lost(), lost("hst_two")], now=NOW, ids=ids))
    _, cleared = await store.write(lambda conn: operations.keep_alerts(conn, [lost("hst_two")], now=NOW + 5, ids=ids))
    assert [(row.kind, row.subject) for row in cleared] == [("host.lost", "hst_one")]
    raised, cleared = await store.write(lambda conn: operations.keep_alerts(conn, [lost(), lost("hst_two")], now=NOW + 9, ids=ids))
    assert ([row.subject for row in raised], cleared) == (["hst_one"], [])
    rows = await store.read(lambda conn: operations.alerts(conn, state="all", severity=None, kind=None, limit=10, before=None))
    assert [(row.subject, row.raised_at - NOW, row.cleared_at and row.cleared_at - NOW) for row in rows] == [
        ("hst_one", 9, None),
        ("hst_two", 0, None),
        ("hst_one", 0, 5),
    ]


async def test_what_is_somebody_elses_to_clear_stays(store: Store) -> None:
    ids = numbered()
    theirs = Raised(Alert.STORE_SLOW, "other-replica", Severity.WARNING, "slow")
    await store.write(lambda conn: operations.keep_alerts(conn, [theirs], now=NOW, ids=ids))

    def spare(row: AlertRow) -> bool:
        return row.subject == "other-replica"

    assert await store.write(lambda conn: operations.keep_alerts(conn, [], now=NOW + 1, ids=ids, spare=spare)) == ([], [])
    assert len(await store.read(operations.open_alerts)) == 1


async def test_alerts_come_in_pages_and_by_state_and_severity(store: Store) -> None:
    ids = numbered()
    some = [lost(f"hst_{number}", Severity.INFO if number % 2 else Severity.CRITICAL) for number in range(5)]
    await store.write(lambda conn: operations.keep_alerts(conn, some, now=NOW, ids=ids))
    await store.write(lambda conn: operations.keep_alerts(conn, some[:4], now=NOW + 1, ids=ids))

    async def subjects(
        state: str = "all", *, severity: str | None = None, limit: int = 10, before: tuple[float, str] | None = None
    ) -> list[str]:
        rows = await store.read(lambda conn: operations.alerts(conn, state=state, severity=severity, kind=None, limit=limit, before=before))
        return [row.subject for row in rows]

    assert await subjects(limit=2) == ["hst_4", "hst_3", "hst_2"]  # one more than asked: a page follows
    assert await subjects(before=(NOW, "alr_3")) == ["hst_2", "hst_1", "hst_0"]
    assert await subjects("open", severity="info") == ["hst_3", "hst_1"]
    assert await subjects("cleared") == ["hst_4"]


async def test_sandboxes_at_rest_are_not_looked_at(store: Store, put: Callable[..., object]) -> None:
    await put(state=State.READY, conditions=frozenset({Condition.UNREACHABLE}))
    await put(state=State.RELEASED)
    waiting = await put(state=State.PENDING, conditions=frozenset({Condition.NO_ELIGIBLE_HOST}), detail="no host is registered")
    leaving = await put(
        state=State.RELEASING, conditions=frozenset({Condition.CLEANUP_PENDING}), release_requested_at=NOW, host_id="hst_one"
    )
    found = {one.id: one for one in await store.read(operations.troubled)}
    assert set(found) == {waiting.id, leaving.id}
    assert (found[waiting.id].class_name, found[waiting.id].detail) == ("default", "no host is registered")
    assert (found[leaving.id].host_id, found[leaving.id].release_requested_at) == ("hst_one", NOW)


async def test_those_that_may_not_be_replaced_are_found_by_their_host(store: Store, put: Callable[..., object]) -> None:
    blocked = await put(state=State.READY, host_id="hst_one", conditions=frozenset({Condition.REPLACEMENT_BLOCKED, Condition.UNREACHABLE}))
    await put(state=State.READY, host_id="hst_two", conditions=frozenset({Condition.REPLACEMENT_BLOCKED}))
    await put(state=State.READY, host_id="hst_one", conditions=frozenset({Condition.UNREACHABLE}))
    found = await store.read(lambda conn: operations.blocked(conn, ["hst_one"]))
    assert [one.id for one in found] == [blocked.id]
    assert await store.read(lambda conn: operations.blocked(conn, [])) == []


async def test_the_census_counts_the_living(store: Store, put: Callable[..., object]) -> None:
    for state in (State.READY, State.READY, State.PENDING, State.RELEASED):
        await put(state=state)
    assert sorted(await store.read(operations.census)) == [("pending", "default", 1), ("ready", "default", 2)]


async def test_an_event_of_a_host_stands_among_those_of_sandboxes(store: Store, put: Callable[..., object]) -> None:
    one = await put(state=State.PENDING)
    await store.write(lambda conn: operations.record(conn, DRAINED, event_id="evt_1", at=NOW))
    rows = await store.read(lambda conn: operations.events(conn, EventFilter(), after=0, limit=10))
    assert [(row["type"], row["sandbox_id"], row["host_id"]) for row in rows] == [
        ("sandbox.accepted", one.id, None),
        ("host.drained", "", "hst_one"),
    ]
    assert await store.read(operations.last_seq) == rows[-1]["seq"]
    only = await store.read(lambda conn: operations.events(conn, EventFilter(host_id="hst_one"), after=0, limit=10))
    assert [row["type"] for row in only] == ["host.drained"]


async def test_what_is_old_is_forgotten_and_the_rest_is_kept(store: Store, put: Callable[..., object]) -> None:
    ids = numbered()
    await put(state=State.READY)  # its event goes with its record, not by age

    def fill(conn: sa.Connection) -> None:
        for at in (NOW, NOW + 100):
            operations.audit(conn, Act(US, Action.KEY_REVOKE, "cli_x"), at=at)
            operations.record(conn, DRAINED, event_id="evt_1", at=at)
        operations.keep_alerts(conn, [lost("hst_one")], now=NOW, ids=ids)
        operations.keep_alerts(conn, [lost("hst_two")], now=NOW, ids=ids)

    await store.write(fill)
    assert await store.read(operations.oldest) == operations.Oldest(NOW, NOW, NOW, None, None)
    edge = NOW + 50
    gone = await store.write(
        lambda conn: operations.prune(conn, audit_before=edge, alerts_before=edge, events_before=edge, tokens_before=edge)
    )
    left = await store.read(lambda conn: [count(conn, table) for table in (AUDIT, ALERTS, EVENTS)])
    assert (gone, left) == (3, [1, 1, 2])
    assert await store.read(operations.oldest) == operations.Oldest(NOW + 100, None, NOW + 100, None, None)
    assert (
        await store.write(
            lambda conn: operations.prune(conn, audit_before=edge, alerts_before=edge, events_before=edge, tokens_before=edge)
        )
        == 0
    )
