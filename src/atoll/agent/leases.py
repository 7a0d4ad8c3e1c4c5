"""Leases and ends: what the agent enforces alone, whatever becomes of control.

Theory of operation. Everything is counted on CLOCK_BOOTTIME from when the request that brought it was *sent*: the answer can only be
later, so the agent never counts too long, and steps of the wall clock move nothing. One sleeper waits for the nearest of all ends and
the lease. When one is due, its decision goes to the journal first; the executor does the rest. An end that came due while nobody could
look (the agent was stopped, or begun anew) may have been moved meanwhile, and whoever moved it was told so: control is heard first, if it
answers within HEAR_S. A lease that has run out ends what its
spec says (`end`; `suspend` saves it, or freezes it where its driver cannot; `keep` stays), once; a later renewal revives nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Final

from atoll.agent.alarm import Alarm
from atoll.agent.record import EndedBy, EndRule, Record, ending, rests_by_itself
from atoll.base.clock import Clock
from atoll.base.errors import Code
from atoll.domain.spec import OnEnd, OnLeaseExpiry
from atoll.wire.agent import End

OVERDUE_S: Final = 2.0
"""An end that is found later than this came due while nobody looked."""
HEAR_S: Final = 10.0
"""How long such an end waits for control's word."""
_SLACK: Final = 64

Decide = Callable[[str, Callable[[Record], Record | None]], None]
"""`decide(placement_id, make)`: make this decision durable, however long it takes, and act on it."""


def rule_of(end: End, *, sent_boot: float) -> EndRule:
    """The rule that an end of control's answer means. *Units*: CLOCK_BOOTTIME seconds of when the request was sent."""
    return EndRule(end.revision, sent_boot + end.remaining_s, end.action, end.on_lease_expiry)


def at_lease_expiry(record: Record) -> OnLeaseExpiry:
    """What to do with this placement when the lease has run out: the newest word on it."""
    if record.end is not None:
        return record.end.on_lease_expiry
    return record.blueprint.spec.on_lease_expiry if record.blueprint is not None else OnLeaseExpiry.END


class Deadlines:
    """All of a host's ends, and its lease."""

    def __init__(self, *, clock: Clock, alarm: Alarm, records: Iterable[Record], decide: Decide, lease_until: float | None) -> None:
        self._clock = clock
        self._alarm = alarm
        self._records = records
        self._decide = decide
        self._heap: list[tuple[float, str, int]] = []
        self._current: dict[str, EndRule] = {}
        self.lease_until = lease_until
        self._expired = False
        self._heard = -math.inf
        """When the newest poll was sent whose answer is taken in."""
        self._unsure_since: float | None = None
        for record in records:
            if record.end is not None and not record.absent:
                self.watch(record.placement_id, record.end)

    def watch(self, placement_id: str, end: EndRule) -> None:
        """Enforce this end (which is in the journal) instead of an earlier one; of one that is at rest none."""
        if end.at_boot == math.inf:
            self.unwatch(placement_id)
            return
        self._current[placement_id] = end
        heapq.heappush(self._heap, (end.at_boot, placement_id, end.revision))
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            # Ends that were moved stay in the heap until their time; with many moves they would outnumber the living ones.
            self._heap = [(rule.at_boot, name, rule.revision) for name, rule in self._current.items()]
            heapq.heapify(self._heap)
        self._alarm.poke()

    def unwatch(self, placement_id: str) -> None:
        """It is gone."""
        self._current.pop(placement_id, None)

    def renew(self, *, sent_boot: float, lease_s: float) -> float:
        """A poll was answered; gives when the lease now ends. *Idempotency*: an answer that is overtaken shortens nothing."""
        until = sent_boot + lease_s
        if self.lease_until is None or until > self.lease_until:
            self.lease_until = until
            self._expired = self._expired and until <= self._clock.boot()
            self._alarm.poke()
        return self.lease_until

    def heard(self, *, sent_boot: float) -> None:
        """Everything that the answer to this poll says is taken in."""
        self._heard = max(self._heard, sent_boot)
        if self._unsure_since is not None:
            self._alarm.poke()

    @property
    def unsure(self) -> bool:
        """Whether an end waits for control's word."""
        return self._unsure_since is not None

    @property
    def lapsed(self) -> bool:
        """Whether the lease has run out."""
        return self.lease_until is not None and self.lease_until <= self._clock.boot()

    def may_start(self, record: Record) -> bool:
        """Whether a guest may be begun now: its host may by its lease, or the lease means nothing to it."""
        return not self.lapsed or at_lease_expiry(record) is OnLeaseExpiry.KEEP

    async def run(self) -> None:
        """Enforce until cancelled."""
        while True:
            self.enforce()
            await self._alarm.sleep_until(self._next())

    def enforce(self) -> None:
        """Decide everything that is due now."""
        now = self._clock.boot()
        while (first := self._first()) is not None and first[0] <= now and not self._waits_for_word(first[0], now):
            _, placement_id, revision = heapq.heappop(self._heap)
            del self._current[placement_id]
            self._decide(placement_id, _reached(revision))
        if first is None or first[0] > now:
            self._unsure_since = None
        if self.lapsed and not self._expired:
            self._expired = True
            for record in self._records:
                if not record.absent and at_lease_expiry(record) is not OnLeaseExpiry.KEEP:
                    self._decide(record.placement_id, _lapsed)

    def _next(self) -> float | None:
        due = [] if self._expired or self.lease_until is None else [self.lease_until]
        if self._unsure_since is not None:
            due.append(self._unsure_since + HEAR_S)
        elif (first := self._first()) is not None:
            due.append(first[0])
        return min(due, default=None)

    def _first(self) -> tuple[float, str, int] | None:
        """The nearest end that counts."""
        while self._heap:
            _, placement_id, revision = self._heap[0]
            current = self._current.get(placement_id)
            if current is not None and current.revision == revision:
                return self._heap[0]
            heapq.heappop(self._heap)
        return None

    def _waits_for_word(self, at_boot: float, now: float) -> bool:
        if now - at_boot <= OVERDUE_S or self._heard >= at_boot:
            return False
        if self._unsure_since is None:
            self._unsure_since = now
        return now < self._unsure_since + HEAR_S


def _reached(revision: int) -> Callable[[Record], Record | None]:
    def make(record: Record) -> Record | None:
        # An end that was moved while this decision waited for the disk is not reached.
        if record.end is None or record.end.revision != revision or record.end.at_boot == math.inf:
            return None
        if record.end.action is OnEnd.SUSPEND:
            return rests_by_itself(record, Code.END_REACHED, EndedBy.END_AT)
        return ending(record, EndedBy.END_AT, reason=Code.END_REACHED)

    return make


def _lapsed(record: Record) -> Record | None:
    if at_lease_expiry(record) is OnLeaseExpiry.SUSPEND:
        return rests_by_itself(record, Code.LEASE_EXPIRED, EndedBy.LEASE)
    return ending(record, EndedBy.LEASE, reason=Code.LEASE_EXPIRED)
