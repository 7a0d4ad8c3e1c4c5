"""One packet for one answer: uvicorn's protocol with a transport that gathers what is written within one turn of the loop.

uvicorn writes head and body apart and uvloop sends each at once: two system calls and two packets, the first of which wakes the peer for
a head that it can do nothing with.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

AT_ONCE_BYTES: Final = 64 * 1024
"""So much is not kept for the end of the turn."""


class Corked:
    """A transport that writes at the end of the loop's turn. Everything but writing and closing is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._kept: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Send this soon, after what was written before."""
        if not self._kept:
            self._loop.call_soon(self.flush)
        self._kept.append(data)
        self._size += len(data)
        if self._size > AT_ONCE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what is kept."""
        if self._kept:
            kept, self._kept, self._size = self._kept, [], 0
            self._transport.write(kept[0] if len(kept) == 1 else b"".join(kept))

    def close(self) -> None:
        """Send what is kept, then close."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class CorkedHttp(HttpToolsProtocol):
    """For `uvicorn.Config(http=...)`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", Corked(transport, self.loop)))
