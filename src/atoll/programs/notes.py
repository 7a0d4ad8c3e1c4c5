"""Notes: small files that a program writes about itself while it runs, so that others find it. A full disk must not keep it from that.

Standard library only: the launcher of every child imports it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write(path: Path, content: str, *, mode: int = 0o644) -> None:
    """Have `content` in the file; readers see the old content or the new one.

    Where a full disk has no block for a second file, the one that is there is written over; a reader that comes in that moment may see
    neither. So notes are never removed: they name a process, and when that has ended they say nothing. *Errors*: OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(content)
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC or not path.exists():
            raise
        with path.open("r+") as file:
            file.write(content)
            file.truncate()
