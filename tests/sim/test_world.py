"""The simulator's promises: no seed breaks an invariant, and the same seed tells the same story in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import combinations

import pytest

from atoll.testing.sim.scenario import Kind, Plan, Scenario, Wish, generate
from atoll.testing.sim.story import simulate

pytestmark = pytest.mark.usefixtures("quiet")

SHORT = Plan(hosts_max=3, clients_max=3, fate_s=200.0, faults_max=14, steps_max=20)
AT_ONCE = 5
"""Seeds of one test: few enough that a failing one is found at once, many enough that counting them costs nothing."""
SEEDS = range(1, 201)
LONG_SEEDS = range(1000, 4000)


def traits(world: Scenario) -> set[str]:
    """What may meet in it: kinds of faults, wishes, how many there are, and what was agreed on."""
    agreed = (world.on_lease_expiry, world.on_exit, world.on_loss)
    counts = {
        f"hosts {world.hosts}",
        f"replicas {world.replicas}",
        f"stored {world.stored}",
        *(f"{n} {one}" for n, one in enumerate(agreed)),
    }
    return {f"fault {one.kind}" for one in world.faults} | {f"wish {one.wish}" for one in world.steps} | counts


def meetings(seed: int) -> set[tuple[str, str]]:
    return set(combinations(sorted(traits(generate(seed, SHORT))), 2))


def telling(seeds: Iterable[int]) -> Iterator[int]:
    """Those in which two things meet that meet in none before it."""
    met: set[tuple[str, str]] = set()
    for seed in seeds:
        if not (found := meetings(seed)) <= met:
            met |= found
            yield seed


FOUND = 96
"""It has broken a promise once, though nothing new meets in it."""
CHOSEN = tuple(sorted({*telling(SEEDS), FOUND}))
OTHERS = tuple(seed for seed in SEEDS if seed not in CHOSEN)


def fails(seed: int, plan: Plan) -> str | None:
    outcome = simulate(generate(seed, plan))
    return None if outcome.error is None else f"seed {seed}: {type(outcome.error).__name__}: {outcome.error}"


@pytest.mark.parametrize("at", range(0, len(CHOSEN), AT_ONCE), ids=lambda at: str(CHOSEN[at]))
def test_fate_breaks_no_promise(at: int) -> None:
    assert [broken for seed in CHOSEN[at : at + AT_ONCE] if (broken := fails(seed, SHORT))] == []


def test_every_kind_of_fault_and_every_wish_is_in_a_world_that_is_told() -> None:
    """And whatever two things meet in any world that is left to the long run."""
    told = set().union(*(traits(generate(seed, SHORT)) for seed in CHOSEN))
    assert {f"fault {kind}" for kind in Kind} | {f"wish {wish}" for wish in Wish} <= told
    assert set().union(*map(meetings, OTHERS)) <= set().union(*map(meetings, CHOSEN))


@pytest.mark.long
@pytest.mark.parametrize("at", range(0, len(OTHERS), AT_ONCE), ids=lambda at: str(OTHERS[at]))
def test_fate_breaks_no_promise_where_nothing_new_meets(at: int) -> None:
    assert [broken for seed in OTHERS[at : at + AT_ONCE] if (broken := fails(seed, SHORT))] == []


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
