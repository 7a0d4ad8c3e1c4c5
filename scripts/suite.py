#!/usr/bin/env python3
"""Run the project's checks and tests, and end with one line that counts them all.

    scripts/suite.py check          lint, types, import contracts, unit tests: under a minute
    scripts/suite.py test           that, and everything else, matrices sampled
    scripts/suite.py long           the same with the full matrices
    scripts/suite.py NAME...        some suites by name (scripts/suite.py --list)

A suite that fails does not stop the others; the status is 1 when anything failed. Reports are under build/reports.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

from suites import golang, python
from suites.counts import Counts

REPOSITORY: Final = Path(__file__).resolve().parents[1]
REPORTS: Final = REPOSITORY / "build" / "reports"


class Lane(Enum):
    """Suites of one lane run one after the other; the lanes run beside each other. What is said in another than the first comes at the end."""

    FIRST = "first"
    WAITING = "waiting"
    """They wait (for kills, restores, clocks) more than they compute."""
    PATIENT = "patient"
    """They compute and wait for nobody: they take what the others leave of the processors."""


@dataclass(frozen=True)
class Suite:
    """A part of the whole with a name; `run` is told whether the full matrices are wanted, and where to say what it says."""

    name: str
    run: Callable[[bool, Path | None], Counts]
    lane: Lane = Lane.FIRST
    again: Callable[[bool, Counts], Counts] | None = None
    """Run the few that failed once more, when no other suite runs."""


def _tests(name: str, *places: str, workers: str = "0", again: bool = False, lane: Lane = Lane.FIRST, without: Sequence[str] = ()) -> Suite:
    """Tests of these directories and files, `without` some files."""
    chosen = (*places, *(f"--ignore={one}" for one in without))

    def run(full: bool, log: Path | None) -> Counts:  # noqa: FBT001 - the two answers of _run
        return python.tests(name, chosen, workers=workers, full=full, log=log, patient=log is not None and lane is Lane.PATIENT)

    def once_more(full: bool, first: Counts) -> Counts:  # noqa: FBT001 - as run
        return python.again(name, chosen, first, full=full)

    return Suite(name, run, lane, once_more if again else None)


def _tool(name: str, *commands: Sequence[str]) -> Suite:
    return Suite(name, lambda *_: python.tools(commands))


WORLDS: Final = ("tests/sim/test_world.py", "tests/sim/test_simulator.py", "tests/sim/test_mutations.py")
CHECK: Final = (
    _tool("lint", ["ruff", "check"], ["ruff", "format", "--check"]),
    _tool("types", ["mypy"]),
    _tool("imports", ["lint-imports"], ["deptry", "src"], ["vulture"]),
    _tests("unit", "tests/unit", "tests/property", "tests/wire", "tests/tidy", workers="auto", again=True),
)
REST: Final = (
    # In virtual time, so that it may be slow.
    _tests("worlds", *WORLDS, workers="auto", again=True, lane=Lane.PATIENT),
    # Real runtimes: two at a time, as there is something to measure; kills and restores wait more than they compute.
    _tests("conformance", "tests/conformance", workers="2", again=True, lane=Lane.WAITING),
    # Each worker has an instance of its own.
    _tests("e2e", "tests/e2e", workers="2", again=True, lane=Lane.WAITING),
    _tests("templates", "tests/templates", again=True, lane=Lane.WAITING),
    Suite("go", lambda *_: golang.all_checks(), again=lambda _, first: golang.again(first)),
    _tests("store", "tests/store", "tests/objects", workers="auto", again=True),
    _tests("agent", "tests/agent", workers="auto", again=True),
    # A whole control, most of it on real clocks.
    _tests("sim", "tests/sim", workers="auto", again=True, without=WORLDS),
    # Each file has instances, or machines, of its own, and waits more than it computes.
    _tests("instance", "tests/hosts", "tests/instance", workers="4", again=True),
    _tests("regressions", "tests/regressions"),
)
GROUPS: Final = {"check": CHECK, "test": (*CHECK, *REST), "long": (*CHECK, *REST)}


def main() -> int:
    """Run what was asked for; the last line counts it."""
    known = {suite.name: suite for suite in (*CHECK, *REST)}
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("what", nargs="*", default=["check"], help=f"{', '.join(GROUPS)}, or suites: {', '.join(known)}")
    options.add_argument("--list", action="store_true")
    chosen = options.parse_args()
    if chosen.list:
        print("\n".join(known))
        return 0
    suites: list[Suite] = []
    for name in chosen.what:
        if name not in GROUPS and name not in known:
            options.error(f"no such suite: {name}; there are {', '.join([*GROUPS, *known])}")
        suites.extend(GROUPS.get(name) or (known[name],))
    return _run(suites, full="long" in chosen.what)


def _run(suites: Sequence[Suite], *, full: bool) -> int:
    os.chdir(REPOSITORY)
    REPORTS.mkdir(parents=True, exist_ok=True)
    # What has the machine for itself is not told into a file.
    aside = [suite for suite in suites if suite.lane is not Lane.FIRST] if len({suite.lane for suite in suites}) > 1 else []
    logs = {suite.name: REPORTS / f"{suite.name}.log" for suite in aside}
    done: dict[str, tuple[float, Counts]] = {}
    with ThreadPoolExecutor(len(Lane)) as pool:
        lanes = [
            pool.submit(_lane, [suite for suite in aside if suite.lane is lane], logs, full=full) for lane in (Lane.WAITING, Lane.PATIENT)
        ]
        for suite in suites:
            if suite not in aside:
                print(f"\n=== {suite.name}", flush=True)
                done[suite.name] = _timed(suite, None, full=full)
        for lane in lanes:
            for name, ended in lane.result().items():
                print(f"\n=== {name}, beside the others\n{logs[name].read_text(errors='replace')}", flush=True)
                done[name] = ended
    for suite in suites:
        took, counts = done[suite.name]
        if counts.failed and suite.again is not None:
            print(f"\n=== {suite.name}", flush=True)
            done[suite.name] = (took, suite.again(full, counts))
    whole = sum((counts for _, counts in done.values()), Counts())
    lines = [f"{suite.name:12} {done[suite.name][0]:7.1f} s  {done[suite.name][1]}" for suite in suites]
    print("\n=== summary\n" + "\n".join(lines))
    for name in whole.names:
        print(f"failed: {name}")
    for name in whole.unsteady:
        print(f"unsteady, passed when run again alone: {name}")
    (REPORTS / "summary.txt").write_text(f"{whole}\n")
    print(whole, flush=True)
    return 1 if whole.failed else 0


def _lane(suites: Sequence[Suite], logs: Mapping[str, Path], *, full: bool) -> dict[str, tuple[float, Counts]]:
    return {suite.name: _timed(suite, logs[suite.name], full=full) for suite in suites}


def _timed(suite: Suite, log: Path | None, *, full: bool) -> tuple[float, Counts]:
    """How long it took, in seconds, and its counts."""
    if log is not None:
        log.write_text("")
    began = time.monotonic()
    try:
        counts = suite.run(full, log)
    except FileNotFoundError as error:
        print(f"{error.filename or error}: not found. Run scripts/setup.py --for test first", file=sys.stderr)
        counts = Counts(failed=1, names=(f"{suite.name}: not set up",))
    return time.monotonic() - began, counts


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.SubprocessError as problem:
        sys.exit(f"suite: {problem}")
