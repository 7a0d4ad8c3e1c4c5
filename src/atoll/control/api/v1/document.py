"""The OpenAPI document of `/v1`, as FastAPI makes it from the routes, with what FastAPI cannot know: how a key is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from atoll.control.api.table import Route

PATH: Final = "/v1/openapi.json"
_METHODS: Final = ("get", "post", "put", "patch", "delete")


def finish(schema: dict[str, Any]) -> dict[str, Any]:
    """The document, complete. *Idempotency*: finishing twice changes nothing more."""
    schema.setdefault("components", {})["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": "X-API-KEY"},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    schema["security"] = [{"key": []}, {"bearer": []}]
    return schema


def routes(schema: Mapping[str, Any]) -> Iterator[Route[str]]:
    """Every documented route, by its operation id, and the document's own."""
    for path, operations in schema["paths"].items():
        for method in _METHODS:
            if method in operations:
                yield Route(method.upper(), path, str(operations[method]["operationId"]))
    yield Route("GET", PATH, "")
