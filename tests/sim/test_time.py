"""Clocks that are wrong: an hour's step in either direction, and replicas that disagree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.clock import Clock, ShiftedClock
from atoll.testing.sim.scenario import Fault, Kind, Scenario, Step, Wish
from atoll.testing.sim.story import simulate
from tests.sim.duo import duo
from tests.sim.world import World

pytestmark = pytest.mark.usefixtures("quiet")

LIVES = (Step(1.0, 0, Wish.CREATE, 100), Step(1.0, 1, Wish.CREATE, 1000), Step(1.0, 2, Wish.CREATE, 30))
CALM = Scenario(seed=1, hosts=1, replicas=1, fate_s=200.0, steps=LIVES)


@pytest.mark.parametrize("share", [0.25, 0.75], ids=["an hour back", "an hour on"])
@pytest.mark.parametrize("machine", [0, 1], ids=["control", "host"])
def test_an_hour_s_step_ends_nothing_and_keeps_nothing_too_long(machine: int, share: float) -> None:
    """The simulator holds every end to its time: an early one and a late one are broken promises."""
    outcome = simulate(replace(CALM, faults=(Fault(20.0, Kind.CLOCK_STEP, target=machine, share=share),)))
    assert outcome.error is None, outcome.error
    assert outcome.injected == {"clock_step": 1}
    assert outcome.ends["released END_REACHED"] == 2


def test_a_clock_that_goes_to_and_fro() -> None:
    faults = tuple(Fault(10.0 * n, Kind.CLOCK_STEP, target=n % 2, share=(0.1, 0.9, 0.4)[n % 3]) for n in range(1, 15))
    outcome = simulate(replace(CALM, faults=faults))
    assert outcome.error is None, outcome.error
    assert outcome.ends["released END_REACHED"] == 2


class HourAhead:
    """Another machine's clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now() + 3600.0

    def boot(self) -> float:
        return self._clock.boot()


async def test_replicas_go_by_the_clock_of_their_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that one wrote is read by another whose machine is an hour ahead."""
    async with duo(tmp_path, clocks=(lambda clock: clock, HourAhead)) as (world, agent):
        await world.accept(timeoutSeconds=600)
        with world.through(1):
            await agent.wanted()
        (end,) = agent.ends.values()
        assert 600 < end.remaining_s < 700


async def test_one_control_on_its_own_file_goes_by_its_own_clock(world: World) -> None:
    assert not isinstance(world.running._clock, ShiftedClock)


def test_a_shifted_clock_moves_the_wall_and_not_the_boot() -> None:
    class Still:
        def now(self) -> float:
            return 100.0

        def boot(self) -> float:
            return 7.0

    shifted = ShiftedClock(Still(), by_s=-3.5)
    assert (shifted.now(), shifted.boot()) == (96.5, 7.0)
