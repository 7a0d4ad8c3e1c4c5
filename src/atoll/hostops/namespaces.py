"""Namespaces that nothing but a file descriptor or a process keeps alive.

A network namespace needs no name: the slot holds its descriptor until a sandbox's processes live in it, and when the last of both is
gone the kernel removes it with every device inside. So a killed agent leaves none behind. It costs no entry in the mount table either,
which every new mount namespace copies (700 bind mounts made that five times slower: research/isolation.md A4).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from atoll.hostops import syscalls

T = TypeVar("T")


def in_fresh_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own which ends with it: what it does to its namespaces stays with it."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="namespace") as pool:
        return pool.submit(work).result()


def new_network_namespace() -> int:
    """A new network namespace, as a descriptor that the caller closes. The calling thread is left in it: use `in_fresh_thread`."""
    syscalls.unshare(syscalls.CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def in_network_namespace(fd: int, work: Callable[[], T]) -> T:
    """Run `work` in the network namespace `fd`, in a thread of its own."""

    def enter() -> T:
        syscalls.setns(fd, syscalls.CLONE_NEWNET)
        return work()

    return in_fresh_thread(enter)


def new_mount_namespace() -> None:
    """Give the calling thread, and whatever it starts, a mount table of its own; nothing that it mounts is seen outside."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
