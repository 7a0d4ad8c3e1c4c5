"""The running agent's images, for root's commands: a socket, one request and one answer in JSON for each connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.images.shelf import Shelf
from atoll.programs import root_socket

ASK_S: Final = 3600.0
"""All blobs may have to be read."""
_BYTES_MAX: Final = 16 << 20


def serving(path: Path, shelf: Shelf) -> AbstractAsyncContextManager[None]:
    """Answer while inside."""
    return root_socket.serving(path, lambda reader, writer: _answer(reader, writer, shelf), check="image.socket")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shelf: Shelf) -> None:
    try:
        try:
            line = await reader.readline()
        except ValueError:  # Longer than a request can be.
            line = b""
        writer.write(json.dumps(await _answer_of(line, shelf)).encode())
        with contextlib.suppress(ConnectionError):
            await writer.drain()
    finally:
        writer.close()


async def _answer_of(line: bytes, shelf: Shelf) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError:
        request = None
    try:
        if not isinstance(request, dict):
            raise Refused(Code.INVALID_REQUEST, "a request is one line with an object of JSON")
        return {"ok": await shelf.asked(request)}
    except AtollError as error:
        return {"error": {"code": error.code.value, "message": error.message, "hint": error.hint}}
    except OSError as error:
        return {"error": {"code": Code.INTERNAL.value, "message": f"{type(error).__name__}: {error}", "hint": ""}}


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """What the running agent answers; None when none runs. *Errors*: Refused, as the agent says; Unavailable when it breaks off."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ASK_S)
            line.connect(str(path))
            line.sendall(json.dumps(request).encode() + b"\n")
            said = bytearray()
            while chunk := line.recv(65536):
                said += chunk
                if len(said) > _BYTES_MAX:
                    break
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except OSError as error:
        raise Unavailable(Code.NOT_RUNNING, f"the agent broke off: {error}") from error
    try:
        answer = json.loads(said)
    except ValueError as error:
        raise Unavailable(Code.NOT_RUNNING, "the agent broke off") from error
    if "error" in answer:
        told = answer["error"]
        raise Refused(Code(told["code"]), str(told["message"]), hint=str(told["hint"]) or None)
    return dict(answer["ok"])
