"""Following: what other replicas have committed, taken into this one's memory, and everybody here woken who waits for it.

Theory of operation. The store's hints name rows; this loop reads those rows and does with them what `Reconciler.published` does with a
commit of this process: routes and edges, waiting requests, parked polls, the directory, the next deadline. A hint is followed, then the
row is read, and each waiter reads again for itself: whatever is committed after a waiter's own read is told after it began to wait.
EVERYTHING (after a gap, or when this replica begins) reads all routes and hosts and wakes all. One batch at a time: what comes meanwhile
is the next one, and a crowd of hints about one row costs one read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import AtollError
from atoll.base.units import Vector
from atoll.control.keys import Keys
from atoll.control.loops.fencing import Fencing
from atoll.control.loops.reconcile import Reconciler
from atoll.control.loops.waiting import Waiting
from atoll.control.routes import Routes
from atoll.domain.placement import Holding
from atoll.planning.stimuli import Facts
from atoll.store import facts, hosts, sandboxes
from atoll.store.hints import EVERYTHING, NOTHING, Hints, Shared
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

_ROWS_MAX: Final = 200
"""Read in one go: about 10 ms of this thread."""
_AGAIN_S: Final = 1.0
_BEGIN_S: Final = 5.0


@dataclass(slots=True)
class Following:
    """The loop, and what was told and not taken in yet."""

    line: Shared
    reconciler: Reconciler
    routes: Routes
    fencing: Fencing
    keys: Keys
    waiting: Waiting
    _told: Hints = NOTHING
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def heard(self, hints: Hints) -> None:
        """For the store: others have committed this."""
        self._told = self._told | hints
        self._news.set()

    async def begun(self) -> None:
        """Returns when this replica hears the others, so that what is read from now on is not out of date unheard; or after some seconds
        in which that could not be had: then it is had later, with EVERYTHING.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_S):
                await self._news.wait()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            told, self._told = self._told, NOTHING
            try:
                await self.take_in(told)
            except AtollError as error:
                LOG.warning(names.HINTS_LOST, code=error.code, error=error.message)
                self.heard(EVERYTHING)
                await asyncio.sleep(_AGAIN_S)

    async def take_in(self, told: Hints) -> None:
        """Read what is named, and wake. *Errors*: those of the store."""
        if told.everything:
            await self._everything()
            return
        if told.clients:
            self.keys.forget(told.clients)
        for word in told.ends:
            self.reconciler.ends.heard_elsewhere(word)
        for host_id in sorted(told.hosts):
            await self._host(host_id)
        ids = sorted(told.sandboxes)
        for begin in range(0, len(ids), _ROWS_MAX):
            some = ids[begin : begin + _ROWS_MAX]
            found, used = await self.reconciler.store.read(lambda conn, some=some: _read(conn, some))  # type: ignore[misc]
            for known in found:
                self.reconciler.note_waiting(known.sandbox)
            for host_id, amount in used.items():
                self.reconciler.directory.use(host_id, amount, elsewhere=True)
            for known in found:
                self._sandbox(known)

    def _sandbox(self, known: Facts) -> None:
        sandbox, placement = known.sandbox, known.placement
        self.routes.changed(sandbox, placement)
        self.reconciler.hub.changed(sandbox)
        for one in (placement, *known.older):
            if one is not None and (one.holding is Holding.NONE or one.applied_revision < one.desired_revision):
                self.reconciler.hub.wake_host(one.host_id)
        if sandbox.host_id is not None and sandbox.end_at is not None:
            # Its end may be what is new.
            self.reconciler.hub.wake_host(sandbox.host_id)
        if sandbox.deadline_at is not None and sandbox.deadline_at < self.reconciler.next_look_at:
            self.reconciler.deadlines.set()

    async def _host(self, host_id: str) -> None:
        reconciler = self.reconciler
        host, used = await reconciler.store.read(lambda conn: (hosts.by_id(conn, host_id), facts.used(conn, host_id)))
        if host is None:
            return
        reconciler.directory.put(host, used=used, elsewhere=True)
        reconciler.hub.wake_host(host_id)
        # What waits for room may find some; what is disabled is fenced in its time.
        reconciler.deadlines.set()
        self.fencing.due.set()

    async def _everything(self) -> None:
        self.keys.forget()
        reconciler, cursor = self.reconciler, self.routes.cursor
        await self.waiting.load()
        await reconciler.store.read(reconciler.directory.load)
        self.routes.replace(await reconciler.store.read(sandboxes.reachable), since=cursor)
        reconciler.hub.everything()
        reconciler.deadlines.set()
        self.fencing.due.set()


def _read(conn: sa.Connection, sandbox_ids: Sequence[str]) -> tuple[Sequence[Facts], dict[str, Vector]]:
    """The sandboxes, and what is used of their hosts."""
    found = facts.load_many(conn, sandbox_ids)
    hosts_of = {known.placement.host_id for known in found if known.placement is not None}
    return found, {host_id: facts.used(conn, host_id) for host_id in sorted(hosts_of)}
