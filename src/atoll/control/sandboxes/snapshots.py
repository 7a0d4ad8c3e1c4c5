"""Snapshots as every API asks for them, and what their hosts say of them.

One wish, one commit, and then waiting for the host's word: what was asked for is on record before anybody waits. Nothing here goes to a
host by itself: orders follow from rows, with each poll's answer (`answers.py`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.ids import Dice, Prefix, is_id, new_id
from atoll.base.units import Vector
from atoll.control.loops.reconcile import Reconciler
from atoll.control.loops.stepping import keep_stepping
from atoll.control.service import Caller, Page
from atoll.domain import history as ev
from atoll.domain.building import client_of
from atoll.domain.host import Host
from atoll.domain.operations import Act, Action
from atoll.domain.sandbox import Sandbox
from atoll.domain.sandbox import State as Sandboxes
from atoll.domain.snapshot import DEFAULT_TAG, TERMINAL, Copy, Purpose, Snapshot, State, held_disk_mib
from atoll.domain.spec import SaveMode
from atoll.domain.template import Template
from atoll.planning import keeping
from atoll.planning.stimuli import Note
from atoll.store import builds, copies, facts, hints, hosts, operations, sandboxes, snapshots, tenancy
from atoll.store.engine import Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import agent as wire

LOG = get_logger()

PATIENCE_S: Final = 55.0
"""Less than any client waits for an answer; what takes longer goes on without it."""
HELD_MAX: Final = 1000
"""Snapshots of one team that have not ended."""
LET_IT_RUN: Final = "Let it go on first, then try again."
_LOOK_AGAIN_S: Final = 2.0
_IDLE_S: Final = 60.0
_CALLERS_FAULT: Final = frozenset({Code.NOT_SUPPORTED, Code.ILLEGAL_STATE, Code.PLACEMENT_LOST})
_NAME: Final = re.compile(
    r"(?:(?P<namespace>[a-z0-9][a-z0-9_-]{0,127})/)?(?P<name>[a-z0-9][a-z0-9_-]{0,127})(?::(?P<tag>[a-z0-9._-]{1,128}))?"
)


@dataclass(frozen=True, slots=True)
class Taking:
    """What is asked for."""

    mode: SaveMode = SaveMode.FULL
    name: str | None = None
    """`name` or `name:tag`, perhaps with the team's own name before it; None: it is known by its id alone."""
    purpose: Purpose = Purpose.KEPT


def not_found(reference: str) -> Refused:
    """The same for a stranger's snapshot, one that is gone, and one that never was."""
    return Refused(Code.SNAPSHOT_NOT_FOUND, f"snapshot {reference[:128]!r} was not found")


@dataclass(slots=True, kw_only=True)
class Snapshots:
    """Part of the Service; one per control process."""

    store: Store
    clock: Clock
    dice: Dice
    reconciler: Reconciler
    due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a deadline may have become the next one."""

    async def take(self, caller: Caller, sandbox_id: str, wish: Taking) -> Snapshot:
        """As Service.snapshot."""
        name, tag = _parse(caller, wish.name)
        snapshot_id, now = new_id(Prefix.SNAPSHOT, self.dice), self.clock.now()
        action = Action.SANDBOX_FORK if wish.purpose is Purpose.FORK else Action.SNAPSHOT_CREATE
        act = Act(caller.actor(), action, sandbox_id if wish.purpose is Purpose.FORK else snapshot_id, data={"sandbox": sandbox_id})

        def work(conn: sa.Connection) -> tuple[Snapshot, Vector]:
            found = facts.load(conn, sandbox_id) if is_id(Prefix.SANDBOX, sandbox_id) else None
            sandbox = _takeable(found.sandbox if found is not None else None, caller, sandbox_id)
            assert found is not None
            assert found.placement is not None
            _require_free(conn, caller, name)
            snapshot = Snapshot(
                id=snapshot_id,
                revision=1,
                team_id=sandbox.team_id,
                client_id=caller.client.id,
                sandbox_id=sandbox.id,
                placement_id=found.placement.id,
                host_id=found.placement.host_id,
                state=State.TAKING,
                purpose=wish.purpose,
                mode=wish.mode,
                spec=sandbox.spec,
                created_at=now,
                name=name,
                tag=tag,
                version=0 if name is None else snapshots.next_version(conn, sandbox.team_id, name, tag),
                env=_template_env(conn, sandbox),
                deadline_at=now + sandbox.spec.save_s,
            )
            used = _require_room(conn, snapshot)
            snapshots.add(conn, snapshot)
            self._record(conn, snapshot, Note(ev.SANDBOX_SNAPSHOT_TAKING, {"snapshot_id": snapshot.id}), now)
            operations.audit(conn, act, at=now)
            return snapshot, used + Vector(disk_mib=held_disk_mib(snapshot))

        taken, used = await self.store.write(work)
        self._told(taken, used)
        return await self._kept(taken)

    async def _kept(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot once its host has it. *Errors*: why it has not; OutcomeUnknown when patience ends."""
        until = self.clock.boot() + PATIENCE_S
        with self.reconciler.hub.watch(snapshot.sandbox_id) as changed:
            while True:
                changed.clear()
                now = await self.store.read(lambda conn: snapshots.get(conn, snapshot.id))
                if now is None or now.state not in (State.TAKING, State.READY):
                    _raise_failure(snapshot, now)
                if now.state is State.READY:
                    return now
                left_s = until - self.clock.boot()
                if left_s <= 0:
                    raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, f"snapshot {now.id} is still being taken; look at it again")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _LOOK_AGAIN_S)):
                        await changed.wait()

    async def get(self, caller: Caller, reference: str) -> Snapshot:
        """By id, or the newest of a name. *Errors*: SNAPSHOT_NOT_FOUND."""
        found = await self.look(caller, reference)
        if found is None:
            raise not_found(reference)
        return found

    async def look(self, caller: Caller, reference: str) -> Snapshot | None:
        """As `get`; None where there is none."""
        return await self.store.read(lambda conn: _look(conn, caller, reference))

    async def find(
        self, caller: Caller, *, sandbox_id: str | None = None, name: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> Page[Snapshot]:
        """The team's ready ones, newest first. *Errors*: INVALID_REQUEST."""
        after = page_after(cursor)
        found = await self.store.read(
            lambda conn: snapshots.find(conn, caller.team.id, sandbox_id=sandbox_id, name=name, limit=limit, after=after)
        )
        return page_of(found, limit)

    async def delete(self, caller: Caller, reference: str) -> Snapshot:
        """As Service.delete_snapshot."""
        now = self.clock.now()

        def work(conn: sa.Connection) -> Snapshot:
            known = _look(conn, caller, reference)
            found = snapshots.get(conn, known.id, lock=True) if known is not None else None
            if found is None or (outcome := keeping.delete(found, now=now)) is None:
                raise not_found(reference)
            if count := snapshots.users(conn, found):
                raise Refused(Code.SNAPSHOT_IN_USE, f"{count} sandbox(es) use snapshot {found.reference!r}")
            operations.audit(conn, Act(caller.actor(), Action.SNAPSHOT_DELETE, found.id, data={"name": found.name}), at=now)
            return snapshots.commit(conn, outcome.snapshot)

        gone = await self.store.write(work)
        self._told(gone, None)
        return gone

    async def head_start(self, template: Template) -> Snapshot | None:
        """What the template's build has kept of its start command."""
        team_id = template.team_id
        if team_id is None or not template.build_id or not template.command:
            return None
        return await self.store.read(lambda conn: snapshots.head_start(conn, team_id, client_of(template.build_id)))

    async def retire(self) -> None:
        """Let go of what builds have kept that nothing names any more, and of a build's older ones. *Idempotency*: a second time finds nothing."""

        def work(conn: sa.Connection) -> list[str]:
            found = snapshots.head_starts(conn)
            needed = builds.serving(conn) if found else set()
            newest = {client_id: snapshot_id for snapshot_id, client_id in reversed(found)}
            return [one for one, client_id in found if client_id not in needed or newest[client_id] != one]

        for snapshot_id in await self.store.read(work):
            await self.let_go(snapshot_id)

    async def let_go(self, snapshot_id: str) -> None:
        """A moment that no client knows is not needed any more; one that somebody still begins from goes later. Never raises."""

        def work(conn: sa.Connection) -> Snapshot | None:
            found = snapshots.get(conn, snapshot_id, lock=True)
            outcome = None if found is None or snapshots.users(conn, found) else keeping.delete(found, now=self.clock.now())
            return None if outcome is None else snapshots.commit(conn, outcome.snapshot)

        with contextlib.suppress(AtollError):
            if (gone := await self.store.write(work)) is not None:
                self._told(gone, None)

    async def leave(self, snapshot_id: str) -> None:
        """Its host is to give its copy up; one that is not in the store stays. *Idempotency*: said again, it changes nothing."""
        now = self.clock.now()

        def work(conn: sa.Connection) -> tuple[Snapshot, Vector] | None:
            found = snapshots.get(conn, snapshot_id, lock=True)
            outcome = None if found is None else keeping.leave(found)
            return None if outcome is None else self._commit(conn, outcome, now)

        if (done := await self.store.write(work)) is not None:
            self._told(*done)

    async def heard(self, host: Host, seen: wire.SnapshotSeen, *, unless: Callable[[sa.Connection], None]) -> None:
        """What a host's agent says. *Idempotency*: said again, it changes nothing. `unless` raises when this run may not say it any more."""
        now = self.clock.now()

        def work(conn: sa.Connection) -> tuple[Snapshot, Vector] | None:
            unless(conn)
            word, freed = _word(seen), False
            if isinstance(word, keeping.Absent):
                # Before the snapshot's own row, as everywhere.
                hosts.locked(conn, host.id)
                freed = copies.gone(conn, host.id, seen.id)
            found = snapshots.get(conn, seen.id, lock=True)
            if found is None:
                return None
            outcome = keeping.heard(found, word, now=now) if found.host_id == host.id else None
            if outcome is not None:
                done = self._commit(conn, outcome, now)
                if outcome.snapshot.copy is Copy.NONE:
                    copies.still_used(conn, outcome.snapshot, now=now)
                return done[0], facts.used(conn, host.id)
            return (replace(found, host_id=host.id), facts.used(conn, host.id)) if freed else None

        if (done := await self.store.write(work)) is not None:
            self._told(*done)

    async def leave_copy(self, host_id: str, snapshot_id: str) -> None:
        """A host is to give up what it has fetched of one. *Idempotency*: said again, it changes nothing; one that is used again stays."""

        def work(conn: sa.Connection) -> bool:
            hosts.locked(conn, host_id)
            return copies.leave(conn, host_id, snapshot_id)

        if await self.store.write(work):
            LOG.info(names.COPY_GIVEN_UP, snapshot_id=snapshot_id, host_id=host_id)
            self.reconciler.hub.wake_host(host_id)

    async def count(self, host_id: str, has: Sequence[str]) -> None:
        """A host says what it has: what of that it has fetched, and is not counted, is from now on. An earlier release did not, nor did a backup of
        before. *Idempotency*: said again, it changes nothing.
        """
        if not await self.store.read(lambda conn: copies.unrecorded(conn, host_id, has)):
            return
        now = self.clock.now()

        def work(conn: sa.Connection) -> Vector:
            hosts.locked(conn, host_id)
            for one in copies.unrecorded(conn, host_id, has):
                copies.take(conn, host_id, one.id, disk_mib=copies.size_mib(one), now=now)
            hints.host(conn, host_id)
            return facts.used(conn, host_id)

        self.reconciler.directory.use(host_id, await self.store.write(work))

    async def lost(self, host_id: str) -> None:
        """A host is fenced, and its last lease has run out."""
        now = self.clock.now()

        def work(conn: sa.Connection) -> tuple[list[tuple[Snapshot, Vector]], Vector]:
            copies.lost(conn, host_id)
            outcomes = (keeping.lost(one, now=now) for one in snapshots.held_on(conn, host_id))
            return [self._commit(conn, outcome, now) for outcome in outcomes if outcome is not None], facts.used(conn, host_id)

        # Asked at each look at a host that is fenced: mostly there is nothing any more.
        if not await self.store.read(lambda conn: snapshots.held_on(conn, host_id) or copies.any_on(conn, host_id)):
            return
        gone, used = await self.store.write(work)
        self.reconciler.directory.use(host_id, used)
        for done in gone:
            self._told(*done)

    async def run(self) -> None:
        """Act on deadlines until cancelled."""
        await keep_stepping(self.step, self.due, event=names.SNAPSHOT_DEADLINE)

    async def step(self) -> float:
        """What is late now. *Units*: seconds until the next look."""
        now = self.clock.now()
        for snapshot_id in await self.store.read(lambda conn: snapshots.due(conn, now=now)):
            done = await self.store.write(lambda conn, one=snapshot_id: self._late(conn, one, now))  # type: ignore[misc]
            if done is not None:
                self._told(*done)
        coming = await self.store.read(snapshots.next_deadline)
        return _IDLE_S if coming is None else min(_IDLE_S, max(0.05, coming - self.clock.now()))

    def _late(self, conn: sa.Connection, snapshot_id: str, now: float) -> tuple[Snapshot, Vector] | None:
        found = snapshots.get(conn, snapshot_id, lock=True)
        if found is None or found.deadline_at is None or found.deadline_at > now:
            return None
        if found.state is State.READY and snapshots.users(conn, found):
            # Somebody is still being begun from it.
            return snapshots.commit(conn, replace(found, deadline_at=now + keeping.FORK_LEFT_S)), facts.used(conn, found.host_id)
        outcome = keeping.late(found, now=now)
        return None if outcome is None else self._commit(conn, outcome, now)

    def _commit(self, conn: sa.Connection, outcome: keeping.Outcome, now: float) -> tuple[Snapshot, Vector]:
        after = snapshots.commit(conn, outcome.snapshot)
        if outcome.note is not None:
            self._record(conn, after, outcome.note, now)
        return after, facts.used(conn, after.host_id)

    def _record(self, conn: sa.Connection, snapshot: Snapshot, note: Note, now: float) -> None:
        """In the history of its sandbox, as long as that is on record."""
        found = facts.load(conn, snapshot.sandbox_id)
        if found is not None:
            facts.record(conn, found.sandbox, found.placement, (note,), at=now, ids=self.reconciler.event_id)

    def _told(self, snapshot: Snapshot, used: Vector | None) -> None:
        """Tell whoever waits in this process."""
        if used is not None:
            self.reconciler.directory.use(snapshot.host_id, used)
        self.reconciler.hub.nudge(snapshot.sandbox_id)
        self.reconciler.hub.wake_host(snapshot.host_id)
        self.due.set()
        LOG.info(
            names.SNAPSHOT_CHANGED, snapshot_id=snapshot.id, sandbox_id=snapshot.sandbox_id, state=snapshot.state.value, code=snapshot.code
        )


def require_ready(conn: sa.Connection, snapshot_id: str) -> None:
    """In the commit that accepts a sandbox which begins from it: nobody has deleted it meanwhile. *Errors*: SNAPSHOT_NOT_FOUND."""
    found = snapshots.get(conn, snapshot_id, lock=True)
    if found is None or found.state is not State.READY:
        raise not_found(snapshot_id)


def _takeable(sandbox: Sandbox | None, caller: Caller, sandbox_id: str) -> Sandbox:
    strange = sandbox is None or sandbox.team_id != caller.team.id
    hidden = strange or (sandbox is not None and sandboxes.is_hidden(sandbox) and sandbox.client_id != caller.client.id)
    if hidden or sandbox is None or sandbox.state.value not in sandboxes.VISIBLE:
        raise Refused(Code.SANDBOX_NOT_FOUND, f"sandbox {sandbox_id[:64]!r} was not found")
    if sandbox.state is not Sandboxes.READY:
        raise Refused(
            Code.ILLEGAL_STATE, f"sandbox {sandbox.id} is {sandbox.state}: only one that runs can be kept as it is", hint=LET_IT_RUN
        )
    return sandbox


def _parse(caller: Caller, reference: str | None) -> tuple[str | None, str]:
    """Name and tag. *Errors*: INVALID_REQUEST, FORBIDDEN."""
    if not reference:
        return None, DEFAULT_TAG
    parsed = _NAME.fullmatch(reference)
    if parsed is None or is_id(Prefix.SNAPSHOT, parsed["name"]):
        raise Refused(Code.INVALID_REQUEST, f"{reference[:128]!r} is no name for a snapshot ([team/]name[:tag], lower case)")
    if parsed["namespace"] not in (None, caller.team.name):
        raise Refused(Code.FORBIDDEN, f"{parsed['namespace']!r} is not this key's team")
    return parsed["name"], parsed["tag"] or DEFAULT_TAG


def _require_free(conn: sa.Connection, caller: Caller, name: str | None) -> None:
    """*Errors*: INVALID_REQUEST when a template has the name; RECORDS_QUOTA."""
    if name is not None and any(name in (one.name, *one.aliases) for one in tenancy.templates_for(conn, caller.team.id)):
        raise Refused(Code.INVALID_REQUEST, f"{name!r} is a template's name; give the snapshot another one")
    if snapshots.count_held(conn, caller.team.id) >= HELD_MAX:
        raise Refused(Code.RECORDS_QUOTA, f"this team has {HELD_MAX} snapshots; delete some", limit=HELD_MAX)


def _require_room(conn: sa.Connection, snapshot: Snapshot) -> Vector:
    """What is used of its host, which has room for it. *Errors*: Unavailable INSUFFICIENT_DISK."""
    host, used = hosts.locked(conn, snapshot.host_id), facts.used(conn, snapshot.host_id)
    free_mib = host.capacity.disk_mib - used.disk_mib if host is not None else 0
    if free_mib < held_disk_mib(snapshot):
        message = f"the host of {snapshot.sandbox_id} has {max(0, free_mib)} MiB of disk left, {held_disk_mib(snapshot)} are needed"
        raise Unavailable(Code.INSUFFICIENT_DISK, message, retry_after_s=5.0)
    return used


def _template_env(conn: sa.Connection, sandbox: Sandbox) -> tuple[tuple[str, str], ...]:
    """What its template gives everybody; of one that began from a snapshot, what that had."""
    if sandbox.spec.origin is not None and not sandbox.spec.origin.or_boot:
        before = snapshots.get(conn, sandbox.spec.origin.snapshot_id)
        return before.env if before is not None else ()
    template = tenancy.template(conn, sandbox.spec.template_id)
    return template.env if template is not None else ()


def _look(conn: sa.Connection, caller: Caller, reference: str) -> Snapshot | None:
    parsed = _NAME.fullmatch(reference)
    if parsed is None or parsed["namespace"] not in (None, caller.team.name):
        return None
    if is_id(Prefix.SNAPSHOT, parsed["name"]):
        found = snapshots.get(conn, parsed["name"]) if parsed["tag"] in (None, DEFAULT_TAG) else None
        shown = found is not None and found.team_id == caller.team.id and found.purpose is Purpose.KEPT
        return found if shown and found is not None and found.state not in TERMINAL | {State.DELETING} else None
    return snapshots.newest(conn, caller.team.id, parsed["name"], parsed["tag"] or DEFAULT_TAG)


def _word(seen: wire.SnapshotSeen) -> keeping.Kept | keeping.NotKept | keeping.Absent:
    match seen.state:
        case wire.SnapshotState.KEPT:
            stored = wire.moment_of(seen.moment, seen.moment_size, seen.moment_kind)
            return keeping.Kept(seen.save_mode or SaveMode.FILES, seen.size_bytes, stored)
        case wire.SnapshotState.FAILED:
            return keeping.NotKept(seen.code or Code.SAVE_FAILED.value, seen.message)
        case wire.SnapshotState.ABSENT:
            return keeping.Absent()


def _raise_failure(asked: Snapshot, found: Snapshot | None) -> NoReturn:
    """Why it is not kept, as its host has said."""
    told = found.code if found is not None else None
    code = Code(told) if told is not None and told in Code.__members__ else Code.SAVE_FAILED
    why = (found.message if found is not None else None) or "somebody has deleted it meanwhile"
    message = f"sandbox {asked.sandbox_id} was not kept: {why}"
    if code in _CALLERS_FAULT:
        raise Refused(Code.ILLEGAL_STATE if code is Code.PLACEMENT_LOST else code, message)
    raise Unavailable(code, message, retry_after_s=5.0)


def page_of(found: Sequence[Snapshot], limit: int) -> Page[Snapshot]:
    """The first so many of these, and where the next page begins."""
    items = found[:limit]
    cursor = base64.urlsafe_b64encode(f"{items[-1].created_at!r}|{items[-1].id}".encode()).decode() if len(found) > limit else None
    return Page(items, cursor)


def page_after(cursor: str | None) -> tuple[float, str] | None:
    """Creation and id of the last one of the page before; None: this is the first. *Errors*: INVALID_REQUEST."""
    if not cursor:
        return None
    try:
        at, _, snapshot_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition("|")
        parsed = float(at)
    except (ValueError, binascii.Error, UnicodeError):
        raise Refused(Code.INVALID_REQUEST, "the page token is not one of ours") from None
    if not is_id(Prefix.SNAPSHOT, snapshot_id):
        raise Refused(Code.INVALID_REQUEST, "the page token is not one of ours")
    return parsed, snapshot_id
