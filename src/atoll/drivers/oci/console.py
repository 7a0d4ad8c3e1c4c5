"""The console file of a guest: read from its end, and cut when it grows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from atoll.drivers.oci.runtime import CONSOLE


def tail(directory: Path, bytes_max: int) -> bytes:
    """The last bytes of a placement's console; empty when there is none."""
    try:
        with (directory / CONSOLE).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - bytes_max))
            return file.read(bytes_max)
    except FileNotFoundError:
        return b""


def cut(directories: Iterable[Path], bytes_max: int) -> None:
    """Keep the last half of every console that is larger than `bytes_max`: a guest may write for ever."""
    for directory in directories:
        path = directory / CONSOLE
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > bytes_max:
                last = tail(directory, bytes_max // 2)
                with path.open("r+b") as file:
                    # The guest's descriptor appends, so it goes on after whatever the file holds.
                    file.truncate(0)
                    file.write(last)
