"""What sandboxes have used: asked of their hosts' agents when somebody wants to know; control keeps nothing of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.control.service import UsagePoint
from atoll.control.sessions.consoles import Consoles
from atoll.domain.sandbox import Sandbox, State
from atoll.wire import agent as wire

_RUNS: Final = State.READY


@dataclass(slots=True, kw_only=True)
class Usages:
    """Part of the Service."""

    clock: Clock
    consoles: Consoles

    async def course(self, sandbox: Sandbox) -> list[UsagePoint]:
        """One sandbox's whole course, oldest first; empty for one that does not run. *Errors*: OutcomeUnknown when its host is silent."""
        if sandbox.state is not _RUNS or sandbox.host_id is None or sandbox.placement_id is None:
            return []
        found = await self.consoles.usage(host_id=sandbox.host_id, placement_ids=[sandbox.placement_id], points_max=wire.POINTS_MAX)
        points = self._points(sandbox.id, found.get(sandbox.placement_id, ()))
        # What a guest that was made ahead has used before is nobody's.
        return [point for point in points if point.at >= sandbox.created_at]

    async def latest(self, sandboxes: Iterable[Sandbox]) -> dict[str, UsagePoint]:
        """What each uses now. Those that do not run, and those whose host does not answer, are left out."""
        by_host: defaultdict[str, dict[str, str]] = defaultdict(dict)
        since: dict[str, float] = {}
        for one in sandboxes:
            if one.state is _RUNS and one.host_id is not None and one.placement_id is not None:
                by_host[one.host_id][one.placement_id] = one.id
                since[one.id] = one.created_at
        answers = await asyncio.gather(*(self._of_host(host_id, list(places)) for host_id, places in by_host.items()))
        found: dict[str, UsagePoint] = {}
        for places, samples in zip(by_host.values(), answers, strict=True):
            for placement_id, points in samples.items():
                sandbox_id = places.get(placement_id)
                if sandbox_id is not None and points and (last := self._points(sandbox_id, points)[-1]).at >= since[sandbox_id]:
                    found[sandbox_id] = last
        return found

    async def _of_host(self, host_id: str, placement_ids: list[str]) -> dict[str, Sequence[wire.Sample]]:
        found: dict[str, Sequence[wire.Sample]] = {}
        for begin in range(0, len(placement_ids), wire.SAMPLED_MAX):
            try:
                some = placement_ids[begin : begin + wire.SAMPLED_MAX]
                found.update(await self.consoles.usage(host_id=host_id, placement_ids=some))
            except AtollError:
                break
        return found

    def _points(self, sandbox_id: str, samples: Sequence[wire.Sample]) -> list[UsagePoint]:
        now = self.clock.now()
        return [UsagePoint(sandbox_id, now - one.age_s, one.cpu_pct, one.memory_bytes, one.cache_bytes, one.disk_bytes) for one in samples]
