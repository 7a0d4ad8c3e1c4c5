"""The registry's disk gets full in the middle of an upload: said clearly, nobody else is hurt, and it goes on once there is room."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.instance.conftest import Instance
from tests.instance.survival import Client
from tests.instance.test_registry import ask, push

MIB = 1 << 20
SPARE_MIB = 1024
"""What the registry leaves of its disk."""


@pytest.fixture
def disk(instance: Instance, tmp_path: Path) -> Iterator[Path]:
    """The registry's folder on a disk of its own, which has 200 MiB above what is to be left of it."""
    place = instance.layout.registry / "data"
    place.mkdir(exist_ok=True)
    image, owner = tmp_path / "disk", instance.layout.registry.stat()
    with image.open("wb") as file:
        file.truncate((SPARE_MIB + 200) * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", "-E", "nodiscard", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    os.chown(place, owner.st_uid, owner.st_gid)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("length", ["said", "not said"])
def test_a_disk_that_gets_full_in_an_upload_is_said(instance: Instance, client: Client, disk: Path, length: str) -> None:
    repository = f"default/{os.urandom(4).hex()}"
    content = os.urandom(120 * MIB)
    begun = ask(client, "POST", f"/v2/{repository}/blobs/uploads/", repository)
    assert begun.status_code == 202, begun.text
    hog = disk / "hog"

    def sent() -> Iterator[bytes]:
        yield content[: 20 * MIB]
        # Somebody else takes the room in the meantime.
        free = os.statvfs(disk)
        with hog.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - SPARE_MIB * MIB - 10 * MIB)
        for at in range(20 * MIB, len(content), MIB):
            yield content[at : at + MIB]

    headers = {"Content-Length": str(len(content))} if length == "said" else {}
    try:
        refused = ask(client, "PATCH", begun.headers["location"], repository, content=sent(), headers=headers)
    except httpx.TransportError:
        # The answer came before all was sent, and was lost with the connection: the next request says it.
        refused = ask(client, "POST", f"/v2/{repository}/blobs/uploads/", repository)
    assert refused.status_code == 507, refused.text
    assert refused.json()["errors"][0]["code"] == "UNAVAILABLE"
    assert "disk is full" in refused.text
    free = os.statvfs(disk)
    assert free.f_bavail * free.f_frsize > (SPARE_MIB - 40) * MIB, "what is to be left is left"
    assert client.http.get("/v2/").status_code == 401, "it answers all the same"
    hog.unlink()
    # Where it was it goes on, once there is room.
    asked = ask(client, "GET", begun.headers["location"], repository)
    assert asked.status_code == 204, asked.text
    have = int(asked.headers["range"].partition("-")[2]) + 1
    rest = ask(
        client,
        "PATCH",
        asked.headers["location"],
        repository,
        content=content[have:],
        headers={"Content-Range": f"{have}-{len(content) - 1}"},
    )
    assert rest.status_code == 202, rest.text
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    assert ask(client, "PUT", f"{rest.headers['location']}&digest={digest}", repository).status_code == 201
    push(client, repository, 1)
