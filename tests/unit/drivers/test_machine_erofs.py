"""One tree has one fingerprint, whenever and in whatever order it was made."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from atoll.drivers.machines.erofs import fingerprint

needs_mkfs = pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="needs mkfs.erofs (apt-get install erofs-utils)")
NAMES = [f"name-{number}" for number in range(900)]
"""More than a block of a directory holds."""


def tree(path, *, backwards=False, at=1_700_000_000, odd=b"odd"):
    (path / "many" / "deep").mkdir(parents=True)
    for name in reversed(NAMES) if backwards else NAMES:
        (path / "many" / name).write_bytes(name.encode() * 3)
    (path / "many" / "deep" / "large").write_bytes(bytes(range(256)) * 100)
    (path / "many" / "deep" / "odd").write_bytes(odd)
    (path / "link").symlink_to("many/deep")
    os.link(path / "many" / "name-1", path / "another-name")
    for directory, names, files in os.walk(path):
        for name in (*names, *files, "."):
            os.utime(Path(directory) / name, (at, at + len(name)), follow_symlinks=False)
    return path


def disk(tree, name):
    file = tree.parent / name
    subprocess.run(["mkfs.erofs", "--quiet", str(file), str(tree)], check=True)
    return file


@needs_mkfs
def test_it_knows_no_times(tmp_path):
    first = disk(tree(tmp_path / "one"), "1")
    second = disk(tree(tmp_path / "other", backwards=True, at=1_600_000_000), "2")
    assert first.read_bytes() != second.read_bytes()
    assert fingerprint(first) == fingerprint(second)


@needs_mkfs
def test_all_else_counts(tmp_path):
    known = {fingerprint(disk(tree(tmp_path / "one"), "1"))}
    known.add(fingerprint(disk(tree(tmp_path / "content", odd=b"Odd"), "2")))
    modes = tree(tmp_path / "modes")
    (modes / "many" / "deep" / "odd").chmod(0o600)
    known.add(fingerprint(disk(modes, "3")))
    names = tree(tmp_path / "names")
    (names / "many" / "deep" / "odd").rename(names / "many" / "deep" / "even")
    known.add(fingerprint(disk(names, "4")))
    assert len(known) == 4


def test_what_is_no_erofs_is_taken_as_it_is(tmp_path):
    for number, content in enumerate((b"", b"content", bytes(5000), b"other")):
        (tmp_path / str(number)).write_bytes(content)
    assert len({fingerprint(tmp_path / str(number)) for number in range(4)}) == 4
