"""System calls that Python 3.11 lacks, by ctypes. Each raises OSError with the path or flag that it was about."""

from __future__ import annotations

import ctypes
import os
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_NOATIME: Final = 1024
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MS_SLAVE: Final = 1 << 19
MNT_DETACH: Final = 2

_PIDFD_GETFD: Final = 438
"""The same number on every architecture."""

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move the calling *thread* into new namespaces. CLONE_NEWNS also gives it a file-system state of its own."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    """Move the calling *thread* into the namespace that `fd` names."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), f"setns {kind:#x}")


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """A descriptor of another process's, as one of our own, closed by `execve`. What it is of is not opened again: nothing waits or happens."""
    result = int(_libc.syscall(ctypes.c_long(_PIDFD_GETFD), ctypes.c_int(pidfd), ctypes.c_int(fd), ctypes.c_uint(0)))
    if result < 0:
        _check(result, f"pidfd_getfd {fd}")
    return result


def syncfs(fd: int) -> None:
    """Have everything that was written to a file system on its device."""
    _check(_libc.syncfs(ctypes.c_int(fd)), "syncfs")


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """Mount, as the system call has it."""
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), None if data is None else data.encode())
    _check(result, f"mount {kind or ''} {source or ''} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """Unmount; MNT_DETACH lets go at once and finishes when nobody uses it."""
    _check(_libc.umount2(target.encode(), ctypes.c_int(flags)), f"umount {target}")
