"""kill -9 of the registry and of what stands before it, in the middle of a push."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, kill

PART = 3 << 20


def token(client: Client, repository: str) -> str:
    key = client.http.headers["x-api-key"]
    shown = base64.b64encode(f"anybody:{key}".encode()).decode()
    asked = {"service": "atoll-registry", "scope": f"repository:{repository}:pull,push"}
    answer = client.http.get("/registry/token", params=asked, headers={"Authorization": f"Basic {shown}"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["token"])


def ask(client: Client, method: str, path: str, repository: str, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token(client, repository)}", **options.pop("headers", {})}
    return client.http.request(method, path, headers=headers, **options)


def answering(client: Client) -> bool:
    try:
        return client.http.get("/v2/").status_code == 401
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("programs", [("registry",), ("registry", "edge", "control")], ids="+".join)
def test_an_upload_goes_on_after_a_kill(instance: Instance, client: Client, programs: Sequence[str]) -> None:
    repository = f"default/{os.urandom(4).hex()}"
    content = os.urandom(2 * PART + 4321)
    begun = ask(client, "POST", f"/v2/{repository}/blobs/uploads/", repository)
    assert begun.status_code == 202, begun.text
    where = begun.headers["location"]
    first = ask(client, "PATCH", where, repository, content=content[:PART], headers={"Content-Range": f"0-{PART - 1}"})
    assert first.status_code == 202, first.text
    where = first.headers["location"]

    def broken() -> Any:
        yield content[PART : PART + 1000]
        kill(instance, *programs)
        yield content[PART + 1000 : 2 * PART]

    # The second part is cut in its middle, by the end of who takes it.
    with pytest.raises(httpx.HTTPError):
        ask(client, "PATCH", where, repository, content=broken(), headers={"Content-Range": f"{PART}-{2 * PART - 1}"}).raise_for_status()
    instance.until_well()
    until(lambda: answering(client), within_s=30)
    asked = ask(client, "GET", where, repository)
    assert asked.status_code == 204, asked.text
    # What was not answered for may be there or not: the registry says how far it has got, and is asked for nothing twice.
    have = int(asked.headers["range"].partition("-")[2]) + 1
    assert PART <= have <= 2 * PART
    where = asked.headers["location"]
    rest = ask(client, "PATCH", where, repository, content=content[have:], headers={"Content-Range": f"{have}-{len(content) - 1}"})
    assert rest.status_code == 202, rest.text
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    done = ask(client, "PUT", f"{rest.headers['location']}&digest={digest}", repository)
    assert done.status_code == 201, done.text
    assert ask(client, "GET", f"/v2/{repository}/blobs/{digest}", repository).content == content
