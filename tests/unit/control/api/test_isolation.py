"""A stranger's key learns nothing: on every route, another team's things answer as things that never were."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.base.secret import Secret
from atoll.control.api.e2b.routes import build_table

NOBODY = "i" + "9" * 20
BODIES: dict[str, Any] = {
    "timeout": {"timeout": 5},
    "refreshes": {"duration": 5},
    "connect": {"timeout": 5},
    "end": {"timeoutSeconds": 5},
    "replacement-authorizations": {"generation": 1},
}
SANDBOX_ROUTES = [
    ("GET", "/sandboxes/{}"),
    ("DELETE", "/sandboxes/{}"),
    ("POST", "/sandboxes/{}/timeout"),
    ("POST", "/sandboxes/{}/refreshes"),
    ("POST", "/sandboxes/{}/connect"),
    ("POST", "/v2/sandboxes/{}/connect"),
    ("GET", "/sandboxes/{}/logs"),
    ("GET", "/v2/sandboxes/{}/logs"),
    ("GET", "/sandboxes/{}/metrics"),
    ("POST", "/sandboxes/{}/pause"),
    ("POST", "/sandboxes/{}/resume"),
    ("POST", "/sandboxes/{}/fork"),
    ("POST", "/sandboxes/{}/snapshots"),
    ("PUT", "/sandboxes/{}/network"),
    ("GET", "/events/sandboxes/{}"),
    ("GET", "/v1/sandboxes/{}"),
    ("DELETE", "/v1/sandboxes/{}"),
    ("POST", "/v1/sandboxes/{}/end"),
    ("POST", "/v1/sandboxes/{}/pause"),
    ("POST", "/v1/sandboxes/{}/suspend"),
    ("POST", "/v1/sandboxes/{}/resume"),
    ("GET", "/v1/sandboxes/{}/events"),
    ("GET", "/v1/sandboxes/{}/events/stream"),
    ("GET", "/v1/sandboxes/{}/metrics"),
    ("GET", "/v1/sandboxes/{}/logs"),
    ("GET", "/v1/sandboxes/{}/placement"),
    ("POST", "/v1/sandboxes/{}/replacement-authorizations"),
    ("POST", "/v1/sandboxes/{}/snapshots"),
    ("POST", "/v1/sandboxes/{}/forks"),
]


def test_no_route_with_an_id_is_left_out(api, settings, shared) -> None:
    """A route that is added later has to be added above."""
    table = build_table(api.service, settings)
    known = {path for _, path in SANDBOX_ROUTES}
    declared = {path.replace("{sandboxID}", "{}") for _, path, _ in table._patterns if "{sandboxID}" in path}
    assert declared <= known
    ours = {path.replace("{sandbox_id}", "{}") for path in shared[1].openapi()["paths"] if "{sandbox_id}" in path}
    assert ours <= known


def _comparable(answer, given: str) -> tuple[int, str, list[tuple[str, str]]]:
    def plain(text: str) -> str:
        return text.replace(given, "ID").replace(answer.headers["x-request-id"], "REQUEST")

    return answer.status_code, plain(answer.text), sorted((k, plain(v)) for k, v in answer.headers.items())


@pytest.mark.parametrize(("method", "path"), SANDBOX_ROUTES)
@pytest.mark.parametrize("composite", [False, True])
async def test_anothers_sandbox_answers_as_one_that_never_was(api, method, path, composite) -> None:
    made = await api.create(timeout=100, metadata={"secret": "metadata"}, envVars={"SECRET": "value"})
    before = await api.service.get(await api.service.authenticate(Secret(api.key)), made["sandboxID"])
    body = BODIES.get(path.rpartition("/")[2])
    suffix = f"-{made['clientID']}" if composite else ""
    answers = []
    for given in (made["sandboxID"], NOBODY):
        answer = await api.call(method, path.format(given + suffix), key=api.stranger_key, json=body)
        answers.append(_comparable(answer, given))
    assert answers[0] == answers[1]
    assert answers[0][0] in (404, 501)
    after = await api.service.get(await api.service.authenticate(Secret(api.key)), made["sandboxID"])
    assert before == after


async def test_lists_hold_ones_own(api) -> None:
    await api.create(metadata={"a": "b"})
    for path in ("/sandboxes", "/v2/sandboxes", "/v2/sandboxes?metadata=a%3Db", "/v2/sandboxes?state=running,paused"):
        answer = await api.call("GET", path, key=api.stranger_key)
        assert answer.json() == []
        assert answer.headers.get("x-total-running", "0") == "0"
    for path in ("/v1/sandboxes", "/v1/sandboxes?scope=all"):
        body = (await api.call("GET", path, key=api.stranger_key)).json()
        assert body == {"items": [], "nextCursor": None, "totalRunning": 0}
    assert [one["name"] for one in (await api.call("GET", "/api-keys", key=api.stranger_key)).json()] == ["first of strangers"]
    assert [one["name"] for one in (await api.call("GET", "/v1/keys", key=api.stranger_key)).json()["items"]] == ["first of strangers"]
    assert [one["name"] for one in (await api.call("GET", "/teams", key=api.stranger_key)).json()] == ["strangers"]


async def test_anothers_cursor_shows_nothing_of_anothers(api) -> None:
    for _ in range(3):
        await api.create()
    token = (await api.call("GET", "/v2/sandboxes?limit=1")).headers["x-next-token"]
    assert (await api.call("GET", f"/v2/sandboxes?nextToken={token}", key=api.stranger_key)).json() == []


@pytest.mark.parametrize("path", ["/api-keys/{}", "/v1/keys/{}"])
async def test_anothers_keys(api, path) -> None:
    listed = (await api.call("GET", "/api-keys" if path.startswith("/api") else "/v1/keys")).json()
    ours = (listed if isinstance(listed, list) else listed["items"])[0]["id"]
    answers = []
    for given in (ours, ours[:-4] + "0000"):
        answers.append(_comparable(await api.call("DELETE", path.format(given), key=api.stranger_key), given))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404
    assert (await api.call("GET", "/v2/sandboxes")).status_code == 200


async def test_an_operators_key_of_another_team_sees_sandboxes_through_its_own_routes_only(api) -> None:
    made = await api.create()
    assert (await api.call("GET", f"/sandboxes/{made['sandboxID']}", key=api.operator_key)).status_code == 404
    assert (await api.call("GET", "/v1/hosts", key=api.operator_key)).json()["items"][0]["sandboxes"] == 1
