"""`Operations` in memory, beside `FakeService`: its events, and alerts and audit that tests put there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.base.errors import Code, Refused
from atoll.control.operations import AlertQuery, AlertRecord, AuditQuery, AuditRecord, CollectedArtifacts, EventQuery
from atoll.control.service import Caller, EventRecord, Page
from atoll.domain.operations import Act


@dataclass
class FakeOperations:
    """`service`: a FakeService, or what stands for one."""

    service: Any
    alerts_known: list[AlertRecord] = field(default_factory=list)
    entries: list[AuditRecord] = field(default_factory=list)
    artifacts: dict[str, int] = field(default_factory=dict)
    """Keys and sizes of what nothing needs."""
    page: bytes = b"# HELP atoll_sandboxes Living sandboxes.\n# TYPE atoll_sandboxes gauge\natoll_sandboxes 1.0\n"

    async def alerts(self, caller: Caller, query: AlertQuery) -> Page[AlertRecord]:
        _operator(caller)
        found = [
            one
            for one in self.alerts_known
            if (query.state == "all" or (one.cleared_at is None) == (query.state == "open"))
            and query.severity in (None, one.severity)
            and query.kind in (None, one.kind)
        ]
        begin = int(query.cursor) if query.cursor and query.cursor.isdigit() else 0
        if query.cursor and not query.cursor.isdigit():
            raise Refused(Code.INVALID_REQUEST, "the cursor is not one of ours")
        end = begin + query.limit
        return Page(found[begin:end], str(end) if len(found) > end else None)

    async def audit(self, caller: Caller, query: AuditQuery) -> Sequence[AuditRecord]:
        _operator(caller)
        found = [
            one
            for one in self.entries
            if one.seq > query.after
            and query.action in (None, one.action)
            and query.subject in (None, one.subject)
            and query.result in (None, one.result)
            and query.client_id in (None, one.client_id)
            and query.team in (None, one.team_id)
        ]
        return found[-query.limit :] if query.newest else found[: query.limit]

    async def events(self, caller: Caller, query: EventQuery) -> Sequence[EventRecord]:
        _operator(caller)
        found = [
            one
            for one in self.service.recorded
            if one.seq > query.after
            and query.type in (None, one.type)
            and query.sandbox_id in (None, one.sandbox_id)
            and query.host_id in (None, one.host_id)
            and query.request_id in (None, one.request_id)
            and query.team in (None, one.team_id)
        ]
        return found[-query.limit :] if query.newest else found[: query.limit]

    def follow(self, caller: Caller, query: EventQuery) -> AsyncIterator[Sequence[EventRecord]]:
        """What there is, and the end: nobody waits for more in a test without hosts."""
        _operator(caller)
        return self._follow(caller, query)

    async def _follow(self, caller: Caller, query: EventQuery) -> AsyncIterator[Sequence[EventRecord]]:
        yield await self.events(caller, query)
        yield []

    async def metrics(self, caller: Caller) -> bytes:
        _operator(caller)
        return self.page

    async def collect(self, caller: Caller, *, dry_run: bool) -> CollectedArtifacts:
        _operator(caller)
        found = CollectedArtifacts(tuple(self.artifacts), sum(self.artifacts.values()))
        if not dry_run:
            self.artifacts.clear()
        return found

    async def refused(self, act: Act) -> None:
        actor = act.actor
        self.entries.append(
            AuditRecord(
                len(self.entries) + 1,
                self.service.now(),
                act.action,
                act.subject,
                act.result,
                actor.team_id,
                actor.client_id,
                actor.address,
                actor.request_id,
                dict(act.data),
            )
        )


def _operator(caller: Caller) -> None:
    if not caller.operator:
        raise Refused(Code.FORBIDDEN, "the deployment's records are the operator's")
