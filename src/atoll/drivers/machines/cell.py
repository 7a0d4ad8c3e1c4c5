"""The namespaces in which a machine's program starts, and the only files of the host's that it has there. For a thread that ends with it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.hostops import syscalls

INNER_VM: Final = "/vm"
"""Its machine's own directory: disk, memory, sockets."""
INNER_IMAGE: Final = "/image"
INNER_KERNEL: Final = "/kernel"
INNER_INITRD: Final = "/initrd"
SAFE: Final = syscalls.MS_NOSUID | syscalls.MS_NODEV


@dataclass(frozen=True, slots=True)
class Cell:
    """One machine's files, and whose process may have them."""

    vm: Path
    image: Path
    kernel: Path
    initrd: Path
    user: int


def enter(namespace: int) -> None:
    """Have the calling thread, and what it starts, in the slot's network, with mounts of its own. The thread must end afterwards."""
    syscalls.setns(namespace, syscalls.CLONE_NEWNET)
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS)
    # As a slave: what the host unmounts is not kept by machines that started before.
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)


def furnish(cell: Cell, root: Path) -> None:
    """Mount the machine's files below what will be its program's root, where there are places for them. After `enter`."""
    bind(cell.vm, root / INNER_VM.lstrip("/"), SAFE | syscalls.MS_NOEXEC)
    for source, inner in ((cell.image, INNER_IMAGE), (cell.kernel, INNER_KERNEL), (cell.initrd, INNER_INITRD)):
        bind(source, root / inner.lstrip("/"), SAFE | syscalls.MS_NOEXEC | syscalls.MS_RDONLY)


def bind(source: Path, target: Path, flags: int) -> None:
    """Mount a file or directory somewhere else, with these flags there."""
    syscalls.mount(str(source), str(target), None, syscalls.MS_BIND)
    syscalls.mount(None, str(target), None, syscalls.MS_BIND | syscalls.MS_REMOUNT | flags)


def starting(groups: Sequence[Path], pid_file: Path, program: Sequence[str]) -> list[str]:
    """A shell that joins the control groups, starts a program without any privilege to gain, notes which process that is, and ends."""
    join = "".join(f"echo 0 >{shlex.quote(str(path / 'cgroup.procs'))} && " for path in groups)
    guarded = ["setpriv", "--no-new-privs", *program]
    return ["/bin/sh", "-c", f"{join}{{ {shlex.join(guarded)} & echo $! >{shlex.quote(str(pid_file))}; }}"]
