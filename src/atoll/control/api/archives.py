"""`PUT /v1/template-archives`: a tar with an image, streamed to the disk, to be named by its SHA-256 in an import.

A bare application beside the front, whose bodies are small and kept in memory. It guards itself: key first, then length and room on the
disk, then the bytes; what breaks off leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from starlette.types import Receive, Scope, Send

from atoll.base.errors import AtollError, Code, Refused
from atoll.control.api import auth
from atoll.control.api.errors import v1_error
from atoll.control.api.exchange import json_answer
from atoll.control.artifacts.imports import free_bytes
from atoll.control.service import Service
from atoll.images.library import Library

PREFIX: Final = "/v1/template-archives"
BYTES_MAX: Final = 32 << 30
SPARE_BYTES: Final = 1 << 30
QUIET_S: Final = 60.0


class Archives:
    """The application."""

    def __init__(self, service: Service, uploads: Path, *, request_id: Callable[[], str], library: Library | None = None) -> None:
        """`library`: as of `uploads.Uploads`."""
        self._library = library
        self._service = service
        self._uploads = uploads
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] != "PUT" or scope["path"] != PREFIX:
                raise Refused(Code.INVALID_REQUEST, f"only PUT {PREFIX}")
            headers = dict(scope["headers"])
            caller = await auth.authenticate(self._service, auth.presented_key(headers))
            digest, size = await self._take(receive, self._uploads / caller.team.id, headers.get(b"content-length"))
            answer = json_answer(201, {"archive": f"sha256:{digest}", "bytes": size})
        except AtollError as error:
            answer = v1_error(error, self._request_id())
        await answer.send(send)

    async def _take(self, receive: Receive, place: Path, length: bytes | None) -> tuple[str, int]:
        place.mkdir(parents=True, exist_ok=True, mode=0o750)
        room = min(BYTES_MAX, free_bytes(place) - SPARE_BYTES)
        if length is not None and (not length.isdigit() or len(length) > 15 or int(length) > room):
            raise Refused(Code.BODY_TOO_LARGE, f"there is room for {max(room, 0)} bytes")
        total, found = hashlib.sha256(), 0
        with tempfile.NamedTemporaryFile(dir=place, prefix=".upload-", delete=False) as file:
            path = Path(file.name)
            try:
                async for part in parts(receive):
                    found += len(part)
                    if found > room:
                        raise Refused(Code.BODY_TOO_LARGE, f"there is room for {max(room, 0)} bytes")
                    total.update(part)
                    await asyncio.to_thread(file.write, part)
                file.flush()
                target = place / f"{total.hexdigest()}.tar"
                if self._library is not None:
                    await self._library.keep_upload(path, name=target)
                path.replace(target)
            except OSError as error:
                raise Refused(Code.HOST_DISK_FULL, f"the archive could not be kept: {error.strerror}") from error
            finally:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
        return total.hexdigest(), found


async def parts(receive: Receive) -> AsyncIterator[bytes]:
    """A body as it comes. *Errors*: Refused INVALID_REQUEST when the client leaves, or sends nothing for QUIET_S."""
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                message = await receive()
        except TimeoutError as error:
            raise Refused(Code.INVALID_REQUEST, f"nothing came for {QUIET_S:g} s") from error
        if message["type"] == "http.disconnect":
            raise Refused(Code.INVALID_REQUEST, "the client left")
        yield message.get("body", b"")
        if not message.get("more_body"):
            return
