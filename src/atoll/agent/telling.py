"""Telling: what a poll says of what this host holds: all of it, or what has changed since control last took it in.

Theory of operation. Control answers with the number of the poll up to which it knows what is here (`PollAnswer.told`). The next poll names
that number, and what is new since. When a poll is lost, or control does not know that number (it began anew, or another replica answers),
the whole is told again. What does not fit into one message is told with the next: left out is never gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from atoll.agent.messages import Window, part_of
from atoll.base.clock import Clock

WHOLE_EVERY_S: Final = 600.0
"""The whole is told again so often, whatever is known."""
WHOLE_AFTER_MISS: Final = 8
"""So many polls tell the whole once control did not know the one before: behind a balancer each may come to another replica."""

Held = Mapping[str, tuple[int, int]]
"""placement → desired revision accepted, revision of the end that is enforced or 0."""


@dataclass(frozen=True, slots=True)
class Word:
    """Of one poll; fields as in wire.agent.Poll."""

    since: int | None
    holds: dict[str, int]
    end_revisions: dict[str, int]
    dropped: list[str]
    more: bool
    """There is more to tell, and control adds it to this."""


class Telling:
    """One per run of the agent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window = Window()
        self._told: int | None = None
        """The poll that control has taken in last; None: the whole has to be told."""
        self._said: dict[str, tuple[int, int]] = {}
        """What it knows by that."""
        self._whole_at = -WHOLE_EVERY_S
        self._whole_left = 0
        self._word: Word | None = None
        self._adds = False
        """Control has taken something in: it is worth telling the rest at once."""

    def compose(self, held: Held, *, bytes_max: int) -> Word:
        """What to say now."""
        now = self._clock.boot()
        if self._told is None or self._whole_left > 0 or now - self._whole_at >= WHOLE_EVERY_S:
            self._told, self._said, self._whole_at = None, {}, now
            self._whole_left = max(0, self._whole_left - 1)
        changed = [placement_id for placement_id, word in held.items() if self._said.get(placement_id) != word]
        gone = [placement_id for placement_id in self._said if placement_id not in held]
        dropped, size = part_of(gone, Window(), bytes_max=bytes_max // 2)
        # Each is named twice at most.
        part, _ = part_of(changed, self._window, bytes_max=(bytes_max - size) // 2)
        holds = {placement_id: held[placement_id][0] for placement_id in part}
        ends = {placement_id: held[placement_id][1] for placement_id in part if held[placement_id][1]}
        more = self._adds and (len(part) < len(changed) or len(dropped) < len(gone))
        self._word = Word(self._told, holds, ends, dropped, more)
        return self._word

    def answered(self, told: int | None) -> None:
        """Control's answer to what was composed last. `told`: as in wire.agent.PollAnswer."""
        word, self._word = self._word, None
        if word is None:
            return
        if told is None and word.since is not None:
            self._whole_left = WHOLE_AFTER_MISS
        self._told, self._adds = told, told is not None
        self._said.update(
            {placement_id: (revision, word.end_revisions.get(placement_id, 0)) for placement_id, revision in word.holds.items()}
        )
        for placement_id in word.dropped:
            self._said.pop(placement_id, None)

    def lost(self) -> None:
        """Nobody knows whether control has heard what was composed last."""
        self._word = self._told = None
