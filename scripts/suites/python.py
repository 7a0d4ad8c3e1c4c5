"""Python's checks: tools by their exit status, pytest by the report that it writes."""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from suites.counts import Counts

BIN: Final = Path(".venv") / "bin"
NO_TESTS_COLLECTED: Final = 5
AGAIN_MAX: Final = 6
"""Tests of one suite that may be run again alone; more failures than that are no accident of the machine."""
PATIENCE_S: Final = 900
"""How long one test may take that runs beside other suites."""

_LAST: Final = ("sh", "-c", 'echo 19 2>/dev/null >/proc/self/autogroup; exec nice -n 19 "$@"', "sh")
"""Runs a command with what others leave of the processors. Where the kernel groups processes by session (sched_autogroup_enabled), nice alone
counts inside of one only, and every program that an instance starts is a session of its own: so it gets its own, and that the priority."""


def environment() -> dict[str, str]:
    """The caller's environment with this checkout's tools first on the path."""
    here = Path.cwd()
    return {**os.environ, "PATH": f"{here / BIN}:{here / 'build' / 'tools'}:{os.environ.get('PATH', '')}"}


def tools(commands: Sequence[Sequence[str]]) -> Counts:
    """Run each tool from the environment; each that complains is one failure."""
    failed: list[str] = []
    for command in commands:
        words = " ".join(command)
        ended = subprocess.run([BIN / command[0], *command[1:]], check=False, env=environment())
        print(f"{words}: {'good' if ended.returncode == 0 else f'status {ended.returncode}'}", flush=True)
        if ended.returncode != 0:
            failed.append(words)
    return Counts(failed=len(failed), names=tuple(failed))


def tests(name: str, directories: Sequence[str], *, workers: str, full: bool, log: Path | None, patient: bool) -> Counts:
    """Run pytest over the directories that hold tests, and files, but those that an `--ignore=` names. The counts come from its report.

    A crash without one is a failure.

    `log`: they run beside other suites, and say what they say into this file. `patient`: with what these leave of the processors.
    """
    present = _present(directories)
    for directory in directories:
        if directory not in present:
            print(f"{directory}: no tests there yet", flush=True)
    if not present:
        return Counts()
    report = _report(name)
    report.unlink(missing_ok=True)
    # By files, since what a file shares (an instance, a database) takes longer to make than its tests.
    options = ["-n", workers, "--dist", "loadfile" if workers.isdecimal() else "load", f"--junitxml={report}"]
    if patient:
        # Nobody's turn comes early at this priority; what hangs is still ended.
        options += [f"--timeout={PATIENCE_S}"]
    ended = _run([*_pytest(name, present, full=full), *options], environment() | _matrices(full=full), log, patient=patient)
    counts = _read(report) if report.exists() else Counts()
    if ended.returncode not in (0, 1, NO_TESTS_COLLECTED) or (ended.returncode == 1 and counts.failed == 0):
        print(f"pytest ended with status {ended.returncode}", flush=True)
        counts += Counts(failed=1, names=(f"pytest ended with status {ended.returncode}",))
    return counts


def again(name: str, directories: Sequence[str], first: Counts, *, full: bool) -> Counts:
    """What failed of these tests, once more, one after the other: they run against real clocks and programs.

    A test that fails twice has failed; one that does not is named as unsteady. More than a few failures are none of the machine's accidents.
    """
    if not 0 < first.failed <= AGAIN_MAX or not _report(name).exists():
        return first
    print(f"{first.failed} failed: once more, alone", flush=True)
    second = _report(name).with_suffix(".again.xml")
    second.unlink(missing_ok=True)
    options = [f"--junitxml={second}", "-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
    _run([*_pytest(name, _present(directories), full=full), *options], environment() | _matrices(full=full), None)
    counts = _read(second) if second.exists() else Counts()
    if counts.passed + counts.failed != first.failed:
        return first
    unsteady = tuple(name for name in first.names if name not in counts.names)
    return Counts(first.passed + counts.passed, counts.failed, first.skipped, counts.names, unsteady)


def _present(directories: Sequence[str]) -> list[str]:
    return [one for one in directories if one.startswith("--") or Path(one).is_file() or any(Path(one).rglob("test_*.py"))]


def _report(name: str) -> Path:
    return Path("build") / "reports" / f"{name}.xml"


def _pytest(name: str, present: Sequence[str], *, full: bool) -> list[str]:
    selection = [] if full else ["-m", "not long"]
    command = [str(BIN / "pytest"), *present, *selection, "-q", "--durations=5", "--durations-min=5"]
    # What failed last is kept there: two suites beside each other would write over it.
    return [*command, "-o", f"cache_dir=.pytest_cache/{name}"]


def _matrices(*, full: bool) -> dict[str, str]:
    return {"ATOLL_TEST_MATRICES": "full" if full else "sampled"}


def _run(command: Sequence[str], env: dict[str, str], log: Path | None, *, patient: bool = False) -> subprocess.CompletedProcess[bytes]:
    command = [*_LAST, *command] if patient else command
    if log is None:
        return subprocess.run(command, check=False, env=env)
    with log.open("ab") as output:
        return subprocess.run(command, check=False, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def _read(report: Path) -> Counts:
    suites = list(ET.parse(report).getroot().iter("testsuite"))

    def total(key: str) -> int:
        return sum(int(suite.get(key, "0")) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    names = tuple(
        f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    )
    return Counts(passed=total("tests") - failed - skipped, failed=failed, skipped=skipped, names=names)
