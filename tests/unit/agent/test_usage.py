"""Usage: what a placement has used, in a bounded number of points; and what it costs to know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from atoll.agent.record import Blueprint, Record
from atoll.agent.usage import EVERY_S, NEW, OLD, Course, Usage
from atoll.base.errors import Code, Unavailable
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation
from atoll.drivers.port import Usage as Measured
from atoll.wire.agent import MESSAGE_BYTES_MAX, POINTS_MAX, SAMPLED_MAX, Collected
from tests.builders import spec


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def boot(self) -> float:
        return self.at


class Driver:
    def __init__(self) -> None:
        self.found: dict[str, Measured] = {}
        self.asked: list[list[str]] = []
        self.error: Exception | None = None

    async def usage(self, placement_ids: Sequence[str]) -> Mapping[str, Measured]:
        self.asked.append(list(placement_ids))
        if self.error is not None:
            raise self.error
        return {one: self.found[one] for one in placement_ids if one in self.found}


def record(placement_id: str = "plc_a", **changes: Any) -> Record:
    values: dict[str, Any] = {
        "placement_id": placement_id, "sandbox_id": "i1", "team_id": "tea_1", "generation": 1, "desired": Kind.ENSURE_RUNNING,
        "desired_revision": 1, "command_id": "c", "digest": "d", "boot_id": "b", "observed": Observed.RUNNING,
        "blueprint": Blueprint(spec(cpu_millis=2000), "n", "k", "h"),
    }  # fmt: skip
    return Record(**{**values, **changes})


class World:
    def __init__(self) -> None:
        self.clock, self.driver, self.records = Clock(), Driver(), [record()]
        self.usage = Usage(lambda: self.records, {Isolation.GVISOR: self.driver}, self.clock)  # type: ignore[dict-item]

    async def look(self, cpu_s: float, memory: int = 1000, *, later_s: float = EVERY_S) -> None:
        self.clock.at += later_s
        self.driver.found["plc_a"] = Measured(cpu_s, memory, 10, 5)
        await self.usage.measure(self.records)


@pytest.fixture
def world() -> World:
    return World()


async def test_cpu_is_a_share_of_what_the_placement_may_use(world: World) -> None:
    await world.look(3.0)
    await world.look(8.0)  # 5 s of CPU in 5 s, of two cores
    await world.look(8.0)
    points = (await world.usage.samples(["plc_a"], 10))["plc_a"]
    assert [point.cpu_pct for point in points] == [0.0, 50.0, 0.0]
    assert [point.age_s for point in points] == [10.0, 5.0, 0.0]


async def test_whoever_asks_gets_a_point_of_now(world: World) -> None:
    await world.look(1.0)
    world.clock.at += 3.0
    world.driver.found["plc_a"] = Measured(2.5, 2000, 20, 6)
    (point,) = (await world.usage.samples(["plc_a"], 1))["plc_a"]
    assert (point.age_s, point.cpu_pct, point.memory_bytes, point.cache_bytes, point.disk_bytes) == (0.0, 25.0, 2000, 20, 6)
    asked = len(world.driver.asked)
    await world.usage.samples(["plc_a"], 1)
    assert len(world.driver.asked) == asked, "what was measured just now is not measured again"


async def test_a_long_life_stays_within_its_points_and_reaches_back(world: World) -> None:
    course = Course(cores=1.0, began=0.0)
    for number in range(100_000):
        course.add(Measured(number * 0.5, number, 0, 0), at=number * EVERY_S)
        assert len(course.old) < OLD
        assert len(course.new) <= NEW
    points = course.points(POINTS_MAX)
    assert len(points) <= POINTS_MAX
    assert [point.at for point in points] == sorted({point.at for point in points}), "in order, none twice"
    assert points[0].at < 100_000 * EVERY_S / 50, "the beginning is still there"
    assert [point.at for point in points[-NEW:]] == [number * EVERY_S for number in range(100_000 - NEW, 100_000)], (
        "the end is as fine as ever"
    )
    assert all(point.cpu_pct == pytest.approx(10.0, abs=0.1) for point in points[1:])


async def test_what_does_not_run_is_neither_measured_nor_kept(world: World) -> None:
    await world.look(1.0)
    world.records = [replace(world.records[0], observed=Observed.ABSENT)]
    assert await world.usage.samples(["plc_a"], 10) == {}
    assert world.driver.asked == [["plc_a"]]
    assert world.usage._courses == {}


async def test_only_what_was_asked_for_is_told(world: World) -> None:
    world.records = [record("plc_a"), record("plc_b")]
    world.driver.found = {"plc_a": Measured(1, 1, 1, 1), "plc_b": Measured(1, 1, 1, 1)}
    assert set(await world.usage.samples(["plc_b", "plc_zzz"], 1)) == {"plc_b"}


@pytest.mark.parametrize("error", [OSError("gone"), Unavailable(Code.STORE_FULL, "no")])
async def test_a_measurement_that_fails_is_missing_and_no_more(world: World, error: Exception) -> None:
    world.driver.error = error
    await world.usage.measure(world.records)
    world.driver.error = None
    await world.look(1.0)
    assert len((await world.usage.samples(["plc_a"], 10))["plc_a"]) == 1


async def test_a_driver_that_cannot_measure_is_left_alone() -> None:
    usage = Usage(lambda: [record()], {Isolation.GVISOR: object()}, Clock())  # type: ignore[dict-item]
    assert await usage.samples(["plc_a"], 1) == {}


async def test_many_are_measured_more_seldom() -> None:
    waited: list[float] = []

    class Enough(Exception):
        pass

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise Enough

    driver, records = Driver(), [record(f"plc_{number}") for number in range(1000)]
    driver.found = {one.placement_id: Measured(1, 1, 1, 1) for one in records}
    with pytest.raises(Enough):
        await Usage(lambda: records, {Isolation.GVISOR: driver}, Clock(), sleep=sleep).run()  # type: ignore[dict-item]
    assert waited == [EVERY_S, 40.0, 40.0]


async def test_the_largest_answers_fit_into_a_message(world: World) -> None:
    for number in range(POINTS_MAX + 100):
        await world.look(number * 1.234567, memory=2**36 - number)
    course = await world.usage.samples(["plc_a"], POINTS_MAX)
    base = {"host_id": "hst_" + "a" * 20, "epoch": "epo_" + "a" * 20, "id": "dlv_" + "a" * 20, "placement_id": ""}
    assert len(Collected(**base, samples=course).model_dump_json()) < MESSAGE_BYTES_MAX
    many = {f"plc_{number:020d}": course["plc_a"][-1:] for number in range(SAMPLED_MAX)}
    assert len(Collected(**base, samples=many).model_dump_json()) < MESSAGE_BYTES_MAX
