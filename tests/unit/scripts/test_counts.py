"""The counting of tests: a suite that fails must never be summed to a good end."""

import json
import sys
import threading
from collections.abc import Iterator
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
    assert python.tests("store", ["tests/store"], workers="0", full=False, again=False, log=None) == Counts()
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
    counted = python.tests("some", ["tests"], workers="0", full=False, again=True, log=None)
    assert counted == Counts(passed=2, failed=1, names=("tests/test_some::test_wrong",), unsteady=("tests/test_some::test_unsteady",))


def test_a_patient_suite_runs_beside_the_others_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other_began = threading.Event()

    def patient(full: bool, log: Path | None) -> Counts:
        assert log is not None
        log.write_text("said aside")
        assert other_began.wait(10)
        return Counts(failed=1, names=("one",))

    def other(full: bool, log: Path | None) -> Counts:
        assert (full, log) == (True, None)
        other_began.set()
        return Counts(passed=2)

    monkeypatch.setattr(suite, "REPORTS", tmp_path)
    monkeypatch.setattr(suite, "REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert suite._run([suite.Suite("slow", patient, patient=True), suite.Suite("other", other)], full=True) == 1
    said = capsys.readouterr().out
    assert said.index("=== other") < said.index("said aside")
    assert said.rstrip().endswith("2 passed, 1 failed, 0 skipped")
    assert (tmp_path / "summary.txt").read_text() == "2 passed, 1 failed, 0 skipped\n"
