"""The real clocks.

Records hold wall time, because people read them and several machines may, and what is enforced is counted on CLOCK_BOOTTIME. Between the
two stands whoever turns one into the other: control. So control keeps to the wall time that it began with and counts on from there; a
clock that somebody sets meanwhile is taken over by the next control process, which first moves what the last one wrote
(`store.timeline`).
"""

from __future__ import annotations

import time


class SystemClock:
    """`base.clock.Clock` of this machine, steps of the wall clock included."""

    def now(self) -> float:
        """Wall time. *Units*: seconds since 1970-01-01 UTC."""
        return time.time()

    def boot(self) -> float:
        """CLOCK_BOOTTIME. *Units*: seconds."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """`base.clock.Clock` whose wall time began with this process and is never set."""

    def __init__(self) -> None:
        self._zero_at = time.time() - self.boot()

    def now(self) -> float:
        """Wall time. *Units*: seconds since 1970-01-01 UTC."""
        return self._zero_at + self.boot()

    def boot(self) -> float:
        """CLOCK_BOOTTIME. *Units*: seconds."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def stepped_s(self) -> float:
        """How far the machine's wall clock has gone ahead of this one. *Units*: seconds, negative when it was set back."""
        return time.time() - self.now()
