"""Replicas: this one's heartbeat, and what it knows of the others.

Theory of operation. On a database of its own there is one replica and nothing to say. On a shared one each renews its row every few
seconds and reads the others'. One that falls silent may have died between a commit and its hint, so whatever is waited for here is
looked at again, once. The heartbeat also keeps this replica's wall time at the database's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock, ShiftedClock
from atoll.base.errors import AtollError, Code
from atoll.store import replicas as stored
from atoll.store import restoring
from atoll.store.engine import Store
from atoll.store.replicas import Replica
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

BEAT_S: Final = 5.0
_NOTABLE_S: Final = 1.0
SILENT_S: Final = 16.0
"""Three heartbeats and some: it is told as lost."""


@dataclass(slots=True)
class Replicas:
    """The loop, and what it read last."""

    store: Store
    clock: Clock
    me: Replica
    shared: bool
    on_lost: Callable[[], None] = lambda: None
    """A replica has fallen silent."""
    incarnation: str = ""
    on_outlived: Callable[[], None] = lambda: None
    """The store has begun another life: this process must end."""
    _known: Sequence[Replica] = ()
    _silent: set[str] = field(default_factory=set)

    def everyone(self) -> list[tuple[Replica, bool]]:
        """All that are on record, this one included, each with whether it is heard of."""
        now = self.clock.now()
        others = [one for one in self._known if one.id != self.me.id]
        all_of_them = sorted([*others, replace(self.me, seen_at=now)], key=lambda one: (one.started_at, one.id))
        return [(one, now - one.seen_at < SILENT_S) for one in all_of_them]

    def others(self) -> list[str]:
        """Addresses of the others that are heard of."""
        return [one.address for one, heard in self.everyone() if heard and one.id != self.me.id]

    @property
    def heard(self) -> int:
        """How many are heard of, this one included; as of the last heartbeat."""
        return max(1, len(self._known) - len(self._silent)) if self.shared else 1

    async def beat(self) -> None:
        """One heartbeat. *Errors*: those of the store."""
        if not self.shared:
            return
        await self._follow_the_wall()
        me = replace(self.me, seen_at=self.clock.now())
        try:
            self._known = await self.store.write(self._beating(me))
        except AtollError as error:
            if error.code is Code.CONTROL_UNAVAILABLE:
                LOG.error(names.STORE_RESTORED, was=self.incarnation)  # noqa: TRY400 - the event says all
                self.on_outlived()
            raise
        silent = {one.id for one, heard in self.everyone() if not heard}
        for replica_id in sorted(silent - self._silent):
            LOG.warning(names.REPLICA_LOST, name=replica_id)
            self.on_lost()
        self._silent = silent

    def _beating(self, me: Replica) -> Callable[[sa.Connection], Sequence[Replica]]:
        def work(conn: sa.Connection) -> Sequence[Replica]:
            restoring.require_life(conn, self.incarnation)
            return stored.beat(conn, me)

        return work

    async def _follow_the_wall(self) -> None:
        """Measure again how far the database's clock is from this machine's: one of the two may have been set."""
        if not isinstance(self.clock, ShiftedClock):
            return
        asked_at = self.clock.boot()
        shown = await self.store.wall()
        if shown is not None:
            step_s = shown + (self.clock.boot() - asked_at) / 2 - self.clock.now()
            self.clock.move(step_s)
            if abs(step_s) > _NOTABLE_S:
                LOG.warning(names.CLOCK_STEPPED, step_s=round(step_s, 3))

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.beat()
            except AtollError as error:
                LOG.warning(names.REPLICA_LOST, name=self.me.id, code=error.code, error=error.message)

    async def leave(self) -> None:
        """The end in order: others need not wait for this one's silence."""
        if self.shared:
            await self.store.write(lambda conn: stored.leave(conn, self.me.id))
