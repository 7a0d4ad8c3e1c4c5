"""`/v1/templates`, `/v1/hosts`, `/v1/keys`, `/v1/whoami` and `/v1/status`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Response

from atoll.base.units import ZERO
from atoll.control.api.settings import ApiSettings
from atoll.control.api.v1 import answers, models
from atoll.control.api.v1.context import FAILURES, Who, respond
from atoll.control.service import Service
from atoll.domain.host import Admin, Health
from atoll.domain.tenancy import Role

Reference = Annotated[str, Path(max_length=256)]


def build_router(service: Service, settings: ApiSettings, ready: Callable[[], bool]) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/v1", responses=FAILURES)

    @router.get("/templates", operation_id="listTemplates", response_model=models.TemplateList, tags=["templates"])
    async def templates(caller: Who) -> Response:
        """The templates that this key can use."""
        return respond(200, {"items": [answers.template(one) for one in await service.templates(caller)]})

    @router.get("/templates/{reference}", operation_id="getTemplate", response_model=models.Template, tags=["templates"])
    async def template(caller: Who, reference: Reference) -> Response:
        """One template, by id or alias."""
        return respond(200, answers.template(await service.template(caller, reference)))

    @router.get("/hosts", operation_id="listHosts", response_model=models.HostList, tags=["hosts"])
    async def hosts(caller: Who) -> Response:
        """The hosts and what is used of them; for operators."""
        return respond(200, {"items": [answers.host(one) for one in await service.hosts(caller)]})

    @router.get("/hosts/{reference}", operation_id="getHost", response_model=models.Host, tags=["hosts"])
    async def host(caller: Who, reference: Reference) -> Response:
        """One host, by id or name; for operators."""
        return respond(200, answers.host(await service.host(caller, reference)))

    @router.get("/keys", operation_id="listKeys", response_model=models.KeyList, tags=["keys"])
    async def keys(caller: Who) -> Response:
        """The team's keys, without the keys themselves; revoked ones too."""
        return respond(200, {"items": [answers.key(one) for one in await service.keys(caller)]})

    @router.post("/keys", operation_id="createKey", status_code=201, response_model=models.MadeKey, tags=["keys"])
    async def create_key(caller: Who, body: models.NewKey) -> Response:
        """Make a key. It is in this answer and nowhere else."""
        made = await service.create_key(caller, name=body.name, role=Role(body.role), team=body.team)
        return respond(201, {"key": answers.key(made.client), "secret": made.key.reveal()})

    @router.delete("/keys/{key_id}", operation_id="revokeKey", response_model=models.Key, tags=["keys"])
    async def revoke_key(caller: Who, key_id: Annotated[str, Path(max_length=128)]) -> Response:
        """Refuse this key from now on."""
        return respond(200, answers.key(await service.revoke_key(caller, key_id)))

    @router.get("/whoami", operation_id="whoami", response_model=models.Whoami, tags=["keys"])
    async def whoami(caller: Who) -> Response:
        """Whose key this is."""
        return respond(200, answers.whoami(caller))

    @router.get("/status", operation_id="getStatus", response_model=models.Status, tags=["hosts"])
    async def status(caller: Who) -> Response:
        """The deployment in numbers; for operators."""
        views = await service.hosts(caller)
        body = {
            "version": settings.version,
            "installId": settings.install_id,
            "domain": settings.domain,
            "ready": ready(),
            "hosts": {
                "total": len(views),
                "active": sum(view.host.admin is Admin.ACTIVE for view in views),
                "healthy": sum(view.health is Health.HEALTHY for view in views),
            },
            "capacity": answers.amount(sum((view.host.capacity for view in views), ZERO)),
            "used": answers.amount(sum((view.used for view in views), ZERO)),
            "sandboxes": sum(view.sandboxes for view in views),
        }
        return respond(200, body)

    return router
