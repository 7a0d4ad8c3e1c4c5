"""Small files that must never be half written or readable by the wrong user."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Put `content` at `path` so that readers see the old file or the new one, and a crash leaves one of them.

    Owner and mode are set before the name appears. *Errors*: OSError.
    """
    data = content.encode() if isinstance(content, str) else content
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            if owner is not None and os.geteuid() == 0:
                os.fchown(file.fileno(), *owner)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """One at a time among those that change what is in `directory`; waits for the other."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file of ours; None when there is none, it is not one, or it is not ours to read."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, PermissionError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def make_directory(path: Path, *, mode: int, owner: tuple[int, int] | None = None) -> None:
    """Have the directory with this mode and owner. *Idempotency*: corrects both where they differ."""
    path.mkdir(parents=True, exist_ok=True)
    info = path.stat()
    if info.st_mode & 0o7777 != mode:
        path.chmod(mode)
    if owner is not None and os.geteuid() == 0 and (info.st_uid, info.st_gid) != owner:
        os.chown(path, *owner)
