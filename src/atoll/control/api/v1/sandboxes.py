"""`/v1/sandboxes`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import parse_qsl

from fastapi import APIRouter, Path, Query, Response

from atoll.base.errors import Code, Refused
from atoll.base.ids import Prefix, is_id
from atoll.control.api.egress import network_spec
from atoll.control.api.exchange import TEXT, Answer, changed
from atoll.control.api.moment import read_moment
from atoll.control.api.settings import ApiSettings
from atoll.control.api.v1 import answers, models
from atoll.control.api.v1.context import FAILURES, Expected, Who, etag, respond, response_of
from atoll.control.api.v1.operations import STREAM, stream
from atoll.control.service import Query as Search
from atoll.control.service import Service
from atoll.domain.sandbox import STARTING, Sandbox, State
from atoll.domain.spec import SaveMode
from atoll.planning.resolve import CreateRequest

SandboxPath = Annotated[str, Path(description="Id of a sandbox")]
Shown = Annotated[int, Query(ge=1, le=1000, description="How many hosts are shown; all are counted")]
ONE: Final = "/{sandbox_id}"
ACCEPTED: Final[dict[int | str, dict[str, Any]]] = {202: {"model": models.Sandbox, "description": "Accepted; it is not ready yet"}}
CONSOLE: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def _request(body: models.NewSandbox) -> CreateRequest:
    network = body.network
    return CreateRequest(
        template=body.template,
        timeout_s=body.timeout_seconds,
        class_name=body.class_name,
        metadata=body.metadata,
        env=body.env,
        request_id=body.client_request_id,
        cpu_millis=body.size.cpu_millis,
        memory_mib=body.size.memory_mib,
        disk_mib=body.size.disk_mib,
        network=network_spec(
            internet=network.internet,
            allow_out=network.allow_out,
            deny_out=network.deny_out,
            public_traffic=network.public_traffic,
            mask_request_host=network.mask_request_host,
        ),
        secured=body.secured,
        require_host=body.require_host,
        prefer_host=body.prefer_host,
        wait=body.wait,
    )


def _states(raw: str | None) -> frozenset[str]:
    words = frozenset(word.strip() for word in raw.split(",")) if raw else frozenset()
    unknown = words - set(State)
    if unknown:
        raise Refused(Code.INVALID_REQUEST, f"state is a list of {', '.join(State)}")
    return words


def _metadata(raw: str | None) -> dict[str, str] | None:
    if not raw:
        return None
    try:
        pairs = parse_qsl(raw, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=64)
    except ValueError as error:
        raise Refused(Code.INVALID_REQUEST, "metadata must look like name=value&name=value, each part URL-encoded") from error
    return dict(pairs)


@contextmanager
def about(sandbox_id: str) -> Iterator[None]:
    """One answer for what never was and what is another team's, whatever the service says about it.

    *Errors*: SANDBOX_NOT_FOUND at once for what cannot be an id: the store need not be asked.
    """
    missing = Refused(Code.SANDBOX_NOT_FOUND, f"sandbox {sandbox_id!a} was not found")
    if not is_id(Prefix.SANDBOX, sandbox_id):
        raise missing
    try:
        yield
    except Refused as error:
        if error.code is Code.SANDBOX_NOT_FOUND:
            raise missing from error
        raise


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """The handlers and their routes."""

    service: Service
    settings: ApiSettings

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"], responses=FAILURES)
        add = router.add_api_route
        add(
            "",
            self.create,
            methods=["POST"],
            operation_id="createSandbox",
            status_code=201,
            response_model=models.Sandbox,
            responses=ACCEPTED,
        )
        add("", self.search, methods=["GET"], operation_id="listSandboxes", response_model=models.SandboxPage)
        add(ONE, self.get, methods=["GET"], operation_id="getSandbox", response_model=models.Sandbox)
        add(ONE, self.release, methods=["DELETE"], operation_id="releaseSandbox", response_model=models.Sandbox)
        add(f"{ONE}/end", self.set_end, methods=["POST"], operation_id="setSandboxEnd", response_model=models.Sandbox)
        add(f"{ONE}/pause", self.pause, methods=["POST"], operation_id="pauseSandbox", response_model=models.Sandbox)
        add(f"{ONE}/suspend", self.suspend, methods=["POST"], operation_id="suspendSandbox", response_model=models.Sandbox)
        add(f"{ONE}/resume", self.resume, methods=["POST"], operation_id="resumeSandbox", response_model=models.Sandbox)
        add(
            f"{ONE}/replacement-authorizations",
            self.authorize_replacement,
            methods=["POST"],
            operation_id="authorizeReplacement",
            status_code=201,
            response_model=models.Sandbox,
        )
        add(f"{ONE}/events", self.events, methods=["GET"], operation_id="listSandboxEvents", response_model=models.EventPage)
        add(
            f"{ONE}/events/stream",
            self.event_stream,
            methods=["GET"],
            operation_id="streamSandboxEvents",
            response_class=Response,
            responses=STREAM,
        )
        add(f"{ONE}/metrics", self.metrics, methods=["GET"], operation_id="getSandboxMetrics", response_model=models.UsageList)
        add(f"{ONE}/placement", self.why, methods=["GET"], operation_id="explainSandboxPlacement", response_model=models.Why)
        add(f"{ONE}/logs", self.logs, methods=["GET"], operation_id="getSandboxLogs", response_class=Response, responses=CONSOLE)
        return router

    def dry_run(self) -> APIRouter:
        """What needs no sandbox."""
        router = APIRouter(prefix="/v1/placement", tags=["sandboxes"], responses=FAILURES)
        router.add_api_route("/explain", self.why_request, methods=["POST"], operation_id="explainPlacement", response_model=models.Why)
        return router

    async def create(self, caller: Who, body: models.NewSandbox) -> Response:
        """Create a sandbox, and wait until it is ready unless `wait` is false.

        The same `clientRequestId` with the same body gives the same sandbox; with another body 422.
        """
        sandbox = await self.service.create(caller, _request(body))
        return self._one(202 if sandbox.state in STARTING else 201, sandbox)

    def _one(self, status: int, sandbox: Sandbox) -> Response:
        body = answers.sandbox_with_access(sandbox, service=self.service, settings=self.settings)
        return respond(status, body, (*changed(sandbox), *etag(sandbox.revision)))

    async def search(self, caller: Who, asked: Annotated[models.Search, Query()]) -> Response:
        """The team's sandboxes; for operators other teams' too."""
        search = Search(
            scope=asked.scope,
            states=_states(asked.state),
            metadata=_metadata(asked.metadata),
            template=asked.template or None,
            started_after=read_moment(asked.started_after, "startedAfter"),
            ascending=asked.order == "asc",
            limit=asked.limit,
            cursor=asked.cursor or None,
            team=asked.team,
        )
        page = await self.service.find(caller, search)
        used = await self.service.usage_of(page.items) if asked.usage else {}
        items = [answers.sandbox(one, domain=self.settings.domain, used=used.get(one.id)) for one in page.items]
        return respond(200, {"items": items, "nextCursor": page.next_cursor, "totalRunning": page.total_running})

    async def get(self, caller: Who, sandbox_id: SandboxPath) -> Response:
        """One sandbox, in whatever state it is, for as long as its record is kept."""
        with about(sandbox_id):
            sandbox = await self.service.get(caller, sandbox_id, ended=True, every_team=True)
        if sandbox.team_id != caller.team.id:
            # An operator looks at it; its tokens are its team's.
            shown = answers.sandbox(sandbox, domain=self.settings.domain, isolated_by=self.service.isolated_by(sandbox))
            return respond(200, shown, etag(sandbox.revision))
        return respond(200, answers.sandbox_with_access(sandbox, service=self.service, settings=self.settings), etag(sandbox.revision))

    async def release(self, caller: Who, sandbox_id: SandboxPath, expected: Expected) -> Response:
        """End it. The answer comes when that is decided; `state` goes to `released` when nothing of it is left."""
        with about(sandbox_id):
            sandbox = await self.service.release(caller, sandbox_id, every_team=True, revision=expected)
        return respond(200, answers.sandbox(sandbox, domain=self.settings.domain), (*changed(sandbox), *etag(sandbox.revision)))

    async def set_end(self, caller: Who, sandbox_id: SandboxPath, body: models.NewEnd, expected: Expected) -> Response:
        """Let it end `timeoutSeconds` from now."""
        with about(sandbox_id):
            sandbox = await self.service.set_end(
                caller, sandbox_id, timeout_s=body.timeout_seconds, only_extend=body.only_extend, revision=expected
            )
        return self._one(200, sandbox)

    async def pause(self, caller: Who, sandbox_id: SandboxPath, expected: Expected) -> Response:
        """Freeze it where it is: it keeps memory, disk and connections, and gives its CPU back. It does not end while it is paused."""
        with about(sandbox_id):
            sandbox = await self.service.pause(caller, sandbox_id, revision=expected)
        return self._one(200, sandbox)

    async def suspend(self, caller: Who, sandbox_id: SandboxPath, expected: Expected, body: models.Suspension | None = None) -> Response:
        """Save it, and give its CPU and memory back. `saveMode` says what was saved. It does not end while it is suspended."""
        body = body or models.Suspension()
        mode = SaveMode.FULL if body.memory else SaveMode.FILES
        with about(sandbox_id):
            sandbox = await self.service.suspend(caller, sandbox_id, mode=mode, strict=body.require_healthy_guest, revision=expected)
        return self._one(200, sandbox)

    async def resume(self, caller: Who, sandbox_id: SandboxPath, expected: Expected, body: models.Resumption | None = None) -> Response:
        """Let one that is paused or suspended go on. 503 where its host has no room for it: then it stays as it was."""
        body = body or models.Resumption()
        with about(sandbox_id):
            sandbox, _ = await self.service.resume(
                caller, sandbox_id, timeout_s=body.timeout_seconds, reboot=body.reboot, revision=expected
            )
        return self._one(200, sandbox)

    async def authorize_replacement(self, caller: Who, sandbox_id: SandboxPath, body: models.ReplacementAuthorization) -> Response:
        """Certify that the guest of a lost generation can do no more harm outside: the next generation begins. Said again: the same.

        409 when nothing is blocked: see `conditions`.
        """
        with about(sandbox_id):
            sandbox = await self.service.authorize_replacement(caller, sandbox_id, generation=body.generation, statement=body.statement)
        return self._one(201, sandbox)

    async def events(
        self,
        caller: Who,
        sandbox_id: SandboxPath,
        after: Annotated[int, Query(ge=0, le=2**63 - 1, description="Only those with a larger `seq`")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """Its history, oldest first."""
        with about(sandbox_id):
            found = await self.service.events(caller, sandbox_id, after=after, limit=limit, every_team=True)
        next_after = found[-1].seq if found else after
        return respond(200, {"items": [answers.event(one) for one in found], "nextAfter": next_after})

    async def event_stream(
        self,
        caller: Who,
        sandbox_id: SandboxPath,
        after: Annotated[int, Query(ge=0, le=2**63 - 1, description="Only those with a larger `seq`")] = 0,
    ) -> Response:
        """Its history and then what comes, one a line, until it has ended."""
        with about(sandbox_id):
            batches = await self.service.follow(caller, sandbox_id, after=after)
        return stream(batches)

    async def metrics(self, caller: Who, sandbox_id: SandboxPath) -> Response:
        """What it has used, oldest first: every few seconds of late, and ever more seldom before. Nothing while it does not run."""
        with about(sandbox_id):
            sandbox, points = await self.service.usage(caller, sandbox_id, every_team=True)
        return respond(200, {"items": [answers.usage(sandbox, point) for point in points]})

    async def why(self, caller: Who, sandbox_id: SandboxPath, limit: Shown = 100) -> Response:
        """Why it is where it is, or nowhere: what each filter says of the hosts, as they are now."""
        with about(sandbox_id):
            told = await self.service.why(caller, sandbox_id)
        return respond(200, answers.why(told, limit=limit))

    async def why_request(self, caller: Who, body: models.NewSandbox, limit: Shown = 100) -> Response:
        """Where a sandbox like this would be placed now. Nothing is made."""
        return respond(200, answers.why(await self.service.why_request(caller, _request(body)), limit=limit))

    async def logs(self, caller: Who, sandbox_id: SandboxPath) -> Response:
        """The guest's console as text, as far as its host still has it."""
        with about(sandbox_id):
            raw = await self.service.logs(caller, sandbox_id, every_team=True)
        return response_of(Answer(200, raw.decode("utf-8", "replace").encode(), content_type=TEXT))
