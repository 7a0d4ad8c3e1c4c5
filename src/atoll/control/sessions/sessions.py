"""Agents' sessions: who may speak for a host, and what is answered.

Theory of operation. A poll is checked in layers, each refusing one kind of stale message: credential (version), protocol, epoch, poll
sequence. Its lease is committed before it is answered: polls that follow each other within two seconds are answered with what is left of
the one that was committed last. Then observations are applied, one commit each; then what the host should do is compared with what the
agent says that it holds, and the difference is the answer. Subscribe first, then read, then park.
A poll that was overtaken by a newer one is answered STALE_POLL. Silence, or an empty inventory, is never absence.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.base.ids import EpochId
from atoll.base.records import replace
from atoll.control import commits
from atoll.control.artifacts.image_caches import ImageCaches
from atoll.control.hosts.directory import Directory
from atoll.control.hosts.enrollment import facts_of
from atoll.control.hosts.inspection import Findings, Inspection
from atoll.control.loops.fencing import Fencing
from atoll.control.loops.reconcile import Reconciler
from atoll.control.replicas.hub import Hub
from atoll.control.replicas.peers import Peers
from atoll.control.sandboxes.snapshots import Snapshots
from atoll.control.sessions.answers import Answers
from atoll.control.sessions.captures import Captures
from atoll.control.sessions.consoles import Consoles
from atoll.control.sessions.deliveries import Deliveries
from atoll.control.sessions.holdings import Held
from atoll.control.sessions.orders import Orders
from atoll.control.sessions.settling import PROBLEM, Settling, settled
from atoll.domain.host import LEASE_S, Host
from atoll.domain.placement import Holding, Report
from atoll.domain.sandbox import State
from atoll.planning.stimuli import Facts, Heard
from atoll.store import facts, hosts, restoring
from atoll.store.engine import Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import agent as wire

LOG = get_logger()

FRESH_S: Final = 30.0
"""A session that was heard of this recently is not taken over by a stranger."""
RENEW_S: Final = 2.0
"""A host that was heard of this recently needs no new heartbeat: a busy agent polls more often than that."""
_MOMENT_S: Final = 0.001
"""Less than this is no time to park for."""

_Health = tuple[frozenset[str], frozenset[str], tuple[str, ...], Mapping[str, str], frozenset[str]]
"""Isolations, images, problems, facts, moments."""


@dataclass(slots=True)
class _Session:
    epoch: str
    poll_seq: int = 0
    committed_seq: int = 0
    """Of the poll that this replica committed last: another one on the host's row is another replica's."""
    newest: asyncio.Event | None = None
    """Set when a newer poll arrives: the parked one ends."""
    unknown: frozenset[str] = frozenset()
    """What the agent was told that control has no row for: said again with each answer, but no news any more."""
    held: Held = field(default_factory=Held)


class Sessions:
    """One per control process."""

    def __init__(  # noqa: PLR0913 - a composition root's arguments
        self,
        *,
        store: Store,
        clock: Clock,
        hub: Hub,
        directory: Directory,
        reconciler: Reconciler,
        orders: Orders,
        consoles: Consoles,
        fencing: Fencing,
        incarnation: str,
        stepped_s: Callable[[], float] = lambda: 0.0,
        captures: Captures | None = None,
        peers: Peers | None = None,
        snapshots: Snapshots | None = None,
        takes_moments: Callable[[], bool] = lambda: False,
        moment_bytes_max: Callable[[], int] = lambda: 0,
    ) -> None:
        self._store = store
        self._clock = clock
        self._hub = hub
        self._directory = directory
        self._reconciler = reconciler
        self._orders = orders
        self._consoles = consoles
        self.captures = captures
        self._peers = peers
        self._snapshots = snapshots
        self._fencing = fencing
        self._incarnation = incarnation
        self._settling = Settling(reconciler, clock, incarnation)
        self._answers = Answers(
            store=store,
            orders=orders,
            consoles=consoles,
            captures=captures,
            peers=peers,
            wants=reconciler.wants,
            incarnation=incarnation,
            takes_moments=takes_moments,
            moment_bytes_max=moment_bytes_max,
        )
        self._deliveries = Deliveries(store, clock, reconciler, orders)
        self._inspection = Inspection(stepped_s)
        self._sessions: dict[str, _Session] = {}
        self.image_caches = ImageCaches(directory, peers)

    async def host_of(self, credential: str) -> Host:
        """The host of this credential. *Errors*: Refused CREDENTIAL_REVOKED."""
        digest = hashlib.sha256(credential.encode()).hexdigest()
        found = await self._store.read(lambda conn: hosts.by_credential(conn, digest))
        if found is None:
            raise await self._store.read(lambda conn: _stranger(conn, digest))
        if not hmac.compare_digest(found.credential_digest or "", digest):
            raise Refused(Code.CREDENTIAL_REVOKED, "this host credential is unknown or revoked")
        return found

    def parked(self, host_id: str) -> str | None:
        """Which run of this host's agent has a poll here that waits for its answer."""
        session = self._sessions.get(host_id)
        return session.epoch if session is not None and self._hub.awaits_work(host_id) else None

    async def poll(self, host: Host, poll: wire.Poll) -> wire.PollAnswer:
        """One poll. *Errors*: Refused PROTOCOL_UNSUPPORTED, STALE_AGENT_EPOCH, OVERLAPPING_AGENT_SESSION, STALE_POLL."""
        received_at = self._clock.now()
        self._check(host, poll)
        host, session = await self._session(host, poll)
        findings = self._inspection.look(host, poll, received_at=received_at)
        overtaken = asyncio.Event()
        if session.newest is not None:
            session.newest.set()
        session.newest, session.poll_seq = overtaken, poll.poll_seq
        lease_s = await self._renew(host, poll, session, findings)
        if overtaken.is_set():
            raise Refused(Code.STALE_POLL, "a newer poll of this session has come")
        self._reconciler.ends.heard(host.id, poll.end_revisions, known=session.held.ends)
        known = session.held.take(poll)
        acknowledged, _ = await self.hear(host, poll.observations, epoch=poll.epoch)
        if not known:
            return wire.PollAnswer(lease_s=lease_s, incarnation=self._incarnation, acknowledged=acknowledged)
        if poll.kept and self._snapshots is not None:
            await self._snapshots.count(host.id, poll.kept)
        with self._hub.work_for(host.id) as work:
            until = self._clock.boot() + poll.park_s
            while True:
                work.clear()
                answer = await self._answers.make(host, poll, session.held, acknowledged, received_at=received_at, lease_s=lease_s)
                if overtaken.is_set():
                    raise Refused(Code.STALE_POLL, "a newer poll of this session has come")
                left = until - self._clock.boot()
                news = answer.commands or answer.ends or answer.forget or answer.collect or answer.snapshots or acknowledged
                if left <= _MOMENT_S or news or not settled(poll, self._incarnation) or not session.unknown.issuperset(answer.unknown):
                    session.unknown = frozenset(answer.unknown)
                    return answer
                await _any(work, overtaken, timeout=left)

    async def observe(self, host: Host, message: wire.Observe) -> wire.ObserveAnswer:
        """Observations that could not wait. *Errors*: as `poll`."""
        self._holds(host, message.epoch)
        acknowledged, committed = await self.hear(host, message.observations, epoch=message.epoch)
        if self._snapshots is not None:
            for seen in message.snapshots:
                await self._snapshots.heard(host, seen, unless=lambda conn: _taken_over(conn, host, message.epoch, self._incarnation))
        return wire.ObserveAnswer(
            acknowledged=acknowledged,
            forget=[
                c.placement.id
                for c in committed
                if c.placement is not None and (c.placement.holding is Holding.NONE or c.sandbox.placement_id != c.placement.id)
            ],
            ends=[
                self._orders.end(c.sandbox, c.placement.id)
                for c in committed
                if c.placement is not None and c.sandbox.state is State.READY and c.sandbox.end_at is not None
            ],
        )

    async def payloads(self, host: Host, message: wire.PayloadsWanted) -> wire.Payloads:
        """Payloads and tokens that an agent asks for. *Errors*: as `observe`."""
        self._holds(host, message.epoch)
        return await self._deliveries.give(host, message, unless=lambda conn: _taken_over(conn, host, message.epoch, self._incarnation))

    async def accounts(self, host: Host, message: wire.Accounts) -> wire.AccountsAnswer:
        """What a host has, after the store was taken back to a backup. *Errors*: as `observe`."""
        self._holds(host, message.epoch)
        return await self._settling.take(host, message)

    @staticmethod
    def _holds(host: Host, epoch: str) -> None:
        """Refuse what another run than the host's session says. Right after a restore there is none: the next poll begins it."""
        if host.epoch is None:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "this host has no session yet; a poll begins it")
        if host.epoch != epoch:
            raise Refused(Code.STALE_AGENT_EPOCH, "this epoch does not hold the host")

    async def collected(self, host: Host, message: wire.Collected) -> None:
        """A console that somebody asked for, or why a layer cannot be had. *Errors*: as `observe`."""
        self._holds(host, message.epoch)
        here = self._consoles.wishes.of(host.id, message.id) or (self.captures and self.captures.wishes.of(host.id, message.id))
        if here is None and self._peers is not None:
            await self._peers.pass_on(message.model_copy(update={"host_id": host.id}))
            return
        if self.captures is not None and message.code is not None:
            self.captures.failed(host.id, message)
        self._consoles.collected(host.id, message)

    async def hear(
        self, host: Host, observations: Sequence[wire.Observation], *, epoch: str
    ) -> tuple[dict[str, int], list[facts.Committed]]:
        """Apply observations, one commit each, in the agent's order; what was committed or needs no commit is acknowledged.

        *Errors*: Refused STALE_AGENT_EPOCH when another run has taken over before a commit: it may count its observations anew, and a
        high number of this one would make all of its own stale.
        """
        acknowledged: dict[str, int] = {}
        committed: list[facts.Committed] = []
        heard = await asyncio.gather(*(self._hear_one(host, seen, epoch) for seen in observations))
        for seen, done in zip(observations, heard, strict=True):
            acknowledged[seen.placement_id] = max(seen.seq, acknowledged.get(seen.placement_id, 0))
            if done is not None:
                committed.append(done)
        return acknowledged, committed

    async def _hear_one(self, host: Host, seen: wire.Observation, epoch: str) -> facts.Committed | None:
        def meant(known: Facts) -> bool:
            places = (known.placement, *known.older)
            return any(place is not None and place.id == seen.placement_id and place.host_id == host.id for place in places)

        report = Report(
            seq=seen.seq,
            observed=seen.observed,
            generation=seen.generation,
            applied_revision=seen.applied_revision,
            address=seen.address,
            reason=seen.reason,
            detail=seen.detail,
            failed_revision=seen.failed_revision,
            save_mode=seen.save_mode,
            unresponsive=seen.unresponsive,
            moment=wire.moment_of(seen.moment, seen.moment_size, seen.moment_kind),
            ready=seen.ready,
        )
        done = await self._reconciler.apply(
            seen.sandbox_id,
            Heard(report, ended_by=seen.ended_by, placement_id=seen.placement_id),
            about=meant,
            unless=lambda conn: _taken_over(conn, host, epoch, self._incarnation),
        )
        if done is not None and done.changed and done.sandbox.state in (State.PENDING, State.RESERVING):
            await self._reconciler.settle(seen.sandbox_id)
        return done

    # Layers that refuse.

    @staticmethod
    def _check(host: Host, poll: wire.Poll) -> None:
        if poll.host_id != host.id:
            raise Refused(Code.CREDENTIAL_REVOKED, "this credential belongs to another host")
        if poll.protocol != wire.PROTOCOL:
            raise Refused(Code.PROTOCOL_UNSUPPORTED, f"control speaks protocol {wire.PROTOCOL}, the agent {poll.protocol}")

    async def _session(self, host: Host, poll: wire.Poll) -> tuple[Host, _Session]:
        if host.epoch == poll.epoch:
            session = self._sessions.setdefault(host.id, _Session(poll.epoch))
            if session.epoch == poll.epoch:
                if poll.poll_seq <= max(session.poll_seq, host.poll_seq):
                    raise Refused(Code.STALE_POLL, "a newer poll of this session has come")
                return host, session
        host = await self._take_over(host, poll)
        session = _Session(poll.epoch)
        old = self._sessions.get(host.id)
        if old is not None and old.newest is not None:
            old.newest.set()
        self._sessions[host.id] = session
        return host, session

    async def _take_over(self, host: Host, poll: wire.Poll) -> Host:
        now = self._clock.now()

        def work(conn: sa.Connection) -> Host:
            restoring.require_life(conn, self._incarnation)
            current = hosts.locked(conn, host.id)
            if current is None:
                raise Refused(Code.CREDENTIAL_REVOKED, "this host is gone")
            if hosts.epoch_ended(conn, host.id, poll.epoch):
                raise Refused(Code.STALE_AGENT_EPOCH, "a newer agent run has taken over this host")
            if current.epoch == poll.epoch:
                return current
            fresh = current.seen_at is not None and now - current.seen_at < FRESH_S
            proven = current.epoch is not None and current.epoch == poll.previous_epoch
            if current.epoch is not None and not proven and fresh:
                raise Refused(Code.OVERLAPPING_AGENT_SESSION, "another agent run holds this host")
            if not proven:
                # It does not have the database of the run before it, and so not its sequence numbers: what it sees would be stale for ever.
                hosts.restart_sequences(conn, host.id)
            if current.epoch is not None:
                hosts.end_epoch(conn, host.id, current.epoch, now=now)
            changed = replace(
                current,
                epoch=EpochId(poll.epoch),
                poll_seq=0,
                agent_version=poll.agent_version,
                facts=facts_of(poll.facts),
            )
            hosts.save(conn, changed, read=current)
            return replace(changed, revision=changed.revision + 1)

        taken = await self._store.write(work)
        LOG.info(names.HOST_SESSION_STARTED, host_id=host.id, epoch=poll.epoch)
        return taken

    # What a poll commits and is answered.

    async def _renew(self, host: Host, poll: wire.Poll, session: _Session, findings: Findings) -> float:
        """Have a lease committed for this poll, and say how long it is from when the poll was received.

        The first poll that comes to this replica after one to another is always committed, with its number: that is how the other one
        learns that what it has parked is not the newest any more, and how both know a late poll for one.
        """
        self.image_caches.hear(host.id, poll)
        problems = tuple(check.id for check in poll.health.checks if check.fatal and not check.ok)
        if poll.health.quarantined:
            problems = (*problems, "inventory.quarantine")
        problems = (*problems, *findings.problems)
        if not settled(poll, self._incarnation):
            problems = (*problems, PROBLEM)
        said = poll.health
        health = (frozenset(said.isolations), frozenset(said.images), problems, findings.facts, frozenset(said.moments))
        now = self._clock.now()
        known = self._directory.host(host.id)
        same = known is not None and known.epoch == poll.epoch and _health(host) == health
        # A wall clock that was set back in between makes the age negative, and the lease is made anew.
        same = same and host.poll_seq == session.committed_seq
        if same and host.seen_at is not None and host.lease_until is not None and 0.0 <= now - host.seen_at < RENEW_S:
            return min(LEASE_S, host.lease_until - now)
        await commits.finish(self._commit_poll(host, poll, health, now=now))
        session.committed_seq = poll.poll_seq
        return LEASE_S

    async def _commit_poll(self, host: Host, poll: wire.Poll, health: _Health, *, now: float) -> None:
        def work(conn: sa.Connection) -> Host:
            restoring.require_life(conn, self._incarnation)
            current = hosts.by_id(conn, host.id)
            if current is None:
                raise Refused(Code.CREDENTIAL_REVOKED, "this host is gone")
            if current.credential_digest != host.credential_digest:
                raise Refused(Code.CREDENTIAL_REVOKED, "this host was fenced meanwhile")
            if current.epoch != poll.epoch:
                raise Refused(Code.STALE_AGENT_EPOCH, "a newer agent run has taken over this host")
            if current.poll_seq >= poll.poll_seq:
                raise Refused(Code.STALE_POLL, "a newer poll of this session has come to another replica")
            if _health(current) != health:
                isolations, images, problems, found_out, moments = health
                told = replace(current, isolations=isolations, images=images, problems=problems, facts=found_out, moments=moments)
                hosts.save(conn, told, read=current)
            hosts.polled(conn, current, poll_seq=poll.poll_seq, seen_at=now, lease_until=now + LEASE_S)
            found = hosts.by_id(conn, host.id)
            assert found is not None
            return found

        before = self._directory.host(host.id)
        after = await self._store.write(work)
        self._fencing.renewed(after)
        self._directory.put(after)
        if before is None or before.problems != after.problems or before.isolations != after.isolations or before.images != after.images:
            self._tell(after, before=frozenset(before.problems) if before is not None else frozenset())
            self._reconciler.deadlines.set()
        if before is None or before.epoch != after.epoch:
            used = await self._store.read(lambda conn: facts.used(conn, host.id))
            self._directory.put(after, used=used)

    @staticmethod
    def _tell(host: Host, *, before: frozenset[str]) -> None:
        """Somebody may have to act on a host that takes nothing new; that it does again is good news."""
        what = {"host_id": host.id, "name": host.name, "what": sorted(host.isolations), "check": list(host.problems)}
        if set(host.problems) - before:
            LOG.warning(names.HOST_UNSCHEDULABLE, **what)
        else:
            LOG.info(names.HOST_HEALTH_CHANGED, **what)


def _taken_over(conn: sa.Connection, host: Host, epoch: str, incarnation: str) -> None:
    """*Errors*: Refused CREDENTIAL_REVOKED, STALE_AGENT_EPOCH when this run does not speak for the host any more; Unavailable
    CONTROL_UNAVAILABLE when the store has begun another life.
    """
    now = hosts.session(conn, host.id)
    if now.incarnation != incarnation:
        raise restoring.outlived()
    if now.credential_version != host.credential_version:
        raise Refused(Code.CREDENTIAL_REVOKED, "this host was fenced or enrolled anew meanwhile")
    if now.epoch != epoch:
        raise Refused(Code.STALE_AGENT_EPOCH, "this epoch does not hold the host any more")


def _health(host: Host) -> _Health:
    return host.isolations, host.images, host.problems, host.facts, host.moments


def _stranger(conn: sa.Connection, digest: str) -> AtollError:
    """Why nobody has this credential. A store that was taken back to a backup may only not know it: that is no fence, and ends nothing."""
    if restoring.restored_at(conn) is not None and not hosts.is_revoked(conn, digest):
        return Refused(Code.HOST_UNKNOWN, "this store was restored from a backup that does not know this host credential")
    return Refused(Code.CREDENTIAL_REVOKED, "this host credential is unknown or revoked")


async def _any(*events: asyncio.Event, timeout: float) -> None:
    """Until one of them is set or the time is over. *Units*: seconds."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
