"""Consoles and usage: a reader's wish goes out with the host's next poll, what the host has comes back beside it. Nothing is kept."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from atoll.base.errors import Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.ids import Dice, Prefix, new_id
from atoll.control.replicas.hub import Hub
from atoll.control.replicas.peers import Peers
from atoll.wire import agent as wire

_PATIENCE_S: Final = 10.0
_USAGE_PATIENCE_S: Final = 5.0
_WAITING_MAX: Final = 256


class Consoles:
    """Open wishes, by host."""

    def __init__(self, *, hub: Hub, dice: Dice, peers: Peers | None = None) -> None:
        self._hub = hub
        self._peers = peers
        self._dice = dice
        self._wanted: defaultdict[str, dict[str, wire.Collect]] = defaultdict(dict)
        self._waiting: dict[str, asyncio.Future[wire.Collected]] = {}

    async def read(self, *, host_id: str, placement_id: str) -> bytes:
        """The end of a placement's console.

        *Errors*: Unavailable RATE_LIMITED; OutcomeUnknown when its host does not answer in time; Refused when it has none.
        """
        wish = wire.Collect(id=new_id(Prefix.DELIVERY, self._dice), placement_id=placement_id)
        return base64.b64decode((await self._ask(host_id, wish, patience_s=_PATIENCE_S)).console_base64)

    async def usage(self, *, host_id: str, placement_ids: Sequence[str], points_max: int = 1) -> Mapping[str, Sequence[wire.Sample]]:
        """What placements of one host have used, oldest first; those that do not run are left out. *Errors*: as `read`."""
        wish = wire.Collect(
            id=new_id(Prefix.DELIVERY, self._dice),
            placement_id="",
            what=wire.USAGE,
            placements=list(placement_ids)[: wire.SAMPLED_MAX],
            points_max=points_max,
        )
        return (await self._ask(host_id, wish, patience_s=_USAGE_PATIENCE_S)).samples

    async def _ask(self, host_id: str, wish: wire.Collect, *, patience_s: float) -> wire.Collected:
        if len(self._waiting) >= _WAITING_MAX:
            raise Unavailable(Code.RATE_LIMITED, "too many hosts' consoles and measurements are being read")
        future: asyncio.Future[wire.Collected] = asyncio.get_running_loop().create_future()
        self._waiting[wish.id] = future
        self._wanted[host_id][wish.id] = wish
        self._hub.wake_host(host_id)
        spreading = self._spread(host_id, wish)
        try:
            async with asyncio.timeout(patience_s):
                return await future
        except TimeoutError:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the sandbox's host did not hand in what was asked for in time") from None
        finally:
            if spreading is not None:
                spreading.cancel()
            self._waiting.pop(wish.id, None)
            self._wanted[host_id].pop(wish.id, None)
            if not self._wanted[host_id]:
                del self._wanted[host_id]

    def _spread(self, host_id: str, wish: wire.Collect) -> asyncio.Task[None] | None:
        if self._peers is None:
            return None

        def pending() -> bool:
            return wish.id in self._wanted.get(host_id, {})

        def given(_epoch: str) -> None:
            self._wanted.get(host_id, {}).pop(wish.id, None)

        return asyncio.ensure_future(self._peers.spread(host_id, wish, pending=pending, given=given))

    def waits(self, wish_id: str) -> bool:
        """Whether somebody here waits for an answer with this id."""
        return wish_id in self._waiting

    def wanted(self, host_id: str) -> list[wire.Collect]:
        """Wishes that have not been sent yet; each is given once."""
        wishes = list(self._wanted.get(host_id, {}).values())[: wire.COMMANDS_PER_POLL_MAX]
        for wish in wishes:
            self._wanted[host_id].pop(wish.id, None)
        return wishes

    def collected(self, message: wire.Collected) -> None:
        """An agent's answer. An id that nobody waits for any more is ignored. *Errors*: Refused INVALID_REQUEST."""
        future = self._waiting.get(message.id)
        if future is None or future.done():
            return
        if message.code is not None:
            code = Code(message.code) if message.code in Code.__members__ else Code.SANDBOX_NOT_FOUND
            future.set_exception(Refused(code, "the host has nothing of this sandbox"))
            return
        try:
            base64.b64decode(message.console_base64, validate=True)
        except binascii.Error:
            raise Refused(Code.INVALID_REQUEST, "console_base64 is not base64") from None
        future.set_result(message)
