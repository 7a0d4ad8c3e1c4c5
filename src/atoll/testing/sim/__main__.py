"""`python -m atoll.testing.sim --seed N`: one seed, told readably. `--seeds K`: many, with what was injected. A failing one is shrunk.

A scenario that failed is written to a file, and `--scenario FILE` plays it again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from atoll.telemetry import log
from atoll.testing.sim.scenario import Fault, Plan, Scenario, Step, generate
from atoll.testing.sim.shrink import shrink
from atoll.testing.sim.story import Outcome, simulate

_PROGRESS = 25


def main() -> int:
    """Exit code 1 when a promise is broken."""
    parser = argparse.ArgumentParser(prog="atoll.testing.sim", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=0, help="run so many, from --seed on, and sum up")
    parser.add_argument("--scenario", type=Path, help="play this file instead of a seed")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--digest", action="store_true", help="print nothing but the digest of the trace")
    parser.add_argument("--log", default="critical", help="the product's own log from this level on, e.g. warning")
    options = parser.parse_args()
    log.configure("sim", options.log)
    if options.log == "critical":
        logging.disable(logging.CRITICAL)
    if options.seeds:
        return _many(range(options.seed, options.seed + options.seeds), keep_going=options.keep_going, shrinking=not options.no_shrink)
    scenario = Scenario.from_json(options.scenario.read_text()) if options.scenario else generate(options.seed)
    outcome = simulate(scenario)
    if options.digest:
        print(outcome.digest)
        return 1 if outcome.error else 0
    _tell(outcome)
    if outcome.error is not None and not options.no_shrink and not options.scenario:
        _shrunk(outcome)
    return 1 if outcome.error else 0


def _tell(outcome: Outcome) -> None:
    scenario = outcome.scenario
    print(f"seed {scenario.seed}: {scenario.hosts} hosts, {scenario.replicas} control replicas, {scenario.clients} clients")
    print(f"at lease expiry: {scenario.on_lease_expiry}; at exit: {scenario.on_exit}; wall clocks off by {list(scenario.skews_s)} s\n")
    print("\n".join(outcome.trace))
    print(f"\n{_summary(outcome)}")
    if outcome.error is not None:
        print(f"\nBROKEN: {type(outcome.error).__name__}: {outcome.error}")
        if not isinstance(outcome.error, AssertionError):
            traceback.print_exception(outcome.error)


def _summary(outcome: Outcome) -> str:
    return (
        f"virtual time {outcome.trace[-1].split()[0] if outcome.trace else 0} s, {outcome.commits} commits, {outcome.messages} messages, {outcome.claims} claims\n"
        f"faults: {_counted(outcome.injected)}\nsandboxes: {_counted(outcome.ends)}\ndigest: {outcome.digest or '-'}"
    )


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _many(seeds: range, *, keep_going: bool, shrinking: bool) -> int:
    begun = time.monotonic()
    injected: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    failed: dict[int, str] = {}
    commits = claims = 0
    for number, seed in enumerate(seeds, 1):
        outcome = simulate(generate(seed, Plan()))
        injected += outcome.injected
        ends += outcome.ends
        commits += outcome.commits
        claims += outcome.claims
        if outcome.error is not None:
            failed[seed] = f"{type(outcome.error).__name__}: {outcome.error}"
            print(f"seed {seed} is broken: {failed[seed]}\n  repeat it with: make sim SEED={seed}", flush=True)
            if shrinking:
                _shrunk(outcome)
            if not keep_going:
                break
        if number % _PROGRESS == 0 or number == len(seeds):
            print(f"{number} of {len(seeds)} seeds, {len(failed)} broken, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{commits} commits, {claims} warm guests claimed\nfaults injected: {_counted(injected)}\nsandboxes ended: {_counted(ends)}")
    if failed:
        print(f"broken seeds: {', '.join(map(str, failed))}")
    return 1 if failed else 0


def _shrunk(outcome: Outcome) -> None:
    smallest = shrink(outcome, on_progress=lambda text: print(f"  {text}", file=sys.stderr, flush=True))
    path = Path(f"sim-{outcome.scenario.seed}.json")
    path.write_text(smallest.scenario.to_json())
    print(f"\nthe smallest scenario that breaks the same promise ({path}):")
    parts: list[Fault | Step] = [*smallest.scenario.faults, *smallest.scenario.steps]
    for part in sorted(parts, key=lambda one: one.at_s):
        print(f"  {part}")
    print(f"  {type(smallest.error).__name__}: {smallest.error}")


if __name__ == "__main__":
    sys.exit(main())
