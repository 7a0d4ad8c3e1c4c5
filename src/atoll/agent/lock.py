"""Lock: one agent a state directory. The kernel gives it back when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self

from atoll.base.errors import Code, Refused


class Lock:
    """An exclusive flock on a file, with the holder's pid in it for people."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> Self:
        """*Errors*: Refused AGENT_LOCKED."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise Refused(Code.AGENT_LOCKED, f"another agent (pid {holder or 'unknown'}) holds {self._path}") from None
        # Written over, then cut: a full disk has no new block for it, and it is only for people.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, os.pwrite(fd, f"{os.getpid()}\n".encode(), 0))
        self._fd = fd
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def holder_of(path: Path) -> str | None:
    """The pid of the agent that holds the lock; None when nobody does."""
    try:
        with Lock(path):
            return None
    except Refused:
        return path.read_text(errors="replace").strip() or "unknown"
    except FileNotFoundError:
        return None
