"""Which files a COPY means, and by what they are known again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.base.errors import Refused
from atoll.cli.context import chosen, digest, ignoring
from atoll.cli.dockerfile.stages import Copied


@pytest.fixture
def context(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt", "src/main.py", "src/deep/x.pyc", "node_modules/big/file", "keep/secret", "keep/not"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("# ours\nnode_modules\n**/*.pyc\nkeep/*\n!keep/not\n.dockerignore\n")
    return tmp_path


def names(context: Path, source: str) -> list[str]:
    return [one.name for one in chosen(context, source)]


def test_all_but_what_is_left_out(context: Path) -> None:
    assert names(context, ".") == ["a.txt", "b.txt", "keep", "keep/not", "src", "src/deep", "src/main.py"]


def test_patterns_and_directories(context: Path) -> None:
    assert names(context, "*.txt") == ["a.txt", "b.txt"]
    assert names(context, "src") == names(context, "src/") == ["src", "src/deep", "src/main.py"]
    assert names(context, "missing") == names(context, "node_modules") == []


def test_a_link_that_is_asked_for_means_what_it_leads_to(context: Path) -> None:
    (context / "link").symlink_to("src")
    (context / "alias").symlink_to("a.txt")
    assert names(context, "link") == ["link", "link/deep", "link/main.py"]
    assert [(one.name, one.path.read_text()) for one in chosen(context, "alias")] == [("alias", "a.txt")]
    assert [(one.name, one.path.is_symlink()) for one in chosen(context, "*l*i*")][:1] == [("alias", False)]


def test_a_link_in_a_directory_is_a_link(context: Path) -> None:
    (context / "src/out").symlink_to("/etc")
    found = {one.name: one.path for one in chosen(context, "src")}
    assert found["src/out"].is_symlink()
    assert found.keys() == {"src", "src/deep", "src/main.py", "src/out"}


def test_a_link_that_leads_to_itself_is_nothing(context: Path) -> None:
    (context / "loop").symlink_to("loop")
    (context / "dangling").symlink_to("nowhere")
    assert names(context, "loop") == names(context, "dangling") == []


def test_content_counts_and_time_does_not(context: Path) -> None:
    one = Copied("src", "/srv", "root", "")
    files = list(chosen(context, "src"))
    before = digest(files, one)
    os.utime(context / "src/main.py", (1, 1))
    assert digest(files, one) == before
    (context / "src/main.py").write_text("changed")
    changed = digest(files, one)
    (context / "src/main.py").chmod(0o755)
    assert len({before, changed, digest(files, one)}) == 3


def test_what_leads_out_by_a_link_is_refused(context: Path) -> None:
    (context / "out").symlink_to("/etc")
    for source in ("out/passwd", "out", "o*"):
        with pytest.raises(Refused, match="leads out"):
            names(context, source)


def test_a_copy_leaves_out_what_it_excludes(context: Path) -> None:
    assert [one.name for one in chosen(context, "*.txt", excluded=["b*"])] == ["a.txt"]
    assert [one.name for one in chosen(context, "src", excluded=["**/deep"])] == ["src", "src/main.py"]


def test_a_dockerfile_has_an_ignore_file_of_its_own(context: Path) -> None:
    (context / "my.Dockerfile.dockerignore").write_text("# none of these\n*\n!s[r-t]c\nsrc/de?p\n!keep/s\\ecret\n")
    out = ignoring(context, context / "my.Dockerfile")
    assert [name for name in ("a.txt", "src/main.py", "src/deep/x", "keep/not", "keep/secret") if not out(name)] == [
        "src/main.py",
        "keep/secret",
    ]
    (context / ".dockerignore").write_bytes(b"\xef\xbb\xbfa.txt\nb.txt\n")
    assert "a.txt" not in names(context, "."), "a mark that an editor has left hides the first line"
    (context / ".dockerignore").write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match="cannot be read"):
        ignoring(context)
