"""Guest line: one HTTP/1.1 connection to a guest's control side.

Theory of operation. The guest is not trusted: its answer is parsed by llhttp, and its size and time are bounded. A guest that has just
been started does not listen yet, and under gVisor its whole network stack is not there yet: a first SYN may be lost, and the kernel
would send the next one a second later. So each attempt is a new connection with a short limit of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Final

import httptools

from atoll.base.secret import Secret

ANSWER_BYTES_MAX: Final = 64 * 1024


class LineBroken(Exception):
    """The connection could not be made, or broke, or what came is no HTTP: try again with a new one."""


class _Answer:
    """Collects one response for httptools."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False

    def on_body(self, body: bytes) -> None:
        self.body += body
        if len(self.body) > ANSWER_BYTES_MAX:
            raise LineBroken("the guest's answer is too long")

    def on_message_complete(self) -> None:
        self.complete = True


class GuestLine:
    """An open connection; one request at a time."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self._socket = sock
        self._host = host

    @classmethod
    async def open(cls, host: str, port: int, *, within_s: float) -> GuestLine:
        """Connect. *Errors*: LineBroken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(within_s):
                await asyncio.get_running_loop().sock_connect(sock, (host, port))
        except (OSError, TimeoutError) as error:
            sock.close()
            raise LineBroken(_words(error)) from error
        except BaseException:
            sock.close()
            raise
        return cls(sock, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    async def call(self, method: str, path: str, *, token: Secret, body: bytes | None = None, within_s: float) -> tuple[int, bytes]:
        """One request, one answer: status and body. *Errors*: LineBroken; then whether it arrived is unknown."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {token.reveal()}\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        loop = asyncio.get_running_loop()
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        try:
            async with asyncio.timeout(within_s):
                await loop.sock_sendall(self._socket, head.encode() + b"\r\n" + (body or b""))
                while not answer.complete:
                    data = await loop.sock_recv(self._socket, 65536)
                    if not data:
                        raise LineBroken("the guest closed the connection")
                    parser.feed_data(data)
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            with contextlib.suppress(OSError):
                self._socket.close()
            raise LineBroken(_words(error)) from error
        return parser.get_status_code(), bytes(answer.body)


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
