"""`/v1/snapshots`, and taking them; forks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import Field

from atoll.base.errors import AtollError, Code
from atoll.control.api.errors import row_of
from atoll.control.api.exchange import changed
from atoll.control.api.settings import ApiSettings
from atoll.control.api.v1 import answers, models
from atoll.control.api.v1.context import FAILURES, Who, respond
from atoll.control.api.v1.models import Incoming, Outgoing, Size, Text, like
from atoll.control.api.v1.paging import Cursor, Limit
from atoll.control.api.v1.sandboxes import SandboxPath, about
from atoll.control.service import Service
from atoll.domain.sandbox import Sandbox
from atoll.domain.snapshot import Copy, Snapshot, State
from atoll.domain.spec import Isolation, SaveMode

Reference = Annotated[str, Path(max_length=256, description="Id of a snapshot, or its `name[:tag]`: the newest of that")]


class NewSnapshot(Incoming):
    """What to keep. Where a host cannot keep memory, files are kept alone, and `mode` of the answer says so."""

    model_config = like({"name": "warm", "memory": True})

    name: Annotated[Text | None, Field(min_length=1, description="`name[:tag]`; the next one of it is its next version")] = None
    memory: Annotated[bool, Field(description="Memory and files of one moment; false: files alone, and what begins from it boots.")] = True


class NewFork(Incoming):
    """Clones of memory and files of one moment, each with its own id, tokens and end. `timeoutSeconds`: otherwise as their parent was created."""

    model_config = like({"count": 2, "timeoutSeconds": 600})

    count: Annotated[int, Field(ge=1, le=100)] = 1
    timeout_seconds: Annotated[int | None, Field(ge=1, le=models.INT32_MAX)] = None
    client_request_id: Annotated[Text | None, Field(min_length=1, description="Said again, the same clones")] = None


class SnapshotView(Outgoing):
    """A snapshot. `bytes`: what it takes of its host's disk. `localCopy`: whether that host still has it, once it is in the artifact store."""

    id: str
    revision: int
    state: State
    mode: SaveMode
    name: str | None
    tag: str
    version: int
    sandbox_id: str
    host_id: str
    isolation: Isolation
    size: Size
    template: models.TemplateRef
    bytes: int
    stored: models.Stored | None
    local_copy: Copy
    created_at: str
    taken_at: str | None


class SnapshotPage(Outgoing):
    items: list[SnapshotView]
    next_cursor: str | None


class ForkFailure(Outgoing):
    """Why a clone is not there."""

    status: int
    code: Code
    message: str
    hint: str


class ForkResult(Outgoing):
    """One clone: one of the two."""

    sandbox: models.Sandbox | None
    error: ForkFailure | None


class ForkResults(Outgoing):
    items: list[ForkResult]


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The handlers and their routes."""

    service: Service
    settings: ApiSettings

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/v1", tags=["snapshots"], responses=FAILURES)
        for method, path, handler, operation_id, model, status in (
            ("POST", "/sandboxes/{sandbox_id}/snapshots", self.take, "takeSnapshot", SnapshotView, 201),
            ("POST", "/sandboxes/{sandbox_id}/forks", self.fork, "forkSandbox", ForkResults, 201),
            ("GET", "/snapshots", self.search, "listSnapshots", SnapshotPage, 200),
            ("GET", "/snapshots/{reference}", self.get, "getSnapshot", SnapshotView, 200),
            ("DELETE", "/snapshots/{reference}", self.delete, "deleteSnapshot", SnapshotView, 200),
        ):
            router.add_api_route(path, handler, methods=[method], operation_id=operation_id, response_model=model, status_code=status)
        return router

    async def take(self, caller: Who, sandbox_id: SandboxPath, body: NewSnapshot | None = None) -> Response:
        """Keep what a running sandbox is at this moment. It goes on; a create whose `template` names the snapshot begins from it."""
        body = body or NewSnapshot()
        mode = SaveMode.FULL if body.memory else SaveMode.FILES
        with about(sandbox_id):
            taken = await self.service.snapshot(caller, sandbox_id, mode=mode, name=body.name)
        return respond(201, answer(taken))

    async def fork(self, caller: Who, sandbox_id: SandboxPath, body: NewFork | None = None) -> Response:
        """Clone a running sandbox. Each clone is there, or says why it is not; the parent goes on."""
        body = body or NewFork()
        with about(sandbox_id):
            made = await self.service.fork(
                caller, sandbox_id, count=body.count, timeout_s=body.timeout_seconds, request_id=body.client_request_id
            )
        last = [one for one in made if isinstance(one, Sandbox)][-1:]
        return respond(201, {"items": [self._result(one) for one in made]}, changed(last[0]) if last else ())

    def _result(self, one: Sandbox | AtollError) -> dict[str, Any]:
        if isinstance(one, AtollError):
            failure = {"status": row_of(one).status, "code": one.code, "message": one.message, "hint": one.hint}
            return {"sandbox": None, "error": failure}
        return {"sandbox": answers.sandbox_with_access(one, service=self.service, settings=self.settings), "error": None}

    async def search(
        self,
        caller: Who,
        sandbox: Annotated[str | None, Query(max_length=64, description="Only of this sandbox, by id")] = None,
        name: Annotated[str | None, Query(max_length=128, description="Only of this name")] = None,
        limit: Limit = 100,
        cursor: Cursor = None,
    ) -> Response:
        """The team's snapshots, newest first."""
        page = await self.service.snapshots(caller, sandbox_id=sandbox, name=name, limit=limit, cursor=cursor)
        return respond(200, {"items": [answer(one) for one in page.items], "nextCursor": page.next_cursor})

    async def get(self, caller: Who, reference: Reference) -> Response:
        """One snapshot."""
        return respond(200, answer(await self.service.find_snapshot(caller, reference)))

    async def delete(self, caller: Who, reference: Reference) -> Response:
        """Take a snapshot away; refused while sandboxes that began from it live."""
        return respond(200, answer(await self.service.delete_snapshot(caller, reference)))


def answer(one: Snapshot) -> dict[str, Any]:
    """A snapshot as `/v1` shows it."""
    spec = one.spec
    return {
        "id": one.id,
        "revision": one.revision,
        "state": one.state.value,
        "mode": one.mode.value,
        "name": one.name,
        "tag": one.tag,
        "version": one.version,
        "sandboxId": one.sandbox_id,
        "hostId": one.host_id,
        "isolation": spec.isolation.value,
        "size": {"cpuMillis": spec.cpu_millis, "memoryMib": spec.memory_mib, "diskMib": spec.disk_mib},
        "template": {"id": spec.template_id, "name": spec.image_name},
        "bytes": one.size_bytes,
        "stored": answers.stored(one.moment),
        "localCopy": one.copy.value,
        "createdAt": answers.timestamp(one.created_at),
        "takenAt": answers.timestamp(one.taken_at),
    }
