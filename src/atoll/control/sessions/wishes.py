"""Wishes: what somebody here asks of a host's agent and waits for. It goes out with the host's next poll, whichever replica that is parked at.

A new run of the agent is given anew what is still waited for; nothing of this is kept: a wish that is lost is asked again by its reader.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from atoll.base.errors import Code, OutcomeUnknown, Unavailable
from atoll.control.replicas.hub import Hub
from atoll.control.replicas.peers import Peers
from atoll.wire import agent as wire

AT_ONCE: Final = 256
T = TypeVar("T")


@dataclass(slots=True)
class Open(Generic[T]):
    """One that is waited for."""

    host_id: str
    wish: wire.Collect
    future: asyncio.Future[T]
    given_to: str | None = None
    """The epoch of the agent's run that has it: a later run does not know of it."""


class Wishes(Generic[T]):
    """The open ones of this process, whose answers are all of one kind."""

    def __init__(self, *, hub: Hub, peers: Peers | None) -> None:
        self._hub = hub
        self._peers = peers
        self._open: dict[str, Open[T]] = {}
        self._of_host: defaultdict[str, dict[str, Open[T]]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, host_id: str, wish: wire.Collect, *, patience_s: float) -> T:
        """Its answer. *Errors*: what is set as the answer's; Unavailable RATE_LIMITED; OutcomeUnknown when the host does not answer in time."""
        if len(self._open) >= AT_ONCE:
            raise Unavailable(Code.RATE_LIMITED, "too much is being asked of hosts")
        known = Open[T](host_id, wish, asyncio.get_running_loop().create_future())
        self._open[wish.id] = self._of_host[host_id][wish.id] = known
        self._hub.wake_host(host_id)
        spreading = self._spread(known)
        try:
            async with asyncio.timeout(patience_s):
                return await known.future
        except TimeoutError:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the sandbox's host did not hand in what was asked for in time") from None
        finally:
            if spreading is not None:
                spreading.cancel()
            del self._open[wish.id]
            del self._of_host[host_id][wish.id]
            if not self._of_host[host_id]:
                del self._of_host[host_id]

    def _spread(self, known: Open[T]) -> asyncio.Task[None] | None:
        if self._peers is None:
            return None

        def pending() -> bool:
            return not known.future.done() and known.given_to is None

        def given(epoch: str) -> None:
            known.given_to = epoch

        return asyncio.ensure_future(self._peers.spread(known.host_id, known.wish, pending=pending, given=given))

    def of(self, host_id: str, wish_id: str) -> Open[T] | None:
        """What is waited for here, of this host, under this id."""
        known = self._open.get(wish_id)
        return known if known is not None and known.host_id == host_id and not known.future.done() else None

    def wanted(self, host_id: str, epoch: str, room: int) -> list[wire.Collect]:
        """At most `room` wishes that this run of the agent has not been given yet; they are given now."""
        taken = [one for one in self._of_host.get(host_id, {}).values() if one.given_to != epoch][: max(room, 0)]
        for one in taken:
            one.given_to = epoch
        return [one.wish for one in taken]
