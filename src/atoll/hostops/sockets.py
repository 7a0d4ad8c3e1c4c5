"""Sockets: have this machine's own TCP connections to an address end with an error at once.

Where a slot's interface is gone nobody answers any more, and whoever only reads from it would wait for ever. The kernel searches by a
filter of ours, and tells each socket's owner ECONNABORTED. Source: linux/inet_diag.h, linux/sock_diag.h, sock_diag(7).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from typing import Final

from atoll.hostops.netlink import NLM_F_DUMP, Request, Socket, attribute

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
SOCK_DESTROY: Final = 21
INET_DIAG_REQ_BYTECODE: Final = 1
INET_DIAG_BC_D_COND: Final = 8
TIME_WAIT: Final = 6
LISTEN: Final = 10
CONNECTED: Final = 0xFFF & ~(1 << TIME_WAIT | 1 << LISTEN)

_REQUEST: Final = struct.Struct("=BBBxI")
"""inet_diag_req_v2 up to the socket's id: family, protocol, extensions, states."""
_ID_BYTES: Final = 48
_OPERATION: Final = struct.Struct("=BBH")
_HOST: Final = struct.Struct("=BBxxi")
_ANY_PORT: Final = -1


def listing(address: str) -> Request:
    """What to ask: all connected sockets whose peer is the address."""
    condition = _HOST.pack(socket.AF_INET, 32, _ANY_PORT) + ipaddress.IPv4Address(address).packed
    length = _OPERATION.size + len(condition)
    # To the end of the program where it holds, and beyond it, which means no, where it doesn't.
    program = _OPERATION.pack(INET_DIAG_BC_D_COND, length, length + _OPERATION.size) + condition
    body = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, CONNECTED) + bytes(_ID_BYTES) + attribute(INET_DIAG_REQ_BYTECODE, program)
    return Request(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, body, f"list connections to {address}")


def ending(found: bytes) -> Request:
    """What to ask: end the socket of one answer to `listing`. One that ended meanwhile is fine."""
    state, identity = found[1], found[4 : 4 + _ID_BYTES]
    body = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 1 << state) + identity
    return Request(SOCK_DESTROY, 0, body, "end a connection", tolerated=(errno.ENOENT,))


def abort_to(address: str) -> int:
    """End every connection of this network namespace to the address; how many. *Errors*: OSError; EOPNOTSUPP where the kernel can't."""
    with Socket(NETLINK_SOCK_DIAG) as sock:
        found = [payload for kind, payload in sock.ask(listing(address)) if kind == SOCK_DIAG_BY_FAMILY]
        sock.batch([ending(payload) for payload in found])
    return len(found)
