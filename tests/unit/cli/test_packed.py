"""What pushing remembers of ready-made images, and how little depends on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli.packed import IMAGES_MAX, REPOSITORIES_MAX, Remembered, recall, remember

MADE = Remembered("sha256:" + "a" * 64, 7, "sha256:" + "b" * 64, "amd64")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "atoll" / "pushed.json"


def test_a_layer_is_known_again_with_where_it_is_newest_first() -> None:
    assert recall("image") is None
    remember("image", MADE, "a/one")
    first = recall("image")
    assert first == Remembered(MADE.digest, 7, MADE.tar_digest, "amd64", ("a/one",))
    remember("image", first, "a/two")
    second = recall("image")
    assert second is not None
    assert second.repositories == ("a/two", "a/one")
    remember("image", second, "a/one")
    assert recall("image") == Remembered(MADE.digest, 7, MADE.tar_digest, "amd64", ("a/one", "a/two"))
    assert recall("another") is None


@pytest.mark.parametrize("text", ["{", "", "[]", "null", '{"image": 1}', '{"image": {}}'])
def test_a_file_that_says_nothing_is_nothing_and_is_written_anew(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    assert recall("image") is None
    remember("image", MADE, "a/one")
    found = recall("image")
    assert found is not None
    assert found.digest == MADE.digest


@pytest.mark.parametrize("key", ["digest", "tar_digest"])
@pytest.mark.parametrize("value", ["", "sha256:", "sha256:" + "A" * 64, "../../etc/passwd", "sha256:" + "a" * 65])
def test_what_is_no_digest_is_not_asked_for(file: Path, key: str, value: str) -> None:
    remember("image", MADE, "a/one")
    said = json.loads(file.read_text())
    said["image"][key] = value
    file.write_text(json.dumps(said))
    assert recall("image") is None


def test_the_oldest_is_forgotten() -> None:
    for number in range(IMAGES_MAX + 1):
        remember(f"image {number}", MADE, "a/one")
    assert recall("image 0") is None
    assert recall("image 1") is not None
    for number in range(REPOSITORIES_MAX + 1):
        remember("image 1", recall("image 1") or MADE, f"a/{number}")
    found = recall("image 1")
    assert found is not None
    assert len(found.repositories) == REPOSITORIES_MAX
    assert found.repositories[0] == f"a/{REPOSITORIES_MAX}"
