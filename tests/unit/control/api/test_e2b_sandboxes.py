"""E2B's sandbox routes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.domain.sandbox import State
from atoll.wire.guest import ENVD_VERSION

NOBODY = "i" + "0" * 20


def double(pairs: dict[str, str]) -> str:
    """As the SDKs quote a metadata filter, before the query itself is quoted."""
    return urlencode({quote(k, safe=""): quote(v, safe="") for k, v in pairs.items()})


async def test_create_v2_answers_exactly_these_keys(api) -> None:
    answer = await api.call("POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 30, "metadata": {}, "envVars": {}})
    body = answer.json()
    assert answer.status_code == 201
    assert set(body) == {"templateID", "sandboxID", "clientID", "envdVersion", "domain", "alias", "envdAccessToken"}
    assert body["envdVersion"] == ENVD_VERSION
    assert body["domain"] == "localhost:3000"
    assert body["clientID"] == "abcdefgh"
    assert answer.headers["atoll-changed"] == f"{body['sandboxID']}:2"


async def test_create_asks_the_service_in_our_words(api) -> None:
    await api.create(timeout=77, metadata={"a": "b"}, envVars={"X": "1"}, allow_internet_access=False)
    request = api.service.requests[-1]
    assert (request.template, request.timeout_s, request.metadata, request.env) == ("base", 77, {"a": "b"}, {"X": "1"})
    assert request.network.internet is False
    assert request.secured
    assert request.e2b_env
    assert request.wait


@pytest.mark.parametrize(("path", "timeout_s", "secured"), [("/sandboxes", 15, False), ("/v2/sandboxes", 300, True)])
async def test_defaults_of_each_route(api, path, timeout_s, secured) -> None:
    answer = await api.call("POST", path, json={"templateID": "base"})
    assert api.service.requests[-1].timeout_s == timeout_s
    assert api.service.requests[-1].secured is secured
    assert ("envdAccessToken" in answer.json()) is secured


async def test_v1_secure_is_the_clients_choice_and_v2_has_none(api) -> None:
    assert "envdAccessToken" in (await api.call("POST", "/sandboxes", json={"templateID": "base", "secure": True})).json()
    assert "envdAccessToken" in (await api.call("POST", "/v2/sandboxes", json={"templateID": "base", "secure": False})).json()


async def test_private_traffic_gives_its_token(api) -> None:
    body = await api.create(network={"allowPublicTraffic": False})
    assert body["trafficAccessToken"]
    v1 = await api.call("POST", "/sandboxes", json={"templateID": "base", "network": {"allowPublicTraffic": False}})
    assert v1.status_code == 400
    assert "secure" in v1.json()["message"]


async def test_unknown_template_is_404(api) -> None:
    answer = await api.call("POST", "/v2/sandboxes", json={"templateID": "nope"})
    assert answer.status_code == 404
    assert answer.json()["code"] == 404
    assert "nope" in answer.json()["message"]


@pytest.mark.parametrize("timeout", [0, -1, 24 * 3600 + 1, 2**31, 2**63, -(2**40), 1.5, True, "30", [], {}])
async def test_timeouts_that_cannot_be(api, timeout) -> None:
    answer = await api.call("POST", "/v2/sandboxes", json={"templateID": "base", "timeout": timeout})
    assert answer.status_code == 400
    assert answer.json()["code"] == 400


async def test_a_whole_float_is_a_number_of_seconds(api) -> None:
    await api.create(timeout=30.0)
    assert api.service.requests[-1].timeout_s == 30


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mcp", {"exa": {}}),
        ("iam", {"tokens": {"aws": {"audience": "a", "tokenType": "JWT-SVID"}}}),
        ("volumeMounts", [{"name": "v", "path": "/v"}]),
        ("somethingNew", {"a": 1}),
        ("somethingNew", 0.5),
    ],
)
async def test_an_option_that_we_cannot_honour_is_refused_by_name(api, option, value) -> None:
    answer = await api.call("POST", "/v2/sandboxes", json={"templateID": "base", option: value})
    assert answer.status_code == 400
    assert answer.json()["error_code"] == "NOT_SUPPORTED"
    assert option in answer.json()["message"]
    assert answer.headers["should-retry"] == "false"
    assert api.service.requests == []


@pytest.mark.parametrize(
    ("option", "value"),
    [("egressProxy", {"address": "h:1"}), ("rules", {"a.b": []}), ("dnsServers", ["1.1.1.1"]), ("httpsPorts", [8443])],
)
async def test_a_network_option_that_we_cannot_honour_is_refused_by_name(api, option, value) -> None:
    answer = await api.call("POST", "/v2/sandboxes", json={"templateID": "base", "network": {option: value}})
    assert answer.status_code == 400
    assert f"network.{option}" in answer.json()["message"]


async def test_options_that_say_nothing_are_fine(api) -> None:
    await api.create(
        autoPause=False, autoPauseMemory=True, autoResume={"enabled": False}, mcp=None, iam={"tokens": {}}, volumeMounts=[],
        network={"egressProxy": None, "rules": {}, "allowOut": [], "denyOut": None}, metadata=None, envVars=None, timeout=None,
    )  # fmt: skip


async def test_pause_and_its_answers(api) -> None:
    sandbox_id = (await api.create(timeout=100))["sandboxID"]
    path = f"/sandboxes/{sandbox_id}"
    assert (await api.call("POST", f"{path}/pause", json={"memory": "no"})).status_code == 400
    assert (await api.call("POST", f"{path}/resume", json={})).status_code == 409, "it runs"
    assert (await api.call("POST", f"{path}/pause", json={"memory": False})).status_code == 204
    assert (await api.call("POST", f"{path}/pause")).status_code == 409
    detail = (await api.call("GET", path)).json()
    assert (detail["state"], detail["pauseMode"]) == ("paused", "filesystem")
    assert "envdUnresponsiveAtPause" not in detail
    assert (await api.call("POST", f"{path}/timeout", json={"timeout": 5})).status_code == 409
    back = await api.call("POST", f"/v2{path}/connect", json={"timeout": 40})
    assert (back.status_code, back.json()["sandboxID"]) == (201, sandbox_id)
    assert (await api.call("POST", f"/v2{path}/connect", json={"timeout": 40})).status_code == 200
    assert "pauseMode" not in (await api.call("GET", path)).json()
    api.service.unresponsive.add(sandbox_id)
    refused = await api.call("POST", f"{path}/pause", json={"requireHealthyGuest": True})
    assert (refused.status_code, refused.json()["error_code"]) == (409, "sandbox_snapshot_guest_agent_unresponsive")
    assert (await api.call("POST", f"{path}/pause", json={})).status_code == 204
    assert (await api.call("GET", path)).json()["envdUnresponsiveAtPause"] is True
    assert (await api.call("POST", f"{path}/resume", json={"timeout": 30})).status_code == 201
    assert (await api.call("POST", f"{path}/pause")).status_code == 204
    assert (await api.call("DELETE", path)).status_code == 204
    for verb in ("pause", "resume", "connect"):
        assert (await api.call("POST", f"{path}/{verb}", json={"timeout": 5} if verb == "connect" else {})).status_code == 404


async def test_what_is_to_happen_at_the_end(api) -> None:
    await api.create(autoPause=True, autoPauseMemory=False)
    asked = api.service.requests[-1]
    assert (asked.on_end.value, asked.end_mode.value) == ("suspend", "filesystem")
    both = await api.call(
        "POST",
        "/v2/sandboxes",
        json={"templateID": "base", "autoPause": True, "autoPauseMemory": False, "autoResume": {"enabled": True}},
    )
    assert (both.status_code, "autoResume" in both.json()["message"]) == (400, True)


async def test_auto_pause_memory_needs_auto_pause(api) -> None:
    answer = await api.call("POST", "/v2/sandboxes", json={"templateID": "base", "autoPauseMemory": False})
    assert answer.status_code == 400
    assert "autoPause" in answer.json()["message"]


async def test_idempotency_key(api) -> None:
    first = await api.call("POST", "/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": "abc-1"})
    again = await api.call("POST", "/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": "abc-1"})
    other = await api.call("POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 9}, headers={"Idempotency-Key": "abc-1"})
    assert first.json() == again.json()
    assert (other.status_code, other.json()["error_code"]) == (422, "idempotency_request_mismatch")
    assert other.headers["should-retry"] == "false"


async def test_idempotency_key_of_a_create_that_still_runs(api) -> None:
    api.service.gate.clear()
    first = asyncio.ensure_future(api.call("POST", "/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": "k"}))
    await asyncio.sleep(0.01)
    second = await api.call("POST", "/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": "k"})
    assert (second.status_code, second.json()["error_code"]) == (409, "idempotency_in_progress")
    assert second.headers["should-retry"] == "true"
    api.service.gate.set()
    assert (await first).status_code == 201


@pytest.mark.parametrize("key", ["", "ABC", "a_b", "a" * 256, "a b"])
async def test_idempotency_keys_that_cannot_be(api, key) -> None:
    answer = await api.call("POST", "/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": key})
    assert answer.status_code == 400
    assert "Idempotency-Key" in answer.json()["message"]


async def test_the_same_key_of_two_teams_is_two_keys(api) -> None:
    ours = await api.call("POST", "/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": "k"})
    theirs = await api.call("POST", "/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": "k"}, key=api.stranger_key)
    assert ours.json()["sandboxID"] != theirs.json()["sandboxID"]


@pytest.mark.parametrize(
    ("failure", "status", "error_code", "should_retry"),
    [
        (Unavailable(Code.NO_CAPACITY, "no room"), 503, "sandbox_capacity_unavailable", "false"),
        (Unavailable(Code.CREATE_TIMEOUT, "too slow"), 503, "sandbox_placement_timeout", "false"),
        (Unavailable(Code.NO_HOSTS, "no hosts"), 503, "sandbox_no_compatible_node", "false"),
        (Unavailable(Code.START_FAILED, "did not start"), 503, "sandbox_create_failed", "false"),
        (Unavailable(Code.STORE_UNAVAILABLE, "no database"), 503, "STORE_UNAVAILABLE", "true"),
        (Refused(Code.TEAM_SANDBOX_QUOTA, "too many"), 429, "TEAM_SANDBOX_QUOTA", "false"),
        (Unavailable(Code.RATE_LIMITED, "too fast", retry_after_s=2.2), 429, "RATE_LIMITED", None),
    ],
)
async def test_failures_of_create(api, failure, status, error_code, should_retry) -> None:
    api.service.fail_next = failure
    answer = await api.call("POST", "/v2/sandboxes", json={"templateID": "base"})
    assert (answer.status_code, answer.json()["error_code"]) == (status, error_code)
    assert answer.json()["code"] == status
    assert answer.headers.get("should-retry") == should_retry
    if failure.code is Code.RATE_LIMITED:
        assert answer.headers["retry-after"] == "3"


async def test_detail(api) -> None:
    made = await api.create(timeout=60, metadata={"who": "me"})
    answer = await api.call("GET", f"/sandboxes/{made['sandboxID']}")
    body = answer.json()
    assert set(body) == {
        "templateID", "sandboxID", "clientID", "startedAt", "endAt", "envdVersion", "cpuCount", "memoryMB", "diskSizeMB", "state",
        "alias", "envdAccessToken", "allowInternetAccess", "domain", "metadata", "network", "lifecycle",
    }  # fmt: skip
    assert body["metadata"] == {"who": "me"}
    assert body["state"] == "running"
    assert body["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    assert body["envdAccessToken"] == made["envdAccessToken"]
    assert datetime.fromisoformat(body["startedAt"]) == datetime.fromtimestamp(api.time.at, UTC)
    assert datetime.fromisoformat(body["endAt"]) == datetime.fromtimestamp(api.time.at + 60, UTC)


async def test_network_is_reported_as_it_was_asked_for(api) -> None:
    made = await api.create(
        network={"allowOut": ["8.8.8.8", "1.1.1.0/24"], "denyOut": ["0.0.0.0/0", "::/0"], "maskRequestHost": "localhost:${PORT}"}
    )
    body = (await api.call("GET", f"/sandboxes/{made['sandboxID']}")).json()
    assert body["network"] == {
        "allowPublicTraffic": True, "allowOut": ["8.8.8.8", "1.1.1.0/24"], "denyOut": ["0.0.0.0/0"], "maskRequestHost": "localhost:${PORT}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"allowOut": ["example.com"]}, 'denyOut ["0.0.0.0/0"]'),
        ({"allowOut": ["*.example.com"]}, 'denyOut ["0.0.0.0/0"]'),
        ({"allowOut": ["example.com"], "denyOut": ["0.0.0.0/0"]}, "domains"),
        ({"denyOut": ["example.com"]}, "not domains"),
        ({"denyOut": ["10.0.0.0/33"]}, "10.0.0.0/33"),
        ({"allowOut": ["300.1.1.1"]}, "300.1.1.1"),
        ({"allowOut": [""]}, "allowOut"),
        ({"allowOut": ["2001:db8::/32"]}, "IPv6"),
        ({"allowOut": ["1.1.1.1"] * 257}, "256"),
        ({"maskRequestHost": "a b"}, "maskRequestHost"),
        ({"maskRequestHost": "a\r\nX: y"}, "maskRequestHost"),
        ({"allowOut": "8.8.8.8"}, "allowOut"),
        ({"allowPublicTraffic": "no"}, "allowPublicTraffic"),
        ([], "network"),
    ],
)
async def test_networks_that_cannot_be(api, network, words) -> None:
    answer = await api.call("POST", "/v2/sandboxes", json={"templateID": "base", "network": network})
    assert answer.status_code == 400
    assert words in answer.json()["message"]


async def test_composite_ids_are_cut_at_the_dash(api) -> None:
    made = await api.create()
    assert (await api.call("GET", f"/sandboxes/{made['sandboxID']}-{made['clientID']}")).json()["sandboxID"] == made["sandboxID"]
    assert (await api.call("DELETE", f"/sandboxes/{made['sandboxID']}-x-y")).status_code == 204


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (NOBODY, 404),
        ("abc", 404),
        ("does-not-exist", 404),
        ("ABC", 400),
        ("%20", 400),
        ("a_b", 400),
        ("-", 400),
        ("i%00", 400),
        ("é", 400),
        ("x" * 129, 400),
    ],
)
async def test_ids_that_lead_nowhere(api, given, status) -> None:
    for method, path in (("GET", f"/sandboxes/{given}"), ("DELETE", f"/sandboxes/{given}")):
        answer = await api.call(method, path)
        assert answer.status_code == status, answer.text
        assert answer.json()["code"] == status
    answer = await api.call("POST", f"/sandboxes/{given}/timeout", json={"timeout": 5})
    assert answer.status_code == status


async def test_not_found_names_the_id(api) -> None:
    answer = await api.call("GET", f"/sandboxes/{NOBODY}")
    assert NOBODY in answer.json()["message"]


async def test_kill_once(api) -> None:
    made = await api.create()
    first = await api.call("DELETE", f"/sandboxes/{made['sandboxID']}")
    assert (first.status_code, first.content) == (204, b"")
    assert first.headers["atoll-changed"].startswith(f"{made['sandboxID']}:")
    assert "content-length" not in first.headers
    assert (await api.call("DELETE", f"/sandboxes/{made['sandboxID']}")).status_code == 404
    assert (await api.call("GET", f"/sandboxes/{made['sandboxID']}")).status_code == 404
    assert (await api.call("GET", "/v2/sandboxes")).json() == []


@pytest.mark.parametrize("state", [State.PENDING, State.RESERVING, State.PROVISIONING, State.RELEASING, State.RELEASED, State.FAILED])
async def test_states_that_do_not_exist_for_e2bs_clients(api, state) -> None:
    made = await api.create()
    api.service.set_state(made["sandboxID"], state)
    assert (await api.call("GET", f"/sandboxes/{made['sandboxID']}")).status_code == 404
    assert (await api.call("GET", "/v2/sandboxes")).json() == []
    assert (await api.call("POST", f"/v2/sandboxes/{made['sandboxID']}/connect", json={})).status_code == 404


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (State.READY, "running"), (State.RESUMING, "running"), (State.PAUSING, "paused"), (State.PAUSED, "paused"),
        (State.SUSPENDING, "paused"), (State.SUSPENDED, "paused"), (State.STOPPING, "paused"), (State.STOPPED, "paused"),
    ],
)  # fmt: skip
async def test_two_words_for_eight_states(api, state, word) -> None:
    made = await api.create()
    api.service.set_state(made["sandboxID"], state)
    assert (await api.call("GET", f"/sandboxes/{made['sandboxID']}")).json()["state"] == word
    other = {"running": "paused", "paused": "running"}[word]
    # The count speaks of running ones: who asked for paused ones only is not told it.
    assert ("x-total-running" in (await api.call("GET", "/v2/sandboxes", params={"state": "paused"})).headers) is False
    assert len((await api.call("GET", "/v2/sandboxes", params={"state": word})).json()) == 1
    assert (await api.call("GET", "/v2/sandboxes", params={"state": other})).json() == []
    assert len((await api.call("GET", "/v2/sandboxes", params={"state": "running,paused"})).json()) == 1
    connect = await api.call("POST", f"/v2/sandboxes/{made['sandboxID']}/connect", json={})
    assert connect.status_code == (200 if word == "running" and state is State.READY else connect.status_code)
    if word == "paused":
        assert connect.status_code == 201, "resumed"


async def test_connect_only_extends(api) -> None:
    made = await api.create(timeout=100)
    path = f"/sandboxes/{made['sandboxID']}"
    shorter = await api.call("POST", f"/v2{path}/connect", json={"timeout": 10})
    assert shorter.status_code == 200
    assert shorter.json() == made
    end = datetime.fromisoformat((await api.call("GET", path)).json()["endAt"]).timestamp()
    assert end == api.time.at + 100
    longer = await api.call("POST", f"{path}/connect", json={"timeout": 500})
    assert longer.status_code == 200
    assert longer.headers["atoll-changed"]
    end = datetime.fromisoformat((await api.call("GET", path)).json()["endAt"]).timestamp()
    assert end == api.time.at + 500


async def test_connect_bodies(api) -> None:
    made = await api.create()
    path = f"/sandboxes/{made['sandboxID']}/connect"
    assert (await api.call("POST", f"/v2{path}")).status_code == 200
    assert (await api.call("POST", f"/v2{path}", json={"memory": False})).status_code == 200
    assert (await api.call("POST", path, json={})).status_code == 400
    assert (await api.call("POST", path)).status_code == 400
    assert (await api.call("POST", path, json={"timeout": 5})).status_code == 200
    assert (await api.call("POST", f"/v2{path}", json={"timeout": 5, "onlyOnTuesdays": True})).status_code == 400


async def test_set_timeout_moves_the_end_both_ways(api) -> None:
    made = await api.create(timeout=100)
    path = f"/sandboxes/{made['sandboxID']}"
    for seconds in (500, 20):
        answer = await api.call("POST", f"{path}/timeout", json={"timeout": seconds})
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["atoll-changed"]
        end = datetime.fromisoformat((await api.call("GET", path)).json()["endAt"]).timestamp()
        assert end == api.time.at + seconds


@pytest.mark.parametrize("seconds", [0, -5])
async def test_set_timeout_zero_ends_it(api, seconds) -> None:
    made = await api.create()
    assert (await api.call("POST", f"/sandboxes/{made['sandboxID']}/timeout", json={"timeout": seconds})).status_code == 204
    assert (await api.call("GET", f"/sandboxes/{made['sandboxID']}")).status_code == 404


async def test_refresh_only_extends(api) -> None:
    made = await api.create(timeout=100)
    path = f"/sandboxes/{made['sandboxID']}"
    for body, seconds in (({"duration": 5}, 100), ({}, 100), ({"duration": 3600}, 3600)):
        assert (await api.call("POST", f"{path}/refreshes", json=body)).status_code == 204
        end = datetime.fromisoformat((await api.call("GET", path)).json()["endAt"]).timestamp()
        assert end == api.time.at + seconds
    for duration in (-1, 3601, "5", True):
        assert (await api.call("POST", f"{path}/refreshes", json={"duration": duration})).status_code == 400


async def test_an_expired_sandbox_is_gone(api) -> None:
    made = await api.create(timeout=10)
    api.time.at += 10
    assert (await api.call("GET", f"/sandboxes/{made['sandboxID']}")).status_code == 404
    assert (await api.call("POST", f"/sandboxes/{made['sandboxID']}/timeout", json={"timeout": 5})).status_code == 404


async def _some(api, count: int) -> list[str]:
    ids = []
    for number in range(count):
        ids.append((await api.create(timeout=1000, metadata={"n": str(number), "half": str(number % 2)}))["sandboxID"])
        api.time.at += 1
    return ids


async def test_pages_in_both_orders(api) -> None:
    ids = await _some(api, 7)
    for order, wanted in (("asc", ids), ("desc", ids[::-1]), (None, ids[::-1])):
        found: list[str] = []
        token: str | None = None
        for _ in range(10):
            params = {"limit": "3", **({"order": order} if order else {}), **({"nextToken": token} if token else {})}
            answer = await api.call("GET", "/v2/sandboxes", params=params)
            found += [one["sandboxID"] for one in answer.json()]
            assert answer.headers["x-total-running"] == "7"
            token = answer.headers.get("x-next-token")
            if token is None:
                break
        assert found == wanted


async def test_filters(api) -> None:
    ids = await _some(api, 4)
    listed = await api.call("GET", "/v2/sandboxes", params={"metadata": double({"half": "1"})})
    assert [one["sandboxID"] for one in listed.json()] == [ids[3], ids[1]]
    assert listed.headers["x-total-running"] == "2"
    later = datetime.fromtimestamp(api.time.at - 2, UTC).isoformat()
    listed = await api.call("GET", "/v2/sandboxes", params={"startedAfter": later})
    assert [one["sandboxID"] for one in listed.json()] == [ids[3], ids[2]]
    # An unquoted plus sign reaches us as a blank.
    listed = await api.call("GET", f"/v2/sandboxes?startedAfter={later}")
    assert len(listed.json()) == 2
    for template, count in (("base", 4), ("tpl_basebasebasebasebase", 4), ("unknown", 0)):
        listed = await api.call("GET", "/v2/sandboxes", params={"template": template})
        assert len(listed.json()) == count
    assert (await api.call("GET", "/v2/sandboxes", params={"template": "base:latest"})).status_code == 400


@pytest.mark.parametrize("value", ["plain", "with space", "a&b=c", "50%", "%2541", "ünïcode", "a+b", "slash/", "", '{json: "yes"}'])
async def test_metadata_survives_double_quoting(api, value) -> None:
    made = await api.create(metadata={f"key {value}": value, "other": "x"})
    await api.create(metadata={"other": "x"})
    for path in ("/sandboxes", "/v2/sandboxes"):
        listed = await api.call("GET", path, params={"metadata": double({f"key {value}": value, "other": "x"})})
        assert [one["sandboxID"] for one in listed.json()] == [made["sandboxID"]]
        assert listed.json()[0]["metadata"] == {f"key {value}": value, "other": "x"}


async def test_metadata_quoted_once_works_too(api) -> None:
    made = await api.create(metadata={"user": "abc", "app": "prod"})
    listed = await api.call("GET", "/v2/sandboxes", params={"metadata": "user=abc&app=prod"})
    assert [one["sandboxID"] for one in listed.json()] == [made["sandboxID"]]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=101", "limit=x", "limit=-1", "limit=1e2", "limit=99999999999999999999", "limit=٣", "order=up", "state=dead", "state=running,",
        "startedAfter=yesterday", "startedAfter=2026-13-01T00:00:00Z", "nextToken=%00", "nextToken=zzz", "metadata=nonsense",
        "metadata=a%3Db%2500", "metadata=%ff%3Da", "template=%00", "limit=%ff",
    ],
)  # fmt: skip
async def test_queries_that_cannot_be(api, query) -> None:
    answer = await api.call("GET", f"/v2/sandboxes?{query}")
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] == 400


async def test_the_old_list_has_all_running_ones_and_no_pages(api) -> None:
    ids = await _some(api, 205)
    api.service.set_state(ids[0], State.PAUSED)
    listed = await api.call("GET", "/sandboxes")
    assert {one["sandboxID"] for one in listed.json()} == set(ids[1:])
    assert "x-next-token" not in listed.headers
