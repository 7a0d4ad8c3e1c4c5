"""Consoles and usage, as a host's agent hands them in beside its polls. Nothing is kept."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.base.ids import Dice, Prefix, new_id
from atoll.control.replicas.hub import Hub
from atoll.control.replicas.peers import Peers
from atoll.control.sessions.wishes import Wishes
from atoll.wire import agent as wire

_PATIENCE_S: Final = 10.0
_USAGE_PATIENCE_S: Final = 5.0


class Consoles:
    """One per control process."""

    def __init__(self, *, hub: Hub, dice: Dice, peers: Peers | None = None) -> None:
        self._dice = dice
        self.wishes: Wishes[wire.Collected] = Wishes(hub=hub, peers=peers)

    async def read(self, *, host_id: str, placement_id: str) -> bytes:
        """The end of a placement's console. *Errors*: as `Wishes.ask`; Refused when its host has none."""
        wish = wire.Collect(id=new_id(Prefix.DELIVERY, self._dice), placement_id=placement_id)
        return base64.b64decode((await self.wishes.ask(host_id, wish, patience_s=_PATIENCE_S)).console_base64)

    async def usage(self, *, host_id: str, placement_ids: Sequence[str], points_max: int = 1) -> Mapping[str, Sequence[wire.Sample]]:
        """What placements of one host have used, oldest first; those that do not run are left out. *Errors*: as `read`."""
        wish = wire.Collect(
            id=new_id(Prefix.DELIVERY, self._dice),
            placement_id="",
            what=wire.USAGE,
            placements=list(placement_ids)[: wire.SAMPLED_MAX],
            points_max=points_max,
        )
        return (await self.wishes.ask(host_id, wish, patience_s=_USAGE_PATIENCE_S)).samples

    def collected(self, host_id: str, message: wire.Collected) -> None:
        """An agent's answer. An id that nobody waits for any more is ignored. *Errors*: Refused INVALID_REQUEST."""
        known = self.wishes.of(host_id, message.id)
        if known is None:
            return
        if message.code is not None:
            code = Code(message.code) if message.code in Code.__members__ else Code.SANDBOX_NOT_FOUND
            known.future.set_exception(Refused(code, "the host has nothing of this sandbox"))
            return
        try:
            base64.b64decode(message.console_base64, validate=True)
        except binascii.Error:
            raise Refused(Code.INVALID_REQUEST, "console_base64 is not base64") from None
        known.future.set_result(message)
