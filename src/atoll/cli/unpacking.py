"""Unpacking what a sandbox sent: never outside the directory that was named, whatever the archive says.

Python 3.11.2, which Debian 12 has, knows no extraction filters yet; these are stricter anyway. Names that are absolute or climb are
refused; a path that leads through a link is refused, so a link in the archive can name whatever it likes and nothing is ever written
through it; set-uid bits are dropped; devices and pipes are left out and reported.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO, Final

from atoll.base.errors import Code, Refused

_CHUNK_BYTES: Final = 1 << 20


def unpack(stream: IO[bytes], target: Path) -> list[str]:
    """Unpack a tar stream below `target`, which exists; the names of members that were left out.

    *Errors*: Refused INVALID_REQUEST for a member that leads outside; tarfile.TarError for what is no archive; OSError.
    """
    left_out: list[str] = []
    modes: list[tuple[Path, int]] = []
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            place = _place(target, member.name)
            if member.isdir():
                if place != target:
                    _directory(place)
                modes.append((place, member.mode))
            elif member.isreg():
                _make_way(place)
                _file(archive, member, place)
            elif member.issym():
                _make_way(place)
                place.symlink_to(member.linkname)
            elif member.islnk():
                _hard_link(target, member, place)
            else:
                left_out.append(member.name)
    # Last, and deepest first: a directory without write permission must still take its files.
    for place, mode in reversed(modes):
        place.chmod(mode & 0o777)
    return left_out


def _place(target: Path, name: str) -> Path:
    """Where a member goes. *Errors*: Refused when its name or an existing link would lead elsewhere."""
    parts = [part for part in PurePosixPath(name).parts if part != "."]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise Refused(
            Code.INVALID_REQUEST, f"the archive has the name {name[:200]!r}, which leads outside", hint="Copy its parts one by one."
        )
    place = target
    for part in parts[:-1]:
        place /= part
        if place.is_symlink():
            raise Refused(Code.INVALID_REQUEST, f"{name[:200]!r} leads through the link {place}", hint=f"Remove {place} and copy again.")
        place.mkdir(exist_ok=True)
    return place / parts[-1] if parts else target


def _directory(place: Path) -> None:
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        place.unlink()
    place.mkdir(exist_ok=True)


def _make_way(place: Path) -> None:
    """Nothing is written through what is there: a link or file goes, a directory is in the way."""
    try:
        info = place.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(info.st_mode):
        raise Refused(
            Code.INVALID_REQUEST, f"{place} is a directory here and a file in the sandbox", hint=f"Remove {place} and copy again."
        )
    place.unlink()


def _file(archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    content = archive.extractfile(member)
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        if content is not None:
            shutil.copyfileobj(content, file, _CHUNK_BYTES)
        os.fchmod(file.fileno(), member.mode & 0o777)
    os.utime(place, (member.mtime, member.mtime), follow_symlinks=False)


def _hard_link(target: Path, member: tarfile.TarInfo, place: Path) -> None:
    source = _place(target, member.linkname)
    if not source.is_symlink() and not source.is_file():
        raise Refused(Code.INVALID_REQUEST, f"{member.name[:200]!r} is linked to {member.linkname[:200]!r}, which is not in the archive")
    _make_way(place)
    os.link(source, place, follow_symlinks=False)
