"""Fencing: what a disabled host held counts as gone, once its last lease has surely run out.

Theory of operation. The lease is counted on CLOCK_BOOTTIME from the last renewal that this process committed; a renewal that it has not
seen itself (before its start, or on another replica: the row's lease is another one) counts as made just now, so that waiting errs to the long
side and no clock step shortens it. An operator who says that the machine is off ends the lease by that word. A sandbox whose policy is `keep` may run on
without a lease, and so may one that could not be saved (`suspend`): only that word frees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from atoll.base.clock import Clock
from atoll.control.hosts.directory import Directory
from atoll.control.loops.reconcile import Reconciler
from atoll.control.loops.stepping import keep_stepping
from atoll.domain.host import LEASE_S, Admin, Host
from atoll.domain.spec import OnLeaseExpiry
from atoll.planning.stimuli import Fenced
from atoll.store import hosts
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

SKEW_S: Final = 5.0
_IDLE_S: Final = 60.0


@dataclass(slots=True)
class Fencing:
    """The loop and what it knows of leases."""

    reconciler: Reconciler
    directory: Directory
    clock: Clock
    due: asyncio.Event = field(default_factory=asyncio.Event)
    lost: Callable[[str], Awaitable[None]] | None = None
    """What becomes of a fenced host's snapshots."""
    _renewed: dict[str, tuple[float | None, float]] = field(default_factory=dict)
    """host id → the lease on its row, and the boot time from which that is counted."""

    def renewed(self, host: Host) -> None:
        """The host's lease was renewed just now, as its row says."""
        self._renewed[host.id] = (host.lease_until, self.clock.boot())

    async def run(self) -> None:
        """Runs until it is cancelled."""
        await keep_stepping(self.step, self.due, event=names.HOST_FENCED)

    async def step(self) -> float:
        """Free what may be freed. *Units*: seconds until the next look."""
        pauses = [_IDLE_S]
        for advert in list(self.directory.adverts()):
            host = advert.host
            if host.admin is not Admin.DISABLED:
                continue
            left_s = self._left_s(host)
            if left_s > 0:
                pauses.append(left_s)
            else:
                await self._free(host)
        return min(pauses)

    def _left_s(self, host: Host) -> float:
        """How long the host may still act. *Units*: seconds."""
        if host.lease_until is None:
            return 0.0
        lease, since = self._renewed.get(host.id, (None, 0.0))
        if lease != host.lease_until:
            since = self.clock.boot()
            self._renewed[host.id] = (host.lease_until, since)
        return since + LEASE_S + SKEW_S - self.clock.boot()

    async def _free(self, host: Host) -> None:
        held = await self.reconciler.store.read(lambda conn: hosts.wanted(conn, host.id))
        loaded = await self.reconciler.store.read(lambda conn: hosts.load_many(conn, [one.placement_id for one in held]))
        for placement, sandbox in loaded:
            if sandbox.spec.on_lease_expiry is OnLeaseExpiry.KEEP and host.lease_until is not None:
                continue
            await self.reconciler.apply(sandbox.id, Fenced(placement.id))
            await self.reconciler.settle(sandbox.id)
        if self.lost is not None:
            await self.lost(host.id)
