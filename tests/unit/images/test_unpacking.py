"""An instance's own images: made once, found by digest, collected only when nothing needs them."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.images.artifacts import Folder
from atoll.images.cache import MOUNT_POINTS, ImageCache, count
from atoll.images.carrier import Carrier
from atoll.images.library import Library
from atoll.images.unpacking import Unpacking, touch
from tests.builders import NOW

ONE, TWO, THREE = ("sha256:" + letter * 64 for letter in "123")


def make(directory: Path, digest: str, *, body: str = "x" * 1000) -> Path:
    place = directory / "sha256" / digest.removeprefix("sha256:")
    for point in MOUNT_POINTS:
        (place / "rootfs" / point).parent.mkdir(parents=True, exist_ok=True)
        (place / "rootfs" / point).touch()
    (place / "rootfs" / "body").write_text(body)
    entries, size_bytes = count(place / "rootfs")
    manifest = {"name": "sha256", "recipe_sha256": place.name, "digest": digest, "size_bytes": size_bytes, "entries": entries}
    (place / "manifest.json").write_text(json.dumps(manifest))
    return place


class Maker(Carrier):
    """Makes trees without any program."""

    __slots__ = ("failure", "gate", "runs")

    def __init__(self, failure: Refused | None = None) -> None:
        super().__init__(Path("none"), Path("none"))
        object.__setattr__(self, "runs", [])
        object.__setattr__(self, "gate", asyncio.Event())
        object.__setattr__(self, "failure", failure)

    async def unpack(self, digest: str, cache: Path, *, base: object = None, objects: object = None) -> dict[str, Any]:
        self.runs.append(digest)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        make(cache, digest)
        return {}


async def test_whoever_waits_gets_one_tree(tmp_path: Path) -> None:
    maker = Maker()
    unpacking = Unpacking(maker, tmp_path / "own")
    waiting = [asyncio.create_task(unpacking.ensure(ONE)) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    maker.gate.set()
    assert [type(outcome) for outcome in await asyncio.gather(*waiting, return_exceptions=True)] == [
        asyncio.CancelledError,
        *[type(None)] * 4,
    ]
    assert maker.runs == [ONE]
    cache = ImageCache(tmp_path / "shared", tmp_path / "own")
    assert cache.verified(ONE, "any-name").rootfs == tmp_path / "own" / "sha256" / ONE.removeprefix("sha256:") / "rootfs"
    assert [image.digest for image in cache.all()] == [ONE]


async def test_a_failure_is_everybody_s_and_forgotten(tmp_path: Path) -> None:
    maker = Maker(Refused(Code.IMAGE_REFUSED, "hostile"))
    maker.gate.set()
    unpacking = Unpacking(maker, tmp_path)
    for _ in range(2):
        with pytest.raises(Refused, match="hostile"):
            await unpacking.ensure(ONE)
    assert maker.runs == [ONE, ONE]


def test_a_damaged_own_tree_is_corrupt(tmp_path: Path) -> None:
    (make(tmp_path, ONE) / "rootfs" / "body").write_text("shorter")
    with pytest.raises(Refused) as caught:
        ImageCache(tmp_path / "shared", tmp_path).verified(ONE, "x")
    assert caught.value.code is Code.IMAGE_CORRUPT


async def test_collecting_spares_what_is_used_or_pinned(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "shared", tmp_path)
    unpacking = Unpacking(Maker(), tmp_path, size_mib_max=0)
    for digest in (ONE, TWO, THREE):
        make(tmp_path, digest)
    with unpacking.pin(TWO):
        assert await unpacking.collect(cache, lambda: {ONE}) == [THREE]
    assert await unpacking.collect(cache, lambda: {ONE}) == [TWO]
    assert await unpacking.collect(cache, lambda: {ONE}) == []
    assert cache.verified(ONE, "x").digest == ONE
    with pytest.raises(Refused) as caught:
        cache.look_up(THREE, "x")
    assert caught.value.code is Code.IMAGE_UNAVAILABLE


async def test_the_longest_unused_goes_first(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "shared", tmp_path)
    for digest in (ONE, TWO):
        make(tmp_path, digest, body="x" * (700 << 10))
    for number, digest in enumerate((ONE, TWO)):
        os.utime(cache.verified(digest, "x").directory, (number, number))
    touch(cache.verified(ONE, "x"))
    assert await Unpacking(Maker(), tmp_path, size_mib_max=1).collect(cache, set) == [TWO]


def test_a_removal_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    place = make(tmp_path, ONE)
    place.rename(place.with_name(".doomed-" + place.name))
    unpacking = Unpacking(Maker(), tmp_path)
    assert list(ImageCache(tmp_path / "shared", tmp_path).all()) == []
    unpacking.sweep()
    assert list((tmp_path / "sha256").iterdir()) == []


def test_what_killed_runs_left_goes_and_what_is_being_made_stays(tmp_path: Path) -> None:
    place = tmp_path / "sha256"
    for name in ("abandoned", "working"):
        (place / f".unfinished-{name}" / "rootfs").mkdir(parents=True)
    (place / ".unfinished-unlocked").mkdir()
    for name in ("abandoned", "working", "not-begun"):
        (place / f".lock-{name}").touch()
    (place / ".lock-a-link").symlink_to(tmp_path / "elsewhere")
    whole = make(tmp_path, ONE)
    with (place / ".lock-working").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        Unpacking(Maker(), tmp_path).sweep()
        assert {path.name for path in place.iterdir()} == {".unfinished-working", ".lock-working", ".lock-a-link", whole.name}
    assert not (tmp_path / "elsewhere").exists()
    Unpacking(Maker(), tmp_path).sweep()
    assert {path.name for path in place.iterdir()} == {".lock-a-link", whole.name}


async def test_blobs_that_nothing_needs_go(tmp_path: Path) -> None:
    place = tmp_path / "blobs" / "sha256"
    place.mkdir(parents=True)
    (tmp_path / "partial").mkdir()
    manifest = {"config": {"digest": "sha256:" + "c" * 64}, "layers": [{"digest": "sha256:" + "d" * 64}]}
    (place / ONE.removeprefix("sha256:")).write_text(json.dumps(manifest))
    for name in ("c" * 64, "d" * 64, "e" * 64):
        (place / name).write_text("12345")
    (tmp_path / "partial" / "fetch-1").write_text("12345")
    library = Library(tmp_path, Folder(tmp_path), lambda: NOW)
    assert (await library.collect([ONE, "sha256:not-there"])).size == 5
    assert sorted(path.name[0] for path in place.iterdir()) == ["1", "c", "d"]
    assert list((tmp_path / "partial").iterdir()) == [], "what killed runs left"
    assert (await library.collect([ONE])).keys == ()
    nowhere = tmp_path / "nowhere"
    assert (await Library(nowhere, Folder(nowhere), lambda: NOW).collect([])).keys == ()


def program(tmp_path: Path, text: str) -> Carrier:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return Carrier(path, tmp_path / "store")


async def test_credentials_go_in_by_standard_input(tmp_path: Path) -> None:
    carrier = program(
        tmp_path, 'echo "$@" > "$0.args"; cat > "$0.given"; echo \'{"event":"fetched"}\'; echo \'{"event":"done","image":{"a":1}}\''
    )
    told: list[Any] = []
    assert await carrier.pull("registry:x", options={"password": "secret"}, told=told.append) == {"a": 1}
    assert told == [{"event": "fetched"}]
    assert "secret" not in (tmp_path / "program.args").read_text()
    assert json.loads((tmp_path / "program.given").read_text()) == {"password": "secret"}


async def test_the_operators_mirrors_hold_for_each_pull(tmp_path: Path) -> None:
    made = program(tmp_path, 'cat > "$0.given"; echo \'{"event":"done","image":{}}\'')
    carrier = Carrier(made.program, made.store, {"mirrors": {"a": "b"}})
    await carrier.pull("registry:x", options={"password": "secret", "mirrors": {"a": "evil"}})
    assert json.loads((tmp_path / "program.given").read_text()) == {"password": "secret", "mirrors": {"a": "b"}}


async def test_codes_of_the_program_are_ours(tmp_path: Path) -> None:
    carrier = program(tmp_path, 'echo \'{"event":"failed","code":"IMAGE_CORRUPT","message":"bad"}\'; exit 1')
    with pytest.raises(Refused) as caught:
        await carrier.unpack(ONE, tmp_path)
    assert (caught.value.code, caught.value.message) == (Code.IMAGE_CORRUPT, "bad")


async def test_a_program_that_breaks_off_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="broke off with status 3: alas"):
        await program(tmp_path, "echo alas >&2; exit 3").unpack(ONE, tmp_path)


class Fetcher(Maker):
    """Fetches without any program, too; `images` is what it was asked for, with the place."""

    __slots__ = ("images",)

    def __init__(self, store: Path) -> None:
        super().__init__()
        object.__setattr__(self, "store", store)
        object.__setattr__(self, "images", [])

    async def fetch(self, digest: str, objects: Mapping[str, Any]) -> dict[str, Any]:
        self.images.append((digest, dict(objects)))
        await self.gate.wait()
        return {}


async def test_of_many_that_want_an_image_one_fetches_it(tmp_path: Path) -> None:
    fetcher = Fetcher(tmp_path / "blobs")
    unpacking = Unpacking(fetcher, tmp_path / "own", objects=lambda: {"control": 1})
    waiting = [asyncio.create_task(unpacking.have(ONE)) for _ in range(5)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    fetcher.gate.set()
    await asyncio.gather(*waiting[1:])
    assert fetcher.images == [(ONE, {"control": 1})]


async def test_beside_control_nothing_is_fetched(tmp_path: Path) -> None:
    fetcher = Fetcher(tmp_path / "blobs")
    await Unpacking(fetcher, tmp_path / "own").have(ONE)
    assert fetcher.images == []


async def test_fetched_blobs_go_oldest_first_and_only_when_nobody_needs_them(tmp_path: Path) -> None:
    store = tmp_path / "blobs"
    (store / "blobs" / "sha256").mkdir(parents=True)
    for age, name in enumerate(("new", "old")):
        path = store / "blobs" / "sha256" / name
        path.write_bytes(b"x" * 700_000)
        os.utime(path, (1000 - age, 1000 - age))
    unpacking = Unpacking(Fetcher(store), tmp_path / "own", objects=dict, blobs_mib_max=1)
    cache = ImageCache(tmp_path / "cache", tmp_path / "own")
    with unpacking.pin(ONE), unpacking.pin(TWO):
        await unpacking.collect(cache, set)
    assert len(list((store / "blobs" / "sha256").iterdir())) == 2
    await unpacking.collect(cache, set)
    assert [path.name for path in (store / "blobs" / "sha256").iterdir()] == ["new"]
