"""Shrinking: leave out faults and steps as long as the same promise breaks.

Theory of operation. Delta debugging over the scenario's parts: first halves, then quarters, and so on down to single ones; then fewer
hosts and replicas. "The same" is the kind of the error and its words without ids and numbers. Each try is a whole simulation, so there
is a limit on how many are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from atoll.testing.sim.scenario import Fault, Scenario, Step
from atoll.testing.sim.story import Outcome, simulate

TRIES_MAX: Final = 400
_NAMES: Final = re.compile(r"\b(?:[a-z]{3}_[a-z0-9]{20}|i[a-z0-9]{20}|c\d+-\d+)\b|\d+(?:\.\d+)?")


def signature(error: BaseException | None) -> str | None:
    """What makes two failures the same one; None for none."""
    return None if error is None else f"{type(error).__name__}: {_NAMES.sub('#', str(error))}"


def shrink(
    outcome: Outcome,
    *,
    tries_max: int = TRIES_MAX,
    run: Callable[[Scenario], Outcome] = simulate,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """The smallest outcome found that fails as this one does."""
    wanted = signature(outcome.error)
    best = outcome
    tries = 0

    def fails(scenario: Scenario) -> Outcome | None:
        nonlocal tries
        tries += 1
        found = run(scenario)
        return found if signature(found.error) == wanted else None

    size = max(1, (len(best.scenario.faults) + len(best.scenario.steps)) // 2)
    while tries < tries_max:
        smaller = _without_some(best, size, fails, lambda: tries < tries_max)
        if smaller is not None:
            best = smaller
            on_progress(f"{len(best.scenario.faults)} faults, {len(best.scenario.steps)} steps after {tries} tries")
        elif size > 1:
            size //= 2
        else:
            break
    for narrower in _narrower(best.scenario):
        if tries < tries_max and (found := fails(narrower)) is not None:
            best = found
    return best


def _without_some(best: Outcome, size: int, fails: Callable[[Scenario], Outcome | None], more: Callable[[], bool]) -> Outcome | None:
    parts: list[Fault | Step] = [*best.scenario.faults, *best.scenario.steps]
    for begin in range(0, len(parts), size):
        if not more():
            return None
        left_out = parts[begin : begin + size]
        faults = frozenset(part for part in left_out if isinstance(part, Fault))
        steps = frozenset(part for part in left_out if isinstance(part, Step))
        found = fails(best.scenario.without(faults, steps))
        if found is not None:
            return found
    return None


def _narrower(scenario: Scenario) -> list[Scenario]:
    """The same story in a simpler world: no skews, then one replica, then one host."""
    plain = replace(scenario, skews_s=())
    return [plain, replace(plain, replicas=1), replace(plain, replicas=1, hosts=1)]
