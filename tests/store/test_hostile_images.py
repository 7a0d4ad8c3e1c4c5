"""Each hostile image of the list, given to the real programs: as control pulls it, and as a host has it that was given it nevertheless.

Nothing outside of the tree changes, nothing half-made is left, and whoever asked is told by a code.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.store.hostile.cases import BYTES_MAX, CASES, ENTRIES_MAX, Case, table
from tests.store.hostile.forging import Layout

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAM: Final = Path(os.environ.get("ATOLL_BIN") or ROOT / "build" / "bin") / "atoll-io"
GUIDE: Final = ROOT / "docs" / "guides" / "hostile-images.md"

needs_program = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built: scripts/setup.py --only programs")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files are given to their owners: root")


class Place:
    """A directory with a victim, and the store and cache that it is not to be reached from."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.outside = root / "outside"
        self.outside.mkdir()
        (self.outside / "victim").write_text("mine")
        self.layout = Layout(root / "layout")
        self.store, self.cache = root / "store", root / "cache"
        self.kept = self.all()

    def all(self) -> set[str]:
        """What is outside of store, cache and layout."""
        return {str(path) for path in self.root.rglob("*") if not path.is_relative_to(self.layout.root)}

    def run(self, verb: str, *words: str, given: Mapping[str, Any] | None = None) -> str | None:
        """The code with which it failed; None: it is done."""
        command = [PROGRAM, "image", verb, "--store", self.store, *words, "--bytes-max", BYTES_MAX, "--entries-max", ENTRIES_MAX]
        ran = subprocess.run(
            [str(word) for word in command], input=json.dumps(given or {}), capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.stdout, ran.stderr
        last = json.loads(ran.stdout.splitlines()[-1])
        assert last["event"] in ("done", "failed"), last
        return None if last["event"] == "done" else str(last["code"])

    def have(self, digest: str) -> str | None:
        """What a host does: documents, then layers as they come."""
        given = {"objects": {"folder": str(self.layout.root)}}
        asked = ["--image", digest, "--options", "-"]
        return self.run("fetch", "--documents", *asked, given=given) or self.run("unpack", *asked, "--cache", str(self.cache), given=given)

    def assert_untouched(self) -> None:
        assert (self.outside / "victim").read_text() == "mine"
        assert (self.outside / "victim").stat().st_nlink == 1
        mine = {
            path
            for path in self.all() - self.kept
            if not Path(path).is_relative_to(self.store) and not Path(path).is_relative_to(self.cache)
        }
        assert mine <= {str(self.store), str(self.cache)}
        assert not Path("/etc/escaped").exists()

    def assert_nothing_left(self) -> None:
        assert list((self.store / "partial").iterdir()) == []
        if self.cache.exists():
            assert list((self.cache / "sha256").iterdir()) == []


@needs_program
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pulled(case: Case, tmp_path: Path) -> None:
    place = Place(tmp_path)
    case.write(place.layout, str(place.outside))
    code = place.run("pull", "--source", f"oci-layout:{place.layout.root}", "--options", "-")
    assert code == case.when_pulled
    place.assert_untouched()
    if code is not None:
        place.assert_nothing_left()


@needs_program
@needs_root
@pytest.mark.parametrize("case", [case for case in CASES if case.index is None], ids=lambda case: case.name)
def test_given_to_a_host(case: Case, tmp_path: Path) -> None:
    place = Place(tmp_path)
    digest = case.write(place.layout, str(place.outside))
    assert place.have(digest) == case.code
    place.assert_untouched()
    if case.code is not None:
        place.assert_nothing_left()
        return
    tree = place.cache / "sha256" / digest.removeprefix("sha256:") / "rootfs"
    assert tree.is_dir()
    if case.check is not None:
        case.check(tree)


def test_the_list_in_the_guide_is_this_one() -> None:
    """Write it anew: `python -m tests.store.hostile.cases`, below the guide's first words."""
    _, found, rest = GUIDE.read_text().partition("## Names")
    assert (found + rest).rstrip() == "\n".join(table()).rstrip()
    assert len({case.name for case in CASES}) == len(CASES)
