"""Bounds on what a request may cost before it is understood."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Message, Receive, Scope

from atoll.base.errors import Code, Refused, Unavailable
from atoll.control.api.settings import ApiSettings


class ClientGone(Exception):
    """The client left before its request was complete; there is nobody to answer."""


class SlowBody(Exception):
    """The client did not send its body in time; it is answered 408."""


def check_target(scope: Scope, settings: ApiSettings) -> None:
    """*Errors*: INVALID_REQUEST for a path and query beyond the limit or with a NUL in the path."""
    if len(scope["path"]) + len(scope["query_string"]) > settings.target_bytes_max:
        raise Refused(Code.INVALID_REQUEST, f"the path and query are longer than {settings.target_bytes_max} bytes")
    if "\0" in scope["path"]:
        raise Refused(Code.INVALID_REQUEST, "the path holds a NUL character")


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], settings: ApiSettings) -> bytes:
    """The whole body, with a length or chunked. *Errors*: BODY_TOO_LARGE, SlowBody, ClientGone."""
    length = headers.get(b"content-length")
    if length is None and b"transfer-encoding" not in headers:
        return b""
    if length is not None and (not length.isdigit() or len(length) > 12 or int(length) > settings.body_bytes_max):
        raise _too_large(settings)
    try:
        async with asyncio.timeout(settings.body_s_max):
            return await _read(receive, settings)
    except TimeoutError as error:
        raise SlowBody from error


async def _read(receive: Receive, settings: ApiSettings) -> bytes:
    body = b""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body = message.get("body", b"")
        size += len(body)
        if size > settings.body_bytes_max:
            raise _too_large(settings)
        if not message.get("more_body"):
            return b"".join((*parts, body)) if parts else body
        parts.append(body)


def _too_large(settings: ApiSettings) -> Refused:
    return Refused(Code.BODY_TOO_LARGE, f"the body is larger than {settings.body_bytes_max} bytes")


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` once, then what the connection says."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class Crowd:
    """How many requests are in flight. *Errors*: CONTROL_UNAVAILABLE beyond the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0

    def __enter__(self) -> None:
        if self._inside >= self._limit:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "too many requests are in flight", retry_after_s=1.0)
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
