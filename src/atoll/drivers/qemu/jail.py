"""Where QEMU runs: a root of its own files, a user of its own, the slot's network, and no way to more.

Theory of operation. Once for an instance, QEMU, its libraries and firmware are copied to a directory: the jail's tree. A start makes, in a thread
that ends with it, mount, IPC and name namespaces, and enters the slot's network namespace; there the tree is bound over itself and
read-only, the machine's directory, image and kernel are bound into it, and a small /dev is made. A shell joins the control groups, and its child
becomes the slot's user in that root, without any privilege to gain, and QEMU: which the kernel then lets start nothing (seccomp).
Nothing of it is seen in the host's mount table, and it ends with QEMU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.drivers.machines import cell as cells
from atoll.drivers.machines.cell import INNER_IMAGE, INNER_INITRD, INNER_KERNEL, INNER_VM, Cell
from atoll.drivers.machines.config import Accelerator
from atoll.drivers.qemu.config import QemuConfig
from atoll.hostops import syscalls

INNER_QEMU: Final = "/usr/bin/qemu-system-x86_64"
"""Where the distribution has it: it finds its modules by its own place."""
INNER_FIRMWARE: Final = "/firmware"
FIRMWARE: Final = ("bios-microvm.bin", "linuxboot_dma.bin", "linuxboot.bin", "pvh.bin", "kvmvapic.bin")
_MODULES: Final = ("accel-*.so",)
_DEVICES: Final = (("null", 1, 3), ("zero", 1, 5), ("urandom", 1, 9))
_KVM: Final = ("kvm", 10, 232)
LDD_S: Final = 20.0


def tree(config: QemuConfig, directory: Path) -> Path:
    """Have the jail's tree below a directory; where it is. Named by what it is a copy of, so a newer QEMU gets another one.

    *Errors*: Refused RUNTIME_MISSING; OSError.
    """
    parts = _parts(config)
    digest = hashlib.sha256()
    for source, target in parts:
        about = source.stat()
        digest.update(f"{source} {target} {about.st_size} {about.st_mtime_ns} {about.st_ino}\n".encode())
    final = directory / f"jail-{digest.hexdigest()[:24]}"
    if final.is_dir():
        return final
    unfinished = directory / f".{final.name}.{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    for source, target in parts:
        place = unfinished / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
        place.chmod(0o755)
    for name in (INNER_VM, "/dev"):
        (unfinished / name.lstrip("/")).mkdir()
    for name in (INNER_IMAGE, INNER_KERNEL, INNER_INITRD):
        (unfinished / name.lstrip("/")).touch()
    for path in (unfinished, *(path for path in unfinished.rglob("*") if path.is_dir())):
        path.chmod(0o755)
    unfinished.rename(final)
    return final


def _parts(config: QemuConfig) -> list[tuple[Path, str]]:
    """(file, where it is in the jail) of all that QEMU opens of the distribution's."""
    if not config.qemu.exists():
        raise Refused(Code.RUNTIME_MISSING, f"{config.qemu} is missing", hint="Run `scripts/setup.py --only machines`.")
    programs = [(config.qemu, INNER_QEMU)]
    programs += [(path, str(path)) for pattern in _MODULES for path in sorted(config.modules.glob(pattern))]
    parts = list(programs)
    for program, _ in programs:
        parts += [(library, str(library)) for library in libraries(program)]
    parts += [(path.resolve(), f"{INNER_FIRMWARE}/{name}") for name in FIRMWARE if (path := _firmware(config, name)).exists()]
    return sorted(dict.fromkeys(parts), key=lambda part: part[1])


def _firmware(config: QemuConfig, name: str) -> Path:
    """Debian has part of it with SeaBIOS."""
    return next((path for directory in (config.firmware, Path("/usr/share/seabios")) if (path := directory / name).exists()), Path("/none"))


def libraries(program: Path) -> list[Path]:
    """What a program is linked with, as the loader says: `name => /path (0x...)`, or the loader's own path."""
    try:
        said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=LDD_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Refused(Code.RUNTIME_MISSING, f"ldd {program}: {error}") from error
    found = []
    for line in said.splitlines():
        words = line.split()
        path = words[2] if "=>" in words and len(words) > 2 else words[0] if words else ""
        if path.startswith("/"):
            found.append(Path(path))
    return found


def furnish(place: Path, cell: Cell, accelerator: Accelerator) -> None:
    """Make the jail's tree a root for one machine, read-only, with its files and devices. After `cells.enter`, in its thread."""
    cells.bind(place, place, cells.SAFE | syscalls.MS_RDONLY)
    cells.furnish(cell, place)
    _devices(place / "dev", cell.user, accelerator)


def _devices(place: Path, user: int, accelerator: Accelerator) -> None:
    safe = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    syscalls.mount("tmpfs", str(place), "tmpfs", safe, "mode=755,size=64k")
    for name, major, minor in (*_DEVICES, *((_KVM,) if accelerator is Accelerator.KVM else ())):
        os.mknod(place / name, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        os.chown(place / name, user, user)
    syscalls.mount(None, str(place), None, syscalls.MS_REMOUNT | safe | syscalls.MS_RDONLY)


def program(place: Path, user: int, arguments: Sequence[str]) -> list[str]:
    """QEMU as a user in that root, with these arguments."""
    return ["chroot", f"--userspec={user}:{user}", "--groups=", str(place), INNER_QEMU, *arguments]
