"""Connection tracking: forget every connection of an address before another guest gets it.

The kernel does the searching: a request with a filter (Linux 5.8) goes through the table once, without a word to us about what
else is in it. Source: linux/netfilter/nfnetlink_conntrack.h, ctnetlink_flush_conntrack, ctnetlink_alloc_filter.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from atoll.hostops.netlink import NETLINK_NETFILTER, NLM_F_DUMP, Request, Socket, attribute, attributes, nested

IPCTNL_MSG_CT_NEW: Final = 1 << 8
IPCTNL_MSG_CT_GET: Final = 1 << 8 | 1
IPCTNL_MSG_CT_DELETE: Final = 1 << 8 | 2
CTA_TUPLE_ORIG: Final = 1
CTA_TUPLE_REPLY: Final = 2
CTA_PROTOINFO: Final = 4
CTA_TUPLE_IP: Final = 1
CTA_TUPLE_PROTO: Final = 2
CTA_IP_V4_SRC: Final = 1
CTA_IP_V4_DST: Final = 2
CTA_PROTO_NUM: Final = 1
CTA_PROTO_SRC_PORT: Final = 2
CTA_PROTO_DST_PORT: Final = 3
CTA_PROTOINFO_TCP: Final = 1
CTA_PROTOINFO_TCP_STATE: Final = 1
CTA_FILTER: Final = 25
CTA_FILTER_ORIG_FLAGS: Final = 1
CTA_FILTER_REPLY_FLAGS: Final = 2
BY_SOURCE: Final = 1 << 0
BY_DESTINATION: Final = 1 << 1
BY_PROTOCOL: Final = 1 << 3
AT_WORK: Final = (3, 4, 5)
"""States in which a far end waits for something: established, and closed by one of both."""

_NFGEN: Final = struct.pack("=BBH", socket.AF_INET, 0, 0)


def forgetting(address: str) -> list[Request]:
    """What to ask: connections that this address began, and those that were begun to it."""
    raw = ipaddress.IPv4Address(address).packed
    return [_by(address, CTA_IP_V4_SRC, raw, BY_SOURCE), _by(address, CTA_IP_V4_DST, raw, BY_DESTINATION)]


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection that was begun here, as its far end knows it: by the host's address, where that has taken the place of a guest's."""

    source: str
    source_port: int
    peer: str
    peer_port: int


def listing(address: str) -> Request:
    """What to ask: TCP connections that this address began."""
    number = attribute(CTA_PROTO_NUM, bytes([socket.IPPROTO_TCP]))
    place = nested(CTA_TUPLE_IP, attribute(CTA_IP_V4_SRC, ipaddress.IPv4Address(address).packed))
    body = _NFGEN + nested(CTA_TUPLE_ORIG, place, nested(CTA_TUPLE_PROTO, number)) + _filter(BY_SOURCE | BY_PROTOCOL)
    return Request(IPCTNL_MSG_CT_GET, NLM_F_DUMP, body, f"list connections of {address}")


def connection(found: bytes) -> Connection | None:
    """One answer to `listing`, by what comes back from its far end; None where nobody waits there any more, or it is no such thing."""
    parts = dict(attributes(found[len(_NFGEN) :]))
    try:
        back = dict(attributes(parts[CTA_TUPLE_REPLY]))
        places, ports = dict(attributes(back[CTA_TUPLE_IP])), dict(attributes(back[CTA_TUPLE_PROTO]))
        state = dict(attributes(dict(attributes(parts[CTA_PROTOINFO]))[CTA_PROTOINFO_TCP]))[CTA_PROTOINFO_TCP_STATE][0]
        made = Connection(
            source=str(ipaddress.IPv4Address(places[CTA_IP_V4_DST])),
            source_port=int.from_bytes(ports[CTA_PROTO_DST_PORT], "big"),
            peer=str(ipaddress.IPv4Address(places[CTA_IP_V4_SRC])),
            peer_port=int.from_bytes(ports[CTA_PROTO_SRC_PORT], "big"),
        )
    except (KeyError, IndexError, ValueError):
        return None
    return made if state in AT_WORK else None


def begun_by(addresses: Iterable[str]) -> list[Connection]:
    """TCP connections that these addresses began and whose far ends still wait for something. *Errors*: OSError of the kernel."""
    with Socket(NETLINK_NETFILTER) as sock:
        found = [payload for address in addresses for kind, payload in sock.ask(listing(address)) if kind == IPCTNL_MSG_CT_NEW]
    return [made for payload in found if (made := connection(payload)) is not None]


def _by(address: str, which: int, raw: bytes, flags: int) -> Request:
    body = _NFGEN + nested(CTA_TUPLE_ORIG, nested(CTA_TUPLE_IP, attribute(which, raw))) + _filter(flags)
    return Request(IPCTNL_MSG_CT_DELETE, 0, body, f"forget connections of {address}", tolerated=(errno.ENOENT,))


def _filter(flags: int) -> bytes:
    """Which parts of the first direction's addresses are to be compared; of the other one none."""
    return nested(
        CTA_FILTER, attribute(CTA_FILTER_ORIG_FLAGS, struct.pack("=I", flags)), attribute(CTA_FILTER_REPLY_FLAGS, struct.pack("=I", 0))
    )


def forget(addresses: Iterable[str]) -> None:
    """Delete every connection from or to these addresses. *Errors*: OSError of the kernel."""
    with Socket(NETLINK_NETFILTER) as sock:
        for address in addresses:
            sock.batch(forgetting(address))
