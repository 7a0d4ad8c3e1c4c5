"""E2B's templates, teams, API keys and logs, and what it has that we have not."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from atoll.base.errors import Code, Unavailable
from atoll.base.ids import TeamId, TemplateId
from atoll.base.secret import Secret
from atoll.control.api.e2b import unsupported
from atoll.testing.fake_service import BASE

TEMPLATE_KEYS = {
    "templateID", "buildID", "cpuCount", "memoryMB", "diskSizeMB", "public", "aliases", "names", "createdAt", "updatedAt", "createdBy",
    "lastSpawnedAt", "spawnCount", "buildCount", "envdVersion", "buildStatus",
}  # fmt: skip


def more_templates(api, count: int) -> None:
    for number in range(count):
        api.service.templates_known.append(
            replace(
                BASE,
                id=TemplateId(f"tpl_{number:020}"),
                name=f"t{number}",
                aliases=(f"team/t{number}",),
                created_at=BASE.created_at + number,
            )
        )


async def test_templates(api) -> None:
    for path in ("/templates", "/v2/templates"):
        listed = (await api.call("GET", path)).json()
        assert [set(one) for one in listed] == [TEMPLATE_KEYS]
        assert listed[0]["aliases"] == ["base"]
        assert listed[0]["names"] == ["base"]
        assert listed[0]["createdBy"] is None


async def test_templates_in_pages_newest_first(api) -> None:
    more_templates(api, 6)
    found: list[str] = []
    token = ""
    for _ in range(10):
        answer = await api.call("GET", "/v2/templates", params={"limit": "3", "nextToken": token})
        found += [one["templateID"] for one in answer.json()]
        token = answer.headers.get("x-next-token", "")
        if not token:
            break
    assert found == [one["templateID"] for one in (await api.call("GET", "/templates")).json()]
    assert len(found) == 7
    assert found[0] == f"tpl_{5:020}"
    for bad in ("limit=0", "limit=101", "nextToken=zz", "nextToken=%ff"):
        assert (await api.call("GET", f"/v2/templates?{bad}")).status_code == 400


async def test_templates_of_another_team_are_no_ones_business(api) -> None:
    api.service.templates_known.append(
        replace(BASE, id=TemplateId("tpl_" + "s" * 20), name="secret", aliases=("secret",), public=False, team_id=TeamId("tea_" + "s" * 20))
    )
    assert len((await api.call("GET", "/templates")).json()) == 1
    missing = await api.call("GET", "/templates/aliases/nothing")
    hidden = await api.call("GET", "/templates/aliases/secret")
    assert (hidden.status_code, hidden.text) == (missing.status_code, missing.text.replace("nothing", "secret"))
    ours = (await api.call("GET", "/teams")).json()[0]["teamID"]
    assert (await api.call("GET", f"/templates?teamID={ours}")).status_code == 200
    theirs = await api.call(
        "GET", "/templates", params={"teamID": (await api.call("GET", "/teams", key=api.stranger_key)).json()[0]["teamID"]}
    )
    nobodys = await api.call("GET", "/templates", params={"teamID": "tea_nobody"})
    assert (theirs.status_code, theirs.text) == (nobodys.status_code, nobodys.text)
    assert theirs.status_code == 403


async def test_alias(api) -> None:
    assert (await api.call("GET", "/templates/aliases/base")).json() == {"templateID": BASE.id, "public": True}
    assert (await api.call("GET", "/templates/aliases/none")).status_code == 404
    more_templates(api, 1)
    assert (await api.call("GET", "/templates/aliases/team%2Ft0")).json()["templateID"] == f"tpl_{0:020}"
    assert (await api.call("GET", "/templates/aliases/base:")).status_code == 400
    assert (await api.call("GET", "/templates/aliases/" + "x" * 300)).status_code == 400


async def test_template_with_its_build(api) -> None:
    body = (await api.call("GET", "/templates/base")).json()
    assert body["templateID"] == BASE.id
    assert [build["buildID"] for build in body["builds"]] == [BASE.build_id]
    assert (await api.call("GET", "/templates/none")).status_code == 404


async def test_the_team_shows_the_key_that_was_shown_to_us(api) -> None:
    assert (await api.call("GET", "/teams")).json() == [
        {"teamID": (await api.service.authenticate(Secret(api.key))).team.id, "name": "ours", "apiKey": api.key, "isDefault": True}
    ]


async def test_keys(api) -> None:
    made = await api.call("POST", "/api-keys", json={"name": "ci"})
    body = made.json()
    assert made.status_code == 201
    assert set(body) == {"id", "name", "key", "mask", "createdAt", "createdBy", "lastUsed"}
    assert body["mask"] == {"prefix": "e2b_", "valueLength": 40, "maskedValuePrefix": "", "maskedValueSuffix": body["key"][-4:]}
    assert uuid.UUID(body["id"])
    assert (await api.call("GET", "/v2/sandboxes", key=body["key"])).status_code == 200
    listed = (await api.call("GET", "/api-keys")).json()
    assert {one["name"] for one in listed} == {"first of ours", "ci"}
    assert all("key" not in one for one in listed)
    assert (await api.call("DELETE", f"/api-keys/{body['id']}", key=api.stranger_key)).status_code == 404
    assert (await api.call("DELETE", f"/api-keys/{body['id']}")).status_code == 204
    assert (await api.call("DELETE", f"/api-keys/{body['id']}")).status_code == 404
    assert (await api.call("GET", "/v2/sandboxes", key=body["key"])).status_code == 401
    assert {one["name"] for one in (await api.call("GET", "/api-keys")).json()} == {"first of ours"}
    for bad in ({}, {"name": ""}, {"name": 5}, {"name": "x" * 129}, {"name": "a\0"}, {"name": "a", "admin": True}):
        assert (await api.call("POST", "/api-keys", json=bad)).status_code == 400


async def test_logs_tell_events_and_console(api) -> None:
    api.service.console = b"one\ntwo\xff\n"
    sandbox_id = (await api.create())["sandboxID"]
    v1 = (await api.call("GET", f"/sandboxes/{sandbox_id}/logs")).json()
    assert {line["line"] for line in v1["logs"]} == {"sandbox.accepted", "sandbox.ready", "one", "two\N{REPLACEMENT CHARACTER}"}
    assert [entry["message"] for entry in v1["logEntries"]] == [line["line"] for line in v1["logs"]]
    assert all(set(entry) == {"timestamp", "message", "level", "fields"} for entry in v1["logEntries"])
    path = f"/v2/sandboxes/{sandbox_id}/logs"
    assert [entry["message"] for entry in (await api.call("GET", path, params={"search": "one"})).json()["logs"]] == ["one"]
    assert (await api.call("GET", path, params={"level": "error"})).json() == {"logs": []}
    forward = (await api.call("GET", path)).json()["logs"]
    assert (await api.call("GET", path, params={"direction": "backward"})).json()["logs"] == forward[::-1]
    assert len((await api.call("GET", path, params={"limit": "2"})).json()["logs"]) == 2
    assert (await api.call("GET", path, params={"limit": "0"})).json() == {"logs": []}
    later = int(api.time.at * 1000) + 1
    assert (await api.call("GET", path, params={"cursor": str(later)})).json() == {"logs": []}
    assert (await api.call("GET", f"/sandboxes/{sandbox_id}/logs", params={"start": str(later)})).json() == {"logs": [], "logEntries": []}


async def test_logs_of_an_ended_sandbox_are_its_events(api) -> None:
    sandbox_id = (await api.create())["sandboxID"]
    await api.call("DELETE", f"/sandboxes/{sandbox_id}")
    api.service.end(sandbox_id)
    lines = [line["line"] for line in (await api.call("GET", f"/sandboxes/{sandbox_id}/logs")).json()["logs"]]
    assert lines == ["sandbox.accepted", "sandbox.ready", "sandbox.releasing", "sandbox.released"]
    assert (await api.call("GET", f"/sandboxes/{sandbox_id}/logs", key=api.stranger_key)).status_code == 404


async def test_logs_without_a_host_are_the_events(api) -> None:
    sandbox_id = (await api.create())["sandboxID"]

    async def away(*_: object) -> bytes:
        raise Unavailable(Code.CONTROL_UNAVAILABLE, "the host does not answer")

    api.service.logs = away
    lines = [line["line"] for line in (await api.call("GET", f"/sandboxes/{sandbox_id}/logs")).json()["logs"]]
    assert lines == ["sandbox.accepted", "sandbox.ready"]


@pytest.mark.parametrize("query", ["direction=up", "level=loud", "search=" + "x" * 257, "limit=1001", "limit=-1", "cursor=-1", "cursor=x"])
async def test_log_queries_that_cannot_be(api, query) -> None:
    sandbox_id = (await api.create())["sandboxID"]
    assert (await api.call("GET", f"/v2/sandboxes/{sandbox_id}/logs?{query}")).status_code == 400


@pytest.mark.parametrize(("method", "path", "feature"), unsupported.ROUTES)
async def test_what_is_not_there_yet_says_so(api, method, path, feature) -> None:
    target = path.replace("{", "").replace("}", "")
    answer = await api.call(method, target)
    assert answer.status_code == 501
    assert answer.json() == {"code": 501, "message": f"{feature} is not supported by this release", "error_code": "NOT_SUPPORTED"}
    assert answer.headers["should-retry"] == "false"
    assert (await api.client.request(method, target)).status_code == 401
