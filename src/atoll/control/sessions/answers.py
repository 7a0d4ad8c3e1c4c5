"""Answers to polls: what a host should do, as the difference between what is wanted and what its agent says that it has.

Theory of operation. Everything in an answer follows from rows and from the poll, so it can be made again, by any replica, and a lost one
costs nothing. An answer keeps within a message's size: what does not fit comes with the next poll, and a command whose payload would
burst it travels alone (a payload by itself always fits, see `orders.PAYLOAD_BYTES_MAX`). Left out is never "gone".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import Code, Refused
from atoll.control.replicas.peers import Peers
from atoll.control.sessions.captures import Captures
from atoll.control.sessions.consoles import Consoles
from atoll.control.sessions.holdings import Held, Wants
from atoll.control.sessions.orders import Orders
from atoll.control.sessions.settling import settled
from atoll.domain.command import Kind
from atoll.domain.host import Host
from atoll.domain.snapshot import State
from atoll.domain.spec import SaveMode
from atoll.store import copies, hosts, restoring, snapshots
from atoll.store.engine import Store
from atoll.wire import agent as wire

ENDS_PER_POLL_MAX: Final = 256
FORGET_PER_POLL_MAX: Final = 1024
UNKNOWN_PER_POLL_MAX: Final = 256
COMMANDS_BYTES_MAX: Final = 144 * 1024
"""Of commands with their payloads in one answer. The rest of a message is for ends (38 KiB), tombstones to forget (30), acknowledgements
(11), unknown placements (8) and what surrounds them."""


@dataclass(slots=True, kw_only=True)
class Answers:
    """Makes them."""

    store: Store
    orders: Orders
    consoles: Consoles
    captures: Captures | None
    peers: Peers | None
    wants: Wants
    incarnation: str
    takes_moments: Callable[[], bool] = lambda: False
    moment_bytes_max: Callable[[], int] = lambda: 0
    """Whether hosts should send what they save to the artifact store."""

    async def make(
        self, host: Host, poll: wire.Poll, held: Held, acknowledged: dict[str, int], *, received_at: float, lease_s: float
    ) -> wire.PollAnswer:
        """The answer to this poll as of now; `held`: what was told until then. *Errors*: Refused STALE_AGENT_EPOCH, STALE_POLL when the host's row has a newer word; Unavailable
        CONTROL_UNAVAILABLE when the store has begun another life.
        """
        session, wanted = await self.wants.of(host.id)
        kept = await self.store.read(lambda conn: self._kept(conn, host, poll))
        if session.incarnation != self.incarnation:
            raise restoring.outlived()
        if session.epoch != poll.epoch:
            # Enrolled anew, or taken over, while this poll was parked: what is wanted is no longer this run's business.
            raise Refused(Code.STALE_AGENT_EPOCH, "this epoch does not hold the host")
        if session.poll_seq > poll.poll_seq:
            raise Refused(Code.STALE_POLL, "a newer poll of this session has come to another replica")
        if not settled(poll, self.incarnation):
            return wire.PollAnswer(lease_s=lease_s, incarnation=self.incarnation, acknowledged=acknowledged)
        holds, ends = held.holds, held.ends
        strange = holds.keys() - wanted.keys()
        asked = [p for p in dict.fromkeys((*poll.tombstones, *sorted(strange), *poll.health.quarantined)) if p not in wanted]
        behind = [p for p, w in wanted.items() if holds.get(p, 0) < w.desired_revision]
        late = [p for p, w in wanted.items() if ends.get(p, 0) < w.end_revision]
        gone, unknown = await self.store.read(lambda conn: hosts.gone_or_unknown(conn, host.id, asked))
        # What control has fenced and the agent still has must go; it grants nothing any more.
        behind += sorted(p for p, revision in gone.items() if holds.get(p, revision) < revision)
        behind += sorted(p for p in poll.health.quarantined if p in gone and p not in holds)
        taken, moments = held.taken, self.takes_moments()
        answer = wire.PollAnswer(
            lease_s=lease_s,
            incarnation=self.incarnation,
            acknowledged=acknowledged,
            told=taken,
            moments=moments,
            moment_bytes_max=self.moment_bytes_max(),
        )
        late_now = set(sorted(late)[:ENDS_PER_POLL_MAX])
        await self._fill(answer, poll, behind[: wire.COMMANDS_PER_POLL_MAX], late_now, gone=gone, received_at=received_at)
        answer.snapshots.extend(_orders(kept, poll))
        tombstones = set(poll.tombstones)
        answer.forget.extend(sorted(p for p in tombstones if p in gone or p in unknown)[:FORGET_PER_POLL_MAX])
        answer.unknown.extend(sorted(p for p in strange if p in unknown and p not in tombstones)[:UNKNOWN_PER_POLL_MAX])
        for wishes in (self.consoles.wishes, *(() if self.captures is None else (self.captures.wishes,))):
            answer.collect.extend(wishes.wanted(host.id, poll.epoch, wire.COMMANDS_PER_POLL_MAX - len(answer.collect)))
        if self.peers is not None:
            answer.collect.extend(self.peers.wanted(host.id, wire.COMMANDS_PER_POLL_MAX - len(answer.collect)))
        return answer

    def _kept(self, conn: sa.Connection, host: Host, poll: wire.Poll) -> Sequence[snapshots.Wanted]:
        """What is wanted of a host's snapshots, its own and those that it has fetched. What it has says a poll only now and then."""
        found = (*snapshots.wanted(conn, host.id, has=poll.kept), *copies.ordered_away(conn, host.id))
        return list({one.id: one for one in found}.values())

    async def _fill(
        self, answer: wire.PollAnswer, poll: wire.Poll, room: list[str], late: set[str], *, gone: dict[str, int], received_at: float
    ) -> None:
        """Commands with their payloads as far as they fit, and ends."""
        loaded = await self.store.read(lambda conn: hosts.load_many(conn, [*room, *sorted(late - set(room))]))
        size = 0
        for placement, sandbox in loaded:
            # What is gone is never started again, whatever was wanted of it when it went.
            if placement.id in room and (placement.id not in gone or placement.desired is Kind.ENSURE_ABSENT):
                command, payload = await self.orders.command(placement, sandbox, epoch=poll.epoch)
                size += len(command.model_dump_json()) + (len(payload.model_dump_json()) if payload is not None else 0)
                if answer.commands and size > COMMANDS_BYTES_MAX:
                    room = []
                else:
                    answer.commands.append(command)
                    if payload is not None and command.payload_ref is not None:
                        answer.payloads[command.payload_ref] = payload
            if placement.id in late and sandbox.end_at is not None:
                # The agent counts from when it sent the poll, which may have been parked since.
                answer.ends.append(self.orders.end(sandbox, placement.id, since=received_at))


def _orders(wanted: Sequence[snapshots.Wanted], poll: wire.Poll) -> Iterator[wire.SnapshotOrder]:
    """Of what is wanted of a host's snapshots, what its agent is not at yet."""
    room = wire.SNAPSHOTS_MAX
    for one in wanted:
        wish = wire.SnapshotWish.KEEP if one.state == State.TAKING.value else wire.SnapshotWish.DROP
        if poll.snapshots.get(one.id) is not wish and room > 0:
            room -= 1
            yield wire.SnapshotOrder(id=one.id, wish=wish, placement_id=one.placement_id, save_mode=SaveMode(one.mode))
