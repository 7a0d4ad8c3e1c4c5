"""`/v1/operations`, pages, ETags: their shapes against the document, over a service in memory."""

from __future__ import annotations

import json
import re

import pytest

from atoll.control.operations import AlertRecord
from atoll.domain.operations import Act, Action, Actor, Alert


def alert(number: int, **changes: object) -> AlertRecord:
    values = {
        "id": f"alr_{number}", "kind": Alert.HOST_LOST, "subject": "hst_1", "severity": "critical", "detail": "x", "raised_at": 1.0,
        "seen_at": 2.0, "cleared_at": None,
    }  # fmt: skip
    return AlertRecord(**{**values, **changes})


async def test_alerts(api, checked) -> None:
    api.current.operations.alerts_known += [alert(1), alert(2, cleared_at=3.0), alert(3, id=None, kind=Alert.STORE_FULL)]
    page = (await checked("GET", "/v1/operations/alerts?limit=1&state=all", key=api.operator_key)).json()
    assert page["items"][0]["runbook"] == "docs/RUNBOOK.md#hostlost"
    page = (await checked("GET", f"/v1/operations/alerts?limit=5&state=all&cursor={page['nextCursor']}", key=api.operator_key)).json()
    assert ([one["id"] for one in page["items"]], page["nextCursor"]) == (["alr_2", None], None)
    assert len((await checked("GET", "/v1/operations/alerts?kind=store.full", key=api.operator_key)).json()["items"]) == 1
    for bad in ("state=x", "severity=x", "kind=x", "limit=0", "limit=1001", "cursor=x"):
        assert (await checked("GET", f"/v1/operations/alerts?{bad}", key=api.operator_key)).status_code == 400
    assert (await checked("GET", "/v1/operations/alerts")).status_code == 403


async def test_audit(api, checked) -> None:
    await api.current.operations.refused(Act(Actor("tea_1", "cli_1", "192.0.2.1", "r1"), Action.KEY_REVOKE, "cli_2", "KEY_NOT_FOUND"))
    await api.current.operations.refused(Act(Actor(), Action.HOST_ENROLL, "hst_1"))
    page = (await checked("GET", "/v1/operations/audit", key=api.operator_key)).json()
    assert [one["action"] for one in page["items"]] == ["key.revoke", "host.enroll"]
    assert page["nextAfter"] == 2
    page = (await checked("GET", "/v1/operations/audit?after=1&limit=1", key=api.operator_key)).json()
    assert [one["action"] for one in page["items"]] == ["host.enroll"]
    for bad in ("action=x", "after=-1", "after=" + "9" * 20, "limit=0", "subject=", "newest=perhaps"):
        assert (await checked("GET", f"/v1/operations/audit?{bad}", key=api.operator_key)).status_code == 400
    assert (await checked("GET", "/v1/operations/audit")).status_code == 403


async def test_events(api, checked) -> None:
    made = (await api.call("POST", "/v1/sandboxes", json={})).json()
    page = (await checked("GET", f"/v1/operations/events?sandbox={made['id']}", key=api.operator_key)).json()
    assert [one["type"] for one in page["items"]] == ["sandbox.accepted", "sandbox.ready"]
    assert (await checked("GET", "/v1/operations/events?type=none", key=api.operator_key)).json() == {"items": [], "nextAfter": 0}
    assert (await checked("GET", "/v1/operations/events")).status_code == 403


async def test_streams_are_lines(api) -> None:
    made = (await api.call("POST", "/v1/sandboxes", json={})).json()
    for path, key in ((f"/v1/sandboxes/{made['id']}/events/stream", None), ("/v1/operations/events/stream?after=0", api.operator_key)):
        answer = await api.call("GET", path, key=key)
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = answer.text.splitlines()
        assert [json.loads(line)["type"] for line in lines if line] == ["sandbox.accepted", "sandbox.ready"]
        assert lines[-1] == "", "an empty line says that the stream lives"
    assert (await api.call("GET", "/v1/operations/events/stream")).status_code == 403
    assert (await api.call("GET", f"/v1/sandboxes/{made['id']}/events/stream", key=api.stranger_key)).status_code == 404


async def test_the_metrics_page(api, checked) -> None:
    for path in ("/metrics", "/v1/operations/metrics"):
        answer = await checked("GET", path, key=api.operator_key)
        assert answer.text.startswith("# HELP atoll_sandboxes")
        assert (await checked("GET", path)).status_code == 403
        assert (await checked("GET", path, key="nobody")).status_code == 401
    as_prometheus = await api.client.get("/metrics", headers={"Authorization": f"Bearer {api.operator_key}"})
    assert as_prometheus.status_code == 200


async def test_usage(api, checked) -> None:
    made = (await api.call("POST", "/v1/sandboxes", json={})).json()
    api.time.at += 11
    path = f"/v1/sandboxes/{made['id']}/metrics"
    points = (await checked("GET", path, "/v1/sandboxes/{sandbox_id}/metrics")).json()["items"]
    assert [point["memoryBytes"] >> 20 for point in points] == [20, 21, 22]
    assert (await checked("GET", path, "/v1/sandboxes/{sandbox_id}/metrics", key=api.stranger_key)).status_code == 404
    assert (await checked("GET", path, "/v1/sandboxes/{sandbox_id}/metrics", key=api.operator_key)).status_code == 200
    assert (await checked("GET", "/v1/sandboxes")).json()["items"][0]["usage"] is None
    assert (await checked("GET", "/v1/sandboxes?usage=true")).json()["items"][0]["usage"]["cpuPercent"] == 12.5


async def test_other_teams_lists(api, checked) -> None:
    made = (await api.call("POST", "/v1/sandboxes", json={})).json()
    for query in ("team=*", "team=ours", f"team={made['teamId']}"):
        found = (await checked("GET", f"/v1/sandboxes?{query}", key=api.operator_key)).json()["items"]
        assert [one["id"] for one in found] == [made["id"]]
        expected = 403 if query == "team=*" else 200
        assert (await checked("GET", f"/v1/sandboxes?{query}")).status_code == expected
        assert (await checked("GET", f"/v1/sandboxes?{query}", key=api.stranger_key)).status_code == 403
    assert (await checked("GET", "/v1/sandboxes?team=nobody", key=api.operator_key)).status_code == 400


async def test_every_list_has_pages(api, checked) -> None:
    for number in range(4):
        await api.call("POST", "/v1/keys", json={"name": f"key {number}"})
    names: list[str] = []
    cursor = ""
    while True:
        page = (await checked("GET", f"/v1/keys?limit=2{cursor}")).json()
        assert len(page["items"]) <= 2
        names += [one["name"] for one in page["items"]]
        if page["nextCursor"] is None:
            break
        cursor = f"&cursor={page['nextCursor']}"
    assert sorted(names) == ["first of ours", *(f"key {number}" for number in range(4))]
    for path in ("/v1/templates", "/v1/hosts", "/v1/keys"):
        assert len((await checked("GET", f"{path}?limit=1", key=api.operator_key)).json()["items"]) == 1
        for bad in ("limit=0", "limit=1001", "limit=x", "cursor=%FF", "cursor=é"):
            assert (await checked("GET", f"{path}?{bad}", key=api.operator_key)).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "template", "body"),
    [
        ("POST", "/v1/sandboxes/{}/end", "/v1/sandboxes/{sandbox_id}/end", {"timeoutSeconds": 50}),
        ("DELETE", "/v1/sandboxes/{}", "/v1/sandboxes/{sandbox_id}", None),
        ("POST", "/v1/hosts/local/drain", "/v1/hosts/{reference}/drain", None),
        ("POST", "/v1/hosts/local/disable", "/v1/hosts/{reference}/disable", None),
        ("POST", "/v1/hosts/local/activate", "/v1/hosts/{reference}/activate", None),
    ],
)
async def test_writes_can_insist_on_a_revision(api, checked, method, path, template, body) -> None:
    made = await api.call("POST", "/v1/sandboxes", json={}, key=api.operator_key)
    target = path.format(made.json()["id"])
    looked = await api.call(
        "GET", target.rpartition("/")[0] if template.endswith(("end", "drain", "disable", "activate")) else target, key=api.operator_key
    )
    tag = looked.headers["etag"]

    async def write(tag: str) -> int:
        answer = await checked(method, target, template, key=api.operator_key, json=body, headers={"If-Match": tag})
        if answer.status_code == 412:
            assert answer.json()["error"]["code"] == "REVISION_MISMATCH"
        return answer.status_code

    assert await write('"999"') == 412
    for bad in ("5", "W/" + tag, '"x"', f"{tag}, {tag}", '""', '"' + "9" * 40 + '"'):
        assert await write(bad) == 400, bad
    assert await write(tag) == 200


async def test_refusals_are_on_record(api, checked) -> None:
    for method, path in (("POST", "/v1/hosts/local/drain"), ("POST", "/v1/enrollment-tokens"), ("DELETE", "/v1/keys/cli_x")):
        await api.call(method, path, json={"hostName": "x"})
    await api.call("POST", "/v1/sandboxes", json={"template": "none"})
    assert [(one.action, one.subject, one.result) for one in api.current.operations.entries] == [
        ("host.drain", "local", "FORBIDDEN"),
        ("enrollment_token.create", "", "FORBIDDEN"),
        ("key.revoke", "cli_x", "KEY_NOT_FOUND"),
    ]


async def test_the_document_is_whole(document) -> None:
    """Every operation says what it is for, what it answers, and how it fails; every body has an example that is one."""
    assert len(document["paths"]) > 15
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["operationId"], where
            assert operation["summary"], where
            assert operation["description"].endswith((".", ")")), where
            failures = {status for status in operation["responses"] if status >= "400"}
            assert {"400", "401", "403", "404", "409", "412", "429", "500", "503"} <= failures, where
            assert all(
                operation["responses"][status]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
                for status in failures
            ), where
            for name in re.findall(r"\{(\w+)\}", path):
                assert name in {one["name"] for one in operation.get("parameters", ())}, where
    for name, schema in document["components"]["schemas"].items():
        incoming = schema.get("additionalProperties") is False
        assert not incoming or schema.get("examples"), f"{name} has no example"
    assert document["components"]["schemas"]["ErrorBody"]["examples"]


async def test_artifacts_are_shown_before_they_go(api, checked) -> None:
    path = "/v1/operations/artifacts/collect"
    api.current.operations.artifacts |= {"blobs/sha256/a": 5, "manifests/sha256/b": 7}
    assert (await checked("POST", path, json={})).status_code == 403
    shown = (await checked("POST", path, key=api.operator_key, json={"dryRun": True})).json()
    assert shown == {"count": 2, "bytes": 12, "keys": ["blobs/sha256/a", "manifests/sha256/b"], "busy": False}
    assert (await checked("POST", path, key=api.operator_key, json={})).json() == shown
    assert (await checked("POST", path, key=api.operator_key, json={})).json()["count"] == 0
    assert (await checked("POST", path, key=api.operator_key, json={"dryRun": "maybe?"})).status_code == 400
