"""When a child that died is started again. Pure.

The first restart is immediate: a crash should cost its users as little as possible. A child that keeps dying waits longer each time,
and one that ran well for a while is forgiven.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

FIRST_DELAY_S: Final = 0.25
DELAY_S_MAX: Final = 5.0
FORGIVEN_AFTER_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Restarts:
    """A child's deaths so far. `in_a_row` counts those that came too soon after a start."""

    total: int = 0
    in_a_row: int = 0

    def died(self, *, ran_s: float) -> Restarts:
        """One more death, after `ran_s` seconds of running."""
        return replace(self, total=self.total + 1, in_a_row=1 if ran_s >= FORGIVEN_AFTER_S else self.in_a_row + 1)

    @property
    def delay_s(self) -> float:
        """How long to wait before the next start. *Units*: seconds."""
        if self.in_a_row <= 1:
            return 0.0
        return float(min(DELAY_S_MAX, FIRST_DELAY_S * 2 ** min(self.in_a_row - 2, 10)))
