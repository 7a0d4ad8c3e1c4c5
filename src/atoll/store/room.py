"""Room: blocks kept ready behind the end of a write-ahead log, so that a full disk cannot keep a removal from being recorded.

Theory of operation. Deleting frees space, but its intent has to be on the disk first. Blocks are allocated beyond the file's end while
its length stays as it is: the log grows into them, and nobody else can have them meanwhile (a file that is removed when it is needed
would lose its blocks to the sandbox that is filling the disk). SQLite never cuts a log, and goes on appending to it when the database
itself cannot grow; that file is cut with every checkpoint, so that room behind it would not last.
Source: fallocate(2), FALLOC_FL_KEEP_SIZE; walCheckpoint in SQLite's wal.c. A file system that cannot do it gives no room ahead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Final

AHEAD_BYTES: Final = 16 << 20
"""A removal is three commits of some ten pages: enough for about a hundred, of which each frees more than that."""
LEAST_BYTES: Final = 64 << 10
_KEEP_SIZE: Final = 1
_BLOCK_BYTES: Final = 512

_libc = ctypes.CDLL(None, use_errno=True)


class Room:
    """Of one log, which need not be there yet."""

    def __init__(self, log: Path, *, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._log = log
        self._ahead_bytes = ahead_bytes
        self._file: int | None = None
        self._lock = threading.Lock()

    def keep(self) -> bool:
        """Have the room again that was used, as far as it can be had; whether all is there. One look while it is. For any thread."""
        with self._lock:
            try:
                if self._file is None:
                    self._file = os.open(self._log, os.O_RDWR | os.O_CLOEXEC)
                return self._have(self._file)
            except OSError as error:
                # The log appears with the first write. Where nothing can be kept, nothing is missed.
                return error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENOSYS)

    def close(self) -> None:
        """Let go. The database is closed and has removed its log: leave an empty one, with the room, to whoever opens it next."""
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None:
                os.close(self._file)
                self._file = None
                left = os.open(self._log, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    self._have(left)
                finally:
                    os.close(left)

    def _have(self, file: int) -> bool:
        seen = os.fstat(file)
        # Half of it may be used before it is filled up: not every commit should have to.
        if seen.st_blocks * _BLOCK_BYTES - seen.st_size >= self._ahead_bytes // 2:
            return True
        size = self._ahead_bytes
        while not _allocated(file, seen.st_size, size):
            size //= 2
            if size < LEAST_BYTES:
                return False
        return size == self._ahead_bytes


def _allocated(file: int, offset: int, size: int) -> bool:
    """Whether there were as many blocks. *Errors*: OSError for any other reason."""
    while _libc.fallocate(file, _KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(size)) != 0:
        number = ctypes.get_errno()
        if number == errno.ENOSPC:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True
