"""The artifact store in a folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.images.artifacts import BLOBS, Artifacts, Folder, key_of

KEY = "blobs/sha256/" + "a" * 64


@pytest.fixture
def store(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


async def keys(store: Artifacts, prefix: str) -> set[str]:
    return {info.key async for info in store.list(prefix)}


async def test_a_file_goes_in_and_comes_out(store: Folder, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x" * 3_000_000)
    assert await store.head(KEY) is None
    await store.put(KEY, source)
    found = await store.head(KEY)
    assert found is not None
    assert (found.key, found.size) == (KEY, 3_000_000)
    await store.get(KEY, target)
    assert target.read_bytes() == source.read_bytes()
    assert await store.read(KEY) == source.read_bytes()
    await store.delete(KEY)
    await store.delete(KEY)
    assert await store.head(KEY) is None


async def test_a_file_that_lies_there_already_is_there(store: Folder, tmp_path: Path) -> None:
    await store.write(KEY, b"content")
    place = tmp_path / "store" / KEY
    before = place.stat().st_ino
    await store.put(KEY, place)
    await store.get(KEY, place)
    assert (place.stat().st_ino, place.read_bytes()) == (before, b"content")


async def test_what_is_not_there_is_named(store: Folder, tmp_path: Path) -> None:
    for work in (store.read(KEY), store.get(KEY, tmp_path / "target"), store.get(KEY, tmp_path / "store" / KEY)):
        with pytest.raises(Refused) as caught:
            await work
        assert caught.value.code is Code.ARTIFACT_NOT_FOUND
    assert not (tmp_path / "target").exists()


async def test_what_is_below_a_prefix_is_listed(store: Folder) -> None:
    assert await keys(store, "uploads") == set()
    for key in ("uploads/team/a", "uploads/team/files/b", "uploads-of-others/c", "manifests/d"):
        await store.write(key, b"x")
    assert await keys(store, "uploads") == {"uploads/team/a", "uploads/team/files/b"}


async def test_more_than_was_asked_for_is_refused(store: Folder) -> None:
    await store.write(KEY, b"12345")
    assert await store.read(KEY, bytes_max=5) == b"12345"
    with pytest.raises(Refused) as caught:
        await store.read(KEY, bytes_max=4)
    assert caught.value.code is Code.BODY_TOO_LARGE


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a/../b", "..", "a//b", "a/.b", "a\\b", "a\nb", "x" * 600, "a/", "ü"])
async def test_no_key_leads_out(store: Folder, key: str, tmp_path: Path) -> None:
    for work in (store.write(key, b"x"), store.read(key), store.head(key), store.delete(key), store.put(key, tmp_path)):
        with pytest.raises(Refused) as caught:
            await work
        assert caught.value.code is Code.INVALID_REQUEST


@pytest.mark.parametrize("digest", ["", "sha256:", "sha256:" + "A" * 64, "sha256:" + "a" * 63 + "/", "md5:" + "a" * 64, "a" * 64])
def test_no_digest_that_is_none_makes_a_key(digest: str) -> None:
    with pytest.raises(Refused):
        key_of(BLOBS, digest)
    assert key_of(BLOBS, "sha256:" + "a" * 64) == KEY


async def test_a_write_that_is_cut_off_leaves_what_was_there(store: Folder, tmp_path: Path) -> None:
    await store.write(KEY, b"first")
    fifo = tmp_path / "missing"
    with pytest.raises(Unavailable) as caught:
        await store.put(KEY, fifo)
    assert caught.value.code is Code.ARTIFACTS_UNAVAILABLE
    assert await store.read(KEY) == b"first"
    assert list((tmp_path / "store" / "partial").iterdir()) == []


async def test_many_write_one_key(store: Folder) -> None:
    await asyncio.gather(*(store.write(KEY, b"same" * 1000) for _ in range(20)))
    assert await store.read(KEY) == b"same" * 1000
