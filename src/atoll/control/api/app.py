"""`build_app`: the API as one application. Read `front.py` for what happens to a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.base.errors import AtollError, Bug, Code, Refused
from atoll.base.ids import Dice
from atoll.control.api.e2b.routes import build_table
from atoll.control.api.errors import v1_error
from atoll.control.api.exchange import first_problem
from atoll.control.api.front import DOCS_PATH, Front
from atoll.control.api.settings import ApiSettings
from atoll.control.api.table import Table
from atoll.control.api.uploads import Uploads
from atoll.control.api.v1 import config, deployment, document, hosts, imports, sandboxes
from atoll.control.api.v1.context import CALLER_KEY, REQUEST_ID_KEY, response_of
from atoll.control.api.v1.direct import Direct
from atoll.control.api.v1.operations import OperationsApi
from atoll.control.api.v1.snapshots import Snapshots
from atoll.control.api.v1.warm import WarmApi
from atoll.control.builds.builds import Builds
from atoll.control.metering import Meter
from atoll.control.operations import Operations
from atoll.control.service import Caller, ReplicaView, Service
from atoll.domain.operations import Act, Action


class Application(FastAPI):
    """FastAPI for `/v1`, with the front before it."""

    front: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.front is not None and scope["type"] == "http":
            await self.front(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def behind(self, scope: Scope, receive: Receive, send: Send) -> None:
        """FastAPI itself."""
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        return document.finish(super().openapi())


def build_app(  # noqa: PLR0913 - a composition
    service: Service,
    *,
    settings: ApiSettings,
    ready: Callable[[], bool],
    dice: Dice,
    operations: Operations,
    meter: Meter | None = None,
    replicas: Callable[[], Sequence[ReplicaView]] = tuple,
    extra: Sequence[tuple[str, ASGIApp]] = (),
    building: tuple[Builds, Uploads] | None = None,
) -> FastAPI:
    """The whole API over `service`.

    `ready` decides what `/health` says, `replicas` are those that `/v1/status` names. `dice` makes request ids. `meter` counts requests.
    Each of `extra` is a path prefix and the bare application that gets everything below it, unlimited and unauthenticated: it guards
    itself. `building` makes templates from steps, where control can.
    """
    refusals = _Refusals(operations)
    app = Application(
        title="Atoll",
        version=settings.version,
        openapi_url=document.PATH,
        docs_url=DOCS_PATH if settings.docs else None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
        # Its own would show paths, with the ids in them, to whatever collector the environment names.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        exception_handlers={
            AtollError: refusals,
            RequestValidationError: _not_valid,
            HTTPException: _http,
            Exception: _unexpected,
        },
    )
    of_sandboxes = sandboxes.Sandboxes(service, settings)
    kept = Snapshots(service, settings)
    served = (kept, config.Config(service), imports.Imports(service), WarmApi(service), hosts.HostsApi(service), OperationsApi(operations))
    of_deployment = deployment.Deployment(service, settings, ready, replicas)
    routers = [of_sandboxes.router(), of_sandboxes.dry_run(), of_deployment.router(), *(one.router() for one in served)]
    # As they are: including a router makes each of its routes a second time.
    app.router.routes.extend(route for router in routers for route in router.routes)
    app.front = Front(
        service,
        settings=settings,
        ready=ready,
        dice=dice,
        extra=extra,
        e2b=build_table(service, settings, building),
        v1=Table(document.routes(app.routes)),
        direct=Direct(of_sandboxes, refusals.keep),
        inner=app.behind,
        meter=meter or Meter(),
    )
    return app


def _answer(request: Request, error: AtollError) -> Response:
    return response_of(v1_error(error, request.scope["state"][REQUEST_ID_KEY]))


AUDITED: Final = {
    "releaseSandbox": (Action.SANDBOX_RELEASE, "sandbox_id"),
    "takeSnapshot": (Action.SNAPSHOT_CREATE, "sandbox_id"),
    "deleteSnapshot": (Action.SNAPSHOT_DELETE, "reference"),
    "forkSandbox": (Action.SANDBOX_FORK, "sandbox_id"),
    "authorizeReplacement": (Action.SANDBOX_AUTHORIZE_REPLACEMENT, "sandbox_id"),
    "activateHost": (Action.HOST_ACTIVATE, "reference"),
    "drainHost": (Action.HOST_DRAIN, "reference"),
    "disableHost": (Action.HOST_DISABLE, "reference"),
    "createEnrollmentToken": (Action.ENROLLMENT_TOKEN_CREATE, None),
    "createKey": (Action.KEY_CREATE, None),
    "revokeKey": (Action.KEY_REVOKE, "key_id"),
    "applyConfig": (Action.CONFIG_APPLY, None),
    "keepWarm": (Action.TEMPLATE_WARM, "reference"),
}
"""What is kept of a refusal, too: operation → action, and the path's parameter that names its subject."""


class _Refusals:
    """Answers what the service refuses, and keeps it in the audit where somebody tried to do what the audit knows."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def __call__(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, AtollError)
        operation = getattr(request.scope.get("route"), "operation_id", None) or ""
        _, parameter = AUDITED.get(operation, (None, None))
        subject = str(request.path_params.get(parameter, "")) if parameter else ""
        await self.keep(operation, request.scope["state"][CALLER_KEY], subject, error)
        return _answer(request, error)

    async def keep(self, operation: str, caller: Caller, subject: str, error: AtollError) -> None:
        """Keep it, if the audit knows the operation."""
        known = AUDITED.get(operation)
        if known is not None and isinstance(error, Refused):
            await self._operations.refused(Act(caller.actor(), known[0], subject, str(error.code)))


async def _not_valid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answer(request, Refused(Code.INVALID_REQUEST, first_problem(error.errors())))


async def _http(request: Request, error: Exception) -> Response:
    # What FastAPI itself raises: a body that is not JSON.
    assert isinstance(error, HTTPException)
    return _answer(request, Refused(Code.INVALID_REQUEST, str(error.detail)))


async def _unexpected(request: Request, error: Exception) -> Response:
    # Raised again after this answer, so the front logs it with its trace.
    return _answer(request, Bug(Code.INTERNAL, type(error).__name__))
