"""What was saved, as files: whole or not at all, and known when it was damaged since."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci import saves


def test_what_is_saved_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    draft = saves.begin(tmp_path)
    (draft / "pages.img").write_bytes(b"x" * 100)
    assert not saves.exists(tmp_path)
    save = saves.publish(tmp_path, SaveMode.FULL)
    assert saves.exists(tmp_path)
    assert (save.mode, saves.read(tmp_path / saves.SAVED)) == (SaveMode.FULL, save)
    assert save.size_bytes >= 100
    assert not (tmp_path / saves.DRAFT).exists()


def test_a_draft_with_nothing_in_a_file_is_not_named(tmp_path: Path) -> None:
    (saves.begin(tmp_path) / "pages.img").touch()
    with pytest.raises(Refused) as refused:
        saves.publish(tmp_path, SaveMode.FULL)
    assert refused.value.code is Code.SAVE_FAILED
    assert not saves.exists(tmp_path)


def test_a_draft_of_an_earlier_try_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (saves.begin(tmp_path) / "old.img").write_bytes(b"old")
    (saves.begin(tmp_path) / "new.img").write_bytes(b"new")
    assert set(saves.publish(tmp_path, SaveMode.FILES).files) == {"new.img"}


@pytest.mark.parametrize("damage", ["short", "missing", "no list", "no json", "newer"])
def test_damage_is_seen_before_anything_is_restored(tmp_path: Path, damage: str) -> None:
    (saves.begin(tmp_path) / "pages.img").write_bytes(b"x" * 100)
    place = saves.publish(tmp_path, SaveMode.FULL).directory
    match damage:
        case "short":
            (place / "pages.img").write_bytes(b"x" * 99)
        case "missing":
            (place / "pages.img").unlink()
        case "no list":
            (place / saves.LIST).unlink()
        case "no json":
            (place / saves.LIST).write_text("{")
        case _:
            (place / saves.LIST).write_text('{"format": 2, "mode": "full", "files": {}}')
    with pytest.raises(Refused) as refused:
        saves.read(place)
    assert refused.value.code is Code.RESUME_FAILED


def test_what_is_kept_lies_beside_all_placements_and_goes_by_itself(tmp_path: Path) -> None:
    placement, place = tmp_path / "plc", saves.kept(tmp_path, "snp")
    placement.mkdir()
    (placement / saves.SHOWN).mkdir()
    (saves.begin(placement) / "pages.img").write_bytes(b"x")
    save = saves.publish(placement, SaveMode.FULL, place)
    assert (save.named, saves.read(place), saves.exists(placement)) == (True, save, False)
    for _ in range(2):
        saves.drop_kept(place)
        assert not place.exists()


def test_a_flush_that_is_under_way_holds_up_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement, place = tmp_path / "plc", saves.kept(tmp_path, "snp")
    placement.mkdir()
    (saves.begin(placement) / "pages.img").write_bytes(b"x")
    saves.publish(placement, SaveMode.FULL, place)
    rmdir, marked = os.rmdir, []

    def marks_before(path: str, **options: int) -> None:
        if not marked:
            marked.append((place / saves.DURABLE).touch())
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", marks_before)
    saves.drop_kept(place)
    assert marked
    assert not place.exists()


def test_what_is_set_aside_is_not_saved_any_more_and_makes_room_for_the_next(tmp_path: Path) -> None:
    pasts = []
    for _ in range(2):
        (saves.begin(tmp_path) / "pages.img").write_bytes(b"x")
        saves.publish(tmp_path, SaveMode.FULL)
        pasts.append(saves.set_aside(tmp_path))
        assert not saves.exists(tmp_path)
    assert len(set(pasts)) == 2
    saves.clear_past(tmp_path)
    assert list(tmp_path.iterdir()) == [], "also what a killed run has left"
    (saves.begin(tmp_path) / "pages.img").write_bytes(b"x")
    saves.publish(tmp_path, SaveMode.FULL)
    assert saves.set_aside(tmp_path).exists()
    saves.drop(tmp_path)
    assert list(tmp_path.iterdir()) == [], "whoever removes all of it need not wait"
    assert not saves.set_aside(tmp_path).exists(), "a second time finds nothing"


def test_a_flush_that_outlasts_its_save_says_nothing_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saves.begin(tmp_path) / "pages.img").write_bytes(b"x")
    first = saves.publish(tmp_path, SaveMode.FULL)
    synced, fsync = [], os.fsync

    def another_is_saved_meanwhile(fd: int) -> None:
        if not synced:
            synced.append(saves.set_aside(tmp_path))
            (saves.begin(tmp_path) / "pages.img").write_bytes(b"y")
            saves.publish(tmp_path, SaveMode.FULL)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", another_is_saved_meanwhile)
    saves.flush(first)
    assert synced
    assert not (tmp_path / saves.SAVED / saves.DURABLE).exists()


def test_what_an_earlier_release_has_saved_is_known(tmp_path: Path) -> None:
    (saves.begin(tmp_path) / "pages.img").write_bytes(b"x")
    place = saves.publish(tmp_path, SaveMode.FULL).directory
    (place / saves.LIST).write_text('{"format": 1, "mode": "full", "files": {"pages.img": 1}}')
    assert saves.predates_names(tmp_path)
    assert saves.read(place).size_bytes == 1
    saves.drop(tmp_path)
    assert not saves.predates_names(tmp_path)


def test_what_was_discarded_is_gone_twice(tmp_path: Path) -> None:
    (saves.begin(tmp_path) / "pages.img").write_bytes(b"x")
    save = saves.publish(tmp_path, SaveMode.FULL)
    for _ in range(2):
        saves.drop(tmp_path)
        assert not saves.exists(tmp_path)
    saves.flush(save)
