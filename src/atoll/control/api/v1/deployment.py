"""`/v1/templates`, `/v1/hosts`, `/v1/keys`, `/v1/whoami` and `/v1/status`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Response

from atoll.base.units import ZERO
from atoll.control.api.settings import ApiSettings
from atoll.control.api.v1 import answers, models
from atoll.control.api.v1.context import FAILURES, Who, respond
from atoll.control.service import ReplicaView, Service
from atoll.domain.host import Admin, AdminEvent, Health
from atoll.domain.tenancy import Role

Reference = Annotated[str, Path(max_length=256)]


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
            ("GET", "/hosts", self.hosts, "listHosts", models.HostList, "hosts"),
            ("GET", "/hosts/{reference}", self.host, "getHost", models.Host, "hosts"),
            ("POST", "/hosts/{reference}/activate", self.activate_host, "activateHost", models.Host, "hosts"),
            ("POST", "/hosts/{reference}/drain", self.drain_host, "drainHost", models.Host, "hosts"),
            ("POST", "/hosts/{reference}/disable", self.disable_host, "disableHost", models.Host, "hosts"),
            ("POST", "/enrollment-tokens", self.create_enrollment_token, "createEnrollmentToken", models.EnrollmentToken, "hosts"),
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
        return router

    async def templates(self, caller: Who) -> Response:
        """The templates that this key can use."""
        return respond(200, {"items": [answers.template(one) for one in await self.service.templates(caller)]})

    async def template(self, caller: Who, reference: Reference) -> Response:
        """One template, by id or alias."""
        return respond(200, answers.template(await self.service.template(caller, reference)))

    async def hosts(self, caller: Who) -> Response:
        """The hosts and what is used of them; for operators."""
        return respond(200, {"items": [answers.host(one) for one in await self.service.hosts(caller)]})

    async def host(self, caller: Who, reference: Reference) -> Response:
        """One host, by id or name; for operators."""
        return respond(200, answers.host(await self.service.host(caller, reference)))

    async def activate_host(self, caller: Who, reference: Reference) -> Response:
        """Let the host take new sandboxes; for operators."""
        return respond(200, answers.host(await self.service.set_host_admin(caller, reference, AdminEvent.ACTIVATE)))

    async def drain_host(self, caller: Who, reference: Reference) -> Response:
        """Give the host no new sandboxes; those that it has go on. For operators."""
        return respond(200, answers.host(await self.service.set_host_admin(caller, reference, AdminEvent.DRAIN)))

    async def disable_host(self, caller: Who, reference: Reference, body: models.Disabling | None = None) -> Response:
        """Fence the host: its credential ends, its agent ends every sandbox, and once its last lease has run out they count as gone."""
        off = body is not None and body.off
        return respond(200, answers.host(await self.service.set_host_admin(caller, reference, AdminEvent.DISABLE, off=off)))

    async def create_enrollment_token(self, caller: Who, body: models.NewEnrollmentToken) -> Response:
        """Make a one-use token by which a host of this name enrols; for operators. It is in this answer and nowhere else."""
        made = await self.service.create_enrollment_token(caller, host_name=body.host_name, life_s=float(body.life_seconds))
        return respond(201, {"token": made.token.reveal(), "hostName": made.host_name, "expiresAt": answers.timestamp(made.expires_at)})

    async def keys(self, caller: Who) -> Response:
        """The team's keys, without the keys themselves; revoked ones too."""
        return respond(200, {"items": [answers.key(one) for one in await self.service.keys(caller)]})

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
