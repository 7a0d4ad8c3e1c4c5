"""`atoll sandbox why`, `atoll host why` and `atoll sandbox authorize-replacement`."""

from __future__ import annotations

import json
from typing import Any

from atoll.domain.sandbox import Condition, State


def test_why_says_it_in_a_sentence_a_sum_and_a_line_for_each_host(atoll: Any) -> None:
    made = atoll.json("sandbox", "create", "--json", key=atoll.operator_key)["id"]
    shown = atoll.run("sandbox", "why", made, key=atoll.operator_key)
    assert shown.exit_code == 0, shown.output
    assert "class default, policy pack, needs 1 CPU, 512 MiB memory, 2048 MiB disk" in shown.stdout
    assert "1 of 1 hosts fit" in shown.stdout
    assert "local" in shown.stdout
    told = atoll.json("sandbox", "why", made, "--json", key=atoll.operator_key)
    assert (told["sandboxId"], told["candidates"], told["verdicts"][0]["rank"]) == (made, 1, 1)


def test_a_member_is_told_in_sum_only(atoll: Any) -> None:
    made = atoll.create()
    shown = atoll.run("sandbox", "why", made)
    assert shown.exit_code == 0, shown.output
    assert "1 of 1 hosts fit" in shown.stdout
    assert "local" not in shown.stdout
    assert atoll.run("sandbox", "why", "i" + "0" * 20).exit_code == 3


def test_a_dry_run_says_what_speaks_against_each_host(atoll: Any) -> None:
    shown = atoll.run("host", "why", "--require-host", "elsewhere", "--cpu", "2", key=atoll.operator_key)
    assert shown.exit_code == 0, shown.output
    assert "needs 2 CPU" in shown.stdout
    assert "0 of 1 hosts fit" in shown.stdout
    assert "OTHER_HOST_REQUIRED" in shown.stdout
    assert "elsewhere" in shown.stdout
    one = atoll.run("host", "why", "local", key=atoll.operator_key)
    assert one.exit_code == 0
    nobody = atoll.run("host", "why", "nobody", key=atoll.operator_key)
    assert "No host 'nobody'" in nobody.stdout
    refused = atoll.run("host", "why", "--class", "none", "--json", key=atoll.operator_key)
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (2, "INVALID_REQUEST")
    assert atoll.json("sandbox", "list", "--json", key=atoll.operator_key)["items"] == [], "nothing is made"


def test_a_sandbox_that_there_is_can_be_asked_about_from_the_hosts_side(atoll: Any) -> None:
    made = atoll.create()
    told = atoll.json("host", "why", "--sandbox", made, "--json", key=atoll.operator_key)
    assert told["sandboxId"] == made


def test_a_replacement_is_authorized_for_the_generation_that_is_lost(atoll: Any) -> None:
    made = atoll.create()
    refused = atoll.run("sandbox", "authorize-replacement", made, "--yes", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (1, "REPLACEMENT_NOT_BLOCKED")
    atoll.service.change(made, conditions=frozenset({Condition.UNREACHABLE, Condition.REPLACEMENT_BLOCKED}))
    assert "REPLACEMENT_BLOCKED" in atoll.run("sandbox", "list").stdout
    assert "REPLACEMENT_BLOCKED" in atoll.run("sandbox", "get", made).stdout
    done = atoll.run("sandbox", "authorize-replacement", made, "--yes", "--statement", "keys revoked")
    assert done.exit_code == 0, done.output
    assert f"{made} is pending, generation 2" in done.stdout
    assert atoll.service._sandboxes[made].state is State.PENDING
