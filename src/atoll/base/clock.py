"""Time as an argument.

Two readings, never mixed: `now()` is wall time for people and records; `boot()` is CLOCK_BOOTTIME, which no clock step moves and
which counts through suspends, for every lease, end and deadline that something enforces.
"""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Source of time; only `programs` builds the real one."""

    def now(self) -> float:
        """Wall time. *Units*: seconds since 1970-01-01 UTC."""
        ...

    def boot(self) -> float:
        """Time since boot, suspends included. *Units*: seconds."""
        ...


class ShiftedClock:
    """A clock by somebody else's wall: wall time differs from another clock's by what was measured last."""

    def __init__(self, clock: Clock, *, by_s: float) -> None:
        self._clock = clock
        self._by_s = by_s

    def move(self, by_s: float) -> None:
        """The distance was measured anew, and differs by so much. *Units*: seconds."""
        self._by_s += by_s

    def now(self) -> float:
        """Wall time. *Units*: seconds since 1970-01-01 UTC."""
        return self._clock.now() + self._by_s

    def boot(self) -> float:
        """As the other clock's. *Units*: seconds."""
        return self._clock.boot()
