"""The counting of tests: a suite that fails must never be summed to a good end."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import suite
from suites import golang, python
from suites.counts import Counts


def events(*rows: dict[str, object]) -> Iterator[str]:
    return (json.dumps(row) + "\n" for row in rows)


def test_counts_add_up_and_read_like_a_runner_s_last_line() -> None:
    assert str(Counts(3, 0, 1) + Counts(2, 1)) == "5 passed, 1 failed, 1 skipped"


def test_go_events_count_top_level_tests_once() -> None:
    counted = golang.read_events(
        events(
            {"Action": "run", "Package": "p", "Test": "TestA"},
            {"Action": "output", "Package": "p", "Test": "TestA/sub", "Output": "x\n"},
            {"Action": "pass", "Package": "p", "Test": "TestA/sub"},
            {"Action": "pass", "Package": "p", "Test": "TestA"},
            {"Action": "skip", "Package": "p", "Test": "TestB"},
            {"Action": "pass", "Package": "p", "Elapsed": 0.1},
        )
    )
    assert counted == Counts(passed=1, skipped=1)


def test_go_failure_is_counted_once_and_its_output_shown(capsys: pytest.CaptureFixture[str]) -> None:
    counted = golang.read_events(
        events(
            {"Action": "output", "Package": "p", "Test": "TestA", "Output": "want 1, got 2\n"},
            {"Action": "fail", "Package": "p", "Test": "TestA"},
            {"Action": "fail", "Package": "p", "Elapsed": 0.1},
        )
    )
    assert counted == Counts(failed=1, names=("p TestA",))
    assert "want 1, got 2" in capsys.readouterr().out


def test_go_package_that_does_not_build_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    counted = golang.read_events(
        events(
            {"ImportPath": "p", "Action": "build-output", "Output": "undefined: x\n"},
            {"ImportPath": "p", "Action": "build-fail"},
            {"Action": "fail", "Package": "p", "FailedBuild": "p"},
        )
    )
    assert counted == Counts(failed=1, names=("p does not build",))
    assert "undefined: x" in capsys.readouterr().out


GO = """#!/bin/sh
# The last argument is the package, and before it stands what is to be run.
echo "$PWD: $*" >>"$SAID"
case "$*" in
*TestWrong*) printf '{"Action":"fail","Package":"p","Test":"TestWrong"}\\n{"Action":"fail","Package":"p"}\\n'; exit 1;;
*TestLate*) printf '{"Action":"pass","Package":"m/registry/q","Test":"TestLate"}\\n';;
*) exit 3;;
esac
"""


def test_go_tests_that_fail_are_run_again_and_the_unsteady_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, module in ((tmp_path / "native", "m"), (tmp_path / "native" / "registry", "m/registry")):
        directory.mkdir(parents=True)
        (directory / "go.mod").write_text(f"module {module}\n\ngo 1.26\n")
    go, said = tmp_path / "go", tmp_path / "said"
    go.write_text(GO)
    go.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(golang, "GO", go)
    monkeypatch.setenv("SAID", str(said))
    first = Counts(passed=5, failed=2, skipped=1, names=("p TestWrong", "m/registry/q TestLate"))
    assert golang.again(first) == Counts(6, 1, 1, ("p TestWrong",), ("m/registry/q TestLate",))
    wrong, late = said.read_text().splitlines()
    assert wrong.startswith(f"{tmp_path}/native: test -race -count=1 -run ^TestWrong$ ")
    assert late.startswith(f"{tmp_path}/native/registry: test -trimpath -count=1 -run ^TestLate$ ")
    for unlike in (Counts(failed=1, names=("go vet",)), Counts(failed=1, names=("p does not build",)), Counts(passed=3)):
        assert golang.again(unlike) == unlike


def test_pytest_s_report_is_read(tmp_path) -> None:
    report = tmp_path / "r.xml"
    report.write_text(
        '<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2">'
        '<testcase classname="tests.unit.test_a" name="test_b"><failure/></testcase>'
        '<testcase classname="tests.unit.test_a" name="test_c"/></testsuite></testsuites>'
    )
    assert python._read(report) == Counts(passed=3, failed=2, skipped=2, names=("tests/unit/test_a::test_b",))


def test_directories_without_tests_are_named_not_counted(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert python.tests("store", ["tests/store"], workers="0", full=False, log=None, patient=False) == Counts()
    assert "tests/store: no tests there yet" in capsys.readouterr().out


def test_a_few_that_fail_are_run_again_and_the_unsteady_are_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(python, "BIN", Path(sys.executable).parent)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long: x\n")
    (tmp_path / "build" / "reports").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(
        "from pathlib import Path\n"
        "def test_steady(): pass\n"
        "def test_unsteady():\n    seen = Path('seen').exists(); Path('seen').touch(); assert seen\n"
        "def test_wrong(): assert False\n"
    )
    first = python.tests("some", ["tests"], workers="0", full=False, log=None, patient=False)
    assert (first.passed, first.failed, first.unsteady) == (1, 2, ())
    counted = python.again("some", ["tests"], first, full=False)
    assert counted == Counts(passed=2, failed=1, names=("tests/test_some::test_wrong",), unsteady=("tests/test_some::test_unsteady",))


def test_lanes_run_beside_each_other_and_what_failed_runs_again_when_all_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = {name: threading.Event() for name in ("patient", "waiting", "other")}
    ended: list[str] = []

    def one(name: str, counts: Counts, *, aside: bool, after: str | None = None) -> Callable[[bool, Path | None], Counts]:
        def run(full: bool, log: Path | None) -> Counts:
            assert full
            assert (log is not None) is aside
            assert after is None or after in ended
            if log is not None:
                log.write_text(f"{name} said aside")
            if name in begun:
                begun[name].set()
                assert all(event.wait(10) for event in begun.values())
            ended.append(name)
            return counts

        return run

    def again(full: bool, first: Counts) -> Counts:
        assert full
        assert len(ended) == 4
        return Counts(passed=first.failed, unsteady=first.names)

    monkeypatch.setattr(suite, "REPORTS", tmp_path)
    monkeypatch.setattr(suite, "REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    suites = [
        suite.Suite("patient", one("patient", Counts(failed=1, names=("one",)), aside=True), suite.Lane.PATIENT),
        suite.Suite("waiting", one("waiting", Counts(failed=1, names=("two",)), aside=True), suite.Lane.WAITING, again),
        suite.Suite("second", one("second", Counts(passed=3), aside=True, after="waiting"), suite.Lane.WAITING),
        suite.Suite("other", one("other", Counts(passed=2), aside=False)),
    ]
    assert suite._run(suites, full=True) == 1
    said = capsys.readouterr().out
    assert said.index("=== other") < said.index("waiting said aside") < said.index("second said aside") < said.index("patient said aside")
    assert "failed: one" in said
    assert "unsteady, passed when run again alone: two" in said
    assert said.rstrip().endswith("6 passed, 1 failed, 0 skipped")
    assert (tmp_path / "summary.txt").read_text() == "6 passed, 1 failed, 0 skipped\n"
