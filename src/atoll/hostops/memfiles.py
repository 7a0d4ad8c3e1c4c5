"""Files in memory that a process alone has (memfd), held over its end: whoever lets go last pays for freeing them.

The kernel takes about a millisecond for each 8 MiB, before it says that the process has ended. Held by somebody else, they outlast it, and are freed
where nobody waits. Blocking.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.hostops import syscalls

_MADE_BY_MEMFD: Final = "/memfd:"
_FILES_MAX: Final = 64
_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class Held:
    """What is held of one process. *Units*: bytes."""

    fds: tuple[int, ...] = ()
    size_bytes: int = 0


class MemoryFiles:
    """What is held of all of them, so much at once at the most. For any thread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """What is not free yet, though whose it was may have ended. *Units*: bytes."""
        return self._held_bytes

    def hold(self, pid: int) -> Held:
        """Those of a process, each once; nothing where that is more than there is room for, or where the kernel refuses. Never raises.

        Whoever holds must `let_go`.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return Held()
        try:
            files = _files_of(pid, pidfd)
        finally:
            os.close(pidfd)
        held = Held(tuple(files), sum(files.values()))
        with self._lock:
            fits = self._held_bytes + held.size_bytes <= self._bytes_max
            self._held_bytes += held.size_bytes if fits else 0
        if fits:
            return held
        _close(held)
        return Held()

    def let_go(self, held: Held) -> None:
        """Free them, if whose they were has ended."""
        _close(held)
        with self._lock:
            self._held_bytes -= held.size_bytes


def _files_of(pid: int, pidfd: int) -> dict[int, int]:
    """Descriptor of ours → bytes in memory."""
    found: dict[int, int] = {}
    known: set[tuple[int, int]] = set()
    # What the process calls them is only a hint: whatever else it may be, to have it and to let it go does nothing.
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            if len(found) >= _FILES_MAX:
                break
            with contextlib.suppress(OSError):
                if not str(Path(entry.path).readlink()).startswith(_MADE_BY_MEMFD):
                    continue
                fd = syscalls.pidfd_getfd(pidfd, int(entry.name))
                about = os.fstat(fd)
                if (about.st_dev, about.st_ino) in known:
                    os.close(fd)
                    continue
                known.add((about.st_dev, about.st_ino))
                found[fd] = about.st_blocks * _BLOCK
    return found


def _close(held: Held) -> None:
    for fd in held.fds:
        os.close(fd)
