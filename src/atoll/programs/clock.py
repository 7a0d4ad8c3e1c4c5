"""The real clock."""

from __future__ import annotations

import time


class SystemClock:
    """`base.clock.Clock` of this machine."""

    def now(self) -> float:
        """Wall time. *Units*: seconds since 1970-01-01 UTC."""
        return time.time()

    def boot(self) -> float:
        """CLOCK_BOOTTIME. *Units*: seconds."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
