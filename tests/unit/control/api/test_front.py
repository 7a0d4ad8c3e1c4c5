"""What happens to every request: keys, limits, methods, and failures in the shape of their room."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from atoll.base.errors import Bug, Code
from atoll.control.api.v1 import document

E2B_PATHS = ("/v2/sandboxes", "/sandboxes/" + "i" * 21, "/templates", "/teams", "/api-keys", "/snapshots")
V1_PATHS = ("/v1/sandboxes", "/v1/sandboxes/" + "i" * 21, "/v1/templates", "/v1/hosts", "/v1/keys", "/v1/whoami", "/v1/status")


@pytest.mark.parametrize("path", [*E2B_PATHS, *V1_PATHS])
@pytest.mark.parametrize(
    "headers",
    [
        {}, {"X-API-KEY": ""}, {"X-API-KEY": "e2b_" + "0" * 40}, {"X-API-KEY": "x" * 300}, {"Authorization": "Bearer nothing"},
        {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer "}, {"X-API-KEY": "\xe9"},
    ],
)  # fmt: skip
async def test_without_a_valid_key(api, path, headers) -> None:
    answer = await api.client.get(path, headers=[(k.encode(), v.encode("latin-1")) for k, v in headers.items()])
    assert answer.status_code == 401
    body = answer.json()
    if path.startswith("/v1"):
        assert body["error"]["code"] == "UNAUTHENTICATED"
        assert body["error"]["requestId"] == answer.headers["x-request-id"]
        assert "atoll key create" in body["error"]["hint"]
    else:
        assert body["code"] == 401
        assert set(body) == {"code", "message", "error_code"}


@pytest.mark.parametrize("path", ["/v2/sandboxes", "/v1/sandboxes"])
async def test_ways_to_show_a_key(api, path) -> None:
    for headers in (
        {"X-API-KEY": api.key},
        {"x-api-key": f" {api.key} "},
        {"Authorization": f"Bearer {api.key}"},
        {"Authorization": f"bearer {api.key}"},
        {"Authorization": f"Bearer sk_{api.key}"},
    ):
        assert (await api.client.get(path, headers=headers)).status_code == 200
    # The named header decides: a wrong key is not rescued by a right bearer token.
    both = await api.client.get(path, headers={"X-API-KEY": "wrong", "Authorization": f"Bearer {api.key}"})
    assert both.status_code == 401


async def test_a_stranger_without_a_key_sends_no_body(api) -> None:
    read = 0

    async def endless():
        nonlocal read
        while True:
            read += 1
            yield b"x" * 1000

    answer = await api.client.post("/v2/sandboxes", content=endless())
    assert answer.status_code == 401
    assert read <= 1


async def test_health(api) -> None:
    answer = await api.client.get("/health")
    assert (answer.status_code, answer.content) == (204, b"")
    assert (await api.client.head("/health")).status_code == 204
    api.current.ready = False
    answer = await api.client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["code"] == 503
    assert (await api.client.post("/health")).status_code == 405
    assert (await api.client.options("/health")).headers["allow"] == "GET, HEAD, OPTIONS"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v2/sandboxes", "GET, HEAD, OPTIONS, POST"),
        ("/sandboxes/iabc", "DELETE, GET, HEAD, OPTIONS"),
        ("/sandboxes/iabc/timeout", "OPTIONS, POST"),
        ("/templates/abc", "DELETE, GET, HEAD, OPTIONS, PATCH, POST"),
        ("/v1/sandboxes", "GET, HEAD, OPTIONS, POST"),
        ("/v1/sandboxes/iabc", "DELETE, GET, HEAD, OPTIONS"),
        ("/v1/openapi.json", "GET, HEAD, OPTIONS"),
    ],
)
async def test_methods(api, path, allowed) -> None:
    options = await api.client.options(path)
    assert (options.status_code, options.headers["allow"], options.content) == (204, allowed, b"")
    for method in ("PUT", "TRACE", "BREW"):
        answer = await api.call(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()


async def test_head_is_get_without_the_body(api) -> None:
    for path in ("/v2/sandboxes", "/templates", "/v1/sandboxes", "/v1/whoami", "/v1/openapi.json", "/sandboxes/nothere"):
        got, asked = await api.call("GET", path), await api.call("HEAD", path)
        assert asked.status_code == got.status_code
        assert asked.content == b""
        assert asked.headers["content-length"] == got.headers["content-length"]
        assert asked.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    "path", ["/", "/sandbox", "/v2", "/v2/sandboxes/", "/v3", "/v2/sandboxes/x/y/z", "/docs", "/openapi.json", "/redoc"]
)
async def test_unknown_paths(api, path) -> None:
    answer = await api.call("GET", path)
    assert (answer.status_code, answer.json()["code"]) == (404, 404)


@pytest.mark.parametrize("path", ["/v1/", "/v1/nothing", "/v1/sandboxes/", "/v1/sandboxes/a/b", "/v1/docs"])
async def test_unknown_paths_of_v1(api, path) -> None:
    answer = await api.call("GET", path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


async def test_every_answer_has_a_request_id_of_its_own(api) -> None:
    seen = set()
    for method, path in (
        ("GET", "/v2/sandboxes"),
        ("GET", "/v1/sandboxes"),
        ("GET", "/nothing"),
        ("OPTIONS", "/v1/sandboxes"),
        ("GET", "/health"),
    ):
        answer = await api.call(method, path)
        assert len(answer.headers["x-request-id"]) == 16
        assert answer.headers["x-content-type-options"] == "nosniff"
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == 5


async def test_browsers_may_ask(api, rebuilt, settings) -> None:
    answer = await api.call("GET", "/v2/sandboxes", headers={"Origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "x-next-token" in answer.headers["access-control-expose-headers"]
    preflight = await api.client.options(
        "/v2/sandboxes",
        headers={
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-api-key, lang",
        },
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "x-api-key, lang"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "access-control-allow-origin" not in (await api.call("GET", "/v2/sandboxes")).headers
    async with rebuilt(api, settings=replace(settings, allow_origin=None)) as closed:
        refused = await closed.get("/v2/sandboxes", headers={"Origin": "https://app.example", "X-API-KEY": api.key})
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(("path", "code"), [("/v2/sandboxes", 413), ("/v1/sandboxes", 413)])
async def test_bodies_beyond_the_limit(api, path, code) -> None:
    whole = await api.call("POST", path, content=b"x" * ((1 << 20) + 1))
    assert whole.status_code == code

    async def chunks():
        for _ in range(20):
            yield b"x" * 100_000

    assert (await api.call("POST", path, content=chunks())).status_code == code
    lying = await api.call("POST", path, content=b"{}", headers={"Content-Length": "99999999999999"})
    assert lying.status_code == code


async def test_chunked_bodies(api) -> None:
    async def chunks():
        for part in (b'{"templateID":', b'"base",', b'"timeout":30}'):
            yield part

    answer = await api.call("POST", "/v2/sandboxes", content=chunks())
    assert answer.status_code == 201
    assert api.service.requests[-1].timeout_s == 30

    async def again():
        yield b'{"template":'
        yield b'"base"}'

    assert (await api.call("POST", "/v1/sandboxes", content=again())).status_code == 201


@pytest.mark.parametrize("path", ["/v2/sandboxes", "/v1/sandboxes"])
async def test_a_body_that_does_not_come_in_time(api, path) -> None:
    async def slow():
        yield b"{"
        await asyncio.sleep(5)

    answer = await api.call("POST", path, content=slow())
    assert answer.status_code == 408


async def test_a_client_that_leaves_is_not_answered(api) -> None:
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v2/sandboxes", "raw_path": b"/v2/sandboxes", "query_string": b"",
        "headers": [(b"x-api-key", api.key.encode()), (b"content-length", b"5")],
    }  # fmt: skip
    await api.app(scope, receive, send)
    assert sent == []
    assert api.service.requests == []


async def test_long_targets(api) -> None:
    assert (await api.call("GET", "/v2/sandboxes?metadata=" + "a" * 20000)).status_code == 400
    assert (await api.call("GET", "/v1/" + "a" * 20000)).status_code == 400
    assert (await api.call("GET", "/sandboxes/%00")).status_code == 400


async def test_a_crowd_is_turned_away(api, rebuilt, settings) -> None:
    async with rebuilt(api, settings=replace(settings, requests_max=2)) as client:
        api.service.gate.clear()
        inside = [
            asyncio.ensure_future(client.post("/v2/sandboxes", json={"templateID": "base"}, headers={"X-API-KEY": api.key}))
            for _ in range(2)
        ]
        await asyncio.sleep(0.01)
        third = await client.get("/v2/sandboxes", headers={"X-API-KEY": api.key})
        assert third.status_code == 503
        assert third.headers["retry-after"] == "1"
        api.service.gate.set()
        assert [(await one).status_code for one in inside] == [201, 201]
        assert (await client.get("/v2/sandboxes", headers={"X-API-KEY": api.key})).status_code == 200


async def test_extra_applications_come_first_and_bare(api, rebuilt) -> None:
    async def bare(scope, receive, send):
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async with rebuilt(api, extra=(("/internal/", bare), ("/agent/v1", bare))) as client:
        for path in ("/internal/edge/x", "/agent/v1/poll", "/agent/v1"):
            answer = await client.post(path)
            assert (answer.status_code, answer.text) == (299, path)
            assert "x-request-id" not in answer.headers
        assert (await client.get("/health")).status_code == 204


@pytest.mark.parametrize("fault", [RuntimeError("secret detail"), Bug(Code.INTERNAL, "secret detail"), RecursionError(), KeyError("x")])
@pytest.mark.parametrize("path", ["/v2/sandboxes", "/v1/sandboxes"])
async def test_our_own_faults_say_nothing_but_where_to_look(api, fault, path) -> None:
    async def broken(*_: object) -> None:
        raise fault

    api.service.find = broken
    answer = await api.call("GET", path)
    assert answer.status_code == 500
    assert "secret detail" not in answer.text
    assert answer.headers["x-request-id"] in answer.text
    if path.startswith("/v1"):
        assert answer.json()["error"]["code"] == "INTERNAL"
    else:
        assert answer.json()["error_code"] == "internal_server_error"


def test_the_front_knows_the_documented_operations(shared) -> None:
    """It takes them from the routes, so that nobody waits for the document."""
    app = shared[1]
    known = {(route.path, route.method.lower(), route.target) for route in document.routes(app.routes)}
    said = app.openapi()["paths"]
    documented = {(path, method, one["operationId"]) for path, methods in said.items() for method, one in methods.items()}
    assert known == documented | {(document.PATH, "get", "")}


async def test_openapi_is_served_without_a_key_and_docs_are_not(api, rebuilt, settings) -> None:
    document = (await api.client.get("/v1/openapi.json")).json()
    operations = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(operations) == len(set(operations))
    assert document["security"] == [{"key": []}, {"bearer": []}]
    assert [path for path in document["paths"] if not path.startswith("/v1/")] == ["/metrics"]
    assert "HTTPValidationError" not in json.dumps(document)
    async with rebuilt(api, settings=replace(settings, docs=True)) as client:
        assert (await client.get("/docs")).status_code == 200


async def test_operation_ids_are_stable(api) -> None:
    document = (await api.client.get("/v1/openapi.json")).json()
    assert {one["operationId"]: f"{method.upper()} {path}" for path, ones in document["paths"].items() for method, one in ones.items()} == {
        "createSandbox": "POST /v1/sandboxes",
        "listSandboxes": "GET /v1/sandboxes",
        "getSandbox": "GET /v1/sandboxes/{sandbox_id}",
        "releaseSandbox": "DELETE /v1/sandboxes/{sandbox_id}",
        "setSandboxEnd": "POST /v1/sandboxes/{sandbox_id}/end",
        "takeSnapshot": "POST /v1/sandboxes/{sandbox_id}/snapshots",
        "forkSandbox": "POST /v1/sandboxes/{sandbox_id}/forks",
        "listSnapshots": "GET /v1/snapshots",
        "getSnapshot": "GET /v1/snapshots/{reference}",
        "deleteSnapshot": "DELETE /v1/snapshots/{reference}",
        "pauseSandbox": "POST /v1/sandboxes/{sandbox_id}/pause",
        "suspendSandbox": "POST /v1/sandboxes/{sandbox_id}/suspend",
        "resumeSandbox": "POST /v1/sandboxes/{sandbox_id}/resume",
        "listSandboxEvents": "GET /v1/sandboxes/{sandbox_id}/events",
        "streamSandboxEvents": "GET /v1/sandboxes/{sandbox_id}/events/stream",
        "getSandboxMetrics": "GET /v1/sandboxes/{sandbox_id}/metrics",
        "getSandboxLogs": "GET /v1/sandboxes/{sandbox_id}/logs",
        "authorizeReplacement": "POST /v1/sandboxes/{sandbox_id}/replacement-authorizations",
        "explainSandboxPlacement": "GET /v1/sandboxes/{sandbox_id}/placement",
        "explainPlacement": "POST /v1/placement/explain",
        "listAlerts": "GET /v1/operations/alerts",
        "collectArtifacts": "POST /v1/operations/artifacts/collect",
        "listAudit": "GET /v1/operations/audit",
        "listEvents": "GET /v1/operations/events",
        "streamEvents": "GET /v1/operations/events/stream",
        "getOperationsMetrics": "GET /v1/operations/metrics",
        "getMetrics": "GET /metrics",
        "listTemplates": "GET /v1/templates",
        "getTemplate": "GET /v1/templates/{reference}",
        "getTemplateImage": "GET /v1/templates/{reference}/image",
        "getTemplateLayer": "GET /v1/templates/{reference}/layers/{digest}",
        "deleteTemplate": "DELETE /v1/templates/{reference}",
        "beginTemplateImport": "POST /v1/template-imports",
        "listTemplateImports": "GET /v1/template-imports",
        "listWarm": "GET /v1/warm",
        "keepWarm": "PUT /v1/templates/{reference}/warm",
        "getTemplateImport": "GET /v1/template-imports/{import_id}",
        "listHosts": "GET /v1/hosts",
        "getHost": "GET /v1/hosts/{reference}",
        "activateHost": "POST /v1/hosts/{reference}/activate",
        "drainHost": "POST /v1/hosts/{reference}/drain",
        "disableHost": "POST /v1/hosts/{reference}/disable",
        "registerHost": "PUT /v1/hosts/{name}/registration",
        "resetHost": "POST /v1/hosts/{reference}/reset",
        "recountHost": "POST /v1/hosts/{reference}/recount",
        "createEnrollmentToken": "POST /v1/enrollment-tokens",
        "listKeys": "GET /v1/keys",
        "createKey": "POST /v1/keys",
        "revokeKey": "DELETE /v1/keys/{key_id}",
        "whoami": "GET /v1/whoami",
        "getConfig": "GET /v1/config",
        "applyConfig": "PUT /v1/config",
        "checkConfig": "POST /v1/config/check",
        "listConfigRevisions": "GET /v1/config/revisions",
        "getConfigRevision": "GET /v1/config/revisions/{revision}",
        "getStatus": "GET /v1/status",
    }


async def test_websockets_are_refused(api) -> None:
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    await api.app({"type": "websocket", "path": "/v2/sandboxes", "headers": [], "query_string": b"", "subprotocols": []}, receive, send)
    assert sent[0]["type"] == "websocket.close"
