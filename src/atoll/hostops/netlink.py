"""Netlink, as far as slots need it: build requests, send them, read the answers.

Theory of operation. A request is bytes: header, a fixed struct of its family, attributes. `Socket.ask` sends one request with ACK and
returns what came before the acknowledgement; the kernel's error becomes an OSError. Several requests may go in one `send` (the kernel
handles them in order), which `Socket.batch` uses to make a whole slot in one system call. Source: rtnetlink(7), linux/netlink.h.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

NLM_F_REQUEST: Final = 0x1
NLM_F_ACK: Final = 0x4
NLM_F_DUMP: Final = 0x300
NLM_F_REPLACE: Final = 0x100
NLM_F_EXCL: Final = 0x200
NLM_F_CREATE: Final = 0x400
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
NLA_F_NESTED: Final = 0x8000
NLA_TYPE_MASK: Final = 0x3FFF

NETLINK_ROUTE: Final = 0
NETLINK_NETFILTER: Final = 12

_HEADER: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_ERROR: Final = struct.Struct("=i")
_RECEIVE_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Request:
    """One message without its sequence number. `body` is the family's struct and the attributes."""

    kind: int
    flags: int
    body: bytes
    what: str
    """For the error's text."""
    tolerated: tuple[int, ...] = ()
    """Error numbers that mean that it is so already."""


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded to four bytes."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)


def nested(kind: int, *parts: bytes) -> bytes:
    """An attribute that holds attributes."""
    return attribute(kind | NLA_F_NESTED, b"".join(parts))


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes in `data`; stops at the first that does not fit."""
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size or offset + length > len(data):
            return
        yield kind & NLA_TYPE_MASK, data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3


def only(data: bytes, offset: int, kinds: frozenset[int]) -> dict[int, bytes]:
    """The attributes of these kinds in `data` from `offset` on: a link has fifty, of which two are wanted."""
    found: dict[int, bytes] = {}
    unpack, size, end = _ATTRIBUTE.unpack_from, _ATTRIBUTE.size, len(data)
    while offset + size <= end and len(found) < len(kinds):
        length, kind = unpack(data, offset)
        if length < size or offset + length > end:
            break
        kind &= NLA_TYPE_MASK
        if kind in kinds:
            found[kind] = data[offset + size : offset + length]
        offset += (length + 3) & ~3
    return found


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, sequence number, payload) of each message in one datagram."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _flags, seq, _pid = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size or offset + length > len(data):
            return
        yield kind, seq, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


class Socket:
    """A netlink socket of the namespace in which the calling thread is when it is made. For one thread at a time."""

    def __init__(self, family: int = NETLINK_ROUTE) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.bind((0, 0))
        # The kernel answers at once; anything else is a fault that must not hang a thread.
        self._socket.settimeout(5.0)
        self._seq = 0

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Request) -> list[tuple[int, bytes]]:
        """Send one request and return (type, payload) of what came before its acknowledgement. *Errors*: OSError of the kernel."""
        return self.batch([request])[0]

    def batch(self, requests: Sequence[Request]) -> list[list[tuple[int, bytes]]]:
        """Send all in one system call; each answer in order.

        *Errors*: OSError of the first that failed and is not tolerated, after all have been answered: later ones were still tried.
        """
        if not requests:
            return []
        first = self._seq + 1
        parts = []
        for request in requests:
            self._seq += 1
            flags = request.flags | NLM_F_REQUEST | (0 if request.flags & NLM_F_DUMP == NLM_F_DUMP else NLM_F_ACK)
            parts.append(_HEADER.pack(_HEADER.size + len(request.body), request.kind, flags, self._seq, 0) + request.body)
            parts.append(b"\0" * (-len(request.body) % 4))
        self._socket.send(b"".join(parts))
        answers: list[list[tuple[int, bytes]]] = [[] for _ in requests]
        failed: OSError | None = None
        waiting = len(requests)
        while waiting:
            for kind, seq, payload in messages(self._socket.recv(_RECEIVE_BYTES)):
                index = seq - first
                if not 0 <= index < len(requests):
                    continue
                if kind not in (NLMSG_ERROR, NLMSG_DONE):
                    answers[index].append((kind, payload))
                    continue
                waiting -= 1
                number = -_ERROR.unpack_from(payload)[0] if len(payload) >= _ERROR.size else 0
                if number > 0 and number not in requests[index].tolerated and failed is None:
                    failed = OSError(number, f"{requests[index].what}: {os.strerror(number)}")
        if failed is not None:
            raise failed
        return answers
