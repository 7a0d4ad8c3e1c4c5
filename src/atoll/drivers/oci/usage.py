"""What placements use: CPU and memory of their control groups, and the blocks that their disks take. Blocking; a few reads for each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from atoll.drivers.oci.crun import DISK as DISK_IMAGE
from atoll.drivers.oci.look import View
from atoll.drivers.oci.runsc import DISK as DISK_DIRECTORY
from atoll.drivers.port import Usage
from atoll.hostops import cgroups

_BLOCK_BYTES: Final = 512


def measure(view: View, placement_ids: Iterable[str]) -> dict[str, Usage]:
    """What they use now; those whose group is gone are left out."""
    found: dict[str, Usage] = {}
    for placement_id in placement_ids:
        spent = cgroups.spent(view.layout, view.group(placement_id))
        if spent is not None:
            disk = _disk_bytes(view.directory(placement_id))
            found[placement_id] = Usage(spent.cpu_s, spent.memory_bytes, spent.cache_bytes, disk)
    return found


def _disk_bytes(directory: Path) -> int:
    """What the host's disk holds of the placement's: a sparse image of a file system, or the files in which the sentry keeps it."""
    try:
        return (directory / DISK_IMAGE).stat().st_blocks * _BLOCK_BYTES
    except OSError:
        pass
    try:
        with os.scandir(directory / DISK_DIRECTORY) as entries:
            return sum(entry.stat(follow_symlinks=False).st_blocks for entry in entries) * _BLOCK_BYTES
    except OSError:
        return 0
