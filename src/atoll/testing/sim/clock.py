"""Clocks of a simulation: one true time, and for each machine a boot clock that nothing moves and a wall clock that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

EPOCH_S: Final = 1_800_000_000.0


class MachineClock:
    """`base.clock.Clock` of one machine, as programs.clock.SystemClock reads it: steps are seen at once. *Units*: seconds."""

    def __init__(self, true_s: Callable[[], float], *, skew_s: float, up_since_s: float) -> None:
        self._true_s = true_s
        self.skew_s = self._usual_s = skew_s
        self.unseen = False
        """It was set, and the program that runs has not taken that over yet."""
        self._booted_at = -up_since_s

    def now(self) -> float:
        """Wall time."""
        return EPOCH_S + self._true_s() + self.skew_s

    def boot(self) -> float:
        """CLOCK_BOOTTIME."""
        return self._true_s() - self._booted_at

    def set_right(self) -> None:
        """As far off as it has always been, and no further: a host whose clock is an hour off takes nothing."""
        self.unseen = self.unseen or self.skew_s != self._usual_s
        self.skew_s = self._usual_s

    def step(self, step_s: float) -> None:
        """Somebody sets it."""
        self.skew_s += step_s
        self.unseen = True

    def reboot(self) -> None:
        """The machine starts anew."""
        self._booted_at = self._true_s()


class ProcessClock:
    """What programs.clock.SteadyClock is to a machine: wall time as it was when the process began, counted on from there."""

    def __init__(self, machine: MachineClock) -> None:
        self._machine = machine
        self._zero_at = machine.now() - machine.boot()

    def now(self) -> float:
        """Wall time of this process."""
        return self._zero_at + self._machine.boot()

    def boot(self) -> float:
        """CLOCK_BOOTTIME."""
        return self._machine.boot()
