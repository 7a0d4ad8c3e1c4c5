"""The recipes of ready-made templates: each is a Dockerfile that we take, with what it copies, and installs only what is locked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from atoll.cli.dockerfile.reading import read
from atoll.cli.dockerfile.stages import Copied

RECIPES = Path(__file__).resolve().parents[3] / "deploy" / "templates"
DOCKERFILES = sorted(RECIPES.glob("*/Dockerfile"))
LOCKS = sorted(RECIPES.glob("*/requirements.txt"))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.parent.name)
def test_a_recipe_is_taken_whole(file: Path) -> None:
    made = read(file.read_text(), {})
    assert not made.notes, made.notes

    for one in (step for stage in made.stages for step in stage.steps):
        if isinstance(one, Copied) and "://" in one.source:
            assert one.checksum, f"{one.source} may become another"
        elif isinstance(one, Copied) and one.origin is None:
            assert (file.parent / one.source.rstrip("/")).exists(), one.source
        elif isinstance(one, tuple) and one[0] == "RUN" and "pip install" in one[1][0]:
            assert "--require-hashes" in one[1][0]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.parent.name)
def test_what_a_recipe_installs_is_locked_with_hashes(lock: Path) -> None:
    text = lock.read_text()
    entries = re.findall(r"^([A-Za-z0-9][^ =]*)==([^ ;\\]+)[^\n]*\\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^[A-Za-z0-9]", text, re.MULTILINE)), "one of them has no hash"
    locked = {canonicalize_name(name): version for name, version, _ in entries}
    for line in lock.with_suffix(".in").read_text().splitlines():
        if line and not line.startswith("#"):
            wanted = Requirement(line)
            assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), wanted


def test_there_are_recipes() -> None:
    assert {path.parent.name for path in DOCKERFILES} >= {"code-interpreter", "desktop"}
    assert LOCKS
