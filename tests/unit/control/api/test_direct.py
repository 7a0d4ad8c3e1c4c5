"""Creates and releases without the framework: what is answered is what FastAPI would have answered."""

from __future__ import annotations

import re
from typing import Any

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.control.api.v1.direct import Direct
from atoll.domain.operations import Action

NOBODY = "i" + "0" * 20
_ID = re.compile(r"\bi[a-z0-9]{20}\b")
_ITS_OWN = ("id", "placement", "accessToken", "trafficToken")


def shape(answer: Any) -> tuple[int, dict[str, Any], list[tuple[str, str]]]:
    """Status, body and headers, without what each sandbox and request has of its own."""
    headers = sorted(
        (name, _ID.sub("*", value)) for name, value in answer.headers.items() if name not in ("x-request-id", "content-length")
    )
    body = {name: "own" if name in _ITS_OWN else value for name, value in answer.json().items()}
    if "error" in body:
        body["error"] = {**body["error"], "requestId": "own"}
    return answer.status_code, body, headers


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From now on, FastAPI answers everything."""

    def switch() -> None:
        async def never(*_: Any) -> None:
            return None

        monkeypatch.setattr(Direct, "answer", never)

    return switch


@pytest.mark.parametrize(
    "sent",
    [
        {"json": {}},
        {"json": {"template": "base", "timeoutSeconds": 99, "metadata": {"a": "ü"}, "env": {"K": "v"}, "wait": False}},
        {"json": {"template": "no-such"}},
        {"json": {"timeoutSeconds": "99"}},
        {"json": {"timeoutSeconds": 0}},
        {"json": {"surprise": 1}},
        {"json": []},
        {"json": None},
        {"content": b""},
        {"content": b"{"},
        {"content": b'{"timeoutSeconds": 1.0}'},
        {"content": b'{"timeoutSeconds": 99999999999999999999}'},
        {"content": b"{}", "headers": {"content-type": "text/plain"}},
        {"json": {}, "params": {"wait": "false"}},
    ],
)
async def test_a_create_is_answered_alike(api, framework, sent) -> None:
    direct = await api.call("POST", "/v1/sandboxes", **sent)
    framework()
    assert shape(direct) == shape(await api.call("POST", "/v1/sandboxes", **sent))


@pytest.mark.parametrize("error", [Refused(Code.TEAM_SANDBOX_QUOTA, "full"), Unavailable(Code.NO_CAPACITY, "none", retry_after_s=5.0)])
async def test_what_the_service_refuses_is_answered_alike(api, framework, error, monkeypatch) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(api.service, "create", refuse)
    direct = await api.call("POST", "/v1/sandboxes", json={})
    framework()
    assert shape(direct) == shape(await api.call("POST", "/v1/sandboxes", json={}))


@pytest.mark.parametrize("headers", [{}, {"If-Match": "*"}, {"If-Match": '"1"'}, {"If-Match": '"77"'}, {"If-Match": "what"}])
async def test_a_release_is_answered_alike(api, framework, headers) -> None:
    one, other = [(await api.call("POST", "/v1/sandboxes", json={})).json()["id"] for _ in range(2)]
    direct = await api.call("DELETE", f"/v1/sandboxes/{one}", headers=headers)
    framework()
    assert shape(direct) == shape(await api.call("DELETE", f"/v1/sandboxes/{other}", headers=headers))


@pytest.mark.parametrize("name", [NOBODY, "x", "i" + "A" * 20])
async def test_a_release_of_what_is_not_there_is_answered_alike_and_kept(api, framework, name) -> None:
    direct = await api.call("DELETE", f"/v1/sandboxes/{name}")
    kept = list(api.current.operations.entries)
    assert direct.status_code == 404
    assert [entry for entry in kept if Action.SANDBOX_RELEASE in str(entry)], "the audit has who tried"
    framework()
    assert shape(direct) == shape(await api.call("DELETE", f"/v1/sandboxes/{name}"))
