"""Outbox: observations that control has not acknowledged yet.

Theory of operation. Only durable records come in, so a sequence number is on disk before it is sent. One entry a placement, the newest:
an observation is the whole state. What a message in flight carries is not put into another one, unless it has been overtaken; a lost
message gives its entries back. Acknowledged is what control says it has committed, by sequence number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from atoll.agent.record import Record, observation_of
from atoll.wire.agent import OBSERVATIONS_PER_MESSAGE_MAX, Observation


class Outbox:
    """What is to be said, and what is being said."""

    def __init__(self) -> None:
        self._waiting: dict[str, Record] = {}
        self._flying: dict[str, int] = {}
        self.urgent = asyncio.Event()
        """Set when something should go at once, beside the poll."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, record: Record, *, urgent: bool) -> None:
        """Say this; replaces what was to be said of the same placement."""
        known = self._waiting.get(record.placement_id)
        if known is None or known.seq <= record.seq:
            self._waiting[record.placement_id] = record
        if urgent:
            self.urgent.set()

    def say_again(self, record: Record) -> None:
        """Control asks as if it had not heard: send it even if it is in flight."""
        self._flying.pop(record.placement_id, None)
        self.put(record, urgent=False)

    def take(self, *, bytes_max: int, count_max: int = OBSERVATIONS_PER_MESSAGE_MAX) -> list[Observation]:
        """The next message's worth, oldest first, marked as in flight."""
        batch: list[Observation] = []
        size = 0
        for placement_id, record in self._waiting.items():
            if self._flying.get(placement_id, 0) >= record.seq:
                continue
            observation = observation_of(record)
            size += len(observation.model_dump_json()) + 1
            if len(batch) == count_max or (batch and size > bytes_max):
                break
            batch.append(observation)
        for observation in batch:
            self._flying[observation.placement_id] = observation.seq
        return batch

    def more(self) -> bool:
        """Whether something waits that no message carries."""
        return any(self._flying.get(placement_id, 0) < record.seq for placement_id, record in self._waiting.items())

    def lost(self, batch: Sequence[Observation]) -> None:
        """The message with these did not get through, as far as is known."""
        for observation in batch:
            if self._flying.get(observation.placement_id) == observation.seq:
                del self._flying[observation.placement_id]

    def landed(self, batch: Sequence[Observation], acknowledged: Mapping[str, int]) -> None:
        """The message was answered. What it carried and the answer does not acknowledge is sent again."""
        self.lost(batch)
        for placement_id, seq in acknowledged.items():
            record = self._waiting.get(placement_id)
            if record is not None and record.seq <= seq:
                del self._waiting[placement_id]

    def drop(self, placement_id: str) -> None:
        """Control knows that it is gone."""
        self._waiting.pop(placement_id, None)
        self._flying.pop(placement_id, None)
