"""Settling: a host and a store that was taken back to a backup agree again about what the host has.

Theory of operation. An agent remembers of which life of the store (incarnation) its last settled answer was, and says so with each poll. While it
names another than this one, the host takes nothing new, and is answered nothing but its lease and the incarnation. It then gives an
account of every placement that it has, in parts, and remembers the new incarnation when all are taken; a run that ends in between begins
again, and what was taken before is known then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import Code, Unavailable
from atoll.base.units import Vector
from atoll.control.loops.reconcile import Reconciler
from atoll.domain.account import Account
from atoll.domain.host import UNSETTLED, Host
from atoll.store import facts, restoring
from atoll.store.restoring import Taken
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import agent as wire

LOG = get_logger()

PROBLEM = UNSETTLED
"""Of a host that has not settled yet; any problem keeps new sandboxes away."""


def settled(poll: wire.Poll, incarnation: str) -> bool:
    """Whether this agent's knowledge is of this life of the store. An agent that has none has nothing to settle."""
    return poll.incarnation is None or poll.incarnation == incarnation


@dataclass(frozen=True, slots=True)
class Settling:
    """Part of the agents' side; one per control process."""

    reconciler: Reconciler
    clock: Clock
    incarnation: str

    async def take(self, host: Host, message: wire.Accounts) -> wire.AccountsAnswer:
        """Accounts of what a host has. *Idempotency*: what was taken before is known. *Errors*: Unavailable CONTROL_UNAVAILABLE when another life of
        the store has asked for them: the agent's next poll says which one there is.
        """
        if message.incarnation != self.incarnation:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "these accounts were asked for by another life of the store")
        answer = wire.AccountsAnswer()
        for account in message.accounts:
            taken = await self._take(host, account)
            (answer.unknown if taken is Taken.UNKNOWN else answer.known).append(account.placement_id)
            if taken is not Taken.KNOWN:
                LOG.warning(names.HOST_SETTLED, host_id=host.id, placement_id=account.placement_id, what=taken.name.lower())
        LOG.info(names.HOST_SETTLED, host_id=host.id, count=len(answer.known))
        return answer

    async def _take(self, host: Host, said: wire.Account) -> Taken:
        now = self.clock.now()
        work = self._taking(said.told(), host_id=host.id, now=now)
        taken, _, _ = await self.reconciler.store.write(
            work,
            tell=lambda found: self.reconciler.published(found[1], found[2]),
            doubt=lambda: self.reconciler.doubt(said.sandbox_id),
        )
        return taken

    def _taking(
        self, account: Account, *, host_id: str, now: float
    ) -> Callable[[sa.Connection], tuple[Taken, facts.Committed | None, dict[str, Vector]]]:
        def work(conn: sa.Connection) -> tuple[Taken, facts.Committed | None, dict[str, Vector]]:
            restoring.require_life(conn, self.incarnation)
            taken, done = restoring.take(conn, account, host_id=host_id, now=now, ids=self.reconciler.event_id)
            return taken, done, {host_id: facts.used(conn, host_id)}

        return work
