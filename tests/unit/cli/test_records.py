"""`alert`, `audit`, `events`, `top`, and lists over all teams, as operators see them."""

from __future__ import annotations

import json

import pytest

from atoll.cli import records
from atoll.cli import top as module
from atoll.cli.top import Look, Seen, View, ordered, pressed, share, size, totals
from atoll.control.operations import AlertRecord
from atoll.domain.operations import Act, Action, Actor, Alert


def alert(**changes: object) -> AlertRecord:
    values = {
        "id": "alr_1", "kind": Alert.HOST_LOST, "subject": "hst_1", "severity": "critical", "detail": "host local is not heard of",
        "raised_at": 1_800_000_000.0, "seen_at": 1_800_000_000.0, "cleared_at": None,
    }  # fmt: skip
    return AlertRecord(**{**values, **changes})


def test_alerts(atoll) -> None:
    assert "Nothing is wrong." in atoll.run("alert", "list", key=atoll.operator_key).stdout
    atoll.operations.alerts_known += [alert(), alert(id="alr_2", cleared_at=1_800_000_001.0, severity="info")]
    shown = atoll.run("alert", "list", key=atoll.operator_key)
    assert shown.exit_code == 0
    assert "host.lost" in shown.stdout
    assert "docs/RUNBOOK.md#hostlost" in shown.stdout
    assert [one["id"] for one in atoll.json("alert", "list", "--json", key=atoll.operator_key)["items"]] == ["alr_1"]
    assert len(atoll.json("alert", "list", "--all", "--json", key=atoll.operator_key)["items"]) == 2
    assert len(atoll.json("alert", "list", "--all", "--severity", "info", "--json", key=atoll.operator_key)["items"]) == 1
    assert atoll.run("alert", "list", "--severity", "loud", key=atoll.operator_key).exit_code == 2
    assert atoll.run("alert", "list").exit_code == 1, "members may not"


async def fill(atoll) -> None:
    for number in range(3):
        act = Act(Actor("tea_1", "cli_1", "192.0.2.1", f"r{number}"), Action.HOST_DRAIN, f"hst_{number}", "FORBIDDEN")
        await atoll.operations.refused(act)


async def test_the_audit(atoll) -> None:
    await fill(atoll)
    shown = atoll.run("audit", key=atoll.operator_key).stdout
    assert "host.drain" in shown
    assert "192.0.2.1" in shown
    found = atoll.json("audit", "--limit", "2", "--json", key=atoll.operator_key)["items"]
    assert [one["subject"] for one in found] == ["hst_1", "hst_2"], "the last ones, oldest first"
    assert len(atoll.json("audit", "--subject", "hst_0", "--json", key=atoll.operator_key)["items"]) == 1
    assert atoll.json("audit", "--action", "key.create", "--json", key=atoll.operator_key)["items"] == []
    assert atoll.run("audit", "--action", "nothing.known", key=atoll.operator_key).exit_code == 2


async def test_the_audit_goes_on(atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(atoll)
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt
        more = atoll.operations.entries[0]
        atoll.operations.entries.append(
            type(more)(**{**{name: getattr(more, name) for name in more.__slots__}, "seq": 9, "subject": "hst_9"})
        )

    monkeypatch.setattr(records.time, "sleep", wait)
    done = atoll.run("audit", "--follow", "--json", key=atoll.operator_key)
    assert done.exit_code == 130
    assert [json.loads(line)["subject"] for line in done.stdout.splitlines()] == ["hst_0", "hst_1", "hst_2", "hst_9"]


def test_the_deployments_events(atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    made = atoll.create()
    found = atoll.json("events", "--json", key=atoll.operator_key)["items"]
    assert [one["type"] for one in found] == ["sandbox.accepted", "sandbox.ready"]
    assert made in atoll.run("events", key=atoll.operator_key).stdout
    assert [one["type"] for one in atoll.json("events", "--type", "sandbox.ready", "--json", key=atoll.operator_key)["items"]] == [
        "sandbox.ready"
    ]

    def stop(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(records.time, "sleep", stop)
    done = atoll.run("events", "--follow", "--limit", "1", key=atoll.operator_key)
    assert done.exit_code == 130
    assert done.stdout.count("sandbox.ready") == 1
    assert "sandbox.accepted" not in done.stdout


def test_a_tenants_words_do_not_steer_a_terminal(atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    atoll.operations.alerts_known.append(alert(detail="\x1b]0;owned\x07"))
    assert "\x1b]" not in atoll.run("alert", "list", key=atoll.operator_key).stdout


def test_sandboxes_of_all_teams(atoll) -> None:
    made = atoll.create()
    assert atoll.json("sandbox", "list", "--json", key=atoll.operator_key)["items"] == []
    for arguments in (("--all-teams",), ("--team", "default")):
        assert [one["id"] for one in atoll.json("sandbox", "list", *arguments, "--json", key=atoll.operator_key)["items"]] == [made]
    assert "TEAM" in atoll.run("sandbox", "list", "--all-teams", key=atoll.operator_key).stdout
    assert atoll.run("sandbox", "list", "--all-teams").exit_code == 1
    assert atoll.run("sandbox", "list", "--all-teams", "--team", "x").exit_code == 2


# top


def test_one_look(atoll) -> None:
    made = atoll.create()
    seen = atoll.json("top", "--json", key=atoll.operator_key)
    assert [host["name"] for host in seen["hosts"]] == ["local"]
    assert [(one["id"], one["usage"]["cpuPercent"]) for one in seen["sandboxes"]] == [(made, 12.5)]
    own = atoll.json("top", "--json")
    assert (own["hosts"], len(own["sandboxes"])) == ([], 1), "members see their own sandboxes and no hosts"
    shown = atoll.run("top", "--once", key=atoll.operator_key)
    assert shown.exit_code == 0
    assert made in shown.stdout
    assert "1 of 1 hosts healthy; 1 sandboxes, 1 ready" in shown.stdout
    assert atoll.run("top", "--once", "--sort", "luck").exit_code == 2


def one(number: int, **usage: float) -> dict[str, object]:
    used = {"cpuPercent": 0.0, "cpuMillis": 1000, "memoryBytes": 0, "memoryMib": 512, "diskBytes": 0, "diskMib": 2048, **usage}
    return {
        "id": f"i{number}",
        "state": "ready",
        "createdAt": f"2030-01-0{number + 1}T00:00:00Z",
        "teamId": f"tea_{9 - number}",
        "usage": used,
    }


SEEN = Seen(
    0.0, (), [one(0, cpuPercent=10.0), one(1, cpuPercent=90.0, memoryBytes=5), one(2, cpuPercent=30.0, cpuMillis=4000, diskBytes=9)]
)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (View("cpu"), ["i2", "i1", "i0"]),  # 30 % of four cores are more than 90 % of one
        (View("cpu", reverse=True), ["i0", "i1", "i2"]),
        (View("memory"), ["i1", "i0", "i2"]),
        (View("disk"), ["i2", "i0", "i1"]),
        (View("age"), ["i2", "i1", "i0"]),
        (View("team"), ["i2", "i1", "i0"]),
    ],
)
def test_order(view: View, expected: list[str]) -> None:
    assert [item["id"] for item in ordered(SEEN, view)] == expected


def test_what_has_no_measurement_is_still_shown() -> None:
    silent = Seen(0.0, (), [{"id": "i9", "state": "pending", "usage": None}, *SEEN.sandboxes])
    assert ordered(silent, View("cpu"))[-1]["id"] in {"i9", "i0"}
    assert "4 sandboxes, 3 ready; using 2.20 cores" in totals(silent)


def test_keys() -> None:
    view = View()
    assert pressed(view, "q", rows=10, count=30) is None
    assert pressed(view, "m", rows=10, count=30) == View("memory")
    assert pressed(view, "r", rows=10, count=30) == View("cpu", reverse=True)
    assert pressed(view, " ", rows=10, count=30) == View("cpu", skip=10)
    assert pressed(View(skip=25), " ", rows=10, count=30) == View(skip=29)
    assert pressed(View(skip=5), "b", rows=10, count=30) == View()
    for key in ("x", "\x1b", "[", "é"):
        assert pressed(view, key, rows=10, count=30) == view


def test_amounts_for_people() -> None:
    assert [size(count) for count in (0, 1023, 1536, 3 << 20, 5 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "5120.0 GiB",
    ]
    assert share(1, 2, width=4) == "██░░  50%"
    assert share(5, 0, width=4) == "░░░░   0%"
    assert share(9, 3, width=2) == "██ 100%"


def test_a_look_that_fails_keeps_what_was_seen(atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.client.api import Api
    from atoll.client.target import find

    atoll.create()
    with Api(find({"ATOLL_API_URL": atoll.url, "ATOLL_API_KEY": atoll.operator_key})) as api:
        look = Look(api)
        first = look()
        monkeypatch.setattr(api, "sandboxes", lambda **_: (_ for _ in ()).throw(module.Refused(module.Code.FORBIDDEN, "no more")))
        again = look.again()
    assert (again.sandboxes, again.problem) == (first.sandboxes, "no more [FORBIDDEN]")
