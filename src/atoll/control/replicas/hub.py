"""Who is told of a commit, inside this process: requests that wait for a sandbox, polls that wait for work, edges that follow routes.

Hints: whoever is told reads the store again, but for who waits for one sandbox and is given the row as this process has committed it.
Subscribe, then read: nothing is lost between the two. What other replicas commit comes through `loops/following.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import TypeVar

from atoll.domain.sandbox import Sandbox

E = TypeVar("E", bound=asyncio.Event)


class Watch(asyncio.Event):
    """Set by each commit of one sandbox; whoever waits clears it, then takes what it was told or reads."""

    def __init__(self) -> None:
        super().__init__()
        self._told: Sandbox | None = None

    def tell(self, sandbox: Sandbox | None) -> None:
        """It is as committed here; None: something may have happened elsewhere."""
        if sandbox is None or self._told is None or sandbox.revision > self._told.revision:
            self._told = sandbox
        self.set()

    def take(self) -> Sandbox | None:
        """Forget what it was told. None: read the store."""
        self.clear()
        told, self._told = self._told, None
        return told


class Hub:
    """Single-threaded: all methods are called on the event loop. Watchers are told in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, dict[Watch, None]] = defaultdict(dict)
        self._hosts: defaultdict[str, dict[asyncio.Event, None]] = defaultdict(dict)
        self._of_all: defaultdict[str, dict[asyncio.Event, None]] = defaultdict(dict)

    @contextlib.contextmanager
    def watch(self, sandbox_id: str) -> Iterator[Watch]:
        """An event that is set by each commit of this sandbox; the watcher clears it before it reads."""
        with self._member(self._waiting, sandbox_id, Watch()) as event:
            yield event

    @contextlib.contextmanager
    def work_for(self, host_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when this host may have work."""
        with self._member(self._hosts, host_id, asyncio.Event()) as event:
            yield event

    def awaits_work(self, host_id: str) -> bool:
        """Whether a poll of this host is parked."""
        return host_id in self._hosts

    @contextlib.contextmanager
    def all_commits(self) -> Iterator[asyncio.Event]:
        """An event that is set by every commit that has recorded something."""
        with self._member(self._of_all, "", asyncio.Event()) as event:
            yield event

    def news(self) -> None:
        """Something was recorded, of a sandbox, a host or the deployment."""
        for event in self._of_all.get("", ()):
            event.set()

    def changed(self, sandbox: Sandbox) -> None:
        """A commit of this sandbox is durable."""
        self.news()
        for event in self._waiting.get(sandbox.id, ()):
            event.tell(sandbox)

    def nudge(self, sandbox_id: str) -> None:
        """Something of this sandbox is durable that is not in its row."""
        self.news()
        for event in self._waiting.get(sandbox_id, ()):
            event.tell(None)

    def everything(self) -> None:
        """Whatever anybody waits for may have happened: all look again."""
        for watches in self._waiting.values():
            for watch in watches:
                watch.tell(None)
        for events in self._hosts.values():
            for event in events:
                event.set()

    def wake_host(self, host_id: str) -> None:
        """This host may have work."""
        for event in self._hosts.get(host_id, ()):
            event.set()

    @staticmethod
    @contextlib.contextmanager
    def _member(groups: defaultdict[str, dict[E, None]], key: str, event: E) -> Iterator[E]:
        groups[key][event] = None
        try:
            yield event
        finally:
            groups[key].pop(event, None)
            if not groups[key]:
                del groups[key]
