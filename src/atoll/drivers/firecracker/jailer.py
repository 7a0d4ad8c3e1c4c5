"""Where Firecracker runs: the jail that its own jailer makes, on ground that is prepared for it.

Theory of operation. In a thread that ends with it, the namespaces are entered and a small file system in memory is mounted where the jailer is to make
its root: what Firecracker, whose root it is, might write there takes nothing of the host's disk, counts as its own memory and is gone with it. The
machine's directory, image and kernel are bound into it. The shell that starts the jailer has joined the control groups, so that whatever
the jailer does is within them. It makes the device nodes, becomes the slot's user in that root, and Firecracker, which forbids itself all
system calls but its few. Source: Firecracker's docs/jailer.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.drivers.firecracker.api import SOCKET
from atoll.drivers.firecracker.programs import FIRECRACKER, Programs
from atoll.drivers.machines import cell as cells
from atoll.drivers.machines.cell import INNER_IMAGE, INNER_INITRD, INNER_KERNEL, INNER_VM, Cell
from atoll.drivers.machines.runtime import RUN
from atoll.hostops import syscalls

JAIL: Final = "jail"
"""In a placement's directory: what the jailer is told is the base of its roots."""
ROOT_MIB: Final = 16
"""Of the root in memory, beside the copy of Firecracker that the jailer makes there: device nodes, mount points."""
FILES_MAX: Final = 256
_SPARE_BYTES: Final = 64 << 20


def instance_id(container_id: str) -> str:
    """What the jailer takes as a name: letters, digits and `-`, at most 64 of them."""
    return container_id.replace("_", "-")[:64]


@dataclass(frozen=True, slots=True)
class Jail:
    """One machine's jail. *Units*: bytes."""

    programs: Programs
    directory: Path
    """The placement's."""
    name: str
    namespace: str
    """The slot's network, as a path."""
    file_bytes_max: int
    """The largest file that it may write: its disk, or all of its memory."""

    @property
    def base(self) -> Path:
        return self.directory / JAIL

    @property
    def root(self) -> Path:
        """Where the jailer makes it: BASE/PROGRAM/ID/root."""
        return self.base / FIRECRACKER / self.name / "root"


def furnish(jail: Jail, cell: Cell) -> None:
    """Prepare the ground. After `cells.enter`, in its thread; the base must be there."""
    # Not without devices: the jailer makes its nodes there.
    size_mib = ROOT_MIB + (jail.programs.firecracker.stat().st_size >> 20)
    syscalls.mount("tmpfs", str(jail.base), "tmpfs", syscalls.MS_NOSUID, f"mode=755,size={size_mib}m")
    vm = jail.root / INNER_VM.lstrip("/")
    vm.mkdir(parents=True)
    for name in (INNER_IMAGE, INNER_KERNEL, INNER_INITRD):
        (jail.root / name.lstrip("/")).touch()
    cells.furnish(cell, jail.root)


def program(jail: Jail, user: int) -> list[str]:
    """The jailer's command line, with Firecracker's behind it."""
    return [
        str(jail.programs.jailer),
        "--id", jail.name,
        "--exec-file", str(jail.programs.firecracker),
        "--uid", str(user),
        "--gid", str(user),
        "--chroot-base-dir", str(jail.base),
        "--netns", jail.namespace,
        "--resource-limit", f"fsize={jail.file_bytes_max + _SPARE_BYTES}",
        "--resource-limit", f"no-file={FILES_MAX}",
        "--",
        "--api-sock", f"{INNER_VM}/{RUN}/{SOCKET}",
    ]  # fmt: skip
