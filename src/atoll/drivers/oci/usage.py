"""What placements use: CPU and memory of their control groups, and the blocks that their disks take. Blocking; a few reads for each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from atoll.drivers.oci.crun import DISK as DISK_IMAGE
from atoll.drivers.oci.look import View
from atoll.drivers.oci.runsc import DISK as DISK_DIRECTORY
from atoll.drivers.oci.runtime import read_pid
from atoll.drivers.port import Usage
from atoll.hostops import cgroups

_BLOCK_BYTES: Final = 512
MACHINE_DISK: Final = "vm/disk.img"
"""Where a virtual machine has it."""


def measure(view: View, placement_ids: Sequence[str], files: dict[str, Path]) -> dict[str, Usage]:
    """What they use now; those whose group is gone are left out. `files`: where the sentries' files were found before, kept by the caller until they are removed."""
    found: dict[str, Usage] = {}
    for placement_id in placement_ids:
        spent = cgroups.spent(view.layout, view.group(placement_id))
        if spent is not None:
            disk = _disk_bytes(view.directory(placement_id), placement_id, files)
            found[placement_id] = Usage(spent.cpu_s, spent.memory_bytes, spent.cache_bytes, disk)
    return found


def _disk_bytes(directory: Path, placement_id: str, files: dict[str, Path]) -> int:
    """What the host's disk holds of the placement's: a sparse image of a file system, or the file in which the sentry keeps it."""
    for image in (directory / DISK_IMAGE, directory / MACHINE_DISK):
        with contextlib.suppress(OSError):
            return image.stat().st_blocks * _BLOCK_BYTES
    kept = f"{directory / DISK_DIRECTORY}/"
    blocks = _blocks(files[placement_id], kept) if placement_id in files else None
    if blocks is None and (pid := read_pid(directory)) is not None:
        for file in _open_files(pid):
            blocks = _blocks(file, kept)
            if blocks is not None:
                files[placement_id] = file
                break
    return (blocks or 0) * _BLOCK_BYTES


def _open_files(pid: int) -> list[Path]:
    """The sentry unlinks its file as soon as it has it: only what the process has open leads there."""
    directory = Path(f"/proc/{pid}/fd")
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _blocks(file: Path, kept: str) -> int | None:
    """Of an open file, when it is one of that directory. Processes and their files come and go while they are looked at."""
    try:
        return file.stat().st_blocks if os.readlink(file).startswith(kept) else None  # noqa: PTH115 - Path.readlink resolves nothing more, and costs twice as much
    except OSError:
        return None
