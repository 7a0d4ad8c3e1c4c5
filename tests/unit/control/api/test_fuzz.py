"""Whatever is sent, the answer is one of ours: a status below 500, a JSON body in the right shape, nothing half done."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.testing.fake_service import FakeService

PATHS = [
    ("POST", "/v2/sandboxes"), ("POST", "/sandboxes"), ("POST", "/v2/sandboxes/ID/connect"), ("POST", "/sandboxes/ID/connect"),
    ("POST", "/sandboxes/ID/timeout"), ("POST", "/sandboxes/ID/refreshes"), ("POST", "/api-keys"), ("POST", "/v1/sandboxes"),
    ("POST", "/v1/sandboxes/ID/end"), ("POST", "/v1/keys"),
]  # fmt: skip
NAMES = [
    "templateID", "timeout", "metadata", "envVars", "network", "autoPause", "autoResume", "secure", "allow_internet_access", "allowOut",
    "denyOut", "duration", "memory", "name", "template", "timeoutSeconds", "size", "cpuMillis", "env", "class", "clientRequestId", "enabled",
    "onlyExtend", "wait", "maskRequestHost", "role", "team", "mcp", "iam", "volumeMounts",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["base", "0.0.0.0/0", "8.8.8.8", "example.com", "\0", "\ud800", "x" * 5000]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=8)), inner, max_size=5)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)


def _check(answer: httpx.Response, path: str) -> None:
    assert answer.status_code < 500 or answer.status_code == 501, (answer.status_code, answer.text)
    if answer.status_code >= 400:
        body = answer.json()
        if path.startswith("/v1"):
            assert set(body) == {"error"}
            assert body["error"]["code"]
        else:
            assert body["code"] == answer.status_code
            assert isinstance(body["message"], str)


@pytest.fixture
def send(shared):
    """Synchronous, because hypothesis is; one fresh service for each example."""
    current, app = shared

    def call(method: str, path: str, content: bytes = b"", headers: dict[str, str] | None = None) -> httpx.Response:
        current.service = FakeService(now=lambda: 1_800_000_000.0)
        current.ready = True
        _, key = current.service.add_team("ours")

        async def run() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://api.test") as client:
                sent = {"X-API-KEY": key, "Content-Type": "application/json", **(headers or {})}
                made = await client.post("/v2/sandboxes", headers=sent, content=b'{"templateID":"base"}')
                target = path.replace("ID", made.json()["sandboxID"])
                answer = await client.request(method, target, headers=sent, content=content)
                # Whatever that was, the next request is served.
                assert (await client.get("/v2/sandboxes", headers=sent)).status_code == 200
                return answer

        return asyncio.run(run())

    return call


FUZZ: Any = settings(
    max_examples=200 if os.environ.get("ATOLL_TEST_MATRICES") == "full" else 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize(("method", "path"), PATHS)
@FUZZ
@given(body=st.one_of(OBJECTS, VALUES))
def test_json_of_any_kind(send, method, path, body) -> None:
    _check(send(method, path, json.dumps(body).encode()), path)


@pytest.mark.parametrize(("method", "path"), PATHS)
@FUZZ
@given(body=st.binary(max_size=60))
def test_bytes_of_any_kind(send, method, path, body) -> None:
    answer = send(method, path, body)
    _check(answer, path)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nul", b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b"-Infinity", b'{"timeout":NaN}', b'{"timeout":1e999}', b"\xff\xfe", b"\xef\xbb\xbf{}",
        b'{"templateID":"base","timeout":' + b"9" * 5000 + b"}", b'{"templateID":"\\ud800"}', b'{"templateID":"base","metadata":{"a":"\\u0000"}}',
        b'{"template":"base","timeoutSeconds":' + b"9" * 5000 + b"}", b'{"templateID":"base"} trailing', b'{"templateID":"base","templateID":5}',
        b"{'templateID':'base'}", b'{"templateID":"base",}', b"\0", b'{"templateID":"base","envVars":' + b'{"a":' * 300 + b"1" + b"}" * 301,
    ],
)  # fmt: skip
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_bodies_that_break_parsers(send, method, path, body) -> None:
    answer = send(method, path, body)
    _check(answer, path)
    if not path.endswith(("refreshes", "/v2/sandboxes/ID/connect")):
        assert answer.status_code == 400, answer.text


@FUZZ
@given(
    query=st.text(max_size=40),
    name=st.sampled_from(["metadata", "state", "limit", "order", "nextToken", "startedAfter", "template", "cursor", "scope", "start"]),
)
@pytest.mark.parametrize(
    "path", ["/v2/sandboxes", "/sandboxes", "/v1/sandboxes", "/v2/templates", "/v2/sandboxes/ID/logs", "/v1/sandboxes/ID/events"]
)
def test_queries_of_any_kind(send, path, query, name) -> None:
    try:
        target = f"{path}?{httpx.QueryParams({name: query})}"
    except UnicodeEncodeError:
        return
    _check(send("GET", target), path)


@FUZZ
@given(raw=st.binary(min_size=1, max_size=30))
@pytest.mark.parametrize(
    "path", ["/sandboxes/{}", "/v1/sandboxes/{}", "/templates/aliases/{}", "/v1/templates/{}", "/api-keys/{}", "/{}", "/v1/{}"]
)
def test_paths_of_any_kind(send, path, raw) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in raw)
    answer = send("GET", path.format(quoted))
    _check(answer, path)


@FUZZ
@given(value=st.binary(max_size=40).filter(lambda raw: not set(raw) & {0, 10, 13}))
@pytest.mark.parametrize("header", ["Idempotency-Key", "Content-Length", "Authorization", "Origin", "Access-Control-Request-Headers"])
def test_headers_of_any_kind(shared, header, value) -> None:
    current, app = shared
    current.service = FakeService(now=lambda: 1_800_000_000.0)
    _, key = current.service.add_team("ours")

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://api.test") as client:
            sent = [(b"X-API-KEY", key.encode()), (header.encode(), value)]
            for method in ("POST", "OPTIONS"):
                request = client.build_request(method, "/v2/sandboxes", headers=sent, content=b'{"templateID":"base"}')
                _check(await client.send(request), "/v2/sandboxes")

    asyncio.run(run())
