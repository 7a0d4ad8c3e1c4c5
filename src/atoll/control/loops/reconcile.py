"""Reconcile: a stimulus in, one commit, whatever follows from it, and everybody told.

Theory of operation. `apply` commits what `planning.reconcile.advance` decides in one transaction and then tells the hub, the directory
and the routes, whatever becomes of its caller meanwhile. `settle` goes on while something follows by itself: a sandbox without a host is
placed by asking hosts one at a time, each answer a commit. No retry is in here: a sandbox that stays pending has a deadline, and the
deadline loop activates it again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Unavailable
from atoll.base.ids import Dice, HostId, PlacementId, Prefix, new_id
from atoll.base.records import replace
from atoll.base.units import Vector
from atoll.control.hosts.directory import Directory
from atoll.control.metering import Meter
from atoll.control.replicas.hub import Hub
from atoll.control.sandboxes.ends import Ends
from atoll.control.sessions.holdings import Wants
from atoll.domain.operations import Act
from atoll.domain.placement import Holding, Placement
from atoll.domain.sandbox import Condition, Sandbox, State
from atoll.domain.spec import Spec
from atoll.planning import keeping, storing
from atoll.planning.reconcile import advance, wants_placing
from atoll.planning.stimuli import Facts, NoRoom, ResumeRequested, Stimulus, Tick
from atoll.store import facts, operations, snapshots, warmth
from atoll.store.engine import Store
from atoll.store.hints import Shared
from atoll.store.payloads import Sealed
from atoll.telemetry import events as names
from atoll.telemetry.log import current_request, get_logger

LOG = get_logger()

Used = dict[str, Vector]
"""What is used of hosts whose use a commit has changed, by id."""

_STEPS_MAX = 64
"""Moves of one activation; more is left to the next."""


class RouteSink(Protocol):
    """Who keeps the edges' routes (control.edges)."""

    def changed(self, sandbox: Sandbox, placement: Placement | None) -> None: ...


@dataclass(slots=True)
class Reconciler:
    """Everything that a state change needs; one per control process."""

    store: Store
    clock: Clock
    dice: Dice
    hub: Hub
    directory: Directory
    routes: RouteSink
    ends: Ends
    wants: Wants
    deadlines: asyncio.Event
    """Set when a deadline may have become the next one."""
    meter: Meter = field(default_factory=Meter)
    waiting: dict[str, Sandbox] = field(default_factory=dict)
    """Sandboxes that wait for room, as far as this process knows (`loops/waiting.py`)."""
    shortage: Callable[[Sandbox], None] = lambda _: None
    """Told of each sandbox for which no host has room."""
    next_look_at: float = math.inf
    """When the deadlines are looked at in any case; later ones need not be told."""
    doubtful: set[str] = field(default_factory=set)
    """Sandboxes of which a change may be on disk that nobody here has heard of (`loops/doubts.py`)."""
    doubts: asyncio.Event = field(default_factory=asyncio.Event)
    shared: bool = field(init=False)
    """Whether other processes write to the store, too."""

    def __post_init__(self) -> None:
        self.shared = isinstance(self.store, Shared)

    def event_id(self) -> str:
        """A fresh id of an event."""
        return new_id(Prefix.EVENT, self.dice)

    async def apply(
        self,
        sandbox_id: str,
        stimulus: Stimulus,
        *,
        about: Callable[[Facts], bool] = lambda _: True,
        unless: Callable[[sa.Connection], None] = lambda _: None,
        act: Act | None = None,
        readmit: bool = False,
    ) -> facts.Committed | None:
        """Commit what the stimulus changes; None when there is no such sandbox, or it is none that `about` means.

        `unless` looks first, in the same transaction, and raises when whoever brings the stimulus may not any more. `act`: whose doing it
        is; kept in the same commit, when it changes anything. `readmit`: its host must have room for what it had given back.
        """
        applying = self._applying(sandbox_id, stimulus, now=self.clock.now(), about=about, act=act, readmit=readmit)

        def work(conn: sa.Connection) -> tuple[facts.Committed | None, Used]:
            unless(conn)
            return applying(conn)

        def tell(committed: tuple[facts.Committed | None, Used]) -> None:
            self._told(committed)
            self.meter.met(stimulus, changed=committed[0] is not None and committed[0].changed)

        return (await self._committed(sandbox_id, work, tell))[0]

    async def _committed(
        self,
        sandbox_id: str,
        work: Callable[[sa.Connection], tuple[facts.Committed | None, Used]],
        tell: Callable[[tuple[facts.Committed | None, Used]], None],
    ) -> tuple[facts.Committed | None, Used]:
        return await self.store.write(work, tell=tell, doubt=lambda: self.doubt(sandbox_id))

    def doubt(self, sandbox_id: str) -> None:
        """Something may be committed of it that was not told here."""
        self.doubtful.add(sandbox_id)
        self.doubts.set()

    async def look_again(self, sandbox_id: str) -> None:
        """Tell everybody what is on record of a doubtful one. *Errors*: those of the store; then it is doubtful again."""
        self.doubtful.discard(sandbox_id)

        def work(conn: sa.Connection) -> tuple[facts.Committed | None, Used]:
            found = facts.load_after_others(conn, sandbox_id)
            if found is None:
                return None, {}
            places = [one for one in (found.placement, *found.older) if one is not None]
            done = facts.Committed(found.sandbox, found.placement, changed=True, older=found.older)
            return done, {one.host_id: facts.used(conn, one.host_id) for one in places}

        try:
            self.published(*await self.store.write(work))
        except AtollError:
            self.doubt(sandbox_id)
            raise

    def _told(self, committed: tuple[facts.Committed | None, Used]) -> None:
        self.published(*committed)

    def _applying(
        self,
        sandbox_id: str,
        stimulus: Stimulus,
        *,
        now: float,
        about: Callable[[Facts], bool] = lambda _: True,
        act: Act | None = None,
        readmit: bool = False,
    ) -> Callable[[sa.Connection], tuple[facts.Committed | None, Used]]:
        request_id = current_request()

        def work(conn: sa.Connection) -> tuple[facts.Committed | None, Used]:
            advancing = facts.readmit if readmit else facts.advance_sandbox
            done = advancing(conn, sandbox_id, stimulus, now=now, ids=self.event_id, about=about, request_id=request_id)
            if act is not None and done is not None and done.changed:
                operations.audit(conn, act, at=now)
            return done, self._used(conn, done)

        return work

    async def settle(self, sandbox_id: str, *, known: facts.Committed | None = None) -> facts.Committed | None:
        """Carry on until nothing follows by itself. `known`: what has just been committed, so that it need not be read."""
        done: facts.Committed | None = None
        found = Facts(known.sandbox, known.placement) if known else await self.store.read(lambda conn: facts.load(conn, sandbox_id))
        for _ in range(_STEPS_MAX):
            if found is None:
                return None
            if wants_placing(found.sandbox, now=self.clock.now()):
                done = await self.place(found.sandbox)
            elif advance(found, Tick(), now=self.clock.now()) is not None:
                done = await self.apply(sandbox_id, Tick())
            else:
                return done
            # What was committed is newer than, or as new as, what another read would give; each commit reads for itself again.
            found = None if done is None else Facts(done.sandbox, done.placement)
        return done

    def published(self, done: facts.Committed | None, used: Used) -> None:
        """Tell everybody of a durable commit."""
        if done is None or not done.changed:
            return
        self.meter.committed(done, now=self.clock.now())
        if done.refused_by is not None:
            # What was remembered of this host led the sandbox astray, and would lead the next one.
            self.directory.put(done.refused_by.host, used=done.refused_by.used)
        self.note_waiting(done.sandbox)
        for host_id, sum_of in used.items():
            self.directory.use(host_id, sum_of)
        placement = done.placement
        for one in (placement, *done.older):
            if one is None:
                continue
            self.wants.touched(one.host_id, one.id)
            if one.holding is Holding.NONE or one.applied_revision < one.desired_revision:
                self.hub.wake_host(one.host_id)
        self.routes.changed(done.sandbox, placement)
        self.hub.changed(done.sandbox)
        if done.sandbox.deadline_at is not None and done.sandbox.deadline_at < self.next_look_at:
            self.deadlines.set()
        LOG.info(
            names.SANDBOX_STATE_CHANGED,
            sandbox_id=done.sandbox.id,
            state=done.sandbox.state.value,
            revision=done.sandbox.revision,
            generation=done.sandbox.generation,
            reason=done.sandbox.reason,
        )

    def note_waiting(self, sandbox: Sandbox) -> None:
        """Whether this sandbox waits for room, and for nothing else."""
        if not waits(sandbox):
            self.waiting.pop(sandbox.id, None)
            return
        new = sandbox.id not in self.waiting
        self.waiting[sandbox.id] = sandbox
        if new and self.directory.choose(sandbox.spec, sandbox_id=sandbox.id, now=self.clock.now()) is not None:
            # Freed between the decision that there was none and now, when nobody was known to wait for it.
            self.directory.on_room(False)

    @staticmethod
    def _used(conn: sa.Connection, done: facts.Committed | None) -> Used:
        if done is None:
            return {}
        changed = [one.host_id for one in done.older if one.holding is Holding.NONE]
        found: Used = {host_id: facts.used(conn, host_id) for host_id in changed}
        if done.capacity_changed and done.placement is not None:
            host_id = done.placement.host_id
            found[host_id] = facts.used(conn, host_id) if done.used is None else done.used
        return found

    async def accept(self, sandbox: Sandbox, work: Callable[[sa.Connection], None]) -> facts.Committed | None:
        """Commit a new sandbox by `work`, and place it: two commits that a store may make durable by one flush.

        None when nothing was placed yet, which `settle` makes good. *Errors*: those of `work`, and then nothing was committed.
        """
        placing_it = self._placing(sandbox, await self._sought(sandbox))
        if self.shared:
            # One transaction: beside each other, the second would look for what the first has not committed.
            def both(conn: sa.Connection) -> tuple[facts.Committed | None, Used]:
                work(conn)
                return placing_it(conn)

            return (await self._committed(sandbox.id, both, self._told))[0]

        def tell(placed: tuple[facts.Committed | None, Used]) -> None:
            self._told(placed)
            self._warn(sandbox, placed[0])

        accepting = self.store.write(work)
        placing: Awaitable[tuple[facts.Committed | None, Used]] = self.store.write(placing_it, tell=tell)
        accepted, placed = await asyncio.gather(accepting, placing, return_exceptions=True)
        for outcome in (accepted, placed):
            if isinstance(outcome, BaseException):
                raise outcome
        assert isinstance(placed, tuple)
        return placed[0]

    async def claim(
        self,
        wanted: Sandbox,
        among: Sequence[str],
        *,
        payload: Callable[[str], tuple[Sealed, str]],
        admit: Callable[[sa.Connection, Sandbox], None],
    ) -> facts.Committed | None:
        """Give a create one of these guests, made ahead; None: somebody else has all of them. *Errors*: those of `admit`."""
        now, request_id = self.clock.now(), current_request()

        def work(conn: sa.Connection) -> tuple[facts.Committed | None, Used]:
            done = warmth.claim(conn, wanted, among, payload=payload, admit=admit, now=now, ids=self.event_id, request_id=request_id)
            return done, self._used(conn, done)

        def doubt() -> None:
            for sandbox_id in among:
                self.doubt(sandbox_id)

        return (await self.store.write(work, tell=self._told, doubt=doubt))[0]

    async def place(self, sandbox: Sandbox) -> facts.Committed | None:
        """One host is asked, the best first; or, when none is left, that is recorded. None when there is no such sandbox."""
        done, _ = await self._committed(sandbox.id, self._placing(sandbox, await self._sought(sandbox)), self._told)
        self._warn(sandbox, done)
        return done

    @staticmethod
    def _warn(before: Sandbox, done: facts.Committed | None) -> None:
        """Somebody may have to add a host: said once for each sandbox that waits."""
        if done is not None and Condition.NO_ELIGIBLE_HOST in done.sandbox.conditions - before.conditions:
            LOG.warning(names.SANDBOX_NO_ELIGIBLE_HOST, sandbox_id=before.id, team_id=before.team_id, detail=done.sandbox.detail)

    async def _sought(self, sandbox: Sandbox) -> tuple[Spec, ...]:
        """What a host is looked for with, one after the other: what begins from a snapshot may begin elsewhere as soon as that is in the artifact store."""
        origin = sandbox.spec.origin
        if origin is None:
            return (sandbox.spec,)
        snapshot = await self.store.read(lambda conn: snapshots.get(conn, origin.snapshot_id))
        return keeping.sought(sandbox.spec, snapshot, generation=sandbox.generation)

    def _placing(self, sandbox: Sandbox, ways: tuple[Spec, ...]) -> Callable[[sa.Connection], tuple[facts.Committed | None, Used]]:
        now = self.clock.now()
        sought, chosen = self.directory.choose_by(ways, sandbox_id=sandbox.id, now=now, excluded=sandbox.tried_hosts)
        if chosen is None:
            self.shortage(sandbox)
            return self._applying(sandbox.id, NoRoom(self._shortage(sought, now)), now=now)
        origin_moment = sought.origin.moment if sought.origin is not None else None
        placement = replace(self._reservation(sandbox, chosen, now), origin_moment=origin_moment)
        request_id = current_request()

        def work(conn: sa.Connection) -> tuple[facts.Committed | None, Used]:
            done = facts.reserve(conn, sandbox.id, placement, now=now, ids=self.event_id, request_id=request_id, sought=sought)
            return done, self._used(conn, done)

        return work

    def _shortage(self, sought: Spec, now: float) -> str:
        shortage = self.directory.shortage(sought, now=now)
        self.meter.left_out({name.value: hosts for name, hosts in shortage.removed.items()})
        return shortage.text

    def _reservation(self, sandbox: Sandbox, host_id: str, now: float) -> Placement:
        return Placement(
            id=PlacementId(new_id(Prefix.PLACEMENT, self.dice)),
            sandbox_id=sandbox.id,
            host_id=HostId(host_id),
            generation=sandbox.generation,
            holding=Holding.RESERVED,
            vector=sandbox.spec.vector(),
            nonce=self.dice(16).hex(),
            created_at=now,
        )

    async def take_up(
        self, sandbox: Sandbox, wish: ResumeRequested, *, about: Callable[[Facts], bool] = lambda _: True, act: Act | None = None
    ) -> facts.Committed | None:
        """Resume one that rests in the artifact store alone: hosts are asked one after the other, each in a transaction, until one has room.

        *Errors*: Unavailable NO_CAPACITY when none has, STORE_RESTORED; then it rests as before.
        """
        sought, asked = storing.sought(sandbox), set(sandbox.tried_hosts)
        await self.store.read(lambda conn: facts.require_settled(conn, sandbox))
        while True:
            now = self.clock.now()
            chosen = self.directory.choose(sought, sandbox_id=sandbox.id, now=now, excluded=asked)
            if chosen is None:
                chosen = self.directory.choose(sought, sandbox_id=sandbox.id, now=now, excluded=asked - set(sandbox.tried_hosts))
            if chosen is None:
                self.shortage(sandbox)
                message = f"no host has room for {sandbox.id}, which stays {sandbox.state}: {self._shortage(sought, now)}"
                raise Unavailable(Code.NO_CAPACITY, message, retry_after_s=facts.READMIT_AGAIN_S)
            there = replace(wish, placement=self._reservation(sandbox, chosen, now))
            done = (await self._committed(sandbox.id, self._taking_up(sandbox.id, there, sought, now, about, act), self._told))[0]
            if done is None or done.refused_by is None:
                self.meter.met(wish, changed=done is not None and done.changed)
                return done
            self.directory.put(done.refused_by.host, used=done.refused_by.used)
            asked.add(chosen)

    def _taking_up(
        self, sandbox_id: str, wish: ResumeRequested, sought: Spec, now: float, about: Callable[[Facts], bool], act: Act | None
    ) -> Callable[[sa.Connection], tuple[facts.Committed | None, Used]]:
        request_id = current_request()

        def work(conn: sa.Connection) -> tuple[facts.Committed | None, Used]:
            done = facts.take_up(conn, sandbox_id, wish, sought=sought, now=now, ids=self.event_id, about=about, request_id=request_id)
            if act is not None and done is not None and done.changed:
                operations.audit(conn, act, at=now)
            return done, self._used(conn, done)

        return work


def waits(sandbox: Sandbox) -> bool:
    """Whether a sandbox waits for room, and for nothing else."""
    wrong = sandbox.conditions
    return sandbox.state is State.PENDING and Condition.NO_ELIGIBLE_HOST in wrong and Condition.REPLACEMENT_BLOCKED not in wrong
