"""`/v1` on the running product."""

from __future__ import annotations

import time
import uuid

import pytest


@pytest.fixture
def made(product):
    """Ids to be released after the test."""
    ids: list[str] = []
    yield ids
    for sandbox_id in ids:
        product.call("DELETE", f"/v1/sandboxes/{sandbox_id}")


def _until(product, sandbox_id: str, *states: str, within_s: float = 30) -> dict:
    deadline = time.monotonic() + within_s
    while True:
        body = product.call("GET", f"/v1/sandboxes/{sandbox_id}").json()
        if body["state"] in states:
            return body
        assert time.monotonic() < deadline, body
        time.sleep(0.1)


@pytest.mark.parametrize("class_name", ["default", "shared-kernel"])
def test_from_create_to_released(product, made, class_name) -> None:
    request_id = f"e2e.{uuid.uuid4()}"
    body = {"clientRequestId": request_id, "class": class_name, "timeoutSeconds": 120, "metadata": {"v": "1"}, "env": {"A": "b"}}
    answer = product.call("POST", "/v1/sandboxes", json=body)
    assert answer.status_code == 201, answer.text
    sandbox = answer.json()
    made.append(sandbox["id"])
    assert (sandbox["state"], sandbox["class"], sandbox["generation"]) == ("ready", class_name, 1)
    assert sandbox["isolation"] == {"default": "gvisor", "shared-kernel": "shared-kernel"}[class_name]
    driver, saves = {"default": ("oci-runsc", "full"), "shared-kernel": ("oci-crun", "filesystem")}[class_name]
    assert sandbox["machine"] == {"driver": driver, "hardware": None, "saves": saves}
    assert product.call("POST", "/v1/sandboxes", json=body).json()["id"] == sandbox["id"]
    other = product.call("POST", "/v1/sandboxes", json={**body, "timeoutSeconds": 121})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "REQUEST_MISMATCH")
    listed = product.call("GET", "/v1/sandboxes?metadata=v%3D1").json()["items"]
    assert sandbox["id"] in [one["id"] for one in listed]
    released = product.call("DELETE", f"/v1/sandboxes/{sandbox['id']}")
    assert released.status_code == 200
    assert _until(product, sandbox["id"], "released", "failed")["reason"] == "RELEASE_REQUESTED"
    assert product.call("DELETE", f"/v1/sandboxes/{sandbox['id']}").status_code == 404
    events = product.call("GET", f"/v1/sandboxes/{sandbox['id']}/events").json()["items"]
    assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
    assert {"sandbox.accepted", "sandbox.ready"} <= {event["type"] for event in events}
    assert events[-1]["state"] == "released"


def test_size(product, made) -> None:
    sandbox = product.call("POST", "/v1/sandboxes", json={"size": {"cpuMillis": 500, "memoryMib": 256, "diskMib": 1024}}).json()
    made.append(sandbox["id"])
    assert sandbox["size"] == {"cpuMillis": 500, "memoryMib": 256, "diskMib": 1024}
    too_big = product.call("POST", "/v1/sandboxes", json={"size": {"memoryMib": 10_000_000}})
    assert (too_big.status_code, too_big.json()["error"]["code"]) == (400, "CLASS_LIMIT")


def test_accepted_at_once(product, made) -> None:
    began = time.monotonic()
    answer = product.call("POST", "/v1/sandboxes", json={"wait": False})
    assert time.monotonic() - began < 2
    assert answer.status_code in (201, 202)
    made.append(answer.json()["id"])
    assert _until(product, answer.json()["id"], "ready")["accessToken"]


def test_end(product, made) -> None:
    sandbox = product.call("POST", "/v1/sandboxes", json={"timeoutSeconds": 60}).json()
    made.append(sandbox["id"])
    moved = product.call("POST", f"/v1/sandboxes/{sandbox['id']}/end", json={"timeoutSeconds": 2})
    assert moved.status_code == 200, moved.text
    ended = _until(product, sandbox["id"], "released", within_s=10)
    assert ended["reason"] == "END_REACHED"


def test_another_team(product, stranger, made) -> None:
    sandbox = product.call("POST", "/v1/sandboxes", json={}).json()
    made.append(sandbox["id"])
    nobody = "i" + "0" * 20
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("GET", "/logs")):
        theirs = product.call(method, f"/v1/sandboxes/{sandbox['id']}{path}", key=stranger)
        never = product.call(method, f"/v1/sandboxes/{nobody}{path}", key=stranger)
        assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "SANDBOX_NOT_FOUND")
        assert theirs.json()["error"]["message"].replace(sandbox["id"], nobody) == never.json()["error"]["message"]
    assert product.call("GET", "/v1/sandboxes?scope=all", key=stranger).json()["items"] == []
    assert product.call("GET", "/v1/hosts", key=stranger).status_code == 403


def test_the_deployment(product) -> None:
    assert "base" in {one["name"] for one in product.call("GET", "/v1/templates").json()["items"]}
    status = product.call("GET", "/v1/status").json()
    assert status["ready"]
    assert status["hosts"]["healthy"] >= 1
    hosts = product.call("GET", "/v1/hosts").json()["items"]
    assert "gvisor" in hosts[0]["isolations"]
    document = product.call("GET", "/v1/openapi.json").json()
    assert document["info"]["title"] == "Atoll"
    assert product.call("GET", "/health").status_code == 204
