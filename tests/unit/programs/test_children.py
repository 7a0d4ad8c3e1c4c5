import sys
from pathlib import Path

import pytest

from atoll.programs import children
from atoll.programs.layout import PROCESSES, Layout
from atoll.programs.users import Account

STRANGER = Account("atoll", 4_000_000, 4_000_000)


def test_programs_start_in_order_and_as_their_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "closed_on_the_way", lambda *_: None)
    control, agent, edge, registry = children.specs(Layout(tmp_path), STRANGER)
    assert (control.user, agent.user, edge.user, registry.user) == ("atoll", None, "atoll", "atoll")
    assert control.show is None
    assert control.command[0] == sys.executable
    assert edge.command[-1] == str(tmp_path / "run" / "edge.json")


def test_a_checkout_that_the_user_cannot_reach_is_shown_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = Path("/root/atoll")
    monkeypatch.setattr(children, "repository", lambda: code)
    monkeypatch.setattr(children, "bin_directory", lambda: code / "build" / "bin")
    monkeypatch.setattr(sys, "executable", "/root/atoll/.venv/bin/python")
    monkeypatch.setattr(children, "closed_on_the_way", lambda *_: Path("/root"))
    control, agent, edge, registry = children.specs(Layout(tmp_path), STRANGER)
    shown = f"{tmp_path}/run/code"
    assert control.show == edge.show == registry.show == ("/root/atoll", shown)
    assert control.command[0] == f"{shown}/.venv/bin/python"
    assert control.environment["PYTHONPATH"] == f"{shown}/src"
    assert edge.command[0] == f"{shown}/build/bin/atoll-io"
    assert agent.show is None
    assert agent.command[0] == "/root/atoll/.venv/bin/python"


def test_no_key_of_the_caller_reaches_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("E2B_API_KEY", "ATOLL_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("ATOLL_CACHE", "/somewhere")
    for spec in children.specs(Layout(tmp_path), None):
        assert "s3cret" not in spec.environment.values()
        assert spec.environment["ATOLL_HOME"] == str(tmp_path)
        assert spec.environment["ATOLL_CACHE"] == "/somewhere"
        assert spec.environment["PATH"]


def test_the_fingerprint_follows_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_BIN", str(tmp_path))
    before = children.fingerprint()
    assert children.fingerprint() == before
    (tmp_path / "atoll-io").write_text("new")
    assert children.fingerprint() != before


def test_settings_mark_those_programs_alone_that_read_them(tmp_path: Path) -> None:
    place = Layout(tmp_path)
    assert {children.mark(place, name, "c") for name in PROCESSES} == {"c"}
    place.control_config.write_text("a")
    marked = {name: children.mark(place, name, "c") for name in PROCESSES}
    assert [name for name in PROCESSES if marked[name] != "c"] == ["control", "agent"]
    place.control_config.write_text("b")
    assert children.mark(place, "control", "c") != marked["control"]
