"""Giving hosts what images are made of: `GET /agent/v1/blobs/{digest}`, from any byte on, and signed documents with the keys that count.

A host may have every blob: which images it needs, its commands say, and a digest says nothing that the host could not ask for by a sandbox.
What it gets it counts and digests itself, so nothing is checked here. What control has not on its own disk it sends hosts to fetch by a link
of the artifact store's, which is good for a while and for that object alone; credentials stay here. Why: docs/adr/0020, 0024.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from atoll.base.errors import Code, Refused, Unavailable
from atoll.control import asgi
from atoll.control.artifacts.machines import Machines
from atoll.control.artifacts.manifests import Manifests
from atoll.control.asgi import Scope, Send
from atoll.images.artifacts import BLOBS, Artifacts, key_of

PART_BYTES: Final = 1 << 20
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_RANGE: Final = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")


LINK_S: Final = 900.0
"""How long a link to an object is good: longer than the start of any download, which goes on beyond it."""


@dataclass(frozen=True, slots=True)
class Giving:
    """What hosts may ask for. `local`: where the image program keeps blobs on this machine."""

    local: Path
    artifacts: Artifacts
    manifests: Manifests
    machines: Machines

    async def blob(self, digest: str, scope: Scope, send: Send) -> None:
        """Answer a blob, or where it is. *Errors*: as `give`; those of Artifacts."""
        if self.artifacts.local is None:
            link = await self._link(digest)
            if link is not None:
                # No answer may be kept by anybody in between: the link is a secret for as long as it is good.
                headers = ((b"location", link.encode()), (b"cache-control", b"no-store"))
                await asgi.answer(send, 307, b"{}", headers=headers)
                return
        await give(self.local, digest, scope, send)

    async def _link(self, digest: str) -> str | None:
        """Where the blob is; None where the store has it not, or is away and this machine has it."""
        key = key_of(BLOBS, digest)
        try:
            if await self.artifacts.head(key) is None:
                return None
        except Unavailable:
            if not (self.local / key).is_file():
                raise
            return None
        return await self.artifacts.link(key, lasts_s=LINK_S)

    async def manifest(self, digest: str, send: Send) -> None:
        """Answer a signed manifest. *Errors*: Refused INVALID_REQUEST, IMAGE_UNAVAILABLE; those of Artifacts."""
        await asgi.answer(send, 200, await self.manifests.give(digest))

    async def machine(self, architecture: str, send: Send) -> None:
        """Answer what virtual machines boot by. *Errors*: as `Machines.give`."""
        await asgi.answer(send, 200, await self.machines.give(architecture))

    async def key_chain(self, send: Send) -> None:
        """Answer every key set that there was."""
        await asgi.answer_model(send, self.manifests.chain())


async def give(store: Path, digest: str, scope: Scope, send: Send) -> None:
    """Answer one blob, or the part of it that `Range` names.

    *Errors*: Refused INVALID_REQUEST (no digest, or a range that the blob does not have), IMAGE_UNAVAILABLE (it is not in the store).
    """
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise Refused(Code.INVALID_REQUEST, "a blob is named sha256: and 64 hex digits")
    asked = asgi.header(scope, b"range")
    try:
        file = await asyncio.to_thread(_open, store / "blobs" / "sha256" / match[1])
    except OSError as error:
        raise Refused(Code.IMAGE_UNAVAILABLE, f"blob {digest} is not in the store") from error
    await _send(file, asked, send)


async def give_file(path: Path, scope: Scope, send: Send) -> None:
    """The same of any file of the store. *Errors*: Refused MOMENT_UNAVAILABLE when it is not there, INVALID_REQUEST."""
    try:
        file = await asyncio.to_thread(_open, path)
    except OSError as error:
        raise Refused(Code.MOMENT_UNAVAILABLE, f"{path.name} is not in the store") from error
    await _send(file, asgi.header(scope, b"range"), send)


async def _send(file: BinaryIO, asked: str, send: Send) -> None:
    try:
        size = os.fstat(file.fileno()).st_size
        first, length = _part(asked, size)
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(length).encode())]
        if asked:
            headers.append((b"content-range", f"bytes {first}-{first + length - 1}/{size}".encode()))
        await send({"type": "http.response.start", "status": 206 if asked else 200, "headers": headers})
        await asyncio.to_thread(file.seek, first)
        while length > 0:
            # A file of the store never changes; one that was removed meanwhile is read to its end.
            part = await asyncio.to_thread(file.read, min(PART_BYTES, length))
            if not part:
                raise ConnectionError
            length -= len(part)
            await send({"type": "http.response.body", "body": part, "more_body": length > 0})
        if size == 0:
            await send({"type": "http.response.body", "body": b""})
    finally:
        file.close()


def _open(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _part(asked: str, size: int) -> tuple[int, int]:
    """(first byte, how many) of what a Range header names."""
    if not asked:
        return 0, size
    match = _RANGE.fullmatch(asked)
    if match is None or int(match[1]) >= size:
        raise Refused(Code.INVALID_REQUEST, f"the blob has {size} bytes: ask for bytes=FIRST- or bytes=FIRST-LAST within them")
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    if last < first:
        raise Refused(Code.INVALID_REQUEST, "the range ends before it begins")
    return first, last - first + 1
