"""Answers of E2B's routes against E2B's own description of them.

The `/v2` create and connect routes are not in the description: current clients expect the same objects as from the older routes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openapi_schema_validator import OAS30Validator, oas30_format_checker

Validated = Callable[..., Any]
NOBODY = "i" + "0" * 20


@pytest.fixture
def validated(served, contract) -> Validated:
    def call(method: str, path: str, *, as_path: str | None = None, key: str | None = None, **options: Any) -> httpx.Response:
        answer = served.http.request(
            method, path, headers={"X-API-KEY": served.key if key is None else key, **options.pop("headers", {})}, **options
        )
        described = as_path or re.sub(r"/i[0-9a-z]{20}(?=/|$)", "/{sandboxID}", path.partition("?")[0])
        operation = contract["paths"][described][method.lower()]
        response = operation["responses"].get(str(answer.status_code))
        if response is None:
            # E2B's server sends more failures than it describes; they all have the one shape.
            assert answer.status_code >= 400, f"{method} {described} does not describe {answer.status_code}"
            schema: dict[str, Any] = {"$ref": "#/components/schemas/Error"}
        else:
            if "$ref" in response:
                response = contract["components"]["responses"][response["$ref"].rpartition("/")[2]]
            if "content" not in response:
                assert answer.content == b""
                return answer
            schema = response["content"]["application/json"]["schema"]
        assert answer.headers["content-type"] == "application/json"
        OAS30Validator({**schema, "components": contract["components"]}, format_checker=oas30_format_checker).validate(answer.json())
        return answer

    return call


def test_the_validator_bites(contract) -> None:
    validator = OAS30Validator({"$ref": "#/components/schemas/Sandbox", "components": contract["components"]})
    assert not validator.is_valid({"templateID": "x"})
    assert not validator.is_valid({"templateID": None, "sandboxID": "i", "clientID": "c", "envdVersion": "0"})


def test_create_and_connect(validated) -> None:
    for path, like in (("/sandboxes", "/sandboxes"), ("/v2/sandboxes", "/sandboxes")):
        for body in (
            {"templateID": "base"},
            {
                "templateID": "base",
                "secure": True,
                "metadata": {"a": "b"},
                "envVars": {"A": "b"},
                "timeout": 30,
                "network": {"allowPublicTraffic": False},
            },
        ):
            made = validated("POST", path, as_path=like, json=body)
            assert made.status_code == 201
            sandbox_id = made.json()["sandboxID"]
            one = "/sandboxes/{sandboxID}"
            assert validated("GET", f"/sandboxes/{sandbox_id}").status_code == 200
            assert validated("POST", f"/sandboxes/{sandbox_id}/connect", json={"timeout": 20}).status_code == 200
            assert validated("POST", f"/v2/sandboxes/{sandbox_id}/connect", as_path=f"{one}/connect", json={}).status_code == 200
            assert validated("POST", f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 30}).status_code == 204
            assert validated("POST", f"/sandboxes/{sandbox_id}/refreshes", json={"duration": 30}).status_code == 204
            assert validated("GET", f"/sandboxes/{sandbox_id}/logs").status_code == 200
            assert validated("GET", f"/v2/sandboxes/{sandbox_id}/logs").status_code == 200
            assert validated("DELETE", f"/sandboxes/{sandbox_id}").status_code == 204
            assert validated("DELETE", f"/sandboxes/{sandbox_id}").status_code == 404


def test_lists(validated) -> None:
    made = validated("POST", "/sandboxes", json={"templateID": "base", "timeout": 60, "metadata": {"list": "me"}}).json()
    assert len(validated("GET", "/sandboxes?metadata=list%3Dme").json()) == 1
    listed = validated("GET", "/v2/sandboxes?metadata=list%3Dme&state=running&limit=1&order=asc")
    assert listed.json()[0]["sandboxID"] == made["sandboxID"]
    assert listed.headers["x-total-running"].isdigit()
    validated("DELETE", f"/sandboxes/{made['sandboxID']}")


def test_metrics(validated) -> None:
    made = validated("POST", "/sandboxes", json={"templateID": "base", "timeout": 60}).json()["sandboxID"]
    assert validated("GET", f"/sandboxes/{made}/metrics").json()[0]["memTotal"] == 512 << 20
    assert validated("GET", f"/sandboxes/{made}/metrics?start=0&end=1").json() == []
    many = validated("GET", f"/sandboxes/metrics?sandbox_ids={made},{NOBODY}").json()["sandboxes"]
    assert set(many) == {made}, "what does not run, or is not ours, is left out"
    for bad in (
        "",
        "sandbox_ids=",
        f"sandbox_ids={made},{made}",
        "sandbox_ids=A",
        "sandbox_ids=" + ",".join(f"i{n:020d}" for n in range(101)),
    ):
        assert validated("GET", f"/sandboxes/metrics?{bad}").status_code == 400
    for bad in ("start=5&end=1", "start=x", "end=-1"):
        assert validated("GET", f"/sandboxes/{made}/metrics?{bad}").status_code == 400
    assert validated("DELETE", f"/sandboxes/{made}").status_code == 204
    assert validated("GET", f"/sandboxes/{made}/metrics").status_code == 404


def test_snapshots_and_forks(validated) -> None:
    made = validated("POST", "/sandboxes", json={"templateID": "base", "timeout": 60}).json()["sandboxID"]
    taken = validated("POST", f"/sandboxes/{made}/snapshots", json={"name": "warm"})
    assert taken.status_code == 201
    assert validated("GET", "/snapshots?limit=5").json() == [taken.json()]
    assert validated("GET", "/snapshots?limit=0").status_code == 400
    forked = validated("POST", f"/sandboxes/{made}/fork", json={"count": 2, "timeout": 30})
    assert forked.status_code == 201
    assert len(forked.json()) == 2
    assert validated("POST", f"/sandboxes/{made}/fork", json={"count": 101}).status_code == 400
    for one in forked.json():
        assert validated("DELETE", f"/sandboxes/{one['sandbox']['sandboxID']}").status_code == 204
    assert validated("DELETE", f"/templates/{taken.json()['snapshotID']}", as_path="/templates/{templateID}").status_code == 204
    assert validated("DELETE", f"/templates/{taken.json()['snapshotID']}", as_path="/templates/{templateID}").status_code == 404
    assert validated("DELETE", f"/sandboxes/{made}").status_code == 204


def test_failures_have_the_shape(validated) -> None:
    assert validated("POST", "/sandboxes", json={"templateID": "none"}).status_code == 404
    assert validated("POST", "/sandboxes", json={"templateID": "base", "timeout": -1}).status_code == 400
    assert validated("POST", "/sandboxes", content=b"{").status_code == 400
    assert validated("GET", "/v2/sandboxes?limit=1000").status_code == 400
    assert validated("GET", f"/sandboxes/{NOBODY}").status_code == 404
    assert validated("GET", f"/sandboxes/{NOBODY}", key="wrong").status_code == 401
    assert validated("POST", f"/sandboxes/{NOBODY}/connect", json={"timeout": 5}).status_code == 404
    assert validated("POST", f"/sandboxes/{NOBODY}/pause").status_code == 404
    assert validated("POST", f"/sandboxes/{NOBODY}/snapshots", json={}).status_code == 404
    assert validated("POST", f"/sandboxes/{NOBODY}/fork", json={}).status_code == 404
    assert validated("GET", "/volumes").status_code == 501


def test_templates_and_account(validated) -> None:
    template_id = validated("GET", "/templates").json()[0]["templateID"]
    assert validated("GET", "/v2/templates").status_code == 200
    assert validated("GET", f"/templates/{template_id}", as_path="/templates/{templateID}").status_code == 200
    assert validated("GET", "/templates/aliases/base", as_path="/templates/aliases/{alias}").status_code == 200
    assert validated("GET", "/templates/aliases/none", as_path="/templates/aliases/{alias}").status_code == 404
    assert validated("GET", "/teams").status_code == 200
    assert validated("GET", "/health").status_code == 204
    made = validated("POST", "/api-keys", json={"name": "contract"})
    assert made.status_code == 201
    assert validated("GET", "/api-keys").status_code == 200
    assert validated("DELETE", f"/api-keys/{made.json()['id']}", as_path="/api-keys/{apiKeyID}").status_code == 204
    assert validated("DELETE", f"/api-keys/{made.json()['id']}", as_path="/api-keys/{apiKeyID}").status_code == 404


def test_every_path_of_the_description_is_answered(served, contract) -> None:
    """Nothing of E2B's API is simply unknown to us."""
    for path, operations in contract["paths"].items():
        target = re.sub(r"\{\w+\}", NOBODY, path)
        for method in operations:
            if method == "parameters":
                continue
            answer = served.http.request(method.upper(), target, headers={"X-API-KEY": served.key}, json={} if method != "get" else None)
            assert answer.status_code != 405, (method, path)
            if answer.status_code == 404:
                assert "there is no such path" not in answer.text, (method, path)
