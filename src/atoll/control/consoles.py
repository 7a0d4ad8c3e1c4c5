"""Consoles: a reader's wish goes out with the host's next poll, the end of the console comes back beside it. Nothing is kept."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import defaultdict
from typing import Final

from atoll.base.errors import Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.ids import Dice, Prefix, new_id
from atoll.control.hub import Hub
from atoll.wire import agent as wire

_PATIENCE_S: Final = 10.0
_WAITING_MAX: Final = 256


class Consoles:
    """Open wishes, by host."""

    def __init__(self, *, hub: Hub, dice: Dice) -> None:
        self._hub = hub
        self._dice = dice
        self._wanted: defaultdict[str, dict[str, wire.Collect]] = defaultdict(dict)
        self._waiting: dict[str, asyncio.Future[bytes]] = {}

    async def read(self, *, host_id: str, placement_id: str) -> bytes:
        """The end of a placement's console. *Errors*: Unavailable RATE_LIMITED; OutcomeUnknown when its host does not answer in time."""
        if len(self._waiting) >= _WAITING_MAX:
            raise Unavailable(Code.RATE_LIMITED, "too many consoles are being read")
        wish = wire.Collect(id=new_id(Prefix.DELIVERY, self._dice), placement_id=placement_id)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[wish.id] = future
        self._wanted[host_id][wish.id] = wish
        self._hub.wake_host(host_id)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await future
        except TimeoutError:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the sandbox's host did not hand in its console in time") from None
        finally:
            self._waiting.pop(wish.id, None)
            self._wanted[host_id].pop(wish.id, None)

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
            future.set_exception(Refused(code, "the host has no console of this sandbox"))
            return
        try:
            future.set_result(base64.b64decode(message.console_base64, validate=True))
        except binascii.Error:
            raise Refused(Code.INVALID_REQUEST, "console_base64 is not base64") from None
