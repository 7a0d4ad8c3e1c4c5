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
