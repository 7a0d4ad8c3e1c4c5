"""Inspection: what control itself finds wrong with a host, from what its polls say: a machine that is not the one that was registered, and a
clock that is not control's.

Theory of operation. Each poll says what the machine has and what its wall clock showed when the poll was sent. The first is compared with
what was registered. Of the second, only the difference can be seen, and the time that the message was under way is in it; so the smallest
of the last few differences counts, which one slow message cannot spoil. What is found is a problem of the host like a failed check of its
own: it takes nothing new, and everybody can see why. Nothing is corrected here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.control.hosts.enrollment import facts_of
from atoll.domain.host import DRIVER_FACT, Host
from atoll.domain.inventory import CAPACITY, CLOCK, Inventory, differences
from atoll.wire import agent as wire

SKEW_S_MAX: Final = 5.0
SKEW_FACT: Final = "clock_skew_s"
_SAMPLES: Final = 3
_TELL_S: Final = 1.0
"""A skew that has changed by less is not written down again."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Ids of what is wrong, and the facts as they belong on the host's row."""

    problems: tuple[str, ...]
    facts: Mapping[str, str]


@dataclass(slots=True)
class Inspection:
    """What it remembers: a few differences of clocks, by host."""

    stepped_s: Callable[[], float] = lambda: 0.0
    """How far the wall clock of control's machine was set since this process began, which goes on by its own until it is restarted: hosts are
    compared with what that clock shows, or a step of it would make every host of the same machine a stranger to the time."""
    _skews: dict[str, tuple[str, deque[float]]] = field(default_factory=dict)

    def look(self, host: Host, poll: wire.Poll, *, received_at: float) -> Findings:
        """Judge one poll. *Units*: wall seconds of control."""
        problems = []
        seen = Inventory(poll.facts.cpu_count, poll.facts.memory_mib, poll.facts.disk_mib)
        if host.registered is not None and differences(host.registered.inventory, seen):
            problems.append(CAPACITY)
        facts = facts_of(poll.facts)
        skew_s = self._skew_s(host.id, poll, received_at=received_at + self.stepped_s())
        if skew_s is not None:
            facts[SKEW_FACT] = _told(host.facts.get(SKEW_FACT), skew_s)
            if abs(skew_s) > SKEW_S_MAX:
                problems.append(CLOCK)
        for driver in poll.health.drivers:
            facts[f"{DRIVER_FACT}.{driver.isolation}"] = " ".join(part for part in (driver.name, driver.saves) if part)
        return Findings(tuple(problems), facts)

    def _skew_s(self, host_id: str, poll: wire.Poll, *, received_at: float) -> float | None:
        """How far the host's clock is ahead of control's; None when it does not say. Of the last few, the one nearest to none."""
        if poll.sent_at is None:
            return None
        epoch, samples = self._skews.get(host_id, ("", deque(maxlen=_SAMPLES)))
        if epoch != poll.epoch:
            samples = deque(maxlen=_SAMPLES)
        samples.append(poll.sent_at - received_at)
        self._skews[host_id] = (poll.epoch, samples)
        return min(samples, key=abs)


def _told(before: str | None, skew_s: float) -> str:
    """What is written down: what was, as long as it is about the same and on the same side of the limit."""
    try:
        known = float(before) if before is not None else None
    except ValueError:
        known = None
    same = known is not None and abs(known - skew_s) < _TELL_S and (abs(known) > SKEW_S_MAX) == (abs(skew_s) > SKEW_S_MAX)
    return f"{known if same else skew_s:.1f}"
