"""What is wrong follows from rows and time alone: by kind, each cause and its absence."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.domain.host import LOST_AFTER_S, Admin
from atoll.domain.operations import Alert, Raised, Severity
from atoll.domain.sandbox import Condition, State
from atoll.planning import alerting
from atoll.planning.alerting import HostFacts, StoreFacts, Troubled, wrong
from tests.builders import NOW, host

WELL = StoreFacts("control-1")


def troubled(number: int = 1, **changes: Any) -> Troubled:
    values: dict[str, Any] = {
        "id": f"i{number:020d}", "state": State.PENDING, "class_name": "default", "host_id": None,
        "conditions": frozenset(), "release_requested_at": None, "detail": None,
    }  # fmt: skip
    return Troubled(**{**values, **changes})


def found(*hosts: HostFacts, sandboxes: tuple[Troubled, ...] = (), store: StoreFacts = WELL) -> list[Raised]:
    return wrong(hosts, sandboxes, store, now=NOW)


def kinds(raised: list[Raised]) -> list[tuple[str, str]]:
    return [(one.kind.value, one.severity.value) for one in raised]


def test_where_all_is_well_nothing_is_said() -> None:
    calm = (troubled(), troubled(2, state=State.RELEASING, release_requested_at=NOW - 10, host_id="hst_a"))
    assert found(HostFacts(host(), 3), sandboxes=calm) == []
    assert found() == [], "no host at all is a deployment that is being set up"


def test_a_host_that_is_not_heard_of() -> None:
    silent = host(seen_at=NOW - LOST_AFTER_S)
    assert kinds(found(HostFacts(silent, 2), HostFacts(host(), 0))) == [("host.lost", "critical")]
    assert found(HostFacts(host(seen_at=NOW - LOST_AFTER_S + 1), 2), HostFacts(host(), 0)) == []


@pytest.mark.parametrize(("held", "severity"), [(2, "warning"), (0, "info")])
def test_a_fenced_host_is_said_so_for_as_long_as_it_is(held: int, severity: str) -> None:
    fenced = host(admin=Admin.DISABLED, seen_at=NOW - 1e6, problems=("inventory.quarantine",))
    assert kinds(found(HostFacts(fenced, held))) == [("host.disabled", severity)], "one alert, not one for each symptom"


@pytest.mark.parametrize(
    ("problems", "expected"),
    [
        (("inventory.quarantine",), ["host.quarantine"]),
        (("host.capacity",), ["host.capacity_mismatch"]),
        (("host.clock",), ["host.check_failed"]),
        (("host.clock", "inventory.quarantine", "host.capacity"), ["host.capacity_mismatch", "host.check_failed", "host.quarantine"]),
    ],
)
def test_what_a_host_reports(problems: tuple[str, ...], expected: list[str]) -> None:
    raised = found(HostFacts(host(problems=problems), 0), HostFacts(host(), 0))
    assert [one.kind.value for one in raised] == expected


def test_no_host_takes_anything() -> None:
    hosts = [HostFacts(host(admin=Admin.DRAINING), 0), HostFacts(host(problems=("x",)), 0), HostFacts(host(admin=Admin.DISABLED), 0)]
    assert ("deployment.no_host", "critical") in kinds(found(*hosts))
    assert ("deployment.no_host", "critical") not in kinds(found(*hosts, HostFacts(host(), 0)))


def test_sandboxes_in_the_same_trouble_are_one_alert() -> None:
    waiting = tuple(
        troubled(number, conditions=frozenset({Condition.NO_ELIGIBLE_HOST}), detail="1 host(s): INSUFFICIENT_CPU x1") for number in range(9)
    )
    other = troubled(99, class_name="large", conditions=frozenset({Condition.NO_ELIGIBLE_HOST}))
    raised = found(sandboxes=(*waiting, other))
    assert [(one.kind, one.subject) for one in raised] == [
        (Alert.SANDBOX_NO_ELIGIBLE_HOST, "default"),
        (Alert.SANDBOX_NO_ELIGIBLE_HOST, "large"),
    ]
    assert raised[0].detail.startswith("9 sandbox(es) of class default find no host: i" + "0" * 20)
    assert "INSUFFICIENT_CPU" in raised[0].detail


@pytest.mark.parametrize(
    ("age_s", "conditions", "expected"),
    [
        (61, {Condition.CLEANUP_PENDING}, [("sandbox.cleanup_pending", "warning")]),
        (10, set(), []),
        (alerting.OVERDUE_S + 1, {Condition.CLEANUP_PENDING}, [("release.overdue", "critical")]),
        (alerting.OVERDUE_S + 1, set(), [("release.overdue", "critical")]),
    ],
)
def test_a_release_that_takes_long(age_s: float, conditions: set[Condition], expected: list[tuple[str, str]]) -> None:
    leaving = troubled(state=State.RELEASING, host_id="hst_a", conditions=frozenset(conditions), release_requested_at=NOW - age_s)
    assert kinds(found(sandboxes=(leaving,))) == expected


def test_a_host_is_named_as_people_name_it() -> None:
    one = host(name="rack-7")
    leaving = troubled(state=State.RELEASING, host_id=one.id, conditions=frozenset({Condition.CLEANUP_PENDING}))
    (raised,) = found(HostFacts(one, 1), sandboxes=(leaving,))
    assert (raised.subject, "rack-7" in raised.detail) == (one.id, True)


def test_who_may_not_be_replaced() -> None:
    blocked = troubled(state=State.READY, host_id="hst_a", conditions=frozenset({Condition.REPLACEMENT_BLOCKED, Condition.UNREACHABLE}))
    assert kinds(found(sandboxes=(blocked,))) == [("sandbox.replacement_blocked", "warning")]


def test_what_is_met_at_the_store() -> None:
    assert kinds(found(store=StoreFacts("c", slowest_s=9.0, slow=alerting.SLOW_COMMITS))) == [("store.slow", "warning")]
    assert found(store=StoreFacts("c", slowest_s=9.0, slow=alerting.SLOW_COMMITS - 1)) == [], "a hiccup"
    full = found(store=StoreFacts("c", slowest_s=9.0, slow=9, refused="STORE_FULL"))
    assert [(one.kind.value, one.severity, one.subject) for one in full] == [("store.full", Severity.CRITICAL, "c")]


def test_a_detail_has_a_length() -> None:
    waiting = troubled(conditions=frozenset({Condition.NO_ELIGIBLE_HOST}), detail="x" * 5000)
    assert len(found(sandboxes=(waiting,))[0].detail) == alerting.DETAIL_MAX


def test_the_order_is_always_the_same() -> None:
    hosts = [HostFacts(host(seen_at=NOW - 1000), 1) for _ in range(5)]
    assert found(*hosts) == found(*reversed(hosts))
