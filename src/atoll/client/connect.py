"""The Connect protocol's stream framing, without I/O: one flag byte, four bytes of length, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

END_STREAM: Final = 0x02
_COMPRESSED: Final = 0x01
HEADER_BYTES: Final = 5
FRAME_BYTES_MAX: Final = 16 << 20


class FramingError(ValueError):
    """What came is no Connect stream."""


def encode(message: dict[str, Any]) -> bytes:
    """One frame with one message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return b"\0" + len(body).to_bytes(4, "big") + body


class Frames:
    """Takes bytes as they come and gives whole frames. *Errors* of `feed`: FramingError."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every frame that is whole now: its flags and its message."""
        self._waiting += data
        while len(self._waiting) >= HEADER_BYTES:
            flags, size = self._waiting[0], int.from_bytes(self._waiting[1:HEADER_BYTES], "big")
            if size > FRAME_BYTES_MAX:
                raise FramingError(f"a frame of {size} bytes is larger than {FRAME_BYTES_MAX}")
            if flags & _COMPRESSED:
                raise FramingError("a compressed frame, which was not asked for")
            if len(self._waiting) < HEADER_BYTES + size:
                return
            body = bytes(self._waiting[HEADER_BYTES : HEADER_BYTES + size])
            del self._waiting[: HEADER_BYTES + size]
            try:
                message = json.loads(body) if body else {}
            except ValueError as error:
                raise FramingError("a frame that is not JSON") from error
            if not isinstance(message, dict):
                raise FramingError("a frame that is no object")
            yield flags, message

    @property
    def unfinished(self) -> bool:
        """Whether the stream broke off inside a frame."""
        return bool(self._waiting)
