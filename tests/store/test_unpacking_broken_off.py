"""The real program that fetches and unpacks an image, killed at many moments, on disks that get full, and several at once: the tree is whole, or there is none."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.store.hostile.forging import CONFIG, GZIP, MANIFEST, Entry, Layer, Layout, archive, digest_of
from tests.store.test_hostile_images import PROGRAM, needs_program, needs_root

pytestmark = [needs_program, needs_root]
KILLS: Final = 12
LAYERS: Final = 5
FILES: Final = 60
BYTES: Final = 20_000


class Image:
    """An image of some layers, each of which changes what is below, in the folder of an object store."""

    def __init__(self, root: Path) -> None:
        dice = random.Random(7)
        layout = Layout(root / "from")
        made: list[Layer] = []
        self.files: dict[str, bytes] = {}
        for number in range(LAYERS):
            files = {f"of{number}/f{index}": dice.randbytes(BYTES) for index in range(FILES)} | {"common": bytes([number]) * 100}
            entries = [Entry(name, content) for name, content in files.items()]
            if number:
                entries.append(Entry(f"of{number - 1}/.wh.f0"))
                self.files.pop(f"of{number - 1}/f0")
            self.files |= files
            plain = archive(*entries)
            made.append(Layer(gzip.compress(plain, 1, mtime=0), GZIP, digest_of(plain)))
        manifest, config = layout.document(made)
        manifest["config"] = layout.put(json.dumps(config).encode(), CONFIG)
        self.digest = str(layout.put(json.dumps(manifest).encode(), MANIFEST)["digest"])
        self.store, self.cache, self.layout = root / "store", root / "cache", layout

    def start(self, verb: str, *more: str) -> subprocess.Popen[str]:
        words = [str(PROGRAM), "image", verb, "--store", str(self.store), "--image", self.digest, "--options", "-", *more]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps({"objects": {"folder": str(self.layout.root)}}))
        process.stdin.close()
        return process

    def ended(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        with process:
            assert process.stdout is not None
            said = process.stdout.read()
        return dict(json.loads(said.splitlines()[-1]))

    def documents(self) -> None:
        assert self.ended(self.start("fetch", "--documents"))["event"] == "done"

    def unpacking(self) -> subprocess.Popen[str]:
        return self.start("unpack", "--cache", str(self.cache))

    @property
    def tree(self) -> Path:
        return self.cache / "sha256" / self.digest.removeprefix("sha256:")

    def assert_whole(self) -> None:
        found = {str(path.relative_to(self.tree / "rootfs")): path for path in (self.tree / "rootfs").rglob("*") if path.is_file()}
        ours = {name: path.read_bytes() for name, path in found.items() if name.startswith("of") or name == "common"}
        assert ours == self.files
        assert sorted(path.name for path in self.tree.iterdir()) == ["manifest.json", "rootfs"]
        assert [path.name for path in self.tree.parent.iterdir()] == [self.tree.name]
        assert list((self.store / "partial").iterdir()) == []
        for blob in (self.store / "blobs" / "sha256").iterdir():
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_killed_at_any_moment_it_is_whole_afterwards(image: Image) -> None:
    image.documents()
    began = time.monotonic()
    assert image.ended(image.unpacking())["event"] == "done"
    whole_s = time.monotonic() - began
    dice = random.Random(11)
    for number in range(KILLS):
        subprocess.run(["rm", "-rf", str(image.cache), str(image.store)], check=True)
        image.documents()
        process = image.unpacking()
        time.sleep(whole_s * (number + dice.random()) / KILLS)
        with process:
            process.kill()
        assert not image.tree.exists() or (image.tree / "manifest.json").exists(), "a tree appears whole"
        assert image.ended(image.unpacking())["event"] == "done"
        image.assert_whole()


def test_several_at_once_make_one_tree(image: Image) -> None:
    image.documents()
    running = [image.unpacking() for _ in range(4)]
    assert [image.ended(process)["event"] for process in running] == ["done"] * 4
    image.assert_whole()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    file, point = tmp_path / "disk", tmp_path / "small"
    point.mkdir()
    with file.open("wb") as opened:
        opened.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(file)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(file), str(point)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("a loop device cannot be mounted here: mount -o loop")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.parametrize("what", ["cache", "store"])
def test_a_disk_that_gets_full_is_named_and_keeps_nothing_of_it(image: Image, small_disk: Path, what: str) -> None:
    """Five megabytes and a half of layers, where there are about five: trees and staged layers, or blobs."""
    elsewhere = getattr(image, what)
    setattr(image, what, small_disk / what)
    with (small_disk / "taken").open("wb") as file:
        file.write(os.urandom(2 << 20))
    image.documents()
    said = image.ended(image.unpacking())
    assert (said["event"], said.get("code")) == ("failed", "HOST_DISK_FULL"), said
    if what == "cache":
        assert list((image.cache / "sha256").iterdir()) == []
    else:
        # Layers that were whole may stay, and are used; what did not fit is gone.
        assert [path for path in (image.store / "partial").iterdir() if path.stat().st_size] == []
    setattr(image, what, elsewhere)
    image.documents()
    assert image.ended(image.unpacking())["event"] == "done"
    image.assert_whole()
