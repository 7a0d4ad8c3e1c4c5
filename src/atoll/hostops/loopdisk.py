"""Disks of a fixed size: sparse files with ext4, on loop devices that let go of themselves.

A loop device is configured with AUTOCLEAR: when the last mount of it is gone, in whatever mount namespace, the kernel frees it. So a
container whose mounts exist only in its own namespace leaves no device behind, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import subprocess
from pathlib import Path
from typing import Final

_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CTL_ADD: Final = 0x4C80
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_MAJOR: Final = 7
_LO_FLAGS_AUTOCLEAR: Final = 4
# struct loop_config: fd, block_size, struct loop_info64 (device, inode, rdevice, offset, sizelimit, number, encrypt_type,
# encrypt_key_size, flags, file_name[64], crypt_name[64], encrypt_key[32], init[2]), reserved[8].
_LOOP_CONFIG: Final = struct.Struct("=II QQQQQIIII 64s 64s 32s QQ 8Q")
_TRIES: Final = 64
JOURNAL_MIB: Final = 4


def make(path: Path, size_mib: int, *, journal: bool = False) -> None:
    """Make a sparse file with an empty ext4 of this size, whole or not at all.

    No journal: what it holds lives no longer than its sandbox, and a host that crashed checks it before it is used again. With `journal`:
    for a guest with a kernel of its own, which may be ended at any moment.
    *Errors*: OSError (ENOSPC) when the host's disk is full, or mkfs's own words.
    """
    temporary = path.with_name(f".{path.name}.unfinished")
    with temporary.open("wb") as file:
        file.truncate(size_mib << 20)
    features = ["-O", "^resize_inode", "-J", f"size={JOURNAL_MIB}"] if journal else ["-O", "^has_journal,^resize_inode"]
    options = ["-q", "-F", "-m", "0", *features, "-E", "lazy_itable_init=1,nodiscard,assume_storage_prezeroed=1"]
    done = _mkfs(options, temporary)
    if done.returncode != 0:
        # e2fsprogs before 1.47 has no assume_storage_prezeroed.
        options[-1] = "lazy_itable_init=1,nodiscard"
        done = _mkfs(options, temporary)
    if done.returncode != 0:
        temporary.unlink(missing_ok=True)
        raise OSError(errno.EIO, f"mkfs.ext4 {path}: {done.stderr.decode(errors='replace').strip()}")
    temporary.replace(path)


def copy(source: Path, target: Path, *, durable: bool = False) -> None:
    """Make a sparse copy of a file, whole or not at all: only what has been written is read. *Errors*: OSError (ENOSPC)."""
    temporary = target.with_name(f".{target.name}.unfinished")
    try:
        with source.open("rb") as data, temporary.open("wb") as file:
            size = os.fstat(data.fileno()).st_size
            file.truncate(size)
            end = 0
            while (start := _next_data(data.fileno(), end)) is not None:
                end = os.lseek(data.fileno(), start, os.SEEK_HOLE)
                while start < end:
                    start += os.copy_file_range(data.fileno(), file.fileno(), end - start, start, start)
            if durable:
                os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _next_data(fd: int, offset: int) -> int | None:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None  # only a hole follows


def _mkfs(options: list[str], path: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["mkfs.ext4", *options, str(path)], stdin=subprocess.DEVNULL, capture_output=True, check=False)


def check(path: Path) -> None:
    """Repair what a crash of the host left. *Errors*: OSError when it cannot be repaired."""
    done = subprocess.run(["e2fsck", "-p", str(path)], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode & ~1:
        raise OSError(errno.EUCLEAN, f"e2fsck {path} ended with {done.returncode}: {done.stdout.decode(errors='replace').strip()[-300:]}")


def attach(path: Path) -> tuple[str, int]:
    """Put a file on a free loop device and return (device, descriptor).

    Keep the descriptor open until the device is mounted: without it and without a mount the device is freed again.
    """
    backing = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        name = str(path).encode()[-63:]
        config = _LOOP_CONFIG.pack(backing, 0, *[0] * 8, _LO_FLAGS_AUTOCLEAR, name, b"", b"", 0, 0, *[0] * 8)
        for _ in range(_TRIES):
            with Path("/dev/loop-control").open("rb") as control:
                number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = _device(number)
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:  # somebody else took the number between the two calls
                    raise
                continue
            return device, fd
    finally:
        os.close(backing)
    raise OSError(errno.EBUSY, "no free loop device")


def _device(number: int) -> str:
    """The device's path; made where nobody (no udev) makes it."""
    path = f"/dev/loop{number}"
    with contextlib.suppress(FileExistsError):
        os.mknod(path, stat.S_IFBLK | 0o660, os.makedev(_LOOP_MAJOR, number))
    return path


def users(directory: Path) -> list[str]:
    """Loop devices that hold a file at or below a directory."""
    found = []
    for device in Path("/sys/block").glob("loop*"):
        try:
            backing = (device / "loop" / "backing_file").read_text().strip()
        except OSError:
            continue
        if backing == str(directory) or backing.startswith(f"{directory}/"):
            found.append(device.name)
    return found
