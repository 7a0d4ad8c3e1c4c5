"""A program is asked for its version once; a busy host does not make it another, or none."""

import pytest

from atoll.base.errors import Code, Refused
from atoll.drivers import versions


def program(directory, version="1.2"):
    """It says its version, unless the host has no time for it."""
    made = directory / "program"
    made.write_text(f"#!/bin/sh\n[ -e {directory}/busy ] && exec sleep 60\necho asked >>{directory}/asked\necho 'Program v{version}'\n")
    made.chmod(0o755)
    return made


def test_what_was_said_is_known_while_it_does_not_answer(tmp_path):
    made = program(tmp_path)
    assert versions.version_of(made, tmp_path / "run") == "Program v1.2"
    (tmp_path / "busy").touch()
    assert versions.version_of(made, tmp_path / "run", within_s=0.2) == "Program v1.2"
    assert (tmp_path / "asked").read_text() == "asked\n", "once"


def test_another_program_is_asked(tmp_path):
    made = program(tmp_path)
    versions.version_of(made, tmp_path / "run")
    program(tmp_path, version="1.3")
    assert versions.version_of(made, tmp_path / "run") == "Program v1.3"


def test_what_was_never_said_is_refused_and_asked_again(tmp_path):
    made = program(tmp_path)
    (tmp_path / "busy").touch()
    with pytest.raises(Refused) as refused:
        versions.version_of(made, tmp_path / "run", within_s=0.2)
    assert refused.value.code is Code.RUNTIME_MISSING
    assert "0 s" in refused.value.message
    (tmp_path / "busy").unlink()
    assert versions.version_of(made, tmp_path / "run") == "Program v1.2"


@pytest.mark.parametrize("left", [None, "#!/bin/sh\nexit 1\n"], ids=["gone", "failing"])
def test_what_is_not_there_or_fails_is_refused(tmp_path, left):
    made = program(tmp_path)
    versions.version_of(made, tmp_path / "run")
    made.unlink()
    if left is not None:
        made.write_text(left)
        made.chmod(0o755)
    with pytest.raises(Refused) as refused:
        versions.version_of(made, tmp_path / "run")
    assert refused.value.code is Code.RUNTIME_MISSING


def test_an_empty_note_is_none(tmp_path):
    made = program(tmp_path)
    versions.version_of(made, tmp_path / "run")
    (note,) = (tmp_path / "run" / versions.NOTES).iterdir()
    note.write_text("")
    assert versions.version_of(made, tmp_path / "run") == "Program v1.2"
