"""The cache of the base template: what is whole, what is broken, and what a killed run leaves."""

import json
import os
import stat
from pathlib import Path

import pytest

from install import base_template
from install.progress import Reporter


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A finished template directory with a file, a hard link to it, a symbolic link, a set-uid program and an empty directory."""
    rootfs = tmp_path / ("a" * 64) / "rootfs"
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "empty").mkdir()
    (rootfs / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    os.link(rootfs / "etc" / "hosts", rootfs / "etc" / "hosts.again")
    (rootfs / "link").symlink_to("etc/hosts")
    (rootfs / "sudo").write_bytes(b"x")
    (rootfs / "sudo").chmod(0o4755)
    seen = base_template.walk(rootfs, contents=True)
    manifest = {"name": "base", "recipe_sha256": "a" * 64, "digest": seen.digest, "size_bytes": seen.size_bytes, "entries": seen.entries}
    (rootfs.parent / "manifest.json").write_text(json.dumps(manifest))
    return rootfs.parent


def reporter(tmp_path: Path) -> Reporter:
    return Reporter(1, 1, "base template", tmp_path / "log")


def test_a_whole_tree_is_whole(tree: Path) -> None:
    assert base_template.verify(tree) is None
    assert base_template.verify(tree, full=True) is None


def test_a_hard_link_is_counted_once(tree: Path) -> None:
    seen = base_template.walk(tree / "rootfs", contents=False)
    assert (seen.entries, seen.size_bytes) == (6, len("127.0.0.1 localhost\n") + len("x"))


def test_the_digest_knows_every_property_but_time(tree: Path) -> None:
    rootfs = tree / "rootfs"
    first = base_template.walk(rootfs, contents=True).digest
    os.utime(rootfs / "etc" / "hosts", (1, 1))
    assert base_template.walk(rootfs, contents=True).digest == first

    seen = {first}
    (rootfs / "sudo").chmod(0o0755)
    seen.add(base_template.walk(rootfs, contents=True).digest)
    (rootfs / "link").unlink()
    (rootfs / "link").symlink_to("etc/other")
    seen.add(base_template.walk(rootfs, contents=True).digest)
    (rootfs / "etc" / "hosts").write_text("127.0.0.1 localhosT\n")
    seen.add(base_template.walk(rootfs, contents=True).digest)
    (rootfs / "empty").rename(rootfs / "Empty")
    seen.add(base_template.walk(rootfs, contents=True).digest)
    assert len(seen) == 5


def test_what_is_missing_or_longer_is_seen_without_reading(tree: Path) -> None:
    (tree / "rootfs" / "empty").rmdir()
    assert "entries" in (base_template.verify(tree) or "")
    (tree / "rootfs" / "empty").mkdir()
    (tree / "rootfs" / "sudo").write_bytes(b"xx")
    assert "bytes" in (base_template.verify(tree) or "")


def test_changed_content_of_equal_size_is_seen_by_the_full_check(tree: Path) -> None:
    (tree / "rootfs" / "sudo").write_bytes(b"y")
    (tree / "rootfs" / "sudo").chmod(0o4755)
    assert stat.S_IMODE((tree / "rootfs" / "sudo").stat().st_mode) == 0o4755
    assert base_template.verify(tree) is None
    assert "content" in (base_template.verify(tree, full=True) or "")


@pytest.mark.parametrize("manifest", [None, "", "{", '{"recipe_sha256": "' + "b" * 64 + '"}'])
def test_a_missing_cut_or_foreign_manifest_is_broken(tree: Path, manifest: str | None) -> None:
    (tree / "manifest.json").unlink()
    if manifest is not None:
        (tree / "manifest.json").write_text(manifest)
    assert base_template.verify(tree) is not None


def test_leftovers_of_a_killed_run_go_and_finished_trees_stay(tree: Path, tmp_path: Path) -> None:
    leftover = tree.parent / ".unfinished-aaaa-1"
    (leftover / "rootfs" / "usr").mkdir(parents=True)
    base_template._clean(tree.parent, reporter(tmp_path))
    assert not leftover.exists()
    assert base_template.verify(tree) is None


def test_quarantine_keeps_the_newest_broken_tree(tree: Path, tmp_path: Path) -> None:
    place = tree.parent / "quarantine"
    (place / "older").mkdir(parents=True)
    base_template._quarantine(tree, "it was cut", reporter(tmp_path))
    assert not tree.exists()
    [kept] = place.iterdir()
    assert kept.name.startswith("a" * 64)
    assert (kept / "manifest.json").exists()


def test_the_recipe_decides_the_place(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "recipe.toml").write_text("packages = []")
    first = base_template.template_directory(tmp_path, recipe)
    assert base_template.template_directory(tmp_path, recipe) == first
    (recipe / "recipe.toml").write_text("packages = ['git']")
    assert base_template.template_directory(tmp_path, recipe) != first


def test_current_follows_the_recipe(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_template, "GROUP", "no-such-group")
    current = tree.parent / "current"
    current.symlink_to("f" * 64)
    base_template._make_current(tree)
    base_template._make_current(tree)
    assert current.resolve() == tree
    assert [path.name for path in tree.parent.iterdir() if path.name.startswith(".current")] == []
