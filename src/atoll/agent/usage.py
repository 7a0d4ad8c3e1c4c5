"""Usage: what each running placement has used over its life, in a bounded number of points.

Theory of operation. Every few seconds all running placements are measured in one go. The newest points of each are kept as they are;
what is older goes into a second row, of which every other point is dropped (two become their mean) whenever it is full, so that it
always reaches back to the beginning and is coarser the longer the placement lives. All in memory: a new run of the agent begins anew.
How often is measured depends on how many there are, so that it costs a small part of one core at most; while nothing runs, nothing is.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from atoll.agent.record import Record
from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation
from atoll.drivers.port import Driver, Metered
from atoll.drivers.port import Usage as Measured
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire.agent import POINTS_MAX, Sample

log = get_logger()

EVERY_S: Final = 5.0
EACH_S: Final = 0.04
"""Longer than a measurement of one placement takes, by so much that all of them take less than a two-hundredth of a core."""
NEW: Final = 60
OLD: Final = POINTS_MAX - NEW - 1
"""One is measured when somebody asks."""
JUST_NOW_S: Final = 1.0
"""What was measured so recently need not be measured again."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. *Units*: seconds of CLOCK_BOOTTIME, percent of what it may use, bytes."""

    at: float
    cpu_pct: float
    memory_bytes: int
    cache_bytes: int
    disk_bytes: int


@dataclass(slots=True)
class Course:
    """The points of one placement."""

    cores: float
    began: float
    cpu_s: float = 0.0
    new: deque[Point] = field(default_factory=deque)
    old: list[Point] = field(default_factory=list)
    _skip: int = 1
    """Of the points that leave `new`, every so manyth goes into `old`."""
    _left: int = 0

    def add(self, seen: Measured, *, at: float) -> None:
        """One more measurement."""
        last = self.new[-1].at if self.new else self.began
        elapsed_s = at - last
        used_s = max(0.0, seen.cpu_s - self.cpu_s)
        cpu_pct = 100.0 * used_s / (elapsed_s * self.cores) if elapsed_s > 0 else 0.0
        self.cpu_s = seen.cpu_s
        # A group's clock is read a moment before or after ours: a little more than all of it is all of it.
        self.new.append(Point(at, min(cpu_pct, 100.0), seen.memory_bytes, seen.cache_bytes, seen.disk_bytes))
        if len(self.new) > NEW:
            self._retire(self.new.popleft())

    def _retire(self, point: Point) -> None:
        self._left += 1
        if self._left % self._skip:
            return
        self.old.append(point)
        if len(self.old) >= OLD:
            pairs = zip(self.old[::2], self.old[1::2], strict=False)
            self.old = [_mean(first, second) for first, second in pairs]
            self._skip *= 2

    def points(self, most: int) -> list[Point]:
        """The newest ones, oldest first."""
        return [*self.old, *self.new][-most:]


def _mean(first: Point, second: Point) -> Point:
    return Point(
        second.at,
        (first.cpu_pct + second.cpu_pct) / 2,
        max(first.memory_bytes, second.memory_bytes),
        max(first.cache_bytes, second.cache_bytes),
        max(first.disk_bytes, second.disk_bytes),
    )


class Usage:
    """Of one host."""

    def __init__(
        self,
        records: Callable[[], Iterable[Record]],
        drivers: Mapping[Isolation, Driver],
        clock: Clock,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._records = records
        self._drivers = drivers
        self._clock = clock
        self._sleep = sleep
        self._courses: dict[str, Course] = {}

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            await self._sleep(max(EVERY_S, EACH_S * len(self._courses)))
            await self.measure(self._running())

    async def measure(self, running: Sequence[Record]) -> None:
        """Measure these, and forget those that do not run any more."""
        now = self._clock.boot()
        wanted: dict[Isolation, list[Record]] = {}
        for record in running:
            assert record.blueprint is not None
            wanted.setdefault(record.blueprint.spec.isolation, []).append(record)
        for isolation, records in wanted.items():
            driver: object = self._drivers.get(isolation)
            if not isinstance(driver, Metered):
                continue
            try:
                found = await driver.usage([record.placement_id for record in records])
            except (AtollError, OSError) as error:
                log.debug(events.COMMAND_FAILED, operation="usage", message=str(error))
                continue
            for record in records:
                if (seen := found.get(record.placement_id)) is not None:
                    self._course(record, seen, now).add(seen, at=now)

    def _course(self, record: Record, seen: Measured, now: float) -> Course:
        known = self._courses.get(record.placement_id)
        if known is None:
            assert record.blueprint is not None
            cores = max(0.001, record.blueprint.spec.cpu_millis / 1000)
            # What it used before this run of the agent looked at it first is in no point: nobody knows over how long it was.
            known = self._courses[record.placement_id] = Course(cores, began=now - EVERY_S, cpu_s=seen.cpu_s)
        return known

    def _running(self) -> list[Record]:
        running = [record for record in self._records() if _runs(record)]
        there = {record.placement_id for record in running}
        for placement_id in [known for known in self._courses if known not in there]:
            del self._courses[placement_id]
        return running

    async def samples(self, placement_ids: Sequence[str], points_max: int) -> dict[str, list[Sample]]:
        """The newest points of each, with one of now; those that do not run are left out."""
        wanted = set(placement_ids)
        running = [record for record in self._running() if record.placement_id in wanted]
        now = self._clock.boot()
        await self.measure([record for record in running if now - self._measured_at(record.placement_id) > JUST_NOW_S])
        now = self._clock.boot()
        return {
            record.placement_id: [_sample(point, now) for point in course.points(points_max)]
            for record in running
            if (course := self._courses.get(record.placement_id)) is not None
        }

    def _measured_at(self, placement_id: str) -> float:
        course = self._courses.get(placement_id)
        return course.new[-1].at if course is not None and course.new else -math.inf


def _runs(record: Record) -> bool:
    return record.blueprint is not None and record.observed is Observed.RUNNING


def _sample(point: Point, now: float) -> Sample:
    return Sample(
        age_s=round(max(0.0, now - point.at), 3),
        cpu_pct=round(point.cpu_pct, 2),
        memory_bytes=point.memory_bytes,
        cache_bytes=point.cache_bytes,
        disk_bytes=point.disk_bytes,
    )
