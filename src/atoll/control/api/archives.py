"""`PUT /v1/template-archives`: a tar with an image, streamed to the disk, to be named by its SHA-256 in an import.

A bare application beside the front, whose bodies are small and kept in memory. It guards itself: key first, then length and room on the
disk, then the bytes; what breaks off leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from starlette.types import Receive, Scope, Send

from atoll.base.errors import AtollError, Code, Refused
from atoll.control.api import auth
from atoll.control.api.errors import v1_error
from atoll.control.api.exchange import json_answer
from atoll.control.api.receiving import receive_file
from atoll.control.service import Service
from atoll.images.library import Library

PREFIX: Final = "/v1/template-archives"
BYTES_MAX: Final = 32 << 30


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
            digest, size = await receive_file(
                receive,
                self._uploads / caller.team.id,
                "{}.tar".format,
                announced=headers.get(b"content-length"),
                bytes_max=BYTES_MAX,
                library=self._library,
            )
            answer = json_answer(201, {"archive": f"sha256:{digest}", "bytes": size})
        except AtollError as error:
            answer = v1_error(error, self._request_id())
        await answer.send(send)
