"""The artifact store: files that outlive machines, under keys such as `blobs/sha256/HEX`: in a folder, or in a bucket (`bucket.py`).

Theory of operation. An object appears whole or not at all, is never changed, and may be replaced by the same. Nothing that comes from the
store is believed: whoever gets a file compares its digest. A folder is on control's own disk, where the image program works, too: to put a
file there that lies there already is nothing. A bucket is elsewhere: what hosts need of it they fetch by links that are good for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from atoll.base.errors import Code, Refused, Unavailable

BLOBS: Final = "blobs/sha256"
"""Layers, configurations and manifests of images, by their digest."""
MACHINES: Final = "machines"
"""What virtual machines boot by, by architecture."""
MANIFESTS: Final = "manifests/sha256"
"""Signed manifests, by the digest of what is signed."""
UPLOADS: Final = "uploads"
"""What teams have sent: `TEAM/...`."""
DOCUMENT_BYTES_MAX: Final = 4 << 20
_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Info:
    """What is known of an object without reading it. *Units*: bytes, wall seconds."""

    key: str
    size: int
    changed_at: float


class Artifacts(Protocol):
    """The port. All calls may be repeated.

    *Errors* of every call: Unavailable ARTIFACTS_UNAVAILABLE (the store does not answer), Refused ARTIFACTS_DENIED (it refuses the
    credentials), INVALID_REQUEST (a key that is none); those that write: Refused HOST_DISK_FULL.
    """

    local: Path | None
    """The folder, where objects are files of this machine's; None: they are elsewhere."""

    async def put(self, key: str, source: Path) -> None:
        """Have the file's content under the key."""
        ...

    async def write(self, key: str, content: bytes) -> None:
        """The same of something small."""
        ...

    async def get(self, key: str, target: Path) -> None:
        """Have the object in a file, which appears whole. *Errors*: Refused ARTIFACT_NOT_FOUND."""
        ...

    async def read(self, key: str, *, bytes_max: int = DOCUMENT_BYTES_MAX) -> bytes:
        """A small object. *Errors*: Refused ARTIFACT_NOT_FOUND, BODY_TOO_LARGE."""
        ...

    async def head(self, key: str) -> Info | None:
        """Whether it is there, and how big."""
        ...

    async def delete(self, key: str) -> None:
        """Have no object under the key."""
        ...

    def list(self, prefix: str) -> AsyncIterator[Info]:
        """Everything below `prefix/`, in no order."""
        ...

    async def link(self, key: str, *, lasts_s: float) -> str | None:
        """Where anybody may read the object for a while; None: it is read by `get` alone. The link is a secret for as long."""
        ...

    async def put_link(self, key: str, *, lasts_s: float) -> str | None:
        """Where anybody may write the object for a while; None: it is written by `put` alone. As `link`; what comes is believed by nobody."""
        ...


def check(key: str) -> str:
    """The key. *Errors*: Refused INVALID_REQUEST when it could lead out of the store."""
    if len(key) > 512 or _KEY.fullmatch(key) is None:
        raise Refused(Code.INVALID_REQUEST, f"{key[:80]!r} is no key of an artifact")
    return key


def key_of(kind: str, digest: str) -> str:
    """The key of what is named by a digest. *Errors*: Refused INVALID_REQUEST."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise Refused(Code.INVALID_REQUEST, f"{digest[:80]!r} is no SHA-256 digest")
    return f"{kind}/{match[1]}"


def missing(key: str) -> Refused:
    """The same from every store."""
    return Refused(Code.ARTIFACT_NOT_FOUND, f"there is no artifact {key}")


class Folder:
    """Implements Artifacts in a folder."""

    def __init__(self, root: Path) -> None:
        self.local: Path | None = root
        self._root = root

    def _path(self, key: str) -> Path:
        return self._root / check(key)

    async def put(self, key: str, source: Path) -> None:
        """See Artifacts."""
        target = self._path(key)
        if target == source:
            return

        def copy(file: int) -> None:
            with source.open("rb") as content, os.fdopen(file, "wb", closefd=False) as to:
                shutil.copyfileobj(content, to, 1 << 20)

        await asyncio.to_thread(self._keep, target, copy)

    async def write(self, key: str, content: bytes) -> None:
        """See Artifacts."""
        target = self._path(key)

        def write(file: int) -> None:
            with os.fdopen(file, "wb", closefd=False) as to:
                to.write(content)

        await asyncio.to_thread(self._keep, target, write)

    def _keep(self, target: Path, fill: Fill) -> None:
        partial = self._root / "partial"
        try:
            for directory in (partial, target.parent):
                directory.mkdir(parents=True, exist_ok=True, mode=0o750)
            whole(partial, target, fill)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Refused(Code.HOST_DISK_FULL, f"an artifact could not be kept: {error.strerror}") from error
            raise Unavailable(Code.ARTIFACTS_UNAVAILABLE, f"an artifact could not be kept: {error.strerror}") from error

    async def get(self, key: str, target: Path) -> None:
        """See Artifacts."""
        source = self._path(key)
        if source == target:
            if not source.is_file():
                raise missing(key)
            return

        def copy() -> None:
            try:
                with source.open("rb") as content:
                    whole(target.parent, target, lambda file: _copy_into(content.fileno(), file))
            except FileNotFoundError:
                raise missing(key) from None

        await asyncio.to_thread(copy)

    async def read(self, key: str, *, bytes_max: int = DOCUMENT_BYTES_MAX) -> bytes:
        """See Artifacts."""
        path = self._path(key)

        def read() -> bytes:
            try:
                with path.open("rb") as file:
                    return file.read(bytes_max + 1)
            except (FileNotFoundError, IsADirectoryError):
                raise missing(key) from None

        content = await asyncio.to_thread(read)
        if len(content) > bytes_max:
            raise Refused(Code.BODY_TOO_LARGE, f"artifact {key} has more than {bytes_max} bytes")
        return content

    async def head(self, key: str) -> Info | None:
        """See Artifacts."""
        return _info(key, self._path(key))

    async def delete(self, key: str) -> None:
        """See Artifacts."""
        self._path(key).unlink(missing_ok=True)

    async def list(self, prefix: str) -> AsyncIterator[Info]:
        """See Artifacts."""
        root = self._root
        found = await asyncio.to_thread(
            lambda: [path for path in (root / check(prefix)).rglob("*") if path.is_file() and not path.is_symlink()]
        )
        for path in found:
            info = _info(str(path.relative_to(root)), path)
            if info is not None:
                yield info

    async def link(self, key: str, *, lasts_s: float) -> str | None:
        """See Artifacts."""
        del lasts_s
        check(key)
        return None

    async def put_link(self, key: str, *, lasts_s: float) -> str | None:
        """See Artifacts."""
        return await self.link(key, lasts_s=lasts_s)


class Fill(Protocol):
    """Writes a file's content, by its descriptor."""

    def __call__(self, file: int, /) -> None: ...


def whole(directory: Path, target: Path, fill: Fill) -> None:
    """Have a file that readers see whole or not at all, 0640; `directory` is on the same file system, for what is unfinished. Blocks."""
    descriptor, name = tempfile.mkstemp(prefix="object-", dir=directory)
    try:
        try:
            fill(descriptor)
            os.fchmod(descriptor, 0o640)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _copy_into(source: int, target: int) -> None:
    with os.fdopen(source, "rb", closefd=False) as content, os.fdopen(target, "wb", closefd=False) as to:
        shutil.copyfileobj(content, to, 1 << 20)


def _info(key: str, path: Path) -> Info | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return Info(key, found.st_size, found.st_mtime) if path.is_file() else None
