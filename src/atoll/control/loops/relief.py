"""Relief: has hosts give up copies of what is in the artifact store, where their disk is wanted (`planning/relieving.py`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from atoll.control.hosts.directory import Directory
from atoll.control.loops.reconcile import Reconciler
from atoll.control.loops.stepping import keep_stepping
from atoll.control.sandboxes.snapshots import Snapshots
from atoll.planning import relieving
from atoll.planning.stimuli import CopyUnwanted
from atoll.store import moments
from atoll.telemetry import events as names

EVERY_S: Final = 15.0


@dataclass(slots=True, kw_only=True)
class Relief:
    """The loop. Replicas that do it at once find it done."""

    reconciler: Reconciler
    directory: Directory
    snapshots: Snapshots
    due: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        await keep_stepping(self.step, self.due, event=names.COPY_GIVEN_UP)

    async def step(self) -> float:
        """Order away what should go now. *Units*: seconds until the next look."""
        for advert in [one for one in self.directory.adverts() if relieving.wants_relief(one)]:
            host_id = advert.host.id
            found = await self.reconciler.store.read(lambda conn, host_id=host_id: moments.kept_locally(conn, host_id))  # type: ignore[misc]
            for copy in relieving.given_up(advert, found):
                if copy.snapshot:
                    await self.snapshots.leave(copy.id)
                else:
                    await self.reconciler.apply(copy.id, CopyUnwanted())
        return EVERY_S
