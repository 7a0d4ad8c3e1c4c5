"""The simulator itself: processes that end and stand still between any two awaits, scenarios as data, and shrinking."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from atoll.testing.sim.loop import Stuck, VirtualLoop
from atoll.testing.sim.process import Process, current
from atoll.testing.sim.scenario import MOMENTS, REPLICAS, Fault, Kind, Scenario, Step, Wish, generate
from atoll.testing.sim.shrink import shrink, signature
from atoll.testing.sim.story import Outcome, simulate

pytestmark = pytest.mark.usefixtures("quiet")

Story = Callable[[], Coroutine[Any, Any, Any]]


def tell(story: Story) -> Any:
    """In virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(story())
    finally:
        loop.close()


# Time.


def test_time_jumps_to_the_next_timer() -> None:
    async def story() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert tell(story) == pytest.approx(1e6)


def test_a_world_in_which_nothing_can_happen_any_more_says_so() -> None:
    with pytest.raises(Stuck):
        tell(lambda: asyncio.Event().wait())  # type: ignore[arg-type,return-value]


# Processes.


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_process_ends_between_any_two_awaits(steps: int) -> None:
    done: list[int] = []

    async def work() -> None:
        for number in range(6):
            done.append(number)
            await asyncio.sleep(0.1)

    async def story() -> bool:
        process = Process("p")
        process.trap(steps)
        process.run(work())
        await asyncio.sleep(10)
        return process.alive

    assert tell(story) is (steps > 7)
    assert done == list(range(min(steps - 1, 6)))


def test_what_a_task_begins_belongs_to_its_process_and_ends_with_it() -> None:
    seen: list[str] = []

    async def child(name: str) -> None:
        process = current()
        assert process is not None
        seen.append(f"{process.name}/{name}")
        await asyncio.sleep(5)
        seen.append(f"{name} lives")

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child("a"))
            asyncio.get_running_loop().call_later(1, lambda: asyncio.ensure_future(child("b")))
            await asyncio.sleep(60)

    async def story() -> None:
        process = Process("p")
        process.run(work())
        await asyncio.sleep(2)
        process.end()
        await process.gone()
        asyncio.get_running_loop().call_later(1, lambda: None)
        await asyncio.sleep(30)
        assert current() is None

    tell(story)
    assert seen == ["p/a", "p/b"]


def test_nothing_of_an_ended_process_has_an_effect() -> None:
    effects: list[str] = []

    async def work(process: Process) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            process.check()
            effects.append("from the grave")

    async def story() -> None:
        process = Process("p")
        process.run(work(process))
        await asyncio.sleep(1)
        process.end()
        await process.gone()

    tell(story)
    assert effects == []


def test_a_task_that_swallows_its_end_takes_no_step_more() -> None:
    steps: list[int] = []

    async def work() -> None:
        while True:
            try:
                steps.append(len(steps))
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
                steps.append(-1)
                return

    async def story() -> None:
        process = Process("p")
        process.run(work())
        await asyncio.sleep(2.5)
        process.end()
        await process.gone()

    tell(story)
    assert steps == [0, 1, 2]


def test_a_frozen_process_goes_on_where_it_stood_and_its_time_has_passed() -> None:
    seen: list[float] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(4):
            await asyncio.sleep(1)
            seen.append(loop.time())
        try:
            async with asyncio.timeout(5):
                await asyncio.sleep(60)
        except TimeoutError:
            seen.append(loop.time())

    async def story() -> None:
        process = Process("p")
        process.run(work())
        await asyncio.sleep(1.5)
        process.freeze()
        await asyncio.sleep(100)
        process.thaw()
        await asyncio.sleep(100)

    tell(story)
    assert seen == pytest.approx([1.0, 101.5, 102.5, 103.5, 108.5])


def test_a_frozen_process_can_be_killed() -> None:
    async def story() -> bool:
        process = Process("p")
        process.run(asyncio.sleep(1))
        process.freeze()
        await asyncio.sleep(5)
        process.end()
        await process.gone()
        return process.alive

    assert tell(story) is False


# Scenarios.


@pytest.mark.parametrize("seed", range(20))
def test_a_scenario_is_data(seed: int) -> None:
    scenario = generate(seed)
    assert Scenario.from_json(scenario.to_json()) == scenario
    assert generate(seed) == scenario
    assert list(scenario.faults) == sorted(scenario.faults, key=lambda f: f.at_s)
    assert all(0 < f.at_s <= scenario.fate_s for f in scenario.faults)


def test_every_kind_of_fault_happens_in_some_world() -> None:
    kinds = {fault.kind for seed in range(200) for fault in generate(seed).faults}
    assert kinds == set(Kind)


def test_every_wish_is_somebodys_in_some_world() -> None:
    assert {step.wish for seed in range(60) for step in generate(seed).steps} == set(Wish)


CALM = Scenario(seed=1, hosts=1, replicas=1, fate_s=40.0, steps=(Step(1.0, 0, Wish.CREATE, 20), Step(2.0, 0, Wish.CREATE, 600)))


def test_a_calm_world_does_what_it_is_asked() -> None:
    outcome = simulate(CALM)
    assert outcome.error is None
    assert outcome.ends == {"released END_REACHED": 1, "released RELEASE_REQUESTED": 2}


WARM = (
    Step(1.0, 0, Wish.WARM, count=4),
    Step(20.0, 1, Wish.CROWD, 20, count=2),
    Step(60.0, 0, Wish.REBUILD),
    Step(90.0, 1, Wish.CROWD, 30, count=1, memory_mib=1024),
    Step(150.0, 0, Wish.WARM, count=1),
)


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_made_ahead_is_claimed_replaced_given_up_and_gone_in_the_end(replicas: int) -> None:
    outcome = simulate(replace(CALM, replicas=replicas, fate_s=180.0, steps=WARM))
    assert outcome.error is None
    assert outcome.claims == 2
    ends = {name.split()[1] for name in outcome.ends}
    assert {"WARM_OUTDATED", "WARM_GIVEN_UP", "WARM_SURPLUS", "RELEASE_REQUESTED"} <= ends, outcome.ends


MOVED = (Step(1.0, 0, Wish.CREATE, 600), Step(3.0, 0, Wish.SUSPEND), Step(12.0, 0, Wish.RESUME, 600), Step(30.0, 0, Wish.SUSPEND))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_saved_goes_through_the_store_and_comes_back(seed: int) -> None:
    steps = (*MOVED, Step(40.0, 0, Wish.RESUME, 600))
    outcome = simulate(replace(CALM, seed=seed, hosts=2, stored=True, local_s=1.0, fate_s=60.0, steps=steps))
    assert outcome.error is None
    resting = [line for line in outcome.trace if "is suspended" in line]
    back = [line for line in outcome.trace if "resuming -> ready" in line]
    assert (len(resting), len(back)) == (2, 2)
    assert back[-1].endswith("generation 3"), back


@pytest.mark.parametrize("kind", list(Kind))
def test_each_fault_alone_is_injected_and_survived(kind: Kind) -> None:
    words = {
        Kind.PARTITION: ("both", "requests", "answers"),
        Kind.VANISH: ("off", "fence", "back"),
        Kind.REBOOT: ("", "wiped"),
        Kind.AGENT_CRASH: ("", "disk"),
        Kind.GUEST_EXITS: ("", "unseen"),
        Kind.DRIVER_FAILS: ("start once", "start after", "prepare always", "stop once", "remove always", "inspect once", "held once"),
        Kind.DRIVER_HANGS: ("start", "remove"),
    }
    for word in words.get(kind, ("",)):
        steps = tuple(Step(2.0 + 3 * n, n % 2, Wish.CREATE, timeout_s=(15, 400)[n % 2]) for n in range(6))
        fault = Fault(6.0, kind, for_s=20.0, share=0.9, word=word)
        if kind in MOMENTS:
            steps = MOVED
        replicas, stored = 2 if kind in REPLICAS else 1, kind in MOMENTS
        world = replace(CALM, replicas=replicas, stored=stored, local_s=1.0, steps=(*steps, Step(35.0, 0, Wish.RELEASE)), faults=(fault,))
        outcome = simulate(world)
        assert outcome.error is None, f"{fault}: {outcome.error}"
        assert outcome.injected == {kind.value: 1}, f"{fault} did not happen"


# Shrinking.


def outcome_of(scenario: Scenario, error: BaseException | None) -> Outcome:
    return Outcome(scenario, [], "", Counter(), Counter(), 0, 0, error)


def test_it_shrinks_to_what_it_takes() -> None:
    faults = tuple(Fault(float(n), Kind.LOSSY, share=0.1) for n in range(30))
    steps = tuple(Step(float(n), 0, Wish.CREATE, 60) for n in range(30))
    needed = {faults[3], faults[17], steps[22]}

    def run(scenario: Scenario) -> Outcome:
        there = needed <= {*scenario.faults, *scenario.steps}
        return outcome_of(scenario, AssertionError(f"sandbox i{'a' * 20} at {len(scenario.faults)}") if there else None)

    scenario = Scenario(7, 3, 2, 100.0, skews_s=(1.0, 2.0), faults=faults, steps=steps)
    smallest = shrink(run(scenario), run=run).scenario
    assert {*smallest.faults, *smallest.steps} == needed
    assert (smallest.hosts, smallest.replicas, smallest.skews_s) == (1, 1, ())


def test_another_failure_is_not_the_same_one() -> None:
    faults = (Fault(1.0, Kind.LOSSY), Fault(2.0, Kind.STUCK))

    def run(scenario: Scenario) -> Outcome:
        return outcome_of(scenario, AssertionError("one thing") if len(scenario.faults) == 2 else AssertionError("another"))

    assert shrink(run(Scenario(1, 1, 1, 10.0, faults=faults)), run=run).scenario.faults == faults


def test_a_failure_is_known_by_its_words_and_not_by_its_names() -> None:
    one = signature(AssertionError(f"sandbox i{'a' * 20} ends 3.5 s too early on plc_{'b' * 20}"))
    other = signature(AssertionError(f"sandbox i{'c' * 20} ends 17.25 s too early on plc_{'d' * 20}"))
    assert one == other
    assert signature(None) is None
