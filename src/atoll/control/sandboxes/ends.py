"""Which end each agent enforces, as its polls say; so that a caller near the old end can wait for the new one to be in force."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping


class Ends:
    """In memory only: a hint that polls renew. `moved` is told `<placement>:<revision>` of each end that has taken an earlier one's place."""

    def __init__(self, moved: Callable[[frozenset[str]], None] = lambda _: None) -> None:
        self._moved = moved
        self._known: dict[str, Mapping[str, int]] = {}
        self._waiting: defaultdict[str, set[tuple[int, asyncio.Event]]] = defaultdict(set)

    def heard(self, host_id: str, revisions: Mapping[str, int], *, known: Mapping[str, int]) -> None:
        """A poll's word. `known`: where all that its host's agent has said is kept; called before `revisions` are in it."""
        before = self._known.get(host_id, {})
        self._known[host_id] = known
        moved = frozenset(f"{name}:{revision}" for name, revision in revisions.items() if 0 < before.get(name, 0) < revision)
        if moved:
            self._moved(moved)
        for placement_id in [name for name in self._waiting if name in revisions]:
            self._wake(placement_id, revisions[placement_id])

    def heard_elsewhere(self, word: str) -> None:
        """Another replica's `moved`."""
        placement_id, _, revision = word.partition(":")
        self._wake(placement_id, int(revision) if revision.isdecimal() else 0)

    def _wake(self, placement_id: str, revision: int) -> None:
        for wanted, event in self._waiting.get(placement_id, ()):
            if revision >= wanted:
                event.set()

    def knows(self, placement_id: str, revision: int) -> bool:
        """Whether an agent has said that it enforces at least this revision."""
        return any(known.get(placement_id, 0) >= revision for known in self._known.values())

    async def told(self, placement_id: str, revision: int, *, timeout_s: float) -> bool:
        """Whether the agent enforces at least this revision within the time. *Units*: seconds."""
        if self.knows(placement_id, revision):
            return True
        entry = (revision, asyncio.Event())
        self._waiting[placement_id].add(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1].wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self._waiting[placement_id].discard(entry)
            if not self._waiting[placement_id]:
                del self._waiting[placement_id]
