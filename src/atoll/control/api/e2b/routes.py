"""The surface: which path of E2B's API leads where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from atoll.control.api.e2b import unsupported
from atoll.control.api.e2b.account import Account
from atoll.control.api.e2b.logs import Logs
from atoll.control.api.e2b.metrics import Metrics
from atoll.control.api.e2b.sandboxes import Sandboxes
from atoll.control.api.e2b.snapshots import Snapshots
from atoll.control.api.e2b.templates import Templates
from atoll.control.api.exchange import Handler
from atoll.control.api.settings import ApiSettings
from atoll.control.api.table import Route, Table
from atoll.control.api.uploads import Uploads
from atoll.control.builds.builds import Builds
from atoll.control.service import Service


def _supported(service: Service, settings: ApiSettings, builds: Builds | None) -> Iterator[Route[Handler]]:
    sandboxes = Sandboxes(service, settings)
    logs = Logs(service)
    account = Account(service, builds)
    metrics = Metrics(service)
    yield Route("POST", "/v2/sandboxes", sandboxes.create_v2)
    yield Route("GET", "/v2/sandboxes", sandboxes.list_v2)
    yield Route("POST", "/sandboxes", sandboxes.create_v1)
    yield Route("GET", "/sandboxes", sandboxes.list_v1)
    yield Route("GET", "/sandboxes/{sandboxID}", sandboxes.get)
    yield Route("DELETE", "/sandboxes/{sandboxID}", sandboxes.kill)
    yield Route("POST", "/v2/sandboxes/{sandboxID}/connect", sandboxes.connect_v2)
    yield Route("POST", "/sandboxes/{sandboxID}/connect", sandboxes.connect_v1)
    yield Route("POST", "/sandboxes/{sandboxID}/pause", sandboxes.pause)
    yield Route("POST", "/sandboxes/{sandboxID}/resume", sandboxes.resume)
    kept = Snapshots(service, settings, account)
    yield Route("DELETE", "/templates/{templateID}", kept.delete)
    yield Route("POST", "/sandboxes/{sandboxID}/snapshots", kept.take)
    yield Route("POST", "/sandboxes/{sandboxID}/fork", kept.fork)
    yield Route("GET", "/snapshots", kept.list)
    yield Route("POST", "/sandboxes/{sandboxID}/timeout", sandboxes.set_timeout)
    yield Route("POST", "/sandboxes/{sandboxID}/refreshes", sandboxes.refresh)
    yield Route("GET", "/sandboxes/{sandboxID}/logs", logs.v1)
    yield Route("GET", "/v2/sandboxes/{sandboxID}/logs", logs.v2)
    yield Route("GET", "/sandboxes/{sandboxID}/metrics", metrics.one)
    yield Route("GET", "/sandboxes/metrics", metrics.many)
    yield Route("GET", "/templates", account.templates_v1)
    yield Route("GET", "/v2/templates", account.templates_v2)
    yield Route("GET", "/templates/{templateID}", account.template)
    yield Route("GET", "/default-templates", account.defaults)
    yield Route("GET", "/templates/aliases/{alias}", account.alias)
    yield Route("GET", "/teams", account.teams)
    yield Route("GET", "/api-keys", account.keys)
    yield Route("POST", "/api-keys", account.create_key)
    yield Route("DELETE", "/api-keys/{apiKeyID}", account.revoke_key)


_BUILDING: Final[tuple[tuple[str, str, Callable[[Templates], Handler]], ...]] = (
    ("POST", "/templates", lambda room: room.request_v1),
    ("POST", "/templates/{templateID}", lambda room: room.request_v1),
    ("POST", "/templates/{templateID}/builds/{buildID}", lambda room: room.start_v1),
    ("POST", "/v3/templates", lambda room: room.request),
    ("POST", "/v2/templates", lambda room: room.request_v2),
    ("GET", "/templates/{templateID}/files/{hash}", lambda room: room.file),
    ("POST", "/v2/templates/{templateID}/builds/{buildID}", lambda room: room.start),
    ("GET", "/templates/{templateID}/builds/{buildID}/status", lambda room: room.status),
    ("GET", "/templates/{templateID}/builds/{buildID}/logs", lambda room: room.logs),
    ("POST", "/templates/tags", lambda room: room.assign_tags),
    ("DELETE", "/templates/tags", lambda room: room.remove_tags),
    ("GET", "/templates/{templateID}/tags", lambda room: room.tags),
    ("GET", "/templates/{templateID}/tags/count", lambda room: room.count_tags),
    ("GET", "/templates/{templateID}/tags/exists", lambda room: room.tag_exists),
    ("PATCH", "/templates/{templateID}", lambda room: room.change),
    ("PATCH", "/v2/templates/{templateID}", lambda room: room.change_v2),
)


def _building(service: Service, building: tuple[Builds, Uploads] | None) -> Iterator[Route[Handler]]:
    if building is None:
        for method, path, _ in _BUILDING:
            yield Route(method, path, unsupported.refuse, {"feature": "building a template"})
        return
    room = Templates(Account(service, building[0]), *building)
    yield from (Route(method, path, handler(room)) for method, path, handler in _BUILDING)


def _unsupported() -> Iterator[Route[Handler]]:
    for method, path, feature in unsupported.ROUTES:
        yield Route(method, path, unsupported.refuse, {"feature": feature})


def build_table(service: Service, settings: ApiSettings, building: tuple[Builds, Uploads] | None = None) -> Table[Handler]:
    """Every route of E2B's that needs a key; `/health` needs none and is the front's."""
    builds = building[0] if building is not None else None
    return Table((*_supported(service, settings, builds), *_building(service, building), *_unsupported()))
