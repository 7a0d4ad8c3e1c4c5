"""The simulator's promises: no seed breaks an invariant, and the same seed tells the same story in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atoll.testing.sim.scenario import Plan, generate
from atoll.testing.sim.story import simulate

pytestmark = pytest.mark.usefixtures("quiet")

SHORT = Plan(hosts_max=3, clients_max=3, fate_s=200.0, faults_max=14, steps_max=20)
AT_ONCE = 5
"""Seeds of one test: few enough that a failing one is found at once, many enough that counting them costs nothing."""
SEEDS = range(1, 201)
LONG_SEEDS = range(1000, 4000)


def fails(seed: int, plan: Plan) -> str | None:
    outcome = simulate(generate(seed, plan))
    return None if outcome.error is None else f"seed {seed}: {type(outcome.error).__name__}: {outcome.error}"


@pytest.mark.parametrize("first", SEEDS[::AT_ONCE])
def test_fate_breaks_no_promise(first: int) -> None:
    assert [broken for seed in range(first, first + AT_ONCE) if (broken := fails(seed, SHORT))] == []


@pytest.mark.long
@pytest.mark.parametrize("first", LONG_SEEDS[::50])
def test_fate_breaks_no_promise_in_thousands_of_worlds(first: int) -> None:
    assert [broken for seed in range(first, first + 50) if (broken := fails(seed, Plan()))] == []


@pytest.mark.parametrize("seed", [242, 299, 711, 800, 423, 764, 844, 2864, 2881, 11, 95, 171, 5055, 5067, 5073])
def test_worlds_that_found_something_are_whole(seed: int) -> None:
    """Each has broken a promise once (docs/FENCING.md)."""
    assert fails(seed, Plan()) is None


@pytest.mark.parametrize("seed", [14, 33])
def test_the_same_seed_tells_the_same_story(seed: int) -> None:
    def run(hash_seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "atoll.testing.sim", "--seed", str(seed), "--digest"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    first = run("1")
    assert len(first) == 65
    assert first == run("2")
