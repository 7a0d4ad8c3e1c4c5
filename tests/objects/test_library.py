"""Control's images with a bucket: two replicas with benches of their own, one store."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.images import assembling
from atoll.images import library as libraries
from atoll.images.artifacts import BLOBS, MANIFESTS, Artifacts, Folder, key_of
from atoll.images.bucket import Bucket
from atoll.images.library import FRESH_S, Library
from atoll.wire import manifests
from tests.objects.server import S3Server


class Now:
    """A clock that tests move."""

    def __init__(self) -> None:
        import time

        self.ahead_s = 0.0
        self._wall = time.time

    def now(self) -> float:
        return self._wall() + self.ahead_s


def put(bench: Path, content: bytes) -> str:
    path = bench / "blobs" / "sha256" / hashlib.sha256(content).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return f"sha256:{path.name}"


def image(bench: Path, *layers: bytes) -> str:
    made = [{"digest": put(bench, layer), "size": len(layer), "mediaType": assembling.LAYER_TYPE} for layer in layers]
    config = json.dumps(
        {"rootfs": {"diff_ids": [one["digest"] for one in made]}, "tag": os.urandom(4).hex(), "config": {"User": "me"}}
    ).encode()
    document = {"config": {"digest": put(bench, config), "size": len(config)}, "layers": made}
    return put(bench, json.dumps(document).encode())


@pytest.fixture
def clock() -> Now:
    return Now()


@pytest.fixture
def store(server: S3Server, tmp_path: Path) -> Bucket:
    return Bucket(server.settings(prefix=tmp_path.name))


def replica(path: Path, store: Artifacts, clock: Now) -> Library:
    path.mkdir(exist_ok=True)
    return Library(path, store, clock.now)


async def keys(store: Artifacts) -> set[str]:
    return {info.key for prefix in (BLOBS, MANIFESTS) async for info in store.list(prefix)}


async def test_an_image_is_everybodys_once_it_is_published(store: Bucket, clock: Now, tmp_path: Path) -> None:
    one, two = (replica(tmp_path / name, store, clock) for name in ("one", "two"))
    digest = image(one.bench, b"first" * 1000, b"second" * 1000)
    assert not await two.has(digest)
    await one.publish(digest)
    assert await two.has(digest)
    assert len(await keys(store)) == 4
    layer = put(two.bench, b"third")
    await two.documents(digest)
    longer = assembling.extend(two.bench, digest, layer=layer, size=5)
    await two.publish(longer)
    assert await one.has(longer), "layers that lie in the store already need not be on the bench"
    await one.publish(digest)


async def test_a_publish_that_was_cut_off_is_not_there(store: Bucket, clock: Now, tmp_path: Path) -> None:
    one, two = (replica(tmp_path / name, store, clock) for name in ("one", "two"))
    digest = image(one.bench, b"layer" * 1000)
    missing = one.bench / key_of(BLOBS, json.loads((one.bench / key_of(BLOBS, digest)).read_bytes())["layers"][0]["digest"])
    content = missing.read_bytes()
    missing.unlink()
    with pytest.raises(Refused) as caught:
        await one.publish(digest)
    assert caught.value.code is Code.IMAGE_UNAVAILABLE
    assert not await two.has(digest), "the manifest comes last"
    missing.write_bytes(content)
    await one.publish(digest)
    assert await two.has(digest)


async def test_a_document_that_was_tampered_with_is_not_taken_up(server: S3Server, store: Bucket, clock: Now, tmp_path: Path) -> None:
    one, two = (replica(tmp_path / name, store, clock) for name in ("one", "two"))
    digest = image(one.bench, b"layer")
    await one.publish(digest)
    await store.write(key_of(BLOBS, digest), b'{"layers": [], "config": {}}')
    with pytest.raises(Refused) as caught:
        await two.documents(digest)
    assert caught.value.code is Code.IMAGE_CORRUPT
    assert not (two.bench / key_of(BLOBS, digest)).exists()


async def test_uploads_are_found_by_every_replica(store: Bucket, clock: Now, tmp_path: Path) -> None:
    one, two = (replica(tmp_path / name, store, clock) for name in ("one", "two"))
    source = one.bench / "uploads" / "tea_1" / "files" / "abc"
    source.parent.mkdir(parents=True)
    source.write_bytes(b"context")
    elsewhere = two.bench / "uploads" / "tea_1" / "files" / "abc"
    assert not await two.bring_upload(elsewhere)
    await one.keep_upload(source, name=source)
    assert await two.bring_upload(elsewhere)
    assert elsewhere.read_bytes() == b"context"
    await two.drop_upload(elsewhere)
    source.unlink()
    assert not await one.bring_upload(source)


async def test_a_cache_of_builds_is_the_newest_of_all_replicas(store: Bucket, clock: Now, tmp_path: Path) -> None:
    one, two = (replica(tmp_path / name, store, clock) for name in ("one", "two"))
    here, there = (each.bench / "uploads" / "tea_1" / "caches" / "abc.tar" for each in (one, two))
    for path in (here, there):
        path.parent.mkdir(parents=True)
    await two.bring_cache(there)
    assert not there.exists()
    here.write_bytes(b"first")
    await one.share_cache(here, folder_bytes_max=100)
    await two.bring_cache(there)
    assert there.read_bytes() == b"first"
    there.write_bytes(b"changed by two")
    await two.share_cache(there, folder_bytes_max=100)
    await one.bring_cache(here)
    assert here.read_bytes() == b"changed by two"
    # What is the newest is not fetched again.
    fetched = []
    store.get = lambda key, target: fetched.append(key)  # type: ignore[method-assign,assignment,func-returns-value]
    await one.bring_cache(here)
    await two.bring_cache(there)
    assert not fetched


async def test_caches_in_the_bucket_have_a_limit_and_are_collected(store: Bucket, clock: Now, tmp_path: Path) -> None:
    one = replica(tmp_path / "one", store, clock)
    folder = one.bench / "uploads" / "tea_1" / "caches"
    folder.mkdir(parents=True)

    async def kept() -> set[str]:
        return {info.key.rpartition("/")[2] async for info in store.list("uploads/tea_1/caches")}

    for name in ("a.tar", "b.tar", "c.tar"):
        (folder / name).write_bytes(b"x" * 40)
        await one.share_cache(folder / name, folder_bytes_max=100)
        # The bucket's times are whole seconds.
        await asyncio.sleep(1.1)
    assert await kept() == {"b.tar", "c.tar"}
    clock.ahead_s = libraries.UPLOADS_KEPT_S + 10
    await one.collect([])
    assert await kept() == set()


async def test_without_a_bucket_a_cache_is_where_it_is(clock: Now, tmp_path: Path) -> None:
    one = replica(tmp_path / "one", Folder(tmp_path / "one"), clock)
    path = one.bench / "uploads" / "tea_1" / "caches" / "abc.tar"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    await one.bring_cache(path)
    await one.share_cache(path, folder_bytes_max=1)
    assert path.read_bytes() == b"mine"
    assert [one.name for one in path.parent.iterdir()] == ["abc.tar"]


def envelope(of: str) -> tuple[str, bytes]:
    payload = json.dumps({"image": of}).encode()
    made = manifests.sealed(payload, manifests.IMAGE_FORM, [])
    return key_of(MANIFESTS, manifests.digest_of(payload)), made.model_dump_json().encode()


@pytest.mark.parametrize("kind", ["bucket", "folder"])
async def test_collection_takes_what_nothing_wanted_has(kind: str, store: Bucket, clock: Now, tmp_path: Path) -> None:
    bench = tmp_path / "one"
    place: Artifacts = store if kind == "bucket" else Folder(bench)
    one = replica(bench, place, clock)
    kept, gone = image(bench, b"shared", b"kept"), image(bench, b"shared", b"gone" * 100)
    for digest in (kept, gone):
        await one.publish(digest)
        await place.write(*envelope(digest))
    await place.write(f"{MANIFESTS}/{'e' * 64}", b"broken")
    everything = await keys(place)
    if kind == "bucket":
        assert (await one.collect({kept})).keys == (), "a replica may be about to record it"
    clock.ahead_s = FRESH_S + 10
    shown = await one.collect({kept}, dry_run=True)
    assert await keys(place) == everything
    # A template that has no image yet names none.
    went = await one.collect({kept, ""})
    assert went == shown
    assert shown.size > 400
    left = await keys(place)
    assert left == everything - set(shown.keys)
    assert {key_of(BLOBS, kept), envelope(kept)[0], key_of(BLOBS, f"sha256:{hashlib.sha256(b'shared').hexdigest()}")} <= left
    assert not {key_of(BLOBS, gone), envelope(gone)[0], f"{MANIFESTS}/{'e' * 64}"} & left
    assert (await one.collect({kept})).keys == ()
    assert await one.has(kept)
    assert not await one.has(gone), "whatever the bench beside a bucket still has"


async def test_many_publish_one_image_at_once(store: Bucket, clock: Now, tmp_path: Path) -> None:
    one = replica(tmp_path / "one", store, clock)
    digest = image(one.bench, os.urandom(2_000_000))
    await asyncio.gather(*(one.publish(digest) for _ in range(4)))
    assert await one.has(digest)
    assert libraries.SIDE_BY_SIDE > 1
