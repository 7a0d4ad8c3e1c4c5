"""`/v1`: every answer against its own OpenAPI document, and what each route means."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.domain.sandbox import Condition, State

NOBODY = "i" + "0" * 20

ONE = "/v1/sandboxes/{sandbox_id}"


async def test_create(api, checked) -> None:
    answer = await checked(
        "POST",
        "/v1/sandboxes",
        json={
            "clientRequestId": "Req-1.a:b_c", "template": "base", "class": "default", "size": {"cpuMillis": 500, "memoryMib": 256},
            "timeoutSeconds": 99, "metadata": {"a": "b"}, "env": {"K": "v"}, "network": {"internet": False, "allowOut": ["8.8.8.8"]},
        },
    )  # fmt: skip
    body = answer.json()
    assert answer.status_code == 201
    assert body["state"] == "ready"
    assert body["size"] == {"cpuMillis": 500, "memoryMib": 256, "diskMib": 2048}
    assert body["network"]["allowOut"] == ["8.8.8.8"]
    assert body["placement"]["hostId"] == api.service.host_view.host.id
    assert body["accessToken"]
    assert body["trafficToken"] is None
    assert body["clientRequestId"] == "Req-1.a:b_c"
    assert answer.headers["atoll-changed"] == f"{body['id']}:{body['revision']}"
    request = api.service.requests[-1]
    assert (request.env, request.e2b_env, request.secured, request.class_name) == ({"K": "v"}, False, True, "default")


async def test_create_with_nothing_said(api, checked) -> None:
    body = (await checked("POST", "/v1/sandboxes", json={})).json()
    assert (body["template"]["name"], body["timeoutSeconds"], body["class"]) == ("base", 300, "default")


async def test_create_without_waiting(api, checked) -> None:
    answer = await checked("POST", "/v1/sandboxes", json={"wait": False, "clientRequestId": "r"})
    assert answer.status_code == 202
    assert answer.json()["state"] == "pending"
    assert answer.json()["placement"] is None
    # The edge has no route to wait for yet.
    assert "atoll-changed" not in answer.headers
    sandbox_id = answer.json()["id"]
    assert (await checked("GET", f"/v1/sandboxes/{sandbox_id}", ONE)).json()["state"] == "pending"
    assert [one["id"] for one in (await checked("GET", "/v1/sandboxes")).json()["items"]] == [sandbox_id]
    assert (await checked("GET", "/v1/sandboxes?scope=visible")).json()["items"] == []
    assert (await checked("POST", "/v1/sandboxes", json={"wait": False, "clientRequestId": "r"})).json()["error"][
        "code"
    ] == "REQUEST_IN_PROGRESS"


async def test_create_again_with_the_same_id(api, checked) -> None:
    first = await checked("POST", "/v1/sandboxes", json={"clientRequestId": "r"})
    again = await checked("POST", "/v1/sandboxes", json={"clientRequestId": "r"})
    other = await checked("POST", "/v1/sandboxes", json={"clientRequestId": "r", "timeoutSeconds": 5})
    assert first.json() == again.json()
    assert (other.status_code, other.json()["error"]["code"]) == (422, "REQUEST_MISMATCH")


async def test_create_in_progress(api, checked) -> None:
    api.service.gate.clear()
    first = asyncio.ensure_future(api.call("POST", "/v1/sandboxes", json={"clientRequestId": "r"}))
    await asyncio.sleep(0.01)
    second = await checked("POST", "/v1/sandboxes", json={"clientRequestId": "r"})
    assert (second.status_code, second.json()["error"]["code"]) == (409, "REQUEST_IN_PROGRESS")
    api.service.gate.set()
    assert (await first).status_code == 201


@pytest.mark.parametrize(
    "body",
    [
        {"template": ""}, {"template": 5}, {"template": "a\0"}, {"template": "x" * 257}, {"timeoutSeconds": 0}, {"timeoutSeconds": "5"},
        {"timeoutSeconds": True}, {"timeoutSeconds": 2**31}, {"timeoutSeconds": 1.5}, {"unknown": 1}, {"size": {"cores": 1}}, {"size": 5},
        {"size": {"cpuMillis": -1}}, {"size": {"cpuMillis": 1}}, {"size": {"memoryMib": 10**9}}, {"metadata": {"a": 1}}, {"metadata": []},
        {"env": {"": "x"}}, {"env": {"A=B": "x"}}, {"env": {"A": "\0"}}, {"metadata": {"a\0": ""}}, {"metadata": {"a": "\ud800"}},
        {"env": {"A": "x" * 70000}}, {"metadata": {"A": "x" * 20000}}, {"metadata": {str(n): "" for n in range(65)}}, {"class": "nope"},
        {"clientRequestId": ""}, {"clientRequestId": "a b"}, {"clientRequestId": "x" * 256}, {"network": {"allowOut": ["example.com"]}},
        {"network": {"rules": {}}}, {"wait": "yes"}, {"wait": None}, [], None, 5, "x", {"timeoutSeconds": 86401},
    ],
)  # fmt: skip
async def test_bodies_that_cannot_be(api, checked, body) -> None:
    answer = await checked("POST", "/v1/sandboxes", content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("INVALID_REQUEST", "CLASS_LIMIT", "NOT_SUPPORTED")


async def test_a_body_is_json_whatever_it_is_called(api, checked) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "nonsense"):
        answer = await checked("POST", "/v1/sandboxes", content=b'{"template":"base"}', headers={"Content-Type": kind})
        assert answer.status_code == 201


async def test_get_one_in_any_state(api, checked) -> None:
    sandbox_id = (await api.call("POST", "/v1/sandboxes", json={})).json()["id"]
    path = f"/v1/sandboxes/{sandbox_id}"
    for state in State:
        api.service.set_state(sandbox_id, state)
        body = (await checked("GET", path, ONE)).json()
        assert body["state"] == state.value
        assert (body["accessToken"] is None) is (state in (State.RELEASED, State.FAILED))


async def test_conditions_and_reasons_are_shown(api, checked) -> None:
    sandbox_id = (await api.call("POST", "/v1/sandboxes", json={})).json()["id"]
    api.service.end(sandbox_id, state=State.FAILED, reason="GUEST_BOOT_TIMEOUT")
    api.service.change(sandbox_id, conditions=frozenset({Condition.UNREACHABLE, Condition.CLEANUP_PENDING}))
    body = (await checked("GET", f"/v1/sandboxes/{sandbox_id}", ONE)).json()
    assert (body["reason"], body["conditions"]) == ("GUEST_BOOT_TIMEOUT", ["CLEANUP_PENDING", "UNREACHABLE"])
    assert body["releasedAt"]


async def test_release(api, checked) -> None:
    sandbox_id = (await api.call("POST", "/v1/sandboxes", json={})).json()["id"]
    answer = await checked("DELETE", f"/v1/sandboxes/{sandbox_id}", ONE)
    assert (answer.status_code, answer.json()["state"], answer.json()["reason"]) == (200, "releasing", "RELEASE_REQUESTED")
    assert answer.headers["atoll-changed"].startswith(sandbox_id)
    assert (await checked("DELETE", f"/v1/sandboxes/{sandbox_id}", ONE)).status_code == 404


async def test_release_of_one_that_still_starts(api, checked) -> None:
    sandbox_id = (await api.call("POST", "/v1/sandboxes", json={"wait": False})).json()["id"]
    assert (await checked("DELETE", f"/v1/sandboxes/{sandbox_id}", ONE)).json()["state"] == "releasing"


async def test_end(api, checked) -> None:
    sandbox_id = (await api.call("POST", "/v1/sandboxes", json={"timeoutSeconds": 100})).json()["id"]
    path = f"/v1/sandboxes/{sandbox_id}/end"

    def ends_in(answer: Any) -> float:
        return datetime.fromisoformat(answer.json()["endAt"]).timestamp() - api.time.at

    assert ends_in(await checked("POST", path, f"{ONE}/end", json={"timeoutSeconds": 50})) == 50
    assert ends_in(await checked("POST", path, f"{ONE}/end", json={"timeoutSeconds": 20, "onlyExtend": True})) == 50
    assert ends_in(await checked("POST", path, f"{ONE}/end", json={"timeoutSeconds": 70, "onlyExtend": True})) == 70
    for bad in ({}, {"timeoutSeconds": -1}, {"timeoutSeconds": 86401}, {"timeoutSeconds": 5, "only_extend": 5}, {"timeoutSeconds": None}):
        assert (await checked("POST", path, f"{ONE}/end", json=bad)).status_code == 400
    assert (await checked("POST", path, f"{ONE}/end", json={"timeoutSeconds": 0})).json()["state"] == "releasing"


async def test_rest_and_back(api, checked) -> None:
    sandbox_id = (await api.call("POST", "/v1/sandboxes", json={"timeoutSeconds": 100})).json()["id"]
    path = f"/v1/sandboxes/{sandbox_id}"
    for _ in range(2):
        paused = (await checked("POST", f"{path}/pause", f"{ONE}/pause")).json()
        assert (paused["state"], paused["endAt"]) == ("paused", None)
    assert (await checked("POST", f"{path}/suspend", f"{ONE}/suspend", json={})).status_code == 409
    assert (await checked("POST", f"{path}/end", f"{ONE}/end", json={"timeoutSeconds": 5})).status_code == 409
    for bad in ({"timeoutSeconds": -1}, {"timeoutSeconds": 86401}, {"reboot": "yes"}):
        assert (await checked("POST", f"{path}/resume", f"{ONE}/resume", json=bad)).status_code == 400
    back = (await checked("POST", f"{path}/resume", f"{ONE}/resume", json={"timeoutSeconds": 40})).json()
    assert back["state"] == "ready"
    assert datetime.fromisoformat(back["endAt"]).timestamp() - api.time.at == 40
    api.service.unresponsive.add(sandbox_id)
    refused = await checked("POST", f"{path}/suspend", f"{ONE}/suspend", json={"requireHealthyGuest": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "GUEST_UNRESPONSIVE")
    kept = (await checked("POST", f"{path}/suspend", f"{ONE}/suspend", json={"memory": False})).json()
    assert (kept["state"], kept["saveMode"]) == ("suspended", "filesystem")
    assert (await checked("DELETE", path, ONE)).json()["state"] == "releasing"


@pytest.mark.parametrize("given", [NOBODY, "abc", "x" * 200, "I" + "0" * 20, "%00", "é", "i" + "0" * 20 + "-abcdefgh"])
async def test_ids_that_lead_nowhere(api, given) -> None:
    for method, path, body in (
        ("GET", "", None), ("DELETE", "", None), ("GET", "/events", None), ("GET", "/logs", None), ("POST", "/end", {"timeoutSeconds": 5}),
    ):  # fmt: skip
        answer = await api.call(method, f"/v1/sandboxes/{given}{path}", json=body)
        assert answer.status_code == (400 if given == "%00" else 404)


async def test_list_filters_and_pages(api, checked) -> None:
    ids = []
    for number in range(5):
        ids.append((await api.call("POST", "/v1/sandboxes", json={"metadata": {"n": str(number), "k&": "v="}})).json()["id"])
        api.time.at += 1
    api.service.end(ids[0])
    page = (await checked("GET", "/v1/sandboxes?limit=3")).json()
    assert [one["id"] for one in page["items"]] == [ids[4], ids[3], ids[2]]
    assert page["totalRunning"] == 4
    assert all(one["accessToken"] is None for one in page["items"])
    page = (await checked("GET", f"/v1/sandboxes?limit=3&cursor={page['nextCursor']}")).json()
    assert ([one["id"] for one in page["items"]], page["nextCursor"]) == ([ids[1]], None)

    async def found(query: str) -> list[str]:
        return [one["id"] for one in (await checked("GET", f"/v1/sandboxes?{query}")).json()["items"]]

    assert await found("scope=all&order=asc") == ids
    assert await found("scope=all&state=released,failed") == [ids[0]]
    assert await found("metadata=n%3D2") == [ids[2]]
    assert await found("metadata=k%2526%3Dv%253D%26n%3D3") == [ids[3]]
    assert await found("template=base&limit=1") == [ids[4]]
    assert await found(f"startedAfter={datetime.fromtimestamp(api.time.at - 2, UTC).isoformat().replace('+', '%2B')}") == [ids[4], ids[3]]
    assert await found("template=none") == []


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=x",
        "state=dead",
        "order=up",
        "scope=mine",
        "metadata=x",
        "startedAfter=x",
        "cursor=x",
        "cursor=" + "x" * 600,
    ],
)
async def test_queries_that_cannot_be(api, checked, query) -> None:
    answer = await checked("GET", f"/v1/sandboxes?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "INVALID_REQUEST"


async def test_events(api, checked) -> None:
    sandbox_id = (await api.call("POST", "/v1/sandboxes", json={})).json()["id"]
    path = f"/v1/sandboxes/{sandbox_id}/events"
    page = (await checked("GET", path, f"{ONE}/events")).json()
    assert [one["type"] for one in page["items"]] == ["sandbox.accepted", "sandbox.ready"]
    later = (await checked("GET", f"{path}?after={page['nextAfter']}", f"{ONE}/events")).json()
    assert later == {"items": [], "nextAfter": page["nextAfter"]}
    assert len((await checked("GET", f"{path}?limit=1", f"{ONE}/events")).json()["items"]) == 1
    for bad in ("after=-1", "limit=0", "limit=1001", "after=" + "9" * 30):
        assert (await checked("GET", f"{path}?{bad}", f"{ONE}/events")).status_code == 400


async def test_logs_are_text(api, checked) -> None:
    api.service.console = b"line\n\xff\x1b[31mred"
    sandbox_id = (await api.call("POST", "/v1/sandboxes", json={})).json()["id"]
    answer = await checked("GET", f"/v1/sandboxes/{sandbox_id}/logs", f"{ONE}/logs")
    assert answer.text == "line\n\N{REPLACEMENT CHARACTER}\x1b[31mred"


async def test_templates(api, checked) -> None:
    assert [one["name"] for one in (await checked("GET", "/v1/templates")).json()["items"]] == ["base"]
    assert (await checked("GET", "/v1/templates/base", "/v1/templates/{reference}")).json()["size"]["cpuMillis"] == 1000
    assert (await checked("GET", "/v1/templates/none", "/v1/templates/{reference}")).json()["error"]["code"] == "TEMPLATE_NOT_FOUND"


async def test_hosts_are_the_operators(api, checked) -> None:
    await api.call("POST", "/v1/sandboxes", json={})
    for path in ("/v1/hosts", "/v1/status"):
        answer = await checked("GET", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN")
        assert (await checked("GET", path, key=api.operator_key)).status_code == 200
    host = (await checked("GET", "/v1/hosts/local", "/v1/hosts/{reference}", key=api.operator_key)).json()
    assert (host["used"]["memoryMib"], host["used"]["slots"], host["sandboxes"], host["health"]) == (512, 1, 1, "healthy")
    assert (await checked("GET", "/v1/hosts/none", "/v1/hosts/{reference}", key=api.operator_key)).status_code == 404
    assert (await checked("GET", "/v1/hosts/local", "/v1/hosts/{reference}")).status_code == 403
    status = (await checked("GET", "/v1/status", key=api.operator_key)).json()
    assert status["hosts"] == {"total": 1, "active": 1, "healthy": 1}
    assert (status["sandboxes"], status["used"]["cpuMillis"], status["ready"], status["domain"]) == (1, 1000, True, "localhost:3000")


async def test_keys(api, checked) -> None:
    made = (await checked("POST", "/v1/keys", json={"name": "ci"})).json()
    assert made["secret"].endswith(made["key"]["hint"])
    assert (await api.call("GET", "/v1/whoami", key=made["secret"])).json()["client"]["name"] == "ci"
    assert {one["name"] for one in (await checked("GET", "/v1/keys")).json()["items"]} == {"first of ours", "ci"}
    path = f"/v1/keys/{made['key']['id']}"
    assert (await checked("DELETE", path, "/v1/keys/{key_id}", key=api.stranger_key)).status_code == 404
    assert (await checked("DELETE", path, "/v1/keys/{key_id}")).json()["revokedAt"]
    assert (await checked("DELETE", path, "/v1/keys/{key_id}")).status_code == 404
    assert (await api.call("GET", "/v1/whoami", key=made["secret"])).status_code == 401
    assert (await checked("POST", "/v1/keys", json={"name": "x", "role": "operator"})).status_code == 403
    assert (await checked("POST", "/v1/keys", json={"name": "x", "team": "strangers"})).status_code == 403
    assert (await checked("POST", "/v1/keys", json={"name": "x", "team": "new", "role": "member"}, key=api.operator_key)).status_code == 201
    for bad in ({}, {"name": ""}, {"name": "x", "role": "king"}, {"name": "x\n"}, {"name": "x" * 257}):
        assert (await checked("POST", "/v1/keys", json=bad)).status_code == 400


async def test_whoami(api, checked) -> None:
    body = (await checked("GET", "/v1/whoami")).json()
    assert body["team"]["name"] == "ours"
    assert body["team"]["limits"] == {"maxSandboxes": 1000, "maxRecords": 100_000, "requestsPerSecond": 2000.0}
    limits = {"maxSandboxes": None, "requestsPerSecond": 200.0}
    assert body["client"] == {"id": body["client"]["id"], "name": "first of ours", "role": "member", "limits": limits}


async def test_config(api, checked) -> None:
    key = api.operator_key
    shown = (await checked("GET", "/v1/config", key=key)).json()
    assert shown["revision"] == 0
    bad = (await checked("POST", "/v1/config/check", key=key, json={"document": "version: 1\nclasses: {a: {x: 1}}"})).json()
    assert [(one["line"], one["path"]) for one in bad["problems"]] == [(2, "classes.a.x")]
    good = {"document": "version: 1\nclasses: {a: {}}", "revision": 0}
    assert (await checked("PUT", "/v1/config", key=key, json=good)).json()["revision"] == 1
    assert (await checked("PUT", "/v1/config", key=key, json=good)).status_code == 200
    for body, status in (
        ({**good, "document": good["document"] + "\n"}, 409),
        ({**good, "document": "version: 3"}, 400),
        ({**good, "revision": -1}, 400),
        ({**good, "revision": "1"}, 400),
        ({**good, "revision": 2**40}, 400),
        ({**good, "document": "x" * 300_000}, 400),
        ({**good, "more": 1}, 400),
        ({"document": "x"}, 400),
        ({"revision": 1}, 400),
    ):
        assert (await checked("PUT", "/v1/config", key=key, json=body)).status_code == status, body
    history = (await checked("GET", "/v1/config/revisions", key=key)).json()
    assert ([one["revision"] for one in history["items"]], history["nextBefore"]) == ([1], None)
    one = "/v1/config/revisions/{revision}"
    assert (await checked("GET", "/v1/config/revisions/1", one, key=key)).json()["document"] == good["document"]
    assert (await checked("GET", "/v1/config/revisions/2", one, key=key)).status_code == 404
    assert (await checked("GET", "/v1/config/revisions/-1", one, key=key)).status_code == 400
    assert (await checked("GET", "/v1/config")).status_code == 403


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (Unavailable(Code.NO_CAPACITY, "no room", retry_after_s=3, host="hst_x"), 503),
        (Refused(Code.TEAM_SANDBOX_QUOTA, "too many", limit=5), 409),
        (Unavailable(Code.RATE_LIMITED, "too fast"), 429),
        (Refused(Code.CLASS_LIMIT, "too big"), 400),
        (Refused(Code.FORBIDDEN, "no"), 403),
    ],
)
async def test_failures(api, checked, failure, status) -> None:
    api.service.fail_next = failure
    answer = await checked("POST", "/v1/sandboxes", json={})
    error = answer.json()["error"]
    assert answer.status_code == status
    assert (error["code"], error["message"], error["hint"], error["detail"]) == (
        failure.code,
        failure.message,
        failure.hint,
        failure.detail,
    )
    assert error["requestId"] == answer.headers["x-request-id"]
    assert "should-retry" not in answer.headers
