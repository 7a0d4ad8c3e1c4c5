"""Watching hosts: a host that is not heard of for long is lost, and its sandboxes say so until it is heard of again.

Frees nothing and ends nothing: only an absence that was looked at, or an operator's fence, does. A pass costs nothing per sandbox unless a
host has changed sides.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.control.hosts.directory import Directory
from atoll.control.loops.reconcile import Reconciler
from atoll.domain.host import Health, health
from atoll.planning.stimuli import HostHeard
from atoll.store import hosts
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

_PAUSE_S: Final = 10.0


@dataclass(slots=True)
class Watch:
    """The loop, and what it said last of each host."""

    reconciler: Reconciler
    directory: Directory
    clock: Clock
    _lost: dict[str, bool] = field(default_factory=dict)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_PAUSE_S)
            try:
                await self.step()
            except AtollError as error:
                LOG.warning(names.HOST_HEALTH_CHANGED, code=error.code, error=error.message)

    async def step(self) -> None:
        """Look at every host once."""
        for advert in list(self.directory.adverts()):
            host = advert.host
            lost = health(host, now=self.clock.now()) is Health.LOST
            if self._lost.get(host.id) is lost:
                continue
            if lost and not await self._still(host.id):
                continue
            held = await self.reconciler.store.read(lambda conn, host_id=host.id: hosts.wanted(conn, host_id))  # type: ignore[misc]
            for one in held:
                await self.reconciler.apply(one.sandbox_id, HostHeard(lost=lost, host_id=host.id))
            if lost:
                LOG.warning(names.HOST_HEALTH_CHANGED, host_id=host.id, name=host.name, state=Health.LOST.value, count=len(held))
            self._lost[host.id] = lost

    async def _still(self, host_id: str) -> bool:
        """Whether its row says so, too: another replica may hear it, and what this one remembers is some seconds old."""
        current = await self.reconciler.store.read(lambda conn: hosts.by_id(conn, host_id))
        if current is None:
            return False
        self.directory.put(current)
        return health(current, now=self.clock.now()) is Health.LOST
