"""A machine's memory, as a file: what it has written since the file was made is gathered from its process into the file. Blocking.

Theory of operation. QEMU maps the file privately: what the guest only reads comes from it, and what it writes is a copy of its process's own, of
which the file knows nothing. The kernel tells which pages these are (/proc/PID/pagemap), so a save costs what was written since the last
one. Gathering may be cut short at any point: the guest sees its own copies whatever the file says, and the next try writes all of
them again. The machine must be halted meanwhile. Source: the kernel's Documentation/admin-guide/mm/pagemap.rst.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_ENTRY: Final = 8
_SCAN_PAGES: Final = 1 << 16
_COPY_BYTES: Final = 1 << 20
_ZEROS: Final = bytes(_COPY_BYTES)
# The highest byte of an entry has: 0x80 present, 0x40 in swap, 0x20 a page of the file (or of shared memory).
_OWN: Final = bytes(1 if top & 0xE0 in (0x80, 0x40) else 0 for top in range(256))
_RUNS: Final = re.compile(b"\x01+")


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a process that maps a part of the file. *Units*: bytes."""

    start: int
    end: int
    offset: int


def regions(maps: str, inode: int, device: int) -> list[Region]:
    """Where a process maps a file, from its /proc/PID/maps."""
    found = []
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) < 5 or int(fields[4]) != inode:
            continue
        major, minor = (int(part, 16) for part in fields[3].split(":"))
        if os.makedev(major, minor) == device:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            found.append(Region(start, end, int(fields[2], 16)))
    return found


def gather(pid: int, file: Path, into: Path | None = None) -> int:
    """Write what the process has of its own of the file into the file, or into a copy of it; how much that was. *Units*: bytes. *Errors*: OSError."""
    about = file.stat()
    with (into or file).open("r+b", buffering=0) as target:
        found = regions(Path(f"/proc/{pid}/maps").read_text(), about.st_ino, about.st_dev)
        if not found:
            raise OSError(errno.ESRCH, f"process {pid} does not have {file} as its memory")
        written = 0
        with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap, Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            for region in found:
                for start, length in own_runs(pagemap.fileno(), region):
                    written += _copy(memory.fileno(), start, target.fileno(), region.offset + start - region.start, length)
        return written


def own_runs(pagemap: int, region: Region) -> Iterator[tuple[int, int]]:
    """(address, length) of what is the process's own, in pieces of a bounded size. *Units*: bytes."""
    page, last = region.start // PAGE, region.end // PAGE
    while page < last:
        count = min(_SCAN_PAGES, last - page)
        entries = os.pread(pagemap, count * _ENTRY, page * _ENTRY)
        if len(entries) < _ENTRY:
            raise OSError(errno.EIO, "the process's page map ends before its memory does")
        own = entries[_ENTRY - 1 :: _ENTRY].translate(_OWN)
        for run in _RUNS.finditer(own):
            for start in range(run.start() * PAGE, run.end() * PAGE, _COPY_BYTES):
                yield page * PAGE + start, min(_COPY_BYTES, run.end() * PAGE - start)
        page += len(own)


def _copy(memory: int, address: int, target: int, offset: int, length: int) -> int:
    data = os.pread(memory, length, address)
    if len(data) != length:
        raise OSError(errno.EIO, f"the process's memory at {address:#x} cannot be read")
    if data == _ZEROS[:length] and _is_hole(target, offset, length):
        return 0
    if os.pwrite(target, data, offset) != length:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return length


def _is_hole(target: int, offset: int, length: int) -> bool:
    try:
        return os.lseek(target, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return True
