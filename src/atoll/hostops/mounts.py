"""The mount table, read and changed."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from pathlib import Path

from atoll.hostops import syscalls


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    point: str
    kind: str
    source: str


def _unescape(text: str) -> str:
    # The kernel writes space, tab, newline and backslash as three octal digits.
    return text.encode().decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape") if "\\" in text else text


def parse(text: str) -> list[Mount]:
    """Read mountinfo; source: proc(5)."""
    found = []
    for line in text.splitlines():
        fields, separator, rest = line.partition(" - ")
        left, right = fields.split(" "), rest.split(" ")
        if separator and len(left) >= 5 and len(right) >= 2:
            found.append(Mount(_unescape(left[4]), right[0], _unescape(right[1])))
    return found


def table() -> list[Mount]:
    """What the calling thread sees mounted. os.path.ismount misses bind mounts of the same file system."""
    return parse(Path("/proc/thread-self/mountinfo").read_text())


def below(directory: Path) -> list[str]:
    """Mount points at or below a directory, deepest first."""
    root = str(directory)
    return sorted((m.point for m in table() if m.point == root or m.point.startswith(root + "/")), key=len, reverse=True)


def unmount_below(directory: Path) -> None:
    """Detach every mount at or below a directory."""
    for point in below(directory):
        with contextlib.suppress(FileNotFoundError):
            try:
                syscalls.umount(point, syscalls.MNT_DETACH)
            except OSError as error:
                if error.errno != errno.EINVAL:  # somebody else was faster
                    raise
