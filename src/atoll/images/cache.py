"""The image cache: `CACHE/templates/NAME/RECIPE_SHA256/{rootfs,manifest.json}`, and `NAME/current` pointing at one of them.

Beside these, which all instances of a machine share, an instance has images of its own, by the digest of their OCI manifest:
`OWN/sha256/HEX/{rootfs,manifest.json}`, which `unpacking.py` makes of blobs.

Theory of operation. A directory appears by one rename when its tree and manifest are whole, so an entry either is complete or was
damaged later. `look_up` reads a manifest once and afterwards looks that it is the same file and the tree is there (microseconds);
`verify` also counts the tree's entries and bytes (about 100 ms for 20,000 entries), until it was whole once for each (directory, manifest).
Both refuse with IMAGE_CORRUPT; what is not there is IMAGE_UNAVAILABLE. Every tree is only ever read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused

MANIFEST: Final = "manifest.json"
CURRENT: Final = "current"
MACHINE_DISK: Final = "machine.erofs"
"""Beside the tree: the same as one file, for virtual machines, made when one first wants it."""
OWN: Final = "sha256"
"""The directory of an instance's own images, and the name that their manifests give."""
MOUNT_POINTS: Final = (".atoll/guest", "etc/resolv.conf", "proc", "sys", "dev", "tmp", "run")
"""What every image brings along: where one of these is missing, runsc makes it in the tree itself, which is shared and only read."""


_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image that is ready. *Units*: bytes."""

    name: str
    digest: str
    directory: Path
    arch: str
    size_bytes: int
    entries: int
    own_bytes: int = 0
    """What it does not share with the trees that it was made from; all of it where nothing is said."""
    shares: tuple[tuple[str, int], ...] = ()
    """Trees that it shares the rest with, by digest, with how many bytes that are not of the trees before. See shares.py."""

    @property
    def rootfs(self) -> Path:
        return self.directory / "rootfs"

    @property
    def machine_bytes(self) -> int:
        """Of the disk that machines have of it, where one was made; it goes with its tree."""
        with contextlib.suppress(OSError):
            return (self.directory / MACHINE_DISK).stat().st_size
        return 0


def _manifest(directory: Path) -> CachedImage:
    """Read one entry. *Errors*: Refused(IMAGE_CORRUPT) with what is wrong."""
    try:
        content: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        image = CachedImage(
            str(content["name"]),
            str(content["digest"]),
            directory,
            str(content.get("arch", "")),
            int(content["size_bytes"]),
            int(content["entries"]),
            int(content.get("own_bytes", content["size_bytes"])),
            tuple((str(share["digest"]), int(share["bytes"])) for share in content.get("shares", ())),
        )
        recipe = content["recipe_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(Code.IMAGE_CORRUPT, f"the manifest of {directory} cannot be read: {error!r}") from error
    if recipe != directory.name:
        raise Refused(Code.IMAGE_CORRUPT, f"the manifest of {directory} is of another recipe ({recipe})")
    if image.name != directory.parent.name:
        raise Refused(Code.IMAGE_CORRUPT, f"the manifest of {directory} is of another template ({image.name})")
    if not image.digest.startswith("sha256:"):
        raise Refused(Code.IMAGE_CORRUPT, f"the manifest of {directory} has no digest")
    if not image.rootfs.is_dir():
        raise Refused(Code.IMAGE_CORRUPT, f"{directory} has no rootfs")
    for point in MOUNT_POINTS:
        if not os.path.lexists(image.rootfs / point):
            raise Refused(Code.IMAGE_CORRUPT, f"{image.rootfs} has no {point} to mount on")
    return image


def _entries(directory: Path) -> list[Path]:
    """Entries of one template, `current` first; unfinished and quarantined ones are none."""
    found: list[Path] = []
    current = directory / CURRENT
    if current.is_symlink():
        found.append(current.resolve())
    if directory.is_dir():
        found += sorted(
            path.resolve()
            for path in directory.iterdir()
            if path.is_dir() and not path.is_symlink() and (path / MANIFEST).exists() and not path.name.startswith(".")
        )
    return list(dict.fromkeys(found))


class ImageCache:
    """Looks images up below the machine's cache directory and, where it is given, the instance's own."""

    def __init__(self, cache: Path, own: Path | None = None) -> None:
        self._templates = cache / "templates"
        self._own = None if own is None else own / OWN
        self._verified: dict[_Version, str | None] = {}
        """What counting a tree found: None when it was whole."""
        self._found: dict[tuple[str, str], tuple[CachedImage, _Version]] = {}
        """Where a digest was found last."""

    def names(self) -> list[str]:
        """Templates that have an entry here."""
        if not self._templates.is_dir():
            return []
        return sorted(path.name for path in self._templates.iterdir() if path.is_dir() and not path.name.startswith("."))

    def current(self, name: str) -> CachedImage:
        """What `NAME/current` points at. *Errors*: Refused(IMAGE_UNAVAILABLE, IMAGE_CORRUPT)."""
        link = self._templates / name / CURRENT
        if not link.exists():
            raise Refused(Code.IMAGE_UNAVAILABLE, f"there is no template {name!r} in {self._templates}")
        return _manifest(link.resolve())

    def all(self) -> Iterator[CachedImage]:
        """Every entry that is not known to be broken (`problems` names those)."""
        places = [self._templates / name for name in self.names()]
        for place in [*places, *([self._own] if self._own is not None else [])]:
            for directory in _entries(place):
                try:
                    image = _manifest(directory)
                except Refused:
                    continue
                if self._verified.get(_version(image)) is None:
                    yield image

    def problems(self) -> list[str]:
        """What is wrong with entries, one line each."""
        found = []
        for name in self.names():
            for directory in _entries(self._templates / name):
                try:
                    problem = self._verified.get(_version(_manifest(directory)))
                except Refused as refusal:
                    problem = refusal.message
                if problem is not None:
                    found.append(problem)
        return found

    def look_up(self, digest: str, name: str) -> CachedImage:
        """The image with this digest, or the current one of this name when no digest is asked for.

        A template whose only entries are broken answers IMAGE_CORRUPT, so that nobody looks for it elsewhere.
        *Errors*: Refused(IMAGE_UNAVAILABLE, IMAGE_CORRUPT).
        """
        if "/" in name or name.startswith("."):
            raise Refused(Code.IMAGE_UNAVAILABLE, f"{name!r} is no name of a template")
        if not digest:
            return self.current(name)
        known = self._found.get((digest, name))
        if known is not None and _still(*known):
            return known[0]
        image = self._own_image(digest) or self._search(digest, name)
        self._found[digest, name] = image, _version(image)
        return image

    def _own_image(self, digest: str) -> CachedImage | None:
        """The instance's own image with this digest. *Errors*: Refused(IMAGE_CORRUPT)."""
        hexadecimal = _DIGEST.fullmatch(digest)
        if self._own is None or hexadecimal is None or not (self._own / hexadecimal[1]).is_dir():
            return None
        image = _manifest(self._own / hexadecimal[1])
        if image.digest != digest:
            raise Refused(Code.IMAGE_CORRUPT, f"the manifest of {image.directory} is of another image ({image.digest})")
        return image

    def _search(self, digest: str, name: str) -> CachedImage:
        broken: Refused | None = None
        # The template's own directory first; any other name may carry the same content.
        for candidate in [name, *(other for other in self.names() if other != name)]:
            for directory in _entries(self._templates / candidate):
                try:
                    image = _manifest(directory)
                except Refused as refusal:
                    broken = broken or (refusal if candidate == name else None)
                    continue
                if image.digest == digest:
                    return image
        if broken is not None:
            raise broken
        raise Refused(Code.IMAGE_UNAVAILABLE, f"no image {digest} ({name}) in {self._templates}")

    def verified(self, digest: str, name: str) -> CachedImage:
        """`look_up`, and on the first time for this tree also compare its entries and bytes with the manifest; blocks while it reads.

        *Errors*: Refused(IMAGE_UNAVAILABLE, IMAGE_CORRUPT).
        """
        image = self.look_up(digest, name)
        key = _version(image)
        # A tree that was whole stays so for this process; a broken one may have been mended since.
        if self._verified.get(key, "") is not None:
            self._verified[key] = _problem(image)
        if (problem := self._verified[key]) is not None:
            raise Refused(Code.IMAGE_CORRUPT, problem)
        return image


_Version = tuple[Path, int, int]


def _version(image: CachedImage) -> _Version:
    """What changes when a tree is built again in the same place."""
    info = (image.directory / MANIFEST).stat()
    return image.directory, info.st_ino, info.st_mtime_ns


def _still(image: CachedImage, version: _Version) -> bool:
    """Whether an entry is as it was when its manifest was read."""
    try:
        return _version(image) == version and image.rootfs.is_dir()
    except OSError:
        return False


def _problem(image: CachedImage) -> str | None:
    """What is wrong with a tree, by counting it."""
    try:
        verify(image)
    except Refused as refusal:
        return refusal.message
    return None


def verify(image: CachedImage) -> None:
    """Count the tree. *Errors*: Refused(IMAGE_CORRUPT) when entries or bytes differ from the manifest."""
    entries, size_bytes = count(image.rootfs)
    if (entries, size_bytes) != (image.entries, image.size_bytes):
        raise Refused(
            Code.IMAGE_CORRUPT,
            f"{image.rootfs} has {entries} entries of {size_bytes} bytes, its manifest says {image.entries} of {image.size_bytes}",
        )


def count(root: Path) -> tuple[int, int]:
    """(entries, bytes of regular files, a file with several names once) of a tree."""
    entries = size_bytes = 0
    linked: set[int] = set()
    waiting = [os.fsencode(root)]
    while waiting:
        with os.scandir(waiting.pop()) as found:
            for entry in found:
                entries += 1
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    waiting.append(entry.path)
                elif stat.S_ISREG(info.st_mode) and info.st_ino not in linked:
                    size_bytes += info.st_size
                    if info.st_nlink > 1:
                        linked.add(info.st_ino)
    return entries, size_bytes
