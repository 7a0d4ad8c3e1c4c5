"""An image's disk is made once, looked at, and made again when it was damaged."""

import threading

import pytest

from atoll.base.errors import Code, Refused
from atoll.drivers.machines.roots import NOTE, Roots
from atoll.images.cache import MACHINE_DISK as FILE
from atoll.images.cache import CachedImage
from atoll.images.shares import held

COUNTS = """#!/bin/sh
echo made >>{log}
cat "$3"/* >"$2"
"""


@pytest.fixture
def mkfs(tmp_path):
    program = tmp_path / "mkfs"
    program.write_text(COUNTS.format(log=tmp_path / "log"))
    program.chmod(0o755)
    return program


@pytest.fixture
def image(tmp_path):
    directory = tmp_path / "image"
    (directory / "rootfs").mkdir(parents=True)
    (directory / "rootfs" / "file").write_text("content")
    (directory / "manifest.json").write_text('{"size_bytes": 7}')
    return directory


def made(tmp_path):
    return (tmp_path / "log").read_text().count("made")


def test_it_is_made_once(tmp_path, mkfs, image):
    roots = Roots(mkfs)
    assert roots.of(image) == image / FILE
    assert roots.of(image).read_text() == "content"
    assert Roots(mkfs).of(image) == image / FILE, "another process finds it"
    assert made(tmp_path) == 1
    assert not list(image.glob(f".{FILE}*"))


def test_it_counts_with_its_tree(mkfs, image):
    known = CachedImage("sha256", "sha256:1", image, "x86_64", 7, 1, own_bytes=7)
    assert held([known]) == {"sha256:1": 7}
    Roots(mkfs).of(image)
    assert held([known]) == {"sha256:1": 7 + len("content")}


def test_of_many_at_once_one_makes_it(tmp_path, mkfs, image):
    threads = [threading.Thread(target=Roots(mkfs).of, args=(image,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made(tmp_path) == 1


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "note", "note gone"])
def test_what_was_damaged_is_made_again(tmp_path, mkfs, image, damage):
    Roots(mkfs).of(image)
    file, note = image / FILE, image / NOTE
    file.chmod(0o644)
    if damage == "changed":
        file.write_text("CONTENT")
    elif damage == "cut":
        file.write_text("con")
    elif damage == "gone":
        file.unlink()
    elif damage == "note":
        note.write_text("{}")
    else:
        note.unlink()
    assert Roots(mkfs).of(image).read_text() == "content"
    assert made(tmp_path) == 2


def test_one_that_changes_while_it_is_known_is_noticed(tmp_path, mkfs, image):
    roots = Roots(mkfs)
    roots.of(image)
    (image / FILE).unlink()
    (image / FILE).write_text("another")
    assert roots.of(image).read_text() == "content"


def test_what_cannot_be_made_leaves_nothing(tmp_path, image):
    program = tmp_path / "fails"
    program.write_text('#!/bin/sh\necho half >"$2"; echo no idea >&2; exit 3\n')
    program.chmod(0o755)
    for tool, code in ((program, Code.START_FAILED), (tmp_path / "none", Code.RUNTIME_MISSING)):
        with pytest.raises(Refused) as refused:
            Roots(tool).of(image)
        assert refused.value.code is code
        assert sorted(path.name for path in image.iterdir() if "lock" not in path.name) == ["manifest.json", "rootfs"]


def test_a_disk_without_room_is_said_before(tmp_path, mkfs, image):
    (image / "manifest.json").write_text('{"size_bytes": 99999999999999}')
    with pytest.raises(Refused) as refused:
        Roots(mkfs).of(image)
    assert refused.value.code is Code.HOST_DISK_FULL
    assert not (tmp_path / "log").exists()
