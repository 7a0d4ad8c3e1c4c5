"""The simulator's promises: invariants hold under fate, a planted fault is found, the same seed tells the same story."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atoll.planning import placing
from atoll.planning.fleet import Fleet
from atoll.testing.sim import checks
from atoll.testing.sim.world import Plan, simulate

SHORT = Plan(fate_s=60.0)
SEEDS = range(1, 201) if os.environ.get("ATOLL_LONG") else range(1, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_fate_breaks_no_promise(seed: int) -> None:
    simulate(seed, SHORT)


def test_a_scheduler_that_grants_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "refusal", lambda _host, _spec, *, used: None)
    monkeypatch.setattr(Fleet, "choose", lambda self, _spec, **_: next((advert.host.id for advert in self.adverts()), None))
    with pytest.raises(checks.Violated, match="has granted more"):
        for seed in range(20):
            simulate(seed, Plan(hosts=1, clients=8, fate_s=60.0, faults_every_s=1e6))


def test_the_same_seed_tells_the_same_story() -> None:
    def run(hash_seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "atoll.testing.sim", "--seed", "14", "--trace"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        return "\n".join(done.stdout.splitlines()[:-1])

    assert run("1") == run("2")
