"""The OpenAPI document of `/v1`, as FastAPI makes it from the routes, with what FastAPI cannot know: how a key is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from atoll.control.api.table import Route

PATH: Final = "/v1/openapi.json"


def finish(schema: dict[str, Any]) -> dict[str, Any]:
    """The document, complete. *Idempotency*: finishing twice changes nothing more."""
    schema.setdefault("components", {})["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": "X-API-KEY"},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    schema["security"] = [{"key": []}, {"bearer": []}]
    return schema


def routes(known: Iterable[BaseRoute]) -> Iterator[Route[str]]:
    """Every documented route, by its operation id, and the document's own. The document itself takes longer, and waits until it is asked for."""
    for route in known:
        if isinstance(route, APIRoute) and route.include_in_schema and route.operation_id is not None:
            for method in sorted(route.methods or ()):
                yield Route(method, route.path_format, route.operation_id)
    yield Route("GET", PATH, "")
