"""Waiting: sandboxes for which no host had room, and who of them is placed when some is freed.

Theory of operation. A sandbox without a host has a deadline of its own and would be looked at again some seconds later. Room that comes
meanwhile (a placement is gone, a host is new, active or healthy again) is told by the directory, and given away at once: one pass goes
through those that wait, the oldest first, and places each for which the directory has room, one after the other, so that each decision
counts what the one before took. What does not fit is not touched, and neither is what is as large and as choosy as something that did
not fit in this pass: a crowd that waits costs a look at a set, and no commit. Where replicas share a store, the one that
committed the freeing goes first, and the others, which hear of it, come a moment later and find out what is left.
What is remembered here is a hint; the deadlines stay.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.control.loops.reconcile import Reconciler, waits
from atoll.store import facts, sandboxes
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

_ROWS_MAX: Final = 100
"""Read in one go."""
_PLACED_MAX: Final = 256
"""Of one pass; another one follows."""


@dataclass(slots=True)
class Waiting:
    """The loop. `stagger_s`: how much later than others' word it looks, another value in each replica."""

    reconciler: Reconciler
    clock: Clock
    stagger_s: float = 0.0
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _soon: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.reconciler.directory.on_room = self.room

    async def load(self) -> None:
        """Who waits when this process begins, and after a gap. *Errors*: those of the store."""
        ids = await self.reconciler.store.read(sandboxes.unplaced)
        self.reconciler.waiting.clear()
        for begin in range(0, len(ids), _ROWS_MAX):
            some = ids[begin : begin + _ROWS_MAX]
            for known in await self.reconciler.store.read(lambda conn, some=some: facts.load_many(conn, some)):  # type: ignore[misc]
                self.reconciler.note_waiting(known.sandbox)

    def room(self, elsewhere: bool) -> None:  # noqa: FBT001 - a callback with one argument
        """For the directory: there is more room than before. `elsewhere`: another replica has committed that."""
        if not self.reconciler.waiting:
            return
        if not elsewhere or self.stagger_s == 0.0:
            self._room.set()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(self.stagger_s, self._now)

    def _now(self) -> None:
        self._soon = None
        self._room.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._room.wait()
            self._room.clear()
            try:
                if await self.step() == _PLACED_MAX:
                    self._room.set()
            except AtollError as error:
                LOG.warning(names.SANDBOX_NO_ELIGIBLE_HOST, code=error.code, error=error.message)

    async def step(self) -> int:
        """One pass; how many were placed. *Errors*: those of the store."""
        placed = 0
        hopeless: set[tuple[object, ...]] = set()
        reconciler = self.reconciler
        for sandbox in sorted(reconciler.waiting.values(), key=lambda one: (one.since, one.id)):
            spec = sandbox.spec
            shape = (spec.vector(), spec.arch, spec.regions, spec.labels, spec.isolation, spec.require_host)
            if shape in hopeless:
                continue
            if reconciler.directory.choose(spec, sandbox_id=sandbox.id, now=self.clock.now()) is None:
                hopeless.add(shape)
                continue
            placed += await self._place(sandbox.id)
            if placed == _PLACED_MAX:
                break
        return placed

    async def _place(self, sandbox_id: str) -> bool:
        reconciler = self.reconciler
        found = await reconciler.store.read(lambda conn: facts.load(conn, sandbox_id))
        if found is None or not waits(found.sandbox):
            reconciler.waiting.pop(sandbox_id, None)
            return False
        done = await reconciler.place(found.sandbox)
        await reconciler.settle(sandbox_id, known=done)
        return done is not None and done.changed
