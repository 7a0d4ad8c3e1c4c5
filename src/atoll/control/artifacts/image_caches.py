"""What hosts keep of images, as their polls say, summed for the page of metrics.

Theory of operation. A host's polls come to any replica, so several have heard of one host; whose word is the newest, the host's row tells: it has
the number of the newest poll that came to another replica than the one before it. Each replica sums those that it has heard last, and asks
the others for theirs: so whichever replica is asked says the same of the whole deployment, and counts no host twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Final

from atoll.control.hosts.directory import Directory
from atoll.control.replicas.peers import Peers
from atoll.domain.host import Admin
from atoll.wire import agent as wire
from atoll.wire.agent import ImageCacheState

PATIENCE_S: Final = 2.0
"""For the other replicas: whoever reads the page waits no longer."""


@dataclass(frozen=True, slots=True)
class _Said:
    epoch: str
    poll_seq: int
    state: ImageCacheState


@dataclass(slots=True)
class ImageCaches:
    """One per control process."""

    directory: Directory
    peers: Peers | None = None
    _said: dict[str, _Said] = field(default_factory=dict)

    def hear(self, host_id: str, poll: wire.Poll) -> None:
        """Take in a poll. One of an agent that is older says nothing, and what was said before stays."""
        state, known = poll.health.image_cache, self._said.get(host_id)
        if state is None and known is not None and known.epoch == poll.epoch:
            state = known.state
        if state is not None:
            self._said[host_id] = _Said(poll.epoch, poll.poll_seq, state)

    def mine(self) -> ImageCacheState:
        """The sum over the hosts whose newest poll came here, without those that are disabled."""
        found: list[ImageCacheState] = []
        for host_id, said in list(self._said.items()):
            host = self.directory.host(host_id)
            if host is None:
                del self._said[host_id]
            elif host.admin is not Admin.DISABLED and host.epoch == said.epoch and said.poll_seq >= host.poll_seq:
                found.append(said.state)
        return _sum(found)

    async def all(self) -> ImageCacheState:
        """The sum over all hosts. A replica that is not reached tells nothing: its hosts' next polls come to another one."""
        others: list[ImageCacheState] = []
        if self.peers is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    others = await self.peers.kept()
        return _sum([self.mine(), *others])


def _sum(found: list[ImageCacheState]) -> ImageCacheState:
    return ImageCacheState(**{name: sum(getattr(state, name) for state in found) for name in ImageCacheState.model_fields})
