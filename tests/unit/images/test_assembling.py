"""Images made of an image and a layer more."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import Code, Refused
from atoll.images import assembling
from atoll.images.artifacts import Folder
from atoll.images.library import Library

READY_MADE = "sha256:" + "b" * 64
LAYER = "sha256:" + "1" * 64


def document(store: Path, digest: str) -> dict[str, Any]:
    content = (store / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()
    assert hashlib.sha256(content).hexdigest() == digest.removeprefix("sha256:")
    return dict(json.loads(content))


def put(store: Path, content: bytes) -> str:
    name = hashlib.sha256(content).hexdigest()
    (store / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    (store / "blobs/sha256" / name).write_bytes(content)
    return f"sha256:{name}"


def pulled(store: Path, layers: int = 2) -> str:
    """An image as a registry has it."""
    diffs = [put(store, b"layer %d" % n) for n in range(layers)]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"WorkingDir": "/w"},
        "history": [{}],
        "rootfs": {"type": "layers", "diff_ids": diffs},
    }
    digest = put(store, json.dumps(config).encode())
    parts = [{"mediaType": assembling.LAYER_TYPE, "digest": one, "size": 7} for one in diffs]
    manifest = {"schemaVersion": 2, "config": {"digest": digest, "size": len(json.dumps(config))}, "layers": parts}
    return put(store, json.dumps(manifest).encode())


def test_on_a_ready_made_image_it_names_that(tmp_path: Path) -> None:
    image = assembling.extend(tmp_path, READY_MADE, layer=LAYER, size=5)
    manifest = document(tmp_path, image)
    assert manifest["annotations"] == {assembling.BASE: READY_MADE, assembling.OUTSIDE: "0"}
    assert [one["digest"] for one in manifest["layers"]] == [LAYER]
    assert document(tmp_path, manifest["config"]["digest"])["rootfs"]["diff_ids"] == [LAYER]
    assert assembling.base_of(tmp_path, image) == READY_MADE
    assert assembling.base_of(tmp_path, READY_MADE) is None
    assert not list((tmp_path / "partial").iterdir())


def test_layers_come_one_after_the_other(tmp_path: Path) -> None:
    other = "sha256:" + "2" * 64
    image = assembling.extend(tmp_path, assembling.extend(tmp_path, READY_MADE, layer=LAYER, size=5), layer=other, size=6)
    manifest = document(tmp_path, image)
    assert [one["digest"] for one in manifest["layers"]] == [LAYER, other]
    assert manifest["annotations"] == {assembling.BASE: READY_MADE, assembling.OUTSIDE: "0"}


async def test_a_pulled_image_keeps_its_layers_and_settings(tmp_path: Path) -> None:
    below = pulled(tmp_path)
    added = put(tmp_path, b"12345")
    image = assembling.extend(tmp_path, assembling.extend(tmp_path, below, layer=added, size=5), layer=added, size=5)
    manifest = document(tmp_path, image)
    assert manifest["annotations"] == {assembling.OUTSIDE: "2"}
    assert len(manifest["layers"]) == 4
    config = document(tmp_path, manifest["config"]["digest"])
    assert config["config"] == {"WorkingDir": "/w"}
    assert "history" not in config
    assert config["rootfs"]["diff_ids"] == [one["digest"] for one in manifest["layers"]]
    assert assembling.is_whole(tmp_path, image)
    collected = await Library(tmp_path, Folder(tmp_path), lambda: 0.0).collect([image])
    assert collected.size > 0, "the images in between are nobody's"
    assert assembling.is_whole(tmp_path, image)


def test_the_same_makes_the_same(tmp_path: Path) -> None:
    assert assembling.extend(tmp_path, READY_MADE, layer=LAYER, size=5) == assembling.extend(tmp_path, READY_MADE, layer=LAYER, size=5)


def test_what_is_not_all_there_is_not_whole(tmp_path: Path) -> None:
    image = assembling.extend(tmp_path, READY_MADE, layer=LAYER, size=5)
    assert not assembling.is_whole(tmp_path, image)
    assert not assembling.is_whole(tmp_path, READY_MADE)
    assert not assembling.is_whole(tmp_path, "nonsense")


def test_a_broken_document_is_not_built_upon(tmp_path: Path) -> None:
    below = pulled(tmp_path)
    path = tmp_path / "blobs/sha256" / below.removeprefix("sha256:")
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(Refused) as refused:
        assembling.extend(tmp_path, below, layer=LAYER, size=5)
    assert refused.value.code is Code.IMAGE_CORRUPT


def test_there_is_an_end_of_layers(tmp_path: Path) -> None:
    below = pulled(tmp_path, layers=assembling.LAYERS_MAX)
    with pytest.raises(Refused) as refused:
        assembling.extend(tmp_path, below, layer=LAYER, size=5)
    assert refused.value.code is Code.IMAGE_REFUSED
