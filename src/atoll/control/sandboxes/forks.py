"""Forks: clones of a sandbox from one moment of it, each with a life of its own.

Theory of operation. One snapshot is taken for them, which no list shows; then each clone is a create like any other (admission, capacity, its own
id, tokens, address and end), and fails or succeeds by itself. When all have begun, the moment is let go; a control that is killed before leaves
it to its deadline. What a clone has of its parent is what was in memory and on disk, the environment and the metadata: no token, no end,
no client's request. Clones of one request have request ids that follow from it, so that a repeated request finds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.control.sandboxes.sandboxes import Sandboxes
from atoll.control.sandboxes.snapshots import LET_IT_RUN, Taking
from atoll.control.service import Caller
from atoll.domain.sandbox import STARTING, TERMINAL, Sandbox, State
from atoll.domain.snapshot import Purpose, Snapshot
from atoll.domain.spec import SaveMode
from atoll.planning.beginning import Beginning, of_snapshot
from atoll.planning.resolve import CreateRequest
from atoll.store import payloads, sandboxes

COUNT_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Forks:
    """Part of the Service; one per control process."""

    sandboxes: Sandboxes

    async def fork(
        self, caller: Caller, sandbox_id: str, *, count: int = 1, timeout_s: int | None = None, request_id: str | None = None
    ) -> Sequence[Sandbox | AtollError]:
        """As Service.fork."""
        if not 1 <= count <= COUNT_MAX:
            raise Refused(Code.INVALID_REQUEST, f"count is a whole number of 1..{COUNT_MAX}")
        parent = await self.sandboxes.get(caller, sandbox_id)
        if parent.state is not State.READY:
            raise Refused(Code.ILLEGAL_STATE, f"sandbox {parent.id} is {parent.state}: only one that runs can be forked", hint=LET_IT_RUN)
        requests = [await self._request(parent, timeout_s, request_id, number) for number in range(count)]
        if request_id is not None and await self._all_known(caller, requests):
            # Said again, after all of it was done.
            return await asyncio.gather(*(self._clone(caller, request, None) for request in requests))
        moment = await self.sandboxes.snapshots.take(caller, parent.id, Taking(SaveMode.FULL, purpose=Purpose.FORK))
        try:
            return await asyncio.gather(*(self._clone(caller, request, moment) for request in requests))
        finally:
            await asyncio.shield(self.sandboxes.snapshots.let_go(moment.id))

    async def _clone(self, caller: Caller, request: CreateRequest, moment: Snapshot | None) -> Sandbox | AtollError:
        try:
            begun: Beginning | None = None if moment is None else of_snapshot(moment, request)
            return await self.sandboxes.create(caller, request, begun=begun)
        except AtollError as error:
            return error

    async def _all_known(self, caller: Caller, requests: Sequence[CreateRequest]) -> bool:
        found = [
            await self.sandboxes.store.read(lambda conn, one=one: sandboxes.by_request(conn, caller.team.id, one.request_id or ""))  # type: ignore[misc]
            for one in requests
        ]
        return all(one is not None and one.state not in TERMINAL | STARTING | {State.RELEASING} for one in found)

    async def _request(self, parent: Sandbox, timeout_s: int | None, request_id: str | None, number: int) -> CreateRequest:
        env, e2b = await self._environment(parent)
        spec = parent.spec
        return CreateRequest(
            template=f"fork:{parent.id}",
            timeout_s=min(spec.timeout_s, spec.timeout_s_max) if timeout_s is None else timeout_s,
            class_name=spec.class_name,
            metadata=dict(parent.metadata),
            env=env,
            request_id=None if request_id is None else f"{request_id}#{number}",
            on_end=spec.on_end,
            auto_resume=spec.auto_resume,
            end_mode=spec.end_mode,
            network=replace(spec.network),
            secured=parent.secured,
            e2b_env=e2b,
        )

    async def _environment(self, parent: Sandbox) -> tuple[dict[str, str], bool]:
        """What its parent's guest was given, without what names the parent; and whether it was given E2B's own variables."""
        sealed = await self.sandboxes.store.read(lambda conn: payloads.get(conn, parent.id))
        if sealed is None:
            return {}, False
        env = self.sandboxes.orders.open(parent, sealed).env
        own = {"E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEAM_ID", "E2B_TEMPLATE_ID"}
        mine = env.get("E2B_SANDBOX_ID") == parent.id
        return ({name: value for name, value in env.items() if name not in own} if mine else dict(env)), mine
