"""The image cache finds images by digest and by name, and tells a broken one from a missing one."""

import json
import os

import pytest

from atoll.base.errors import Code, Refused
from atoll.images.cache import MOUNT_POINTS, ImageCache, count


def make(cache, template="base", recipe="r1", digest="sha256:" + "a" * 64, **changes):
    directory = cache / "templates" / template / recipe
    (directory / "rootfs" / "bin").mkdir(parents=True)
    for point in MOUNT_POINTS:
        (directory / "rootfs" / point).parent.mkdir(exist_ok=True)
        (directory / "rootfs" / point).touch()
    (directory / "rootfs" / "bin" / "sh").write_text("#!")
    os.link(directory / "rootfs" / "bin" / "sh", directory / "rootfs" / "bin" / "dash")
    (directory / "rootfs" / "lib").symlink_to("bin")
    entries, size_bytes = count(directory / "rootfs")
    manifest = {
        "name": template,
        "recipe_sha256": recipe,
        "digest": digest,
        "size_bytes": size_bytes,
        "entries": entries,
        "arch": "x86_64",
        **changes,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    current = directory.parent / "current"
    current.unlink(missing_ok=True)
    current.symlink_to(recipe)
    return directory


def refusal(work, *arguments):
    with pytest.raises(Refused) as caught:
        work(*arguments)
    return caught.value.code


def test_by_digest_by_name_and_not_at_all(tmp_path):
    old = make(tmp_path, recipe="r1", digest="sha256:" + "1" * 64)
    new = make(tmp_path, recipe="r2", digest="sha256:" + "2" * 64)
    cache = ImageCache(tmp_path)
    assert cache.look_up("sha256:" + "1" * 64, "base").directory == old
    assert cache.look_up("", "base").directory == new
    assert cache.current("base").rootfs == new / "rootfs"
    assert {image.digest for image in cache.all()} == {"sha256:" + "1" * 64, "sha256:" + "2" * 64}
    assert refusal(cache.look_up, "sha256:" + "3" * 64, "base") is Code.IMAGE_UNAVAILABLE
    assert refusal(cache.look_up, "", "other") is Code.IMAGE_UNAVAILABLE


def test_what_was_found_once_is_not_trusted_when_it_changes(tmp_path):
    directory = make(tmp_path)
    cache, digest = ImageCache(tmp_path), "sha256:" + "a" * 64
    assert cache.look_up(digest, "base") is cache.look_up(digest, "base")
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text("{")
    assert refusal(cache.look_up, digest, "base") is Code.IMAGE_CORRUPT
    (directory / "manifest.json").write_text(text)
    assert cache.look_up(digest, "base").directory == directory
    (directory / "rootfs").rename(directory / "elsewhere")
    assert refusal(cache.look_up, digest, "base") is Code.IMAGE_CORRUPT
    directory.rename(directory.with_name("gone"))
    assert refusal(cache.look_up, digest, "base") in (Code.IMAGE_CORRUPT, Code.IMAGE_UNAVAILABLE)


def test_another_name_may_carry_the_same_content(tmp_path):
    directory = make(tmp_path, template="renamed")
    assert ImageCache(tmp_path).look_up("sha256:" + "a" * 64, "base").directory == directory


def test_a_name_is_no_path(tmp_path):
    make(tmp_path)
    for name in ("../base", "base/r1", ".hidden"):
        assert refusal(ImageCache(tmp_path).look_up, "", name) is Code.IMAGE_UNAVAILABLE


def test_an_empty_cache_is_no_error(tmp_path):
    cache = ImageCache(tmp_path)
    assert list(cache.all()) == []
    assert cache.problems() == []


@pytest.mark.parametrize("change", [{"recipe_sha256": "other"}, {"name": "other"}, {"digest": "md5:1"}, {"entries": None}])
def test_a_manifest_that_is_of_something_else(tmp_path, change):
    make(tmp_path, **change)
    cache = ImageCache(tmp_path)
    assert refusal(cache.current, "base") is Code.IMAGE_CORRUPT
    assert refusal(cache.look_up, "sha256:" + "a" * 64, "base") is Code.IMAGE_CORRUPT
    assert list(cache.all()) == []
    assert len(cache.problems()) == 1


def test_a_manifest_that_cannot_be_read(tmp_path):
    directory = make(tmp_path)
    (directory / "manifest.json").write_text("{")
    assert refusal(ImageCache(tmp_path).current, "base") is Code.IMAGE_CORRUPT


@pytest.mark.parametrize("point", MOUNT_POINTS)
def test_a_tree_without_a_mount_point_would_be_written_to(tmp_path, point):
    directory = make(tmp_path)
    (directory / "rootfs" / point).unlink()
    assert refusal(ImageCache(tmp_path).current, "base") is Code.IMAGE_CORRUPT


def test_a_tree_that_lost_something_is_found_and_remembered(tmp_path):
    directory = make(tmp_path)
    digest = "sha256:" + "a" * 64
    cache = ImageCache(tmp_path)
    assert [image.digest for image in cache.all()] == [digest]
    (directory / "rootfs" / "bin" / "dash").unlink()
    assert refusal(cache.verified, digest, "base") is Code.IMAGE_CORRUPT
    assert refusal(cache.verified, digest, "base") is Code.IMAGE_CORRUPT
    assert list(cache.all()) == []
    assert "entries" in cache.problems()[0]


def test_a_tree_that_was_mended_is_taken_again(tmp_path):
    directory = make(tmp_path)
    digest = "sha256:" + "a" * 64
    cache = ImageCache(tmp_path)
    (directory / "rootfs" / "not-ours").write_text("x")
    assert refusal(cache.verified, digest, "base") is Code.IMAGE_CORRUPT
    (directory / "rootfs" / "not-ours").unlink()
    assert cache.verified(digest, "base").digest == digest
    assert cache.problems() == []


def test_a_tree_built_again_is_looked_at_again(tmp_path):
    directory = make(tmp_path)
    digest = "sha256:" + "a" * 64
    cache = ImageCache(tmp_path)
    (directory / "rootfs" / "bin" / "dash").unlink()
    assert refusal(cache.verified, digest, "base") is Code.IMAGE_CORRUPT
    entries, size_bytes = count(directory / "rootfs")
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").unlink()
    (directory / "manifest.json.new").write_text(json.dumps({**manifest, "entries": entries, "size_bytes": size_bytes}))
    os.utime(directory / "manifest.json.new", ns=(1, 1))
    (directory / "manifest.json.new").rename(directory / "manifest.json")
    assert cache.verified(digest, "base").directory == directory


def test_a_hard_link_counts_as_an_entry_but_not_as_bytes(tmp_path):
    directory = make(tmp_path)
    entries, size_bytes = count(directory / "rootfs")
    assert size_bytes == 2
    assert entries == len(list((directory / "rootfs").rglob("*")))
