"""`/v1/operations` and `/metrics`, for operators."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from atoll.control.api.exchange import Answer
from atoll.control.api.v1 import answers
from atoll.control.api.v1 import operations_models as models
from atoll.control.api.v1.context import FAILURES, Who, respond, response_of
from atoll.control.operations import AlertQuery, AuditQuery, EventQuery, Operations
from atoll.control.service import EventRecord
from atoll.telemetry.metrics import CONTENT_TYPE

KEYS_MAX: Final = 1000
LINES: Final = "application/x-ndjson"
STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {LINES: {"schema": {"type": "string"}}}, "description": "One event a line; an empty line says that the stream lives"}
}
PAGE: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
}


async def lines(batches: AsyncIterator[Sequence[EventRecord]]) -> AsyncIterator[bytes]:
    """Batches of events as lines of JSON."""
    async with contextlib.aclosing(batches) as open_batches:  # type: ignore[type-var]
        async for batch in open_batches:
            yield b"".join(to_json(answers.event(one)) + b"\n" for one in batch) or b"\n"


def stream(batches: AsyncIterator[Sequence[EventRecord]]) -> Response:
    """An answer that goes on for as long as there are batches."""
    return StreamingResponse(lines(batches), media_type=LINES, headers={"cache-control": "no-store", "x-accel-buffering": "no"})


@dataclass(frozen=True, slots=True)
class OperationsApi:
    """The handlers and their routes."""

    operations: Operations

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(tags=["operations"], responses=FAILURES)
        add = router.add_api_route
        base = "/v1/operations"
        add(f"{base}/alerts", self.alerts, methods=["GET"], operation_id="listAlerts", response_model=models.AlertPage)
        add(f"{base}/audit", self.audit, methods=["GET"], operation_id="listAudit", response_model=models.AuditPage)
        add(f"{base}/events", self.events, methods=["GET"], operation_id="listEvents", response_model=models.DeploymentEventPage)
        add(
            f"{base}/events/stream",
            self.event_stream,
            methods=["GET"],
            operation_id="streamEvents",
            response_class=Response,
            responses=STREAM,
        )
        path = f"{base}/artifacts/collect"
        add(path, self.collect, methods=["POST"], operation_id="collectArtifacts", response_model=models.CollectedView)
        for path, operation_id in ((f"{base}/metrics", "getOperationsMetrics"), ("/metrics", "getMetrics")):
            add(path, self.metrics, methods=["GET"], operation_id=operation_id, response_class=Response, responses=PAGE)
        return router

    async def alerts(self, caller: Who, asked: Annotated[models.AlertsAsked, Query()]) -> Response:
        """What is wrong now, or was; newest first."""
        query = AlertQuery(asked.state, asked.severity, asked.kind, asked.limit, asked.cursor or None)
        page = await self.operations.alerts(caller, query)
        return respond(200, {"items": [answers.alert(one) for one in page.items], "nextCursor": page.next_cursor})

    async def audit(self, caller: Who, asked: Annotated[models.AuditAsked, Query()]) -> Response:
        """Who did what; oldest first. Entries are never changed, and kept for as long as the operator's policy says."""
        query = AuditQuery(
            action=asked.action,
            subject=asked.subject,
            team=asked.team,
            client_id=asked.client,
            result=asked.result,
            after=asked.after,
            limit=asked.limit,
            newest=asked.newest,
        )
        found = await self.operations.audit(caller, query)
        next_after = found[-1].seq if found else asked.after
        return respond(200, {"items": [answers.audit_entry(one) for one in found], "nextAfter": next_after})

    async def events(self, caller: Who, asked: Annotated[models.EventsAsked, Query()]) -> Response:
        """Events of the whole deployment: of every team's sandboxes, of hosts, and of alerts; oldest first."""
        query = EventQuery(
            type=asked.type,
            sandbox_id=asked.sandbox,
            host_id=asked.host,
            team=asked.team,
            request_id=asked.request,
            after=asked.after,
            limit=asked.limit,
            newest=asked.newest,
        )
        found = await self.operations.events(caller, query)
        next_after = found[-1].seq if found else asked.after
        return respond(200, {"items": [answers.event(one) for one in found], "nextAfter": next_after})

    async def event_stream(self, caller: Who, asked: Annotated[models.StreamAsked, Query()]) -> Response:
        """The same as they come, one a line, until the client hangs up."""
        after = asked.after
        if after is None:
            last = await self.operations.events(caller, EventQuery(limit=1, newest=True))
            after = last[-1].seq if last else 0
        query = EventQuery(
            type=asked.type, sandbox_id=asked.sandbox, host_id=asked.host, team=asked.team, request_id=asked.request, after=after
        )
        return stream(self.operations.follow(caller, query))

    async def collect(self, caller: Who, asked: models.CollectAsked) -> Response:
        """Remove from the artifact store what no template, build or living sandbox needs."""
        found = await self.operations.collect(caller, dry_run=asked.dry_run)
        shown = {"count": len(found.keys), "bytes": found.size, "keys": list(found.keys[:KEYS_MAX]), "busy": found.busy}
        return respond(200, shown)

    async def metrics(self, caller: Who) -> Response:
        """Counters and gauges of this control process. docs/METRICS.md lists them."""
        return response_of(Answer(200, await self.operations.metrics(caller), content_type=CONTENT_TYPE.encode()))
