"""The artifact store in a bucket, against a real server: the same port, and what can be wrong with a server."""

from __future__ import annotations

import os
import secrets
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.images import bucket
from atoll.images.bucket import Bucket
from tests.objects.server import S3Server


@pytest.fixture
def store(server: S3Server) -> Bucket:
    return Bucket(server.settings())


@pytest.fixture
def key() -> str:
    return f"blobs/sha256/{secrets.token_hex(32)}"


async def code(work) -> Code | None:
    try:
        await work
    except AtollError as error:
        return error.code
    return None


@pytest.mark.parametrize("size", [0, 1, 5000, 3 * bucket.PART_BYTES + 17])
async def test_a_file_goes_in_and_comes_out(server: S3Server, store: Bucket, key: str, tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "below" / "target"
    source.write_bytes(os.urandom(size))
    assert await store.head(key) is None
    await store.put(key, source)
    found = await store.head(key)
    assert found is not None
    assert (found.key, found.size) == (key, size), "keys are without the prefix"
    assert (server.files / "one" / "two" / key).stat().st_size == size
    await store.get(key, target)
    assert target.read_bytes() == source.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    await store.put(key, source)
    await store.delete(key)
    await store.delete(key)
    assert await store.head(key) is None


async def test_small_ones_are_read_and_big_ones_are_not(store: Bucket, key: str) -> None:
    await store.write(key, b"12345")
    assert await store.read(key, bytes_max=5) == b"12345"
    assert await code(store.read(key, bytes_max=4)) is Code.BODY_TOO_LARGE


async def test_what_is_not_there_is_named(store: Bucket, key: str, tmp_path: Path) -> None:
    assert await code(store.read(key)) is Code.ARTIFACT_NOT_FOUND
    assert await code(store.get(key, tmp_path / "x")) is Code.ARTIFACT_NOT_FOUND
    assert list(tmp_path.iterdir()) == []


async def test_no_key_leads_out(store: Bucket) -> None:
    for key in ("../x", "/x", "a//b", ""):
        assert await code(store.write(key, b"x")) is Code.INVALID_REQUEST
        assert await code(store.read(key)) is Code.INVALID_REQUEST


async def test_what_is_below_a_prefix_is_listed_page_by_page(store: Bucket) -> None:
    for number in range(60):
        await store.write(f"uploads/team/{number}", b"x" * number)
    await store.write("uploads-of-others/1", b"x")
    found = {info.key: info.size async for info in store.list("uploads")}
    assert found == {f"uploads/team/{number}": number for number in range(60)}
    assert {info.key async for info in store.list("nothing")} == set()


async def test_a_link_reads_one_object_for_a_while(server: S3Server, store: Bucket, key: str) -> None:
    await store.write(key, b"0123456789")
    link = await store.link(key, lasts_s=60)
    assert link is not None
    assert server.secret not in link
    request = urllib.request.Request(link, headers={"Range": "bytes=3-5"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert (answer.status, answer.read()) == (206, b"345")
    another = await store.link("blobs/sha256/" + "0" * 64, lasts_s=60)
    assert another is not None
    for wrong in (link.replace(key, "blobs/sha256/" + "0" * 64), link.replace("Signature=", "Signature=0"), another):
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(wrong, timeout=10)


async def test_wrong_credentials_are_said_and_shown_nowhere(server: S3Server, key: str, tmp_path: Path) -> None:
    wrong = server.keep_credentials(tmp_path / "wrong.json", secret="nobody-knows-this-one")
    store = Bucket(server.settings(credentials=wrong))
    for work in (store.write(key, b"x"), store.read(key), store.delete(key)):
        with pytest.raises(Refused) as caught:
            await work
        assert caught.value.code is Code.ARTIFACTS_DENIED
        assert "nobody-knows" not in f"{caught.value} {caught.value.__cause__!r} {store!r} {server.settings()!r}"


async def test_a_server_that_is_away_is_waited_for_a_while_only(
    server: S3Server, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "RETRY_S", 1.0)
    away = Bucket(replace(server.settings(), endpoint="http://127.0.0.1:9"))
    source = tmp_path / "source"
    source.write_bytes(b"x")
    for work in (away.put(key, source), away.read(key), away.head(key), away.get(key, tmp_path / "target")):
        with pytest.raises(Unavailable) as caught:
            await work
        assert caught.value.code is Code.ARTIFACTS_UNAVAILABLE
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_credentials_that_others_may_read_are_not_taken(server: S3Server, tmp_path: Path) -> None:
    path = server.keep_credentials(tmp_path / "c.json")
    path.chmod(0o644)
    for broken in (path, tmp_path / "missing.json"):
        with pytest.raises(Refused) as caught:
            Bucket(server.settings(credentials=broken))
        assert caught.value.code is Code.SETUP_FAILED
        assert server.secret not in str(caught.value)
