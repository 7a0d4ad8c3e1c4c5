"""Processes: found, watched and ended, all by what /proc says now.

A pid is an identity only together with its start time; a pidfd is one by itself. Nothing here trusts a pid from a file alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final


def all_pids() -> Iterator[int]:
    """Every process that can be seen now."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of Path objects for nothing
        if name.isdigit():
            yield int(name)


_LOOKS: Final = 50
_BETWEEN_LOOKS_S: Final = 0.001
_KERNEL_THREAD: Final = 0x00200000
"""PF_KTHREAD of the flags in /proc/PID/stat: the ninth field, the seventh after the name."""


def arguments(pid: int) -> list[str]:
    """The command line; empty for kernel threads, for what is gone or a zombie, and for a program that has unmapped its own.

    A program in the midst of its execve shows none for a moment, and is waited for, 50 ms at the longest.
    """
    shown = False
    for look in range(_LOOKS):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return []
        if line:
            return line.decode(errors="replace").rstrip("\0").split("\0")
        if shown or (place := _arguments_at(pid)) is None:
            return []
        # Every guest process of gVisor has its place and nothing there: to wait for each of them made a look last for seconds.
        shown = place[0] < place[1]
        if not shown and look + 1 < _LOOKS:
            time.sleep(_BETWEEN_LOOKS_S)
    return []


def _arguments_at(pid: int) -> tuple[int, int] | None:
    """Where in its memory a program's arguments are; twice the same before they are there. None for what runs no program."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in ("Z", "X") or int(fields[6]) & _KERNEL_THREAD:
        return None
    return int(fields[45]), int(fields[46])


def children(pid: int) -> list[int]:
    """The children of every thread of a process."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - as above
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = [child for child in children(waiting.pop()) if child not in found]
        found += below
        waiting += below
    return found


def alive(pid: int) -> bool:
    """True while the process runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def started_ticks(pid: int) -> int | None:
    """When it started, in clock ticks since boot: with the pid, its identity."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


def mentioning(*words: str) -> list[int]:
    """Processes whose command line has an argument that contains each of `words`; reads every process: not for hot paths."""
    found = []
    for pid in all_pids():
        line = arguments(pid)
        if line and all(any(word in argument for argument in line) for word in words):
            found.append(pid)
    return found


def send_signal(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal; a process that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_all(find: Callable[[], Iterable[int]], *, patience_s: float = 5.0) -> list[int]:
    """Kill what `find` finds until it finds nothing, and say what is still there when patience ends.

    It asks again after each round, since a process may fork while it is being killed.
    """
    deadline = time.monotonic() + patience_s
    while pids := [pid for pid in find() if pid != os.getpid()]:
        watched = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                watched.append(os.pidfd_open(pid))
            send_signal(pid)
        try:
            _wait_any_end(watched, deadline)
        finally:
            for fd in watched:
                os.close(fd)
        if time.monotonic() >= deadline:
            return [pid for pid in find() if pid != os.getpid()]
    return []


def wait_end(pid: int, timeout_s: float) -> bool:
    """Wait until a process has ended; False when it still runs after `timeout_s`."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(fd)


def _wait_any_end(pidfds: list[int], deadline: float) -> None:
    """Wait until all these have ended, or 50 ms: then the caller looks again."""
    poll = select.poll()
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    until = min(deadline, time.monotonic() + 0.05)
    waiting = len(pidfds)
    while waiting and (left := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            poll.unregister(fd)
            waiting -= 1


# _IOWR(0xff, 11, 80 bytes): kernels refuse to say how a process ended to callers of the first, 64-byte struct pidfd_info.
_PIDFD_GET_INFO: Final = 0xC050FF0B
_PIDFD_INFO_EXIT: Final = 1 << 3
_PIDFD_INFO: Final = struct.Struct("=QQ11Ii16x")


def exit_reason(pid: int, pidfd: int) -> str | None:
    """How a process that has ended ended: `exit 3`, `signal 9`; None when the kernel cannot say.

    Whoever reaps it decides which source has it: /proc while it is a zombie, the descriptor afterwards (since Linux 6.15).
    """
    status = _status_of_reaped(pidfd)
    if status is None:
        status = _status_of_zombie(pid)  # not reaped, so the number is still its own
    if status is None:
        return None
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def _status_of_zombie(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[49]) if fields[0] == "Z" else None


def _status_of_reaped(pidfd: int) -> int | None:
    buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(buffer)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def set_oom_score(pid: int, value: int) -> bool:
    """Make the kernel prefer this process when memory runs out. False when it is gone or the kernel refused."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(value))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return True
