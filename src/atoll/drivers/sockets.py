"""Sockets in a directory where a guest's program may write: not believed to be any, and reached whatever the length of their path. Blocking."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path


def connect(directory: Path, name: str, *, timeout_s: float) -> socket.socket:
    """A connection to a socket in a directory. *Errors*: OSError.

    It is opened without following anything, looked at, and reached by its descriptor. That also helps with the paths of sockets, which are
    short (108 bytes) while those of instances need not be.
    """
    found = os.open(directory / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise OSError(errno.ENOTSOCK, f"{directory / name} is no socket")
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            made.settimeout(timeout_s)
            made.connect(f"/proc/self/fd/{found}")
        except BaseException:
            made.close()
            raise
        return made
    finally:
        os.close(found)


def is_ending(pid: int) -> bool:
    """Whether a process has ended, or is about to: nobody need wait for what it would have said."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
