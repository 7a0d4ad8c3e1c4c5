"""Resets: have the far ends of connections hear that nobody is there any more, though nobody is left who knows what to say to them.

Theory of operation. A reset counts only with the sequence number that its receiver expects, and that was known to a guest that is gone. But whoever
gets the first packet of a connection that he has already answers with the number that he expects, whatever is in that packet. This host has
no such connection, so its kernel resets that answer, with that number. Before that, the host must have forgotten whose the connection was.
Source: RFC 9293 3.10.7.4, RFC 5961 4 (challenge ACK); linux tcp_validate_incoming, tcp_v4_send_reset.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from typing import Final

from atoll.hostops.conntrack import Connection

_IP: Final = struct.Struct(">BBHHHBBH4s4s")
_TCP: Final = struct.Struct(">HHIIBBHHH")
_PSEUDO: Final = struct.Struct(">4s4sBBH")
_SYN: Final = 0x02
_WINDOW: Final = 1024
_HOPS: Final = 64


def question(connection: Connection, number: int) -> bytes:
    """The packet that is answered with what a reset needs: the first one of this connection, with a sequence number of anybody's."""
    source, peer = socket.inet_aton(connection.source), socket.inet_aton(connection.peer)
    parts = [connection.source_port, connection.peer_port, number, 0, _TCP.size // 4 << 4, _SYN, _WINDOW]
    checksum = _sum(_PSEUDO.pack(source, peer, 0, socket.IPPROTO_TCP, _TCP.size) + _TCP.pack(*parts, 0, 0))
    # The kernel writes length, number and checksum of the outer header itself: raw(7).
    outer = _IP.pack(0x45, 0, _IP.size + _TCP.size, 0, 0, _HOPS, socket.IPPROTO_TCP, 0, source, peer)
    return outer + _TCP.pack(*parts, checksum, 0)


def _sum(data: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def provoke(connections: Iterable[Connection]) -> int:
    """Ask each far end; how many could be. It takes a round trip until they know. *Errors*: OSError where nothing can be sent at all."""
    asked = 0
    with socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW) as raw:
        raw.setblocking(False)
        for one in connections:
            try:
                raw.sendto(question(one, int.from_bytes(os.urandom(4), "big")), (one.peer, 0))
            except OSError:
                continue  # no way there any more, or no room: it finds out when it next sends
            asked += 1
    return asked
