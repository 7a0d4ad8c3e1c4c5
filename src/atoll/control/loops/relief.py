"""Relief: has hosts give up copies of what is in the artifact store, where their disk is wanted (`planning/relieving.py`), or nobody wants them.

It looks at once when a host comes under pressure, or a sandbox finds no room; else now and then.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from atoll.base.clock import Clock
from atoll.control.hosts.directory import Directory
from atoll.control.loops.reconcile import Reconciler
from atoll.control.loops.stepping import keep_stepping
from atoll.control.sandboxes.snapshots import Snapshots
from atoll.domain.sandbox import Sandbox
from atoll.domain.spec import Spec
from atoll.planning import relieving
from atoll.planning.stimuli import CopyUnwanted
from atoll.store import copies, moments
from atoll.telemetry import events as names

EVERY_S: Final = 15.0
HEAD_START_UNUSED_S: Final = 3600.0
"""How long a host has a head start that it fetched, and from which nothing begins any more, unless its disk is wanted."""
_SHORT_MAX: Final = 64
"""Sandboxes without room that are looked at in one step; a crowd of them is alike."""


@dataclass(slots=True, kw_only=True)
class Relief:
    """The loop. Replicas that do it at once find it done."""

    reconciler: Reconciler
    directory: Directory
    snapshots: Snapshots
    clock: Clock
    due: asyncio.Event = field(default_factory=asyncio.Event)
    _short_of: dict[str, Spec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.on_pressure = self.due.set

    def shortage(self, sandbox: Sandbox) -> None:
        """For the reconciler: no host has room for it."""
        if len(self._short_of) < _SHORT_MAX:
            self._short_of[sandbox.id] = sandbox.spec
            self.due.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        await keep_stepping(self.step, self.due, event=names.COPY_GIVEN_UP)

    async def step(self) -> float:
        """Order away what should go now. *Units*: seconds until the next look."""
        unused_since = self.clock.now() - HEAD_START_UNUSED_S
        for host_id, snapshot_id in await self.reconciler.store.read(lambda conn: copies.unwanted(conn, unused_since=unused_since)):
            await self.snapshots.leave_copy(host_id, snapshot_id)
        for advert in [one for one in self.directory.adverts() if relieving.wants_relief(one)]:
            host_id = advert.host.id
            for copy in relieving.given_up(advert, await self._copies(host_id)):
                await self._give_up(host_id, copy)
        await self._make_room()
        return EVERY_S

    async def _copies(self, host_id: str) -> list[relieving.LocalCopy]:
        return await self.reconciler.store.read(lambda conn: [*moments.kept_locally(conn, host_id), *copies.idle(conn, host_id)])

    async def _give_up(self, host_id: str, copy: relieving.LocalCopy) -> None:
        if copy.fetched:
            await self.snapshots.leave_copy(host_id, copy.id)
        elif copy.snapshot:
            await self.snapshots.leave(copy.id)
        else:
            await self.reconciler.apply(copy.id, CopyUnwanted())

    async def _make_room(self) -> None:
        """For sandboxes that found none. One that finds none again says so again."""
        specs = dict.fromkeys(self._short_of.values())
        self._short_of.clear()
        if not specs:
            return
        idle = await self.reconciler.store.read(copies.idle_by_host)
        for spec in specs if idle else ():
            found = relieving.for_room(spec, list(self.directory.adverts()), idle, now=self.clock.now())
            if found is not None:
                host_id, chosen = found
                for copy in chosen:
                    await self.snapshots.leave_copy(host_id, copy.id)
