import errno
from pathlib import Path

import pytest

from atoll.programs import notes


def full(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
    """No new file gets a block any more."""

    def refuse(path: Path, content: str, **_: object) -> int:
        path.touch()
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "write_text", refuse)


def test_a_note_is_replaced(tmp_path: Path) -> None:
    note = tmp_path / "note"
    notes.write(note, "a longer first text\n")
    notes.write(note, "second\n", mode=0o600)
    assert note.read_text() == "second\n"
    assert note.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [note]


def test_on_a_full_disk_it_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "note"
    notes.write(note, "a longer first text\n")
    before = note.stat().st_ino
    full(monkeypatch)
    notes.write(note, "second\n")
    assert (note.read_text(), note.stat().st_ino) == ("second\n", before)
    assert list(tmp_path.iterdir()) == [note]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    full(monkeypatch, number)
    with pytest.raises(OSError, match="no"):
        notes.write(tmp_path / "note", "text")
    assert list(tmp_path.iterdir()) == []
