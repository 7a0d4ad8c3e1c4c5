"""Reserve: a little disk kept back, so that a full disk cannot keep the agent from recording that things are to be removed.

Deleting frees space, but its intent has to be on disk first. When the journal meets a full disk it gives the reserve up and goes on;
the reserve is laid in again when there is room.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

BYTES: Final = 4 * 2**20


class Reserve:
    """A file of real blocks beside the journal."""

    def __init__(self, path: Path, *, size_bytes: int = BYTES) -> None:
        self._path = path
        self._size_bytes = size_bytes

    def lay_in(self) -> bool:
        """Make it whole; whether it is there now. Leaves at least as much again free."""
        try:
            if self._path.exists() and self._path.stat().st_size == self._size_bytes:
                return True
            space = os.statvfs(self._path.parent)
            if space.f_bavail * space.f_frsize < 2 * self._size_bytes:
                return False
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, self._size_bytes)
            finally:
                os.close(fd)
        except OSError:
            self.give_up()
            return False
        return True

    def give_up(self) -> bool:
        """Free its blocks; whether there were any."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
