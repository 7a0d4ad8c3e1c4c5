"""Logs that do not fill the disk: by size, with a few old ones kept.

Children write to their file directly, so that the supervisor's death does not take their voice. The file is therefore copied and cut,
not renamed: all writers append, and go on at the new end. What is written between copy and cut is lost; that is a line or two.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Final

SIZE_BYTES_MAX: Final = 16 << 20
KEPT: Final = 3


def rotate(path: Path, *, size_bytes_max: int = SIZE_BYTES_MAX, kept: int = KEPT) -> bool:
    """Cut the log when it has grown beyond the limit, keeping `kept` older ones as `.1`, `.2`...; whether it did."""
    try:
        if path.stat().st_size <= size_bytes_max:
            return False
    except FileNotFoundError:
        return False
    for number in range(kept, 1, -1):
        older = path.with_name(f"{path.name}.{number - 1}")
        if older.exists():
            older.replace(path.with_name(f"{path.name}.{number}"))
    if kept:
        _keep(path, path.with_name(f"{path.name}.1"))
    os.truncate(path, 0)
    return True


def _keep(path: Path, copy: Path) -> None:
    """Copy the log. A disk without room for that needs the log's own room more than it needs the log."""
    try:
        shutil.copy2(path, copy)
    except OSError as error:
        copy.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
