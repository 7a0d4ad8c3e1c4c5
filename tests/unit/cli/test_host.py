"""`atoll host`: words that take time, waited for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from atoll.cli import host as module
from atoll.domain.host import Admin


def test_waiting_until_a_host_is_empty(atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    made = atoll.create()
    looks: list[float] = []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        atoll.service.end(made)

    monkeypatch.setattr(module.time, "sleep", wait)
    done = atoll.json("host", "drain", "local", "--wait", "--json", key=atoll.operator_key)
    assert (done["admin"], done["sandboxes"], len(looks)) == ("draining", 0, 1)


def test_waiting_for_an_empty_host_has_an_end(atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    atoll.create()
    monkeypatch.setattr(module, "WAIT_LOOK_S", 0.01)
    done = atoll.run("host", "drain", "local", "--wait", "--timeout", "1s", "--json", key=atoll.operator_key)
    assert done.exit_code == 4
    assert json.loads(done.stdout)["error"]["code"] == "HOST_NOT_EMPTY"


def test_another_operators_word_ends_the_wait(atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    atoll.create()

    def activated(_seconds: float) -> None:
        view = atoll.service.host_view
        atoll.service.host_view = replace(view, host=replace(view.host, admin=Admin.ACTIVE))

    monkeypatch.setattr(module.time, "sleep", activated)
    assert atoll.json("host", "drain", "local", "--wait", "--json", key=atoll.operator_key)["sandboxes"] == 1


def test_without_waiting_it_answers_at_once(atoll) -> None:
    atoll.create()
    assert "local is draining, 1 sandboxes on it" in atoll.run("host", "drain", "local", key=atoll.operator_key).stdout
