"""Backoff: pauses that double, with jitter, so that a thousand agents don't come back in step."""

from __future__ import annotations

from atoll.base.ids import Dice


class Backoff:
    """Pauses between `first_s` and `most_s`. *Units*: seconds."""

    def __init__(self, dice: Dice, *, first_s: float, most_s: float) -> None:
        self._dice = dice
        self._first_s = first_s
        self._most_s = most_s
        self.failures = 0

    def next_s(self) -> float:
        """The next pause: twice the last one, of which a random half is left out."""
        full = min(self._most_s, self._first_s * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return full * (0.5 + 0.5 * int.from_bytes(self._dice(2), "big") / 65535)

    def reset(self) -> None:
        """It works again."""
        self.failures = 0
