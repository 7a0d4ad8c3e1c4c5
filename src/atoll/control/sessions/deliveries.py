"""Deliveries: what creates brought for their guests, on its way to the hosts.

Theory of operation. An agent asks for a payload when its guest has proved itself. That it gets it is committed before a byte leaves, with
the sandbox's `bootstrap_exposed`: from then on nobody knows what the guest may do outside, and no other is begun in its place by itself
(`planning/replacing.py`). Who may have it again, and who not: `store/payloads.py`. Bytes are opened from their seal in memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.control.loops.reconcile import Reconciler
from atoll.control.sessions.orders import PAYLOAD_BYTES_MAX, Orders
from atoll.domain.command import Kind
from atoll.domain.host import Host
from atoll.domain.placement import Holding
from atoll.domain.sandbox import TERMINAL
from atoll.planning.claiming import CLAIMED
from atoll.planning.stimuli import BootstrapExposed
from atoll.store import facts, hosts, payloads
from atoll.store.engine import Store
from atoll.store.payloads import Sealed
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import agent as wire

LOG = get_logger()

ROOM_BYTES: Final = wire.MESSAGE_BYTES_MAX - PAYLOAD_BYTES_MAX - 32 * 1024
"""Of payloads in an answer before the last one; tokens take the rest."""
Delivered = tuple[facts.Committed, Sealed]


@dataclass(frozen=True, slots=True)
class Deliveries:
    """One per control process."""

    store: Store
    clock: Clock
    reconciler: Reconciler
    orders: Orders

    async def give(self, host: Host, message: wire.PayloadsWanted, *, unless: Callable[[sa.Connection], None]) -> wire.Payloads:
        """Payloads and guest tokens that an agent asks for; of other hosts' sandboxes, and of ended ones, nothing.

        *Errors*: those of `unless`, which looks in the same transaction and raises when whoever asks may not any more.
        """
        answer, size = wire.Payloads(), 0
        for reference in message.refs:
            if size > ROOM_BYTES:
                # Not looked at: it is asked for again.
                break
            try:
                given = await self._deliver(host, reference, epoch=message.epoch, missing=message.missing, unless=unless)
            except Refused as error:
                if error.code is not Code.BOOTSTRAP_DELIVERED:
                    raise
                LOG.warning(names.BOOTSTRAP_REFUSED, sandbox_id=reference, host_id=host.id, epoch=message.epoch, message=error.message)
                answer.refused.append(reference)
                continue
            if given is not None:
                payload = answer.payloads[reference] = self.orders.open(given[0].sandbox, given[1])
                size += len(payload.model_dump_json())
        loaded = await self.store.read(lambda conn: hosts.load_many(conn, message.placements))
        answer.guest_tokens.update(
            (p.id, self.orders.guest_token(p)) for p, _ in loaded if p.host_id == host.id and p.holding is not Holding.NONE
        )
        return answer

    async def _deliver(
        self, host: Host, sandbox_id: str, *, epoch: str, missing: Sequence[str], unless: Callable[[sa.Connection], None]
    ) -> Delivered | None:
        now = self.clock.now()

        def work(conn: sa.Connection) -> Delivered | None:
            unless(conn)
            found = facts.load(conn, sandbox_id)
            placement = found.placement if found is not None else None
            if found is None or placement is None or placement.host_id != host.id or placement.holding is Holding.NONE:
                return None
            if placement.desired is Kind.ENSURE_ABSENT or found.sandbox.state in TERMINAL:
                return None
            if placement.desired is not Kind.ENSURE_RUNNING and found.sandbox.started_at is None:
                # One that was ready may still be on its way back from a rest that failed, when the next one is wanted already.
                return None
            sealed = payloads.get(conn, sandbox_id)
            if sealed is not None and not sealed.exposes:
                return facts.Committed(found.sandbox, placement, changed=False), sealed
            done = facts.advance_sandbox(conn, sandbox_id, BootstrapExposed(placement.id), now=now, ids=self.reconciler.event_id)
            assert done is not None
            # Of what is begun by its agent nobody can say this: a first guest may have had it, and have ended.
            lacks = placement.desired_reason == CLAIMED and placement.id in missing
            return done, payloads.deliver(conn, placement, epoch=epoch, lacks=lacks)

        return await self.store.write(work, tell=self._told)

    def _told(self, given: Delivered | None) -> None:
        if given is not None:
            self.reconciler.published(given[0], {})
