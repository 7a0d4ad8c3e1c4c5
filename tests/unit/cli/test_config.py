"""`atoll config`: show, check, apply, history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atoll.wire import normal_form

GOOD = "version: 1\nclasses:\n  ci: {lifetime: {max: 2h}}\n"
BAD = "version: 1\nclasses:\n  ci: {lifetime: {max: 60}}\n"


def written(path: Path, text: str) -> str:
    file = path / "deployment.yaml"
    file.write_text(text)
    return str(file)


def test_what_is_shown_can_be_applied(atoll: Any, tmp_path: Path) -> None:
    shown = atoll.run("config", "show", key=atoll.operator_key)
    assert shown.exit_code == 0
    assert shown.stdout == normal_form.BUILT_IN
    assert "revision 0" in shown.stderr
    file = written(tmp_path, shown.stdout)
    assert "nothing changes" in atoll.run("config", "apply", file, key=atoll.operator_key).stdout


def test_a_check_needs_nothing_that_runs_and_names_file_and_line(atoll: Any, tmp_path: Path) -> None:
    nowhere = {"ATOLL_API_URL": "http://127.0.0.1:1"}
    assert atoll.run("config", "check", written(tmp_path, GOOD), **nowhere).exit_code == 0
    file = written(tmp_path, BAD)
    done = atoll.run("config", "check", file, **nowhere)
    assert done.exit_code == 2
    assert f"{file}:3:19: classes.ci.lifetime.max: 60 has no unit" in done.stderr
    told = atoll.run("config", "check", file, "--json", **nowhere)
    assert told.exit_code == 2
    assert [one["line"] for one in json.loads(told.stdout)["problems"]] == [3]


def test_apply_shows_the_difference_first(atoll: Any, tmp_path: Path) -> None:
    done = atoll.run("config", "apply", written(tmp_path, GOOD), "--yes", key=atoll.operator_key)
    assert done.exit_code == 0, done.output
    assert "~ default_class: default -> ci" in done.stdout
    assert "- classes.default.isolation: gvisor" in done.stdout
    assert "+ classes.ci.isolation: gvisor" in done.stdout
    assert "revision 1 applies" in done.stderr
    assert atoll.json("config", "show", "--json", key=atoll.operator_key)["document"] == GOOD
    longer = written(tmp_path, GOOD.replace("2h", "3h"))
    changed = atoll.json("config", "apply", longer, "--json", key=atoll.operator_key)
    assert (changed["applied"], changed["revision"]) == (True, 2)
    assert changed["changes"] == [{"path": "classes.ci.lifetime.max", "before": "2h", "after": "3h"}]
    history = atoll.json("config", "history", "--json", key=atoll.operator_key)["items"]
    assert [one["revision"] for one in history] == [2, 1]
    earlier = atoll.run("config", "show", "--revision", "1", key=atoll.operator_key)
    assert earlier.stdout == GOOD


def test_a_dry_run_applies_nothing(atoll: Any, tmp_path: Path) -> None:
    done = atoll.run("config", "apply", written(tmp_path, GOOD), "--dry-run", key=atoll.operator_key)
    assert "~ default_class" in done.stdout
    assert atoll.json("config", "show", "--json", key=atoll.operator_key)["revision"] == 0


def test_a_comment_is_a_new_text_and_no_change(atoll: Any, tmp_path: Path) -> None:
    atoll.run("config", "apply", written(tmp_path, GOOD), "--yes", key=atoll.operator_key)
    done = atoll.run("config", "apply", written(tmp_path, "# ours\n" + GOOD), "--yes", key=atoll.operator_key)
    assert "nothing changes but the text" in done.stdout
    assert "+# ours" in done.stdout
    assert "revision 2" in done.stderr


def test_a_revision_that_is_not_the_newest_is_a_conflict(atoll: Any, tmp_path: Path) -> None:
    atoll.run("config", "apply", written(tmp_path, GOOD), "--yes", key=atoll.operator_key)
    done = atoll.run("config", "apply", written(tmp_path, GOOD.replace("2h", "3h")), "--revision", "0", "--json", key=atoll.operator_key)
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["code"] == "CONFIG_CONFLICT"


def test_a_bad_document_is_not_applied(atoll: Any, tmp_path: Path) -> None:
    file = written(tmp_path, BAD)
    done = atoll.run("config", "apply", file, "--yes", key=atoll.operator_key)
    assert done.exit_code == 2
    assert "has no unit" in done.stderr
    told = atoll.run("config", "apply", file, "--json", key=atoll.operator_key)
    assert (told.exit_code, json.loads(told.stdout)["applied"]) == (2, False)


def test_only_operators(atoll: Any, tmp_path: Path) -> None:
    for command in (("show",), ("history",), ("apply", written(tmp_path, GOOD))):
        done = atoll.run("config", *command, "--json")
        assert done.exit_code == 1
        assert json.loads(done.stdout)["error"]["code"] == "FORBIDDEN"


def test_a_file_that_is_no_text(atoll: Any, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"version: \xff")
    done = atoll.run("config", "check", str(file), "--json")
    assert (done.exit_code, json.loads(done.stdout)["error"]["code"]) == (2, "CONFIG_INVALID")
    assert atoll.run("config", "check", str(tmp_path / "none")).exit_code == 1
