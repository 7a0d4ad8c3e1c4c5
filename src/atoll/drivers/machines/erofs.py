"""What an image's disk is made of, apart from when: its fingerprint. A guest that goes on elsewhere has read that disk, and believes to know its blocks.

Theory of operation. mkfs.erofs lays the same tree out in the same way, in whatever order its names were made. What differs from host to host are times:
of the files that unpacking adds, and of making the disk. So a digest is taken of every byte but those: the superblock's checksum, times and
name, and each inode's time. Source: the kernel's fs/erofs/erofs_fs.h. Blocking.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAGIC: Final = 0xE0F5E1E2
_SUPER: Final = 1024
_HEAD: Final = struct.Struct("<IIIBBHQQIIII")
"""Magic, checksum, features, block bits, slots, root, inodes, time, its nanoseconds, blocks, where inodes are, where shared attributes are."""
_OF_THE_MAKING: Final = ((_SUPER + 4, 4), (_SUPER + 24, 12), (_SUPER + 48, 16))
"""(offset, length) of checksum, time and name."""
_INODE: Final = struct.Struct("<HHHHQI")
"""Format, attributes, mode, (links), size, first block: of an inode in its long form."""
_SLOT: Final = 32
_LONG_BYTES: Final = 64
_TIME: Final = (32, 12)
_DIRENT: Final = struct.Struct("<QHBB")
_PLAIN, _INLINE = 0, 2
_IS_DIRECTORY: Final = 0o040000
_KIND: Final = 0o170000


def fingerprint(file: Path) -> str:
    """SHA-256 of it without times, as hexadecimal digits. Of a file that is no erofs, or in a form that mkfs.erofs makes only when
    asked to compress, it is that of all its bytes. *Errors*: OSError.
    """
    if not file.stat().st_size:
        return hashlib.sha256().hexdigest()
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            left_out = sorted([*_OF_THE_MAKING, *_times(data)])
        except (ValueError, struct.error, IndexError):
            left_out = []
        digest, at = hashlib.sha256(), 0
        view = memoryview(data)
        try:
            for start, length in left_out:
                digest.update(view[at:start])
                at = start + length
            digest.update(view[at:])
        finally:
            view.release()
        return digest.hexdigest()


def _times(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """(offset, length) of every inode's time. *Errors*: ValueError and others when it is no erofs, or compressed."""
    magic, _, _, bits, _, root, _, _, _, _, inodes, _ = _HEAD.unpack_from(data, _SUPER)
    if magic != MAGIC:
        raise ValueError("no erofs")
    block, seen, waiting = 1 << bits, {root}, [root]
    while waiting:
        at = inodes * block + waiting.pop() * _SLOT
        if data[at] & 1:
            yield at + _TIME[0], _TIME[1]
        for number in _entries(data, at, block):
            if number not in seen:
                seen.add(number)
                waiting.append(number)


def _entries(data: mmap.mmap, at: int, block: int) -> Iterator[int]:
    """Numbers of the inodes that a directory names; of anything else: none."""
    form, attributes, mode, _, size, first = _INODE.unpack_from(data, at)
    if mode & _KIND != _IS_DIRECTORY:
        return
    long = bool(form & 1)
    if not long:
        size, first = struct.unpack_from("<I4xI", data, at + 8)
    layout = form >> 1 & 7
    if layout not in (_PLAIN, _INLINE):
        raise ValueError("a directory is compressed")
    pieces = [(first * block + start, min(block, size - start)) for start in range(0, size, block)]
    if layout == _INLINE and pieces:
        behind = at + (_LONG_BYTES if long else _SLOT) + (12 + 4 * (attributes - 1) if attributes else 0)
        pieces[-1] = (behind, pieces[-1][1])
    for start, length in pieces:
        names = _DIRENT.unpack_from(data, start)[1]
        if not 0 < names <= length:
            raise ValueError("a directory makes no sense")
        for entry in range(start, start + names, _DIRENT.size):
            yield _DIRENT.unpack_from(data, entry)[0]
