"""Go's checks over native/: format, vet, and all tests under the race detector."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from suites.counts import Counts
from suites.python import AGAIN_MAX, environment

NATIVE: Final = Path("native")
REGISTRY: Final = NATIVE / "registry"
GO: Final = Path("build") / "tools" / "go"
ENDINGS: Final = frozenset({"pass", "fail", "skip", "build-fail"})


def go_environment() -> dict[str, str]:
    """What builds and tests run with: the chosen toolchain, the locked modules; C for the race detector."""
    settings = {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off", "CGO_ENABLED": "1"}
    return environment() | settings


def all_checks() -> Counts:
    """gofmt, go vet, go test -race; a complaint of the first two is one failure each."""
    if not any(NATIVE.rglob("*_test.go")):
        print("native: no tests there yet", flush=True)
        return Counts()
    go = str(GO.absolute())
    counts = Counts()
    root = subprocess.run([go, "env", "GOROOT"], capture_output=True, text=True, check=True, env=go_environment()).stdout.strip()
    unformatted = subprocess.run([f"{root}/bin/gofmt", "-l", "."], cwd=NATIVE, capture_output=True, text=True, check=False)
    if unformatted.returncode != 0 or unformatted.stdout:
        print(f"gofmt: {unformatted.stdout}{unformatted.stderr} (make fmt)", flush=True)
        counts += Counts(failed=1, names=("gofmt",))
    vet = subprocess.run([go, "vet", "./..."], cwd=NATIVE, check=False, env=go_environment())
    if vet.returncode != 0:
        counts += Counts(failed=1, names=("go vet",))
    return sum((_tests(directory, "./...") for directory in (NATIVE, REGISTRY)), counts)


def again(first: Counts) -> Counts:
    """The few tests that failed, once more, one after the other, as Python's are. What is no test (a format, a build) has failed."""
    failed = [name.split(" ") for name in first.names]
    if not 0 < first.failed <= AGAIN_MAX or not all(len(words) == 2 and words[1].startswith("Test") for words in failed):
        return first
    print(f"{first.failed} failed: once more, alone", flush=True)
    own = f"{_module(REGISTRY)}/"
    second = sum((_tests(REGISTRY if f"{package}/".startswith(own) else NATIVE, package, only=test) for package, test in failed), Counts())
    if second.passed + second.failed != first.failed:
        return first
    unsteady = tuple(name for name in first.names if name not in second.names)
    return Counts(first.passed + second.passed, second.failed, first.skipped, second.names, unsteady)


def _module(directory: Path) -> str:
    return next(line.split()[1] for line in (directory / "go.mod").read_text().splitlines() if line.startswith("module "))


def _tests(directory: Path, packages: str, *, only: str | None = None) -> Counts:
    """Tests of one module."""
    # A module of its own, whose engine was built for the program: under the race detector all of it would be built anew.
    way, settings = (["-trimpath"], {"CGO_ENABLED": "0"}) if directory == REGISTRY else (["-race"], {})
    which = [] if only is None else ["-count=1", "-run", f"^{only}$"]
    settings = go_environment() | settings
    command = [str(GO.absolute()), "test", *way, *which, "-p", str(min(2, os.cpu_count() or 1)), "-timeout", "600s", "-json", packages]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True, env=settings) as run:
        assert run.stdout is not None
        tested = read_events(run.stdout)
    if run.returncode != 0 and tested.failed == 0:
        tested += Counts(failed=1, names=(f"go test in {directory}",))
    return tested


def read_events(lines: Iterable[str]) -> Counts:
    """Count top-level tests in `go test -json`, showing packages' results at once and the output of what failed or was skipped."""
    said: dict[tuple[str, str], list[str]] = defaultdict(list)
    counts = Counts()
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # a compiler's word before the first event
            print(line, end="", flush=True)
            continue
        package, test = event.get("Package") or event.get("ImportPath", ""), event.get("Test", "")
        key = (package, test.partition("/")[0])
        if event.get("Action") in ("output", "build-output"):
            said[key].append(event.get("Output", ""))
        elif event.get("Action") in ENDINGS and "/" not in test:
            counts += _ended(event, package, "".join(said.pop(key, [])))
    return counts


def _ended(event: dict[str, Any], package: str, text: str) -> Counts:
    """One test or, without a test's name, one package or build has ended."""
    action, test = event["Action"], event.get("Test")
    if action in ("fail", "build-fail") or (test and action == "skip"):
        print(text, end="", flush=True)
    if not test:
        if action != "build-fail":
            print(f"{action} {package} {event.get('Elapsed', 0):.1f} s", flush=True)
        # A package that fails because a test in it failed is counted by that test.
        return Counts(failed=1, names=(f"{package} does not build",)) if "FailedBuild" in event else Counts()
    failed = action == "fail"
    return Counts(int(action == "pass"), int(failed), int(action == "skip"), (f"{package} {test}",) if failed else ())
