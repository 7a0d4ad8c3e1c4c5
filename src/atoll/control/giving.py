"""Giving blobs of the image store to hosts of other machines: `GET /agent/v1/blobs/{digest}`, from any byte on.

A host may have every blob: which images it needs, its commands say, and a digest says nothing that the host could not ask for by a sandbox.
What it gets it counts and digests itself, so nothing is checked here. Why: docs/adr/0020.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import BinaryIO, Final

from atoll.base.errors import Code, Refused
from atoll.control import asgi
from atoll.control.asgi import Scope, Send

PART_BYTES: Final = 1 << 20
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_RANGE: Final = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")


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
