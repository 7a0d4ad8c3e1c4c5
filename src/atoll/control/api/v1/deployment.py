"""`/v1/templates`, `/v1/hosts`, `/v1/keys`, `/v1/whoami` and `/v1/status`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Response
from fastapi.responses import FileResponse

from atoll.base.units import ZERO
from atoll.control.api.settings import ApiSettings
from atoll.control.api.v1 import answers, host_models, models
from atoll.control.api.v1.context import FAILURES, Expected, Who, etag, respond
from atoll.control.api.v1.paging import Cursor, Limit, page
from atoll.control.service import HostView, ReplicaView, Service
from atoll.domain.host import Admin, AdminEvent, Health
from atoll.domain.tenancy import Role

Reference = Annotated[str, Path(max_length=256)]


def _host(view: HostView) -> Response:
    return respond(200, answers.host(view), etag(view.host.revision))


@dataclass(frozen=True, slots=True)
class Deployment:
    """The handlers and their routes."""

    service: Service
    settings: ApiSettings
    ready: Callable[[], bool]
    replicas: Callable[[], Sequence[ReplicaView]]

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/v1", responses=FAILURES)
        for method, path, handler, operation_id, model, tag in (
            ("GET", "/templates", self.templates, "listTemplates", models.TemplateList, "templates"),
            ("GET", "/templates/{reference}", self.template, "getTemplate", models.Template, "templates"),
            ("GET", "/templates/{reference}/image", self.image, "getTemplateImage", models.TemplateImage, "templates"),
            ("GET", "/hosts", self.hosts, "listHosts", host_models.HostList, "hosts"),
            ("GET", "/hosts/{reference}", self.host, "getHost", host_models.Host, "hosts"),
            ("POST", "/hosts/{reference}/activate", self.activate_host, "activateHost", host_models.Host, "hosts"),
            ("POST", "/hosts/{reference}/drain", self.drain_host, "drainHost", host_models.Host, "hosts"),
            ("POST", "/hosts/{reference}/disable", self.disable_host, "disableHost", host_models.Host, "hosts"),
            ("POST", "/enrollment-tokens", self.create_enrollment_token, "createEnrollmentToken", host_models.EnrollmentToken, "hosts"),
            ("GET", "/keys", self.keys, "listKeys", models.KeyList, "keys"),
            ("POST", "/keys", self.create_key, "createKey", models.MadeKey, "keys"),
            ("DELETE", "/keys/{key_id}", self.revoke_key, "revokeKey", models.Key, "keys"),
            ("GET", "/whoami", self.whoami, "whoami", models.Whoami, "keys"),
            ("GET", "/status", self.status, "getStatus", models.Status, "hosts"),
        ):
            status = 201 if operation_id.startswith("create") else 200
            router.add_api_route(
                path, handler, methods=[method], operation_id=operation_id, response_model=model, tags=[tag], status_code=status
            )
        router.add_api_route(
            "/templates/{reference}/layers/{digest}",
            self.layer,
            methods=["GET"],
            operation_id="getTemplateLayer",
            response_class=FileResponse,
            responses={200: {"content": {"application/octet-stream": {}}, "description": "The layer's bytes"}},
            tags=["templates"],
        )
        return router

    async def templates(self, caller: Who, limit: Limit = 100, cursor: Cursor = None) -> Response:
        """The templates that this key can use, by name."""
        found = await self.service.templates(caller)
        items, following = page(found, key=lambda one: f"{one.name} {one.id}", limit=limit, cursor=cursor)
        return respond(200, {"items": [answers.template(one) for one in items], "nextCursor": following})

    async def template(self, caller: Who, reference: Reference) -> Response:
        """One template, by id or alias."""
        return respond(200, answers.template(await self.service.template(caller, reference)))

    async def image(self, caller: Who, reference: Reference) -> Response:
        """What a template's files are made of: layers, on a ready-made image or on nothing."""
        found = await self.service.template_image(caller, reference)
        layers = [{"digest": one.digest, "mediaType": one.kind, "sizeBytes": one.size, "tarDigest": one.tar_digest} for one in found.layers]
        return respond(200, {"base": found.base, "architecture": found.processor, "layers": layers})

    async def layer(self, caller: Who, reference: Reference, digest: Reference) -> Response:
        """The bytes of one of a template's layers."""
        return FileResponse(await self.service.template_layer(caller, reference, digest), media_type="application/octet-stream")

    async def hosts(self, caller: Who, limit: Limit = 100, cursor: Cursor = None) -> Response:
        """The hosts and what is used of them, by name; for operators."""
        found = await self.service.hosts(caller)
        items, following = page(found, key=lambda one: f"{one.host.name} {one.host.id}", limit=limit, cursor=cursor)
        return respond(200, {"items": [answers.host(one) for one in items], "nextCursor": following})

    async def host(self, caller: Who, reference: Reference) -> Response:
        """One host, by id or name; for operators."""
        return _host(await self.service.host(caller, reference))

    async def activate_host(self, caller: Who, reference: Reference, expected: Expected) -> Response:
        """Let the host take new sandboxes; for operators."""
        return _host(await self.service.set_host_admin(caller, reference, AdminEvent.ACTIVATE, revision=expected))

    async def drain_host(self, caller: Who, reference: Reference, expected: Expected) -> Response:
        """Give the host no new sandboxes; those that it has go on. For operators."""
        return _host(await self.service.set_host_admin(caller, reference, AdminEvent.DRAIN, revision=expected))

    async def disable_host(
        self, caller: Who, reference: Reference, expected: Expected, body: host_models.Disabling | None = None
    ) -> Response:
        """Fence the host: its credential ends, its agent ends every sandbox, and once its last lease has run out they count as gone."""
        off = body is not None and body.off
        return _host(await self.service.set_host_admin(caller, reference, AdminEvent.DISABLE, off=off, revision=expected))

    async def create_enrollment_token(self, caller: Who, body: host_models.NewEnrollmentToken) -> Response:
        """Make a one-use token by which a host of this name enrols; for operators. It is in this answer and nowhere else."""
        made = await self.service.create_enrollment_token(caller, host_name=body.host_name, life_s=float(body.life_seconds))
        return respond(201, {"token": made.token.reveal(), "hostName": made.host_name, "expiresAt": answers.timestamp(made.expires_at)})

    async def keys(self, caller: Who, limit: Limit = 100, cursor: Cursor = None) -> Response:
        """The team's keys, without the keys themselves, oldest first; revoked ones too."""
        found = await self.service.keys(caller)
        items, following = page(found, key=lambda one: f"{one.created_at:017.6f} {one.id}", limit=limit, cursor=cursor)
        return respond(200, {"items": [answers.key(one) for one in items], "nextCursor": following})

    async def create_key(self, caller: Who, body: models.NewKey) -> Response:
        """Make a key. It is in this answer and nowhere else."""
        made = await self.service.create_key(caller, name=body.name, role=Role(body.role), team=body.team)
        return respond(201, {"key": answers.key(made.client), "secret": made.key.reveal()})

    async def revoke_key(self, caller: Who, key_id: Reference) -> Response:
        """Refuse this key from now on."""
        return respond(200, answers.key(await self.service.revoke_key(caller, key_id)))

    async def whoami(self, caller: Who) -> Response:
        """Whose key this is."""
        return respond(200, answers.whoami(caller, *self.service.limits(caller)))

    async def status(self, caller: Who) -> Response:
        """The deployment in numbers; for operators."""
        views = await self.service.hosts(caller)
        body = {
            "version": self.settings.version,
            "installId": self.settings.install_id,
            "domain": self.settings.domain,
            "ready": self.ready(),
            "hosts": {
                "total": len(views),
                "active": sum(view.host.admin is Admin.ACTIVE for view in views),
                "healthy": sum(view.health is Health.HEALTHY for view in views),
            },
            "capacity": answers.amount(sum((view.host.capacity for view in views), ZERO)),
            "used": answers.amount(sum((view.used for view in views), ZERO)),
            "sandboxes": sum(view.sandboxes for view in views),
            "replicas": [answers.replica(one) for one in self.replicas()],
        }
        return respond(200, body)
