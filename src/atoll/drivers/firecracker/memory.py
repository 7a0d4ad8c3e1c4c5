"""A machine's memory, as a file: what Firecracker has written of what changed is laid over what it began with. Blocking.

Source: Firecracker's docs/snapshotting: the memory file of a Diff snapshot has the size of all memory, and holes where nothing has changed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_COPY_BYTES: Final = 1 << 20


def blank(file: Path, size: int) -> None:
    """Have an empty file of this size, in the place of another one. *Units*: bytes. *Errors*: OSError."""
    file.unlink(missing_ok=True)
    with file.open("wb") as made:
        made.truncate(size)


def lay_over(changed: Path, memory: Path) -> int:
    """Write all that is no hole in one file into the other; how much that was. *Units*: bytes. *Errors*: OSError, also when their sizes differ."""
    written = 0
    with changed.open("rb", buffering=0) as source, memory.open("r+b", buffering=0) as target:
        size = os.fstat(source.fileno()).st_size
        if size != os.fstat(target.fileno()).st_size:
            raise OSError(errno.EINVAL, f"what has changed is of {size} bytes of memory, and {memory} of another size")
        for start, end in _extents(source.fileno(), size):
            while start < end:
                copied = os.copy_file_range(source.fileno(), target.fileno(), min(_COPY_BYTES, end - start), start, start)
                if copied == 0:
                    raise OSError(errno.EIO, f"{changed} ends before it should")
                start += copied  # noqa: PLW2901 - the extent is used up piece by piece
                written += copied
    return written


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # only a hole follows
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end
