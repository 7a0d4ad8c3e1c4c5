"""Warming: looks whether as many guests are made ahead as policies say, makes what is missing, and gives up what is not wanted.

Theory of operation. `planning/warming.py` decides from what is on record; this reads, and carries out. Every replica does it: one that makes
a guest counts in the transaction that makes it, and one that gives one up names it, so that doing it twice is doing it once. A look is cheap
and due when something changed, a little later, so that a crowd of creates is served first. A create that finds no room is looked after at
once: what must go for it is ordered away, and the room that comes of it is given to those that wait (`waiting.py`); for a while after that
nothing is made.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code
from atoll.control.sandboxes.warming import Warming
from atoll.domain.warmth import OWN_TEAM, WarmPolicy
from atoll.planning.stimuli import ReleaseRequested
from atoll.planning.warming import Guest, Plan, Wanted, could_fit, give_up, plan
from atoll.store import warmth
from atoll.telemetry import events as names
from atoll.telemetry import metrics as m
from atoll.telemetry.log import get_logger

LOG = get_logger()

LOOK_S: Final = 2.0
"""Between two looks where nothing is told; other replicas' policies and claims are seen by them."""
IDLE_S: Final = 5.0
"""The same where there is no policy."""
CALM_S: Final = 0.25
"""From what changed to the look, and from one moment to the next while creates are under way: they come first."""
CALM_MOST: Final = 8
"""So often, where they never cease."""
HELD_S: Final = 15.0
"""After a shortage nothing is made for so long."""
MOMENT_S: Final = 5.0
"""What is made good sooner than this is not worth a row."""


@dataclass(slots=True)
class WarmKeeper:
    """The loop."""

    warming: Warming
    clock: Clock
    _held_until: float = 0.0
    _short_at: dict[tuple[str, str, int, int, int], float] = field(default_factory=dict)
    """Since when policies are seen to be short, here."""

    async def run(self) -> None:
        """Runs until it is cancelled."""
        again_s = 0.0
        while True:
            if again_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(again_s):
                        await self.warming.changed.wait()
                    await self._calm()
            self.warming.changed.clear()
            try:
                again_s = await self.step()
            except AtollError as error:
                again_s = LOOK_S
                LOG.warning(names.WARM_NOT_KEPT, code=error.code, error=error.message)

    async def _calm(self) -> None:
        """Let creates go first, unless there is one that waits for what this gives up."""
        meter = self.warming.reconciler.meter
        for _ in range(CALM_MOST):
            if self.warming.short_of:
                return
            await asyncio.sleep(CALM_S)
            if not meter.creating:
                return

    async def step(self) -> float:
        """One look; how long until the next one is due. *Errors*: those of the store."""
        warming, now = self.warming, self.clock.now()
        store, directory = warming.store, warming.reconciler.directory
        policies, guests, failures = await store.read(
            lambda conn: (warmth.policies(conn), warmth.guests(conn), warmth.failures(conn, now=now))
        )
        if not policies and not guests:
            warming.pools = frozenset()
            warming.short_of.clear()
            self._show([], {})
            return IDLE_S
        wanted, lost = await self._resolved(policies)
        warming.pools = frozenset(one.pool for one in wanted) | frozenset(guest.pool for guest in guests)
        await self._give_up(guests)
        pressed = self.clock.boot() < self._held_until or self._somebody_waits()
        made = plan(wanted, guests, list(directory.adverts()), now=now, failures=failures, pressed=pressed)
        for sandbox_id, why in made.retire:
            await self._release(sandbox_id, why)
        for one in made.make:
            if not await warming.make(one, beside=made.beside):
                break
        await self._tell(wanted, lost, made, now=now)
        self._show(guests, made.short)
        more = bool(made.make) or bool(made.retire)
        return min(LOOK_S, made.look_again_s or LOOK_S) if not more else min(LOOK_S, 0.5)

    async def _resolved(self, policies: Sequence[WarmPolicy]) -> tuple[list[Wanted], list[tuple[WarmPolicy, AtollError]]]:
        wanted: list[Wanted] = []
        lost: list[tuple[WarmPolicy, AtollError]] = []
        for policy in policies:
            found = await self.warming.resolved(policy)
            if isinstance(found, Wanted):
                wanted.append(found)
            else:
                lost.append((policy, found))
        return wanted, lost

    def _somebody_waits(self) -> bool:
        reconciler, now = self.warming.reconciler, self.clock.now()
        specs = {one.spec for one in reconciler.waiting.values() if one.team_id != OWN_TEAM}
        return any(could_fit(spec, reconciler.directory.adverts(), now=now) for spec in specs)

    async def _give_up(self, guests: Sequence[Guest]) -> None:
        """What goes for those that have found no room."""
        if self.warming.pressed:
            self.warming.pressed = False
            self._held_until = self.clock.boot() + HELD_S
        short, self.warming.short_of = self.warming.short_of, {}
        if not short:
            return
        left = list(guests)
        adverts = list(self.warming.reconciler.directory.adverts())
        if any(could_fit(spec, adverts, now=self.clock.now()) for spec in short.values()):
            self._held_until = self.clock.boot() + HELD_S
        for spec in short.values():
            gone = give_up(spec, left, adverts, now=self.clock.now())
            left = [guest for guest in left if guest.id not in gone]
            for sandbox_id in gone:
                await self._release(sandbox_id, Code.WARM_GIVEN_UP)
            if gone:
                self.warming.reconciler.meter.metrics.count(m.WARM_GIVEN_UP, by=len(gone))

    async def _release(self, sandbox_id: str, why: Code) -> None:
        """Only while it is nobody's: a create may have taken it since it was looked at."""
        await self.warming.reconciler.apply(sandbox_id, ReleaseRequested(str(why)), about=lambda found: found.sandbox.team_id == OWN_TEAM)

    async def _tell(self, wanted: Sequence[Wanted], lost: Sequence[tuple[WarmPolicy, AtollError]], made: Plan, *, now: float) -> None:
        """What is not kept, and since when, on the policies' rows; written only when it is another."""
        said = [(one.policy, self._is_short(one, made), made.problems.get(one.pool)) for one in wanted]
        said += [(policy, True, f"{error.code}: {error.message}") for policy, error in lost]
        changed = [
            (policy, (policy.short_since or now) if short else None, why if short else None)
            for policy, short, why in said
            if (policy.short_since is not None) is not short or (short and why is not None and why != policy.problem)
        ]
        if not changed:
            return
        for policy, _since, problem in changed:
            if problem is not None and problem != policy.problem:
                LOG.warning(names.WARM_NOT_KEPT, template_id=policy.template_id, what=problem)

        def work(conn: sa.Connection) -> None:
            for policy, since, problem in changed:
                warmth.tell(conn, policy, short_since=since, problem=problem)

        await self.warming.store.write(work)

    def _is_short(self, one: Wanted, made: Plan) -> bool:
        if made.short.get(one.pool, 0) <= 0:
            self._short_at.pop(one.policy.kind, None)
            return False
        since = self._short_at.setdefault(one.policy.kind, self.clock.boot())
        return one.pool in made.problems or self.clock.boot() - since >= MOMENT_S

    def _show(self, guests: Sequence[Guest], short: object) -> None:
        """For the gauges: bounded by states, whatever policies there are."""
        metrics = self.warming.reconciler.meter.metrics
        metrics.clear(m.WARM_GUESTS)
        for state in sorted({guest.state.value for guest in guests}):
            metrics.put(m.WARM_GUESTS, sum(guest.state.value == state for guest in guests), state)
        metrics.put(m.WARM_SHORT, sum(short.values()) if isinstance(short, dict) else 0)
