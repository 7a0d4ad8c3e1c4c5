"""Bare ASGI for the hot routes of agents and edges: no framework between the socket and the message.

Errors of the families in `base.errors` become `{"code", "message", "hint"}` with the status of their kind; anything else is logged and
answered 500 INTERNAL without its text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.telemetry.log import get_logger

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
M = TypeVar("M", bound=BaseModel)

LOG = get_logger()

STATUS: Final = {
    Code.UNAUTHENTICATED: 401,
    Code.CREDENTIAL_REVOKED: 401,
    Code.HOST_UNKNOWN: 401,
    Code.ENROLLMENT_TOKEN_INVALID: 401,
    Code.FORBIDDEN: 403,
    Code.SANDBOX_NOT_FOUND: 404,
    Code.HOST_NOT_FOUND: 404,
    Code.IMAGE_UNAVAILABLE: 404,
    Code.BODY_TOO_LARGE: 413,
    Code.RATE_LIMITED: 429,
    Code.STALE_POLL: 409,
    Code.STALE_AGENT_EPOCH: 409,
    Code.OVERLAPPING_AGENT_SESSION: 409,
    Code.ENROLLMENT_CONFLICT: 409,
    Code.COMMAND_CONFLICT: 409,
    Code.MOMENT_UNAVAILABLE: 404,
    Code.MOMENT_INCOMPLETE: 409,
    Code.MOMENT_TOO_LARGE: 413,
}


def header(scope: Scope, name: bytes) -> str:
    """The first header of this lower-case name; empty when absent."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return ""


def bearer(scope: Scope) -> str:
    """The bearer credential. *Errors*: Refused UNAUTHENTICATED."""
    kind, _, value = header(scope, b"authorization").partition(" ")
    if kind.lower() != "bearer" or not value:
        raise Refused(Code.UNAUTHENTICATED, "this call needs a bearer credential")
    return value


async def body(receive: Receive, *, limit: int) -> bytes:
    """The whole request body. *Errors*: Refused BODY_TOO_LARGE beyond `limit` bytes; ConnectionError when the client has gone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise Refused(Code.BODY_TOO_LARGE, f"the message is larger than {limit} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


async def parts(receive: Receive, *, quiet_s: float) -> AsyncIterator[bytes]:
    """A body of many bytes as it comes. *Errors*: ConnectionError when the client leaves, or sends nothing for so long."""
    while True:
        try:
            async with asyncio.timeout(quiet_s):
                message = await receive()
        except TimeoutError:
            raise ConnectionError(f"nothing came for {quiet_s:g} s") from None
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left")
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def parse(model: type[M], data: bytes) -> M:
    """A message from its JSON. *Errors*: Refused INVALID_REQUEST naming the first field that is wrong."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise Refused(Code.INVALID_REQUEST, f"{where}: {first['msg']}") from None


async def answer(send: Send, status: int, content: bytes, *, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """One whole JSON answer."""
    base = ((b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": [*base, *headers]})
    await send({"type": "http.response.body", "body": content})


async def answer_model(send: Send, model: BaseModel, *, status: int = 200) -> None:
    """One message."""
    await answer(send, status, model.model_dump_json(exclude_defaults=False).encode())


async def answer_error(send: Send, error: AtollError) -> None:
    """A refusal in the protocol's shape."""
    status = STATUS.get(error.code, 503 if isinstance(error, Unavailable) else 400 if isinstance(error, Refused) else 500)
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if isinstance(error, Unavailable):
        headers = ((b"retry-after", str(max(1, round(error.retry_after_s))).encode()),)
    content = json.dumps({"code": error.code, "message": error.message, "hint": error.hint}).encode()
    await answer(send, status, content, headers=headers)


async def guarded(send: Send, work: Awaitable[None]) -> None:
    """Run one request; what it raises becomes an answer."""
    try:
        await work
    except AtollError as error:
        await answer_error(send, error)
    except ConnectionError:
        return
    except Exception:  # the boundary of a request
        LOG.exception("request.failed")
        await answer_error(send, AtollError(Code.INTERNAL, "an internal fault; see the log of control"))
