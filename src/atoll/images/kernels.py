"""Kernels for virtual machines, and the first file system that they start with.

Two places have that form: the cache of a machine, as its own set-up has filled it, and a host's own directory, with what the deployment has
signed (`machine_files.py`).

A kernel is `CACHE/kernels/VERSION/{vmlinuz,vmlinux,modules/NN-name.ko,manifest.json}`, made by the set-up of a package of the distribution's, with
every file's size and SHA-256 in the manifest; `CACHE/kernels/current` names the one to use. The first file system is a cpio archive of the
guest program, as `/init`, and those modules; it is made here, since the guest program is this release's own, unless it came signed with the kernel.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused

MANIFEST: Final = "manifest.json"
INITRD: Final = "initrd"
REFUSED: Final = "refused"
"""Why what the deployment offers is not booted by, in words (`machine_files.py`)."""
_CONSOLE: Final = (5, 1)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that is whole."""

    version: str
    directory: Path
    modules: tuple[Path, ...]
    """In the order in which they are loaded."""

    @property
    def image(self) -> Path:
        return self.directory / "vmlinuz"

    @property
    def unpacked(self) -> Path:
        """The same as an ELF file; kernels that an earlier set-up has fetched lack it."""
        return self.directory / "vmlinux"

    @property
    def initrd(self) -> Path | None:
        """The first file system that came with it."""
        path = self.directory / INITRD
        return path if path.exists() else None


def look_up(cache: Path) -> Kernel:
    """The kernel to use, every byte of it looked at. *Errors*: Refused IMAGE_UNAVAILABLE (there is none), IMAGE_CORRUPT."""
    directory = cache / "kernels" / "current"
    if not (directory / MANIFEST).exists():
        if (cache / REFUSED).exists():
            raise Refused(
                Code.IMAGE_UNTRUSTED, f"what the deployment has machines boot by is refused: {(cache / REFUSED).read_text()[:500]}"
            )
        raise Refused(Code.IMAGE_UNAVAILABLE, f"there is no kernel for virtual machines in {cache / 'kernels'}")
    directory = directory.resolve()
    try:
        said: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        version, files = str(said["version"]), {str(name): dict(about) for name, about in said["files"].items()}
        for name, about in files.items():
            content = (directory / name).read_bytes()
            if len(content) != about["size"] or hashlib.sha256(content).hexdigest() != about["sha256"]:
                raise Refused(Code.IMAGE_CORRUPT, f"{directory / name} is not what its manifest says")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(Code.IMAGE_CORRUPT, f"the kernel in {directory} cannot be read: {error!r}") from error
    if "vmlinuz" not in files:
        raise Refused(Code.IMAGE_CORRUPT, f"the manifest of {directory} names no kernel")
    return Kernel(version, directory, tuple(directory / name for name in sorted(files) if name.startswith("modules/")))


def first_files(kernel: Kernel, guest: Path, directory: Path) -> Path:
    """Have the first file system of this kernel and guest program in a directory; its path.

    *Idempotency*: named by its content, so it is there already or made anew; those of earlier releases stay while guests run that were
    started with them, which costs a few MiB. *Errors*: OSError.
    """
    if kernel.initrd is not None:
        return kernel.initrd
    parts = [*kernel.modules, guest]
    name = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file:
            name.update(hashlib.file_digest(file, "sha256").digest())
    target = directory / f"initrd-{name.hexdigest()[:32]}.cpio"
    if not target.exists():
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            for chunk in archive(kernel.modules, guest):
                file.write(chunk)
        # Machines run as users of their own; there is nothing secret in it.
        temporary.chmod(0o644)
        temporary.replace(target)
    return target


def archive(modules: tuple[Path, ...], guest: Path) -> Iterator[bytes]:
    """A cpio archive in the kernel's format (`newc`), not compressed: unpacking costs more than reading."""
    for directory in ("dev", "proc", "sys", "modules"):
        yield _entry(directory, stat.S_IFDIR | 0o755)
    yield _entry("dev/console", stat.S_IFCHR | 0o600, device=_CONSOLE)
    for module in modules:
        yield _entry(f"modules/{module.name}", stat.S_IFREG | 0o600, module.read_bytes())
    yield _entry("init", stat.S_IFREG | 0o755, guest.read_bytes())
    yield _entry("TRAILER!!!", 0)


def _entry(name: str, mode: int, content: bytes = b"", *, device: tuple[int, int] = (0, 0)) -> bytes:
    """Source: the kernel's Documentation/driver-api/early-userspace/buffer-format.rst: thirteen numbers of eight hexadecimal digits."""
    numbers = (0, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % number for number in numbers) + name.encode() + b"\0"
    return _padded(head) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
