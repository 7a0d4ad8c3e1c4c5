"""The API over a service in memory, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest

from atoll.control.api.app import build_app
from atoll.control.api.settings import ApiSettings
from atoll.domain.tenancy import Role
from atoll.testing.fake_operations import FakeOperations
from atoll.testing.fake_service import FakeService

START = 1_800_000_000.0


class Time:
    def __init__(self) -> None:
        self.at = START

    def __call__(self) -> float:
        return self.at


@dataclass
class Api:
    service: FakeService
    time: Time
    client: httpx.AsyncClient
    app: Any
    key: str
    operator_key: str
    stranger_key: str
    current: Any

    async def call(
        self, method: str, path: str, *, key: str | None = None, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        sent = {"X-API-KEY": self.key if key is None else key, **(headers or {})}
        return await self.client.request(method, path, headers=sent, **options)

    async def create(self, **body: Any) -> dict[str, Any]:
        answer = await self.call("POST", "/v2/sandboxes", json={"templateID": "base", **body})
        assert answer.status_code == 201, answer.text
        return answer.json()


class Current:
    """The service of the running test: the application is built once, because making its OpenAPI document takes a while."""

    service: FakeService
    operations: FakeOperations
    ready = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


@pytest.fixture(scope="session")
def settings() -> ApiSettings:
    return ApiSettings(domain="localhost:3000", install_id="ins_abcdefgh0123456789ab", version="0.1.0", body_s_max=0.2)


@pytest.fixture(scope="session")
def shared(settings: ApiSettings) -> tuple[Current, Any]:
    current = Current()

    def dice(count: int) -> bytes:
        return current.service.dice(count)

    current.operations = FakeOperations(current)
    return current, build_app(current, operations=current.operations, settings=settings, ready=lambda: current.ready, dice=dice)


@pytest.fixture
async def api(shared: tuple[Current, Any]) -> AsyncIterator[Api]:
    current, app = shared
    time = Time()
    current.service = service = FakeService(now=time)
    current.ready = True
    current.operations.alerts_known.clear()
    current.operations.entries.clear()
    _, key = service.add_team("ours")
    _, operator_key = service.add_team("operators", role=Role.OPERATOR)
    _, stranger_key = service.add_team("strangers")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://api.test") as client:
        yield Api(service, time, client, app, key, operator_key, stranger_key, current)


@pytest.fixture
def rebuilt(settings: ApiSettings) -> Callable[..., httpx.AsyncClient]:
    """Another application over the same service, with other arguments."""

    def build(api: Api, **changes: Any) -> httpx.AsyncClient:
        arguments = {"settings": settings, "ready": lambda: True, "dice": api.service.dice, **changes}
        app = build_app(api.service, operations=FakeOperations(api.service), **arguments)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://api.test")

    return build


@pytest.fixture(scope="session")
def document(shared) -> dict[str, Any]:
    return shared[1].openapi()


@pytest.fixture
def checked(api, document):
    """A call whose answer must be one that the document allows."""

    async def call(method: str, path: str, template: str | None = None, **options: Any) -> Any:
        answer = await api.call(method, path, **options)
        operation = document["paths"][template or path.partition("?")[0]][method.lower()]
        described = operation["responses"][str(answer.status_code)]
        kind = answer.headers["content-type"].partition(";")[0]
        schema = {**described["content"][kind]["schema"], "components": document["components"]}
        content = answer.json() if kind == "application/json" else answer.text
        jsonschema.Draft202012Validator(schema).validate(content)
        if kind == "application/json" and answer.status_code < 300 and "$ref" in schema:
            # Nothing undocumented leaves either.
            assert set(content) == set(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"])
        return answer

    return call
