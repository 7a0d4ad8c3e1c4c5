"""Connection tracking: forget every connection of an address before another guest gets it.

The kernel does the searching: a delete request with a filter (Linux 5.8) goes through the table once, without a word to us about what
else is in it. Source: linux/netfilter/nfnetlink_conntrack.h, ctnetlink_flush_conntrack.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterable
from typing import Final

from atoll.hostops.netlink import NETLINK_NETFILTER, Request, Socket, attribute, nested

IPCTNL_MSG_CT_DELETE: Final = 1 << 8 | 2
CTA_TUPLE_ORIG: Final = 1
CTA_TUPLE_IP: Final = 1
CTA_IP_V4_SRC: Final = 1
CTA_IP_V4_DST: Final = 2
CTA_FILTER: Final = 25
CTA_FILTER_ORIG_FLAGS: Final = 1
CTA_FILTER_REPLY_FLAGS: Final = 2
BY_SOURCE: Final = 1 << 0
BY_DESTINATION: Final = 1 << 1

_NFGEN: Final = struct.pack("=BBH", socket.AF_INET, 0, 0)


def forgetting(address: str) -> list[Request]:
    """What to ask: connections that this address began, and those that were begun to it."""
    raw = ipaddress.IPv4Address(address).packed
    return [_by(address, CTA_IP_V4_SRC, raw, BY_SOURCE), _by(address, CTA_IP_V4_DST, raw, BY_DESTINATION)]


def _by(address: str, which: int, raw: bytes, flags: int) -> Request:
    body = (
        _NFGEN
        + nested(CTA_TUPLE_ORIG, nested(CTA_TUPLE_IP, attribute(which, raw)))
        + nested(
            CTA_FILTER, attribute(CTA_FILTER_ORIG_FLAGS, struct.pack("=I", flags)), attribute(CTA_FILTER_REPLY_FLAGS, struct.pack("=I", 0))
        )
    )
    return Request(IPCTNL_MSG_CT_DELETE, 0, body, f"forget connections of {address}", tolerated=(errno.ENOENT,))


def forget(addresses: Iterable[str]) -> None:
    """Delete every connection from or to these addresses. *Errors*: OSError of the kernel."""
    with Socket(NETLINK_NETFILTER) as sock:
        for address in addresses:
            sock.batch(forgetting(address))
