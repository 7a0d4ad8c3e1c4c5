import subprocess
from pathlib import Path

import pytest

from atoll.client.target import home_directory
from atoll.programs import export, layout
from atoll.programs.layout import Layout


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment's `atoll` that says where it would look."""
    path = tmp_path / "a checkout" / "bin" / "atoll"
    path.parent.mkdir(parents=True)
    path.write_text('#!/bin/sh\necho "$0 in ${ATOLL_HOME-nowhere}"\n')
    path.chmod(0o755)
    monkeypatch.setattr(layout.sys, "executable", str(path.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return path


def said(command: str) -> str:
    return subprocess.run(["sh", "-c", command], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True).stdout.strip()


def test_a_new_shell_finds_an_instance_elsewhere(own: Path, tmp_path: Path) -> None:
    home = tmp_path / "its home"
    assert said(export.command(Layout(home))) == f"{own} in {home}"


def test_the_usual_place_needs_no_name(own: Path) -> None:
    assert said(export.command(Layout(home_directory({})))) == f"{own} in nowhere"


@pytest.mark.parametrize(("same", "expected"), [(True, "atoll"), (False, None)])
def test_the_short_name_is_used_where_it_means_this_one(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool, expected: str | None
) -> None:
    found = tmp_path / "path" / "atoll"
    found.parent.mkdir()
    if same:
        found.symlink_to(own)
    else:
        found.write_text("#!/bin/sh\n")
        found.chmod(0o755)
    monkeypatch.setenv("PATH", str(found.parent))
    assert export.command(Layout(home_directory({}))) == (expected or f"'{own}'")
