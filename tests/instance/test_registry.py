"""kill -9 of the registry and of what stands before it, in the middle of a push, a pull and a collection."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.e2e import oci
from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, kill
from tests.instance.test_build_faults import from_image
from tests.instance.test_builds import ended, nothing_left

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


def push(client: Client, repository: str, megabytes: int) -> list[str]:
    """An image with one layer of chance, as `:one`; its blobs' digests."""
    layer = oci.layer(oci.Entry("etc/large", os.urandom(megabytes << 20)))
    diff = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = json.dumps({"os": "linux", "architecture": oci.ARCH, "config": {}, "rootfs": {"type": "layers", "diff_ids": [diff]}}).encode()
    described = []
    for content, kind in ((config, "config.v1+json"), (layer, "layer.v1.tar")):
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        begun = ask(client, "POST", f"/v2/{repository}/blobs/uploads/", repository)
        sent = ask(client, "PUT", f"{begun.headers['location']}&digest={digest}", repository, content=content)
        assert sent.status_code == 201, sent.text
        described.append({"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, "size": len(content)})
    kind = "application/vnd.oci.image.manifest.v1+json"
    document = {"schemaVersion": 2, "mediaType": kind, "config": described[0], "layers": described[1:]}
    path = f"/v2/{repository}/manifests/one"
    sent = ask(client, "PUT", path, repository, content=json.dumps(document).encode(), headers={"Content-Type": kind})
    assert sent.status_code == 201, sent.text
    return [str(one["digest"]) for one in described]


@pytest.mark.parametrize("programs", [("registry",), ("registry", "edge")], ids="+".join)
def test_a_pull_goes_on_after_a_kill_of_the_registry(instance: Instance, client: Client, programs: Sequence[str]) -> None:
    repository = f"default/{os.urandom(4).hex()}"
    push(client, repository, 300)
    image = f"{client.url.removeprefix('http://')}/{repository}:one"
    name = f"r-{os.urandom(4).hex()}"
    build = from_image(client, name, image)
    partial = instance.layout.blobs / "partial"

    def coming() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_size > PART for path in partial.glob("fetch-*"))
        return False

    until(coming, within_s=60)
    kill(instance, *programs)
    instance.until_well()
    done = ended(client, build)
    # Either it was back in time, and the rest was asked for, or the build says that it was not.
    if done["status"] == "error":
        assert done["reason"]["step"] == "base", done
        assert "cannot be fetched" in done["reason"]["message"] or "the registry answered" in done["reason"]["message"], done
    nothing_left(instance)
    again = ended(client, from_image(client, name, image))
    assert again["status"] == "ready", again


def test_a_collection_that_is_killed_takes_nothing_that_is_used_and_is_gone_on_with(instance: Instance, client: Client) -> None:
    repository = f"default/{os.urandom(4).hex()}"
    used = push(client, repository, 1)
    (blobs,) = instance.layout.registry.rglob("registry/v2/blobs/sha256")
    owner = blobs.stat()
    waste = {f"sha256:{hashlib.sha256(str(number).encode()).hexdigest()}" for number in range(4000)}
    long_ago = time.time() - 3 * 24 * 3600
    for digest in waste:
        place = blobs / digest[7:9] / digest[7:]
        place.mkdir(parents=True)
        (place / "data").write_bytes(b"waste")
        os.utime(place / "data", (long_ago, long_ago))
        for one in (place.parent, place, place / "data"):
            os.chown(one, owner.st_uid, owner.st_gid)

    def left() -> int:
        return sum((blobs / digest[7:9] / digest[7:] / "data").exists() for digest in waste)

    told: list[subprocess.CompletedProcess[str]] = []
    collecting = threading.Thread(target=lambda: told.append(instance.run("registry", "gc", check=False)))
    collecting.start()
    until(lambda: left() < len(waste), within_s=30)
    kill(instance, "registry")
    collecting.join(60)
    instance.until_well()
    until(lambda: answering(client), within_s=30)
    assert left(), "it was done before it was killed: more waste is needed"
    assert told[0].returncode != 0
    assert "the registry did not collect" in told[0].stderr
    for digest in used:
        assert ask(client, "HEAD", f"/v2/{repository}/blobs/{digest}", repository).status_code == 200
    done = instance.json("registry", "gc", "--json")
    assert not left()
    assert set(done["blobs"]) <= waste
    for digest in used:
        assert ask(client, "HEAD", f"/v2/{repository}/blobs/{digest}", repository).status_code == 200
    assert ended(client, from_image(client, "after-gc", f"{client.url.removeprefix('http://')}/{repository}:one"))["status"] == "ready"
