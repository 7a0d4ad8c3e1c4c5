"""A host's images for people: used longest ago goes first; what is used, pinned or about to be used never goes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import Code, Refused
from atoll.images import blobs, policy
from atoll.images.cache import ImageCache
from atoll.images.carrier import Carrier
from atoll.images.policy import FILE, Policy
from atoll.images.shelf import Shelf
from atoll.images.unpacking import Unpacking
from atoll.programs import image_socket
from tests.unit.images.test_unpacking import ONE, THREE, TWO, make

NOWHERE = {"folder": "nowhere"}


class Host:
    def __init__(self, path: Path, **limits: int) -> None:
        self.path, self.used = path, set[str]()
        self.file = path / FILE
        policy.save(self.file, Policy(**limits))
        self.unpacking = Unpacking(Carrier(Path("none"), path / "blobs"), path / "own", objects=lambda: NOWHERE, policy=self.file)
        self.cache = ImageCache(path / "shared", path / "own")
        self.shelf = Shelf(self.unpacking, self.cache, self.file, lambda: self.used)
        (path / "own").mkdir()
        for number, digest in enumerate((ONE, TWO, THREE)):
            os.utime(make(path / "own", digest), (1000 + number, 1000 + number))

    def has(self) -> set[str]:
        return {image.digest for image in self.cache.all()}

    def blob(self, content: bytes, *, used_at: float, name: str | None = None) -> Path:
        path = self.path / "blobs" / "blobs" / "sha256" / (name or hashlib.sha256(content).hexdigest())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (used_at, used_at))
        return path


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def do(host: Host, what: str, **more: Any) -> dict[str, Any]:
    return await host.shelf.asked({"do": what, **more})


async def test_what_there_is_used_last_first(host: Host) -> None:
    host.used = {ONE}
    await do(host, "pin", digest=TWO)
    host.blob(b"12345", used_at=1.0)
    found = await do(host, "ls")
    assert [(one["digest"], one["in_use"], one["pinned"], one["own"]) for one in found["images"]] == [
        (THREE, False, False, True), (TWO, False, True, True), (ONE, True, False, True),
    ]  # fmt: skip
    assert (found["sum"]["trees"], found["sum"]["blobs"], found["sum"]["blob_bytes"], found["sum"]["pinned"]) == (3, 1, 5, 1)
    assert json.loads(json.dumps(found)) == found


async def test_prune_spares_what_is_used_pinned_or_about_to_be_used(host: Host) -> None:
    host.used = {ONE}
    await do(host, "pin", digest=TWO)
    assert (await do(host, "prune"))["images"] == [], "all of it is within the limits"
    would = await do(host, "prune", all=True, dry_run=True)
    assert [one["digest"] for one in would["images"]] == [THREE]
    assert host.has() == {ONE, TWO, THREE}
    with host.unpacking.pin(THREE):
        assert (await do(host, "prune", all=True))["images"] == []
    assert [one["digest"] for one in (await do(host, "prune", all=True))["images"]] == [THREE]
    assert host.has() == {ONE, TWO}
    assert (await do(host, "unpin", digest=TWO)) == {"wasPinned": True}
    assert (await do(host, "unpin", digest=TWO)) == {"wasPinned": False}
    host.used = set()
    assert [one["digest"] for one in (await do(host, "prune", all=True))["images"]] == [ONE, TWO], "used longest ago first"


async def test_all_goes_also_what_shares_every_byte(host: Host) -> None:
    for digest in (ONE, TWO, THREE):
        manifest = host.path / "own" / "sha256" / digest.removeprefix("sha256:") / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "own_bytes": 0}))
    assert (await do(host, "prune"))["images"] == []
    assert {one["digest"] for one in (await do(host, "prune", all=True))["images"]} == {ONE, TWO, THREE}
    assert host.has() == set()


def say(host: Host, digest: str, **what: object) -> None:
    """In a tree's manifest, as the program that makes trees says it."""
    manifest = host.path / "own" / "sha256" / digest.removeprefix("sha256:") / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **what}))
    os.utime(manifest.parent, (1000 + int(digest[-1]), 1000 + int(digest[-1])))


async def test_what_two_trees_share_counts_for_the_one_that_is_left(host: Host) -> None:
    say(host, ONE, own_bytes=3 << 20)
    say(host, TWO, own_bytes=0, shares=[{"digest": ONE, "bytes": 3 << 20}])
    say(host, THREE, own_bytes=10)
    assert (await do(host, "ls"))["sum"]["tree_bytes"] == (3 << 20) + 10
    await do(host, "pin", digest=TWO)
    await do(host, "pin", digest=THREE)
    went = await do(host, "prune", all=True)
    assert ([one["digest"] for one in went["images"]], went["bytes"]) == ([ONE], 0), "nothing came free: the other one has it"
    found = await do(host, "ls")
    assert {one["digest"]: one["own_bytes"] for one in found["images"]} == {TWO: 3 << 20, THREE: 10}
    assert found["sum"]["tree_bytes"] == (3 << 20) + 10


async def test_trees_go_until_what_is_left_is_within_the_limit(host: Host) -> None:
    say(host, ONE, own_bytes=3 << 20)
    say(host, TWO, own_bytes=0, shares=[{"digest": ONE, "bytes": 3 << 20}])
    say(host, THREE, own_bytes=10)
    await do(host, "limit", trees_mib=1)
    went = await do(host, "prune")
    assert ([one["digest"] for one in went["images"]], went["bytes"]) == ([ONE, TWO], 3 << 20)


async def test_a_limit_holds_from_the_next_collection_on(host: Host) -> None:
    make(host.path / "own", "sha256:" + "4" * 64, body="x" * (2 << 20))
    assert (await do(host, "limit", trees_mib=1)) == {"treesMib": 1, "blobsMib": policy.BLOBS_MIB_MAX}
    went = await host.unpacking.collect(host.cache, lambda: host.used)
    assert went == [ONE, TWO, THREE, "sha256:" + "4" * 64]


async def test_blobs_go_by_last_use_and_those_of_pinned_images_stay(host: Host) -> None:
    config = host.blob(b"config", used_at=1.0)
    manifest = json.dumps({"config": {"digest": f"sha256:{config.name}"}, "layers": []}).encode()
    pinned = host.blob(manifest, used_at=1.0)
    make(host.path / "own", f"sha256:{pinned.name}")
    await do(host, "pin", digest=f"sha256:{pinned.name}")
    old, new = host.blob(b"o" * 600_000, used_at=10.0), host.blob(b"n" * 600_000, used_at=5.0)
    blobs.used(host.path / "blobs", f"sha256:{new.name}")
    await do(host, "limit", blobs_mib=1)
    await do(host, "prune")
    assert (old.exists(), new.exists(), config.exists(), pinned.exists()) == (False, True, True, True)
    await do(host, "prune", all=True)
    assert (new.exists(), config.exists(), pinned.exists()) == (False, True, True)


async def test_blobs_stay_while_somebody_is_between_them_and_a_tree(host: Host) -> None:
    blob = host.blob(b"fetched", used_at=1.0)
    with host.unpacking.pin(ONE):
        await do(host, "prune", all=True)
        assert blob.exists()
        with host.unpacking.pin(TWO):
            await host.unpacking.collect(host.cache, lambda: host.used, policy=Policy(0, 0), made=ONE)
        assert blob.exists()
        await host.unpacking.collect(host.cache, lambda: host.used, policy=Policy(0, 0), made=ONE)
    assert not blob.exists()


async def test_requests_of_the_socket(host: Host) -> None:
    path = host.path / "s"

    def raw(line: bytes) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(line)
            return dict(json.loads(client.makefile("rb").read()))

    assert image_socket.ask(path, {"do": "ls"}) is None, "no agent runs"
    async with image_socket.serving(path, host.shelf):
        assert path.stat().st_mode & 0o777 == 0o600
        found = await asyncio.to_thread(image_socket.ask, path, {"do": "ls"})
        assert found is not None
        assert [one["digest"] for one in found["images"]] == [THREE, TWO, ONE]
        for line in (
            b"{\n",
            b"[]\n",
            b"\xff\n",
            b"x" * 200_000 + b"\n",
            b'{"do": "limit", "trees_mib": "much"}\n',
            b'{"do": "limit", "blobs_mib": -1}\n',
        ):
            assert (await asyncio.to_thread(raw, line))["error"]["code"] == "INVALID_REQUEST", line[:40]
        with pytest.raises(Refused) as caught:
            await asyncio.to_thread(image_socket.ask, path, {"do": "pin", "digest": "sha256:" + "9" * 64})
        assert (caught.value.code, caught.value.hint) == (Code.IMAGE_UNAVAILABLE, "`atoll image ls` shows what it has.")
    assert not path.exists()
    path.touch()
    with socket.socket(socket.AF_UNIX) as dead:
        path.unlink()
        dead.bind(str(path))
    assert image_socket.ask(path, {"do": "ls"}) is None, "a killed agent leaves its socket"


async def test_verify_sets_aside_what_is_broken_where_nothing_uses_it(host: Host) -> None:
    assert await do(host, "verify") == {"problems": []}
    for digest in (ONE, TWO):
        (host.path / "own" / "sha256" / digest.removeprefix("sha256:") / "rootfs" / "body").write_text("shorter")
    host.used = {ONE}
    good, bad = host.blob(b"good", used_at=1.0), host.blob(b"bad", used_at=1.0, name="a" * 64)
    problems = (await do(host, "verify"))["problems"]
    assert len(problems) == 3
    assert host.has() == {ONE, THREE}, "what a sandbox stands on stays until it has ended"
    assert (good.exists(), bad.exists()) == (True, False)
    assert (host.path / "blobs" / "quarantine" / ("a" * 64)).exists()
    host.used = set()
    assert len((await do(host, "verify"))["problems"]) == 1
    assert await do(host, "verify") == {"problems": []}


async def test_what_cannot_be_done_is_refused(host: Host) -> None:
    for what, more, code in (
        ("pin", {"digest": "sha256:" + "9" * 64}, Code.IMAGE_UNAVAILABLE),
        ("dance", {}, Code.INVALID_REQUEST),
    ):
        with pytest.raises(Refused) as caught:
            await do(host, what, **more)
        assert caught.value.code is code
    host.file.write_text("{")
    for what in ("ls", "prune", "pin"):
        with pytest.raises(Refused) as caught:
            await do(host, what, digest=ONE)
        assert caught.value.code is Code.SETUP_FAILED
    assert host.has() == {ONE, TWO, THREE}, "nothing goes while nobody knows what is pinned"
