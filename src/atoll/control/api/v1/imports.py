"""`/v1/template-imports`, and the deletion of templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import Field

from atoll.control.api.v1 import answers
from atoll.control.api.v1.context import FAILURES, Who, respond
from atoll.control.api.v1.models import Incoming, Outgoing, SizeRequest, Template, like
from atoll.control.service import Service
from atoll.domain.importing import Import, ImportRequest, State

Reference = Annotated[str, Path(max_length=256)]
Line = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]*$")]


class Credentials(Incoming):
    """For the registry; kept in memory while the import runs, and nowhere else."""

    model_config = like({"username": "robot", "password": "secret of the registry"})

    username: Annotated[str, Field(max_length=1024)] = ""
    password: Annotated[str, Field(max_length=65536)] = ""
    token: Annotated[str, Field(max_length=65536)] = ""


class NewImport(Incoming):
    """An image that becomes a template; a template of that name gets a new build."""

    model_config = like({"name": "python", "source": "registry:docker.io/library/python:3.12-slim"})

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    source: Annotated[Line, Field(description="registry:REFERENCE, or archive:sha256:DIGEST[:TAG] of an uploaded archive")]
    size: SizeRequest = Field(default_factory=SizeRequest)
    start_command: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    public: bool = False
    credentials: Annotated[Credentials, Field(repr=False)] = Field(default_factory=Credentials)


class TemplateImport(Outgoing):
    """An import. `log` grows while it runs; `code` and `message` say why it failed."""

    id: str
    name: str
    source: str
    state: State
    log: list[str]
    code: str | None
    message: str | None
    template_id: str | None
    image: str | None
    created_at: str
    finished_at: str | None


class TemplateImportList(Outgoing):
    items: list[TemplateImport]


@dataclass(frozen=True, slots=True)
class Imports:
    """The handlers and their routes."""

    service: Service

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/v1", responses=FAILURES)
        for method, path, handler, operation_id, model, status in (
            ("POST", "/template-imports", self.begin, "beginTemplateImport", TemplateImport, 202),
            ("GET", "/template-imports", self.all, "listTemplateImports", TemplateImportList, 200),
            ("GET", "/template-imports/{import_id}", self.get, "getTemplateImport", TemplateImport, 200),
            ("DELETE", "/templates/{reference}", self.delete, "deleteTemplate", Template, 200),
        ):
            router.add_api_route(
                path, handler, methods=[method], operation_id=operation_id, response_model=model, tags=["templates"], status_code=status
            )
        return router

    async def begin(self, caller: Who, body: NewImport) -> Response:
        """Begin to make a template of an image; ask for the import until it is ready or failed."""
        asked = ImportRequest(
            name=body.name,
            source=body.source,
            cpu_millis=body.size.cpu_millis,
            memory_mib=body.size.memory_mib,
            disk_mib=body.size.disk_mib,
            start_command=body.start_command,
            public=body.public,
            credentials={name: value for name, value in body.credentials.model_dump().items() if value},
        )
        return respond(202, answer(await self.service.begin_import(caller, asked)))

    async def all(self, caller: Who) -> Response:
        """The team's newest imports."""
        return respond(200, {"items": [answer(one) for one in await self.service.imports(caller)]})

    async def get(self, caller: Who, import_id: Reference) -> Response:
        """One import, with its log so far."""
        return respond(200, answer(await self.service.find_import(caller, import_id)))

    async def delete(self, caller: Who, reference: Reference) -> Response:
        """Take a template away; refused while sandboxes use it. Its image goes when nothing needs it."""
        return respond(200, answers.template(await self.service.delete_template(caller, reference)))


def answer(one: Import) -> dict[str, Any]:
    """An import as `/v1` shows it."""
    return {
        "id": one.id,
        "name": one.name,
        "source": one.source,
        "state": one.state,
        "log": list(one.log),
        "code": one.code,
        "message": one.message,
        "templateId": one.template_id,
        "image": one.image,
        "createdAt": answers.timestamp(one.created_at),
        "finishedAt": answers.timestamp(one.finished_at),
    }
