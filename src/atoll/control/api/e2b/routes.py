"""The surface: which path of E2B's API leads where."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.control.api.e2b import unsupported
from atoll.control.api.e2b.account import Account
from atoll.control.api.e2b.logs import Logs
from atoll.control.api.e2b.metrics import Metrics
from atoll.control.api.e2b.sandboxes import Sandboxes
from atoll.control.api.exchange import Handler
from atoll.control.api.settings import ApiSettings
from atoll.control.api.table import Route, Table
from atoll.control.service import Service


def _supported(service: Service, settings: ApiSettings) -> Iterator[Route[Handler]]:
    sandboxes = Sandboxes(service, settings)
    logs = Logs(service)
    account = Account(service)
    metrics = Metrics(service)
    yield Route("POST", "/v2/sandboxes", sandboxes.create_v2)
    yield Route("GET", "/v2/sandboxes", sandboxes.list_v2)
    yield Route("POST", "/sandboxes", sandboxes.create_v1)
    yield Route("GET", "/sandboxes", sandboxes.list_v1)
    yield Route("GET", "/sandboxes/{sandboxID}", sandboxes.get)
    yield Route("DELETE", "/sandboxes/{sandboxID}", sandboxes.kill)
    yield Route("POST", "/v2/sandboxes/{sandboxID}/connect", sandboxes.connect_v2)
    yield Route("POST", "/sandboxes/{sandboxID}/connect", sandboxes.connect_v1)
    yield Route("POST", "/sandboxes/{sandboxID}/timeout", sandboxes.set_timeout)
    yield Route("POST", "/sandboxes/{sandboxID}/refreshes", sandboxes.refresh)
    yield Route("GET", "/sandboxes/{sandboxID}/logs", logs.v1)
    yield Route("GET", "/v2/sandboxes/{sandboxID}/logs", logs.v2)
    yield Route("GET", "/sandboxes/{sandboxID}/metrics", metrics.one)
    yield Route("GET", "/sandboxes/metrics", metrics.many)
    yield Route("GET", "/templates", account.templates_v1)
    yield Route("GET", "/v2/templates", account.templates_v2)
    yield Route("GET", "/templates/{templateID}", account.template)
    yield Route("GET", "/templates/aliases/{alias}", account.alias)
    yield Route("GET", "/teams", account.teams)
    yield Route("GET", "/api-keys", account.keys)
    yield Route("POST", "/api-keys", account.create_key)
    yield Route("DELETE", "/api-keys/{apiKeyID}", account.revoke_key)


def _unsupported() -> Iterator[Route[Handler]]:
    for method, path, feature in unsupported.ROUTES:
        yield Route(method, path, unsupported.refuse, {"feature": feature})


def build_table(service: Service, settings: ApiSettings) -> Table[Handler]:
    """Every route of E2B's that needs a key; `/health` needs none and is the front's."""
    return Table((*_supported(service, settings), *_unsupported()))
