"""Connection tracking: forget every connection of an address before another guest gets it."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from typing import Final

from atoll.hostops.netlink import NETLINK_NETFILTER, NLM_F_DUMP, Request, Socket, attribute, attributes

_SUBSYSTEM: Final = 1 << 8
IPCTNL_MSG_CT_NEW: Final = _SUBSYSTEM | 0
IPCTNL_MSG_CT_GET: Final = _SUBSYSTEM | 1
IPCTNL_MSG_CT_DELETE: Final = _SUBSYSTEM | 2
CTA_TUPLE_ORIG: Final = 1
CTA_TUPLE_REPLY: Final = 2
CTA_TUPLE_IP: Final = 1
CTA_IP_V4_SRC: Final = 1
CTA_IP_V4_DST: Final = 2
CTA_ID: Final = 12
CTA_ZONE: Final = 18

_NFGEN: Final = struct.pack("=BBH", socket.AF_INET, 0, 0)


def _addresses(tuple_: bytes) -> set[bytes]:
    for kind, value in attributes(tuple_):
        if kind == CTA_TUPLE_IP:
            return {raw for name, raw in attributes(value) if name in (CTA_IP_V4_SRC, CTA_IP_V4_DST)}
    return set()


def forget(addresses: set[str]) -> int:
    """Delete every connection to or from these addresses and say how many there were.

    Reads the whole table once, so give it many addresses at a time.
    """
    wanted = {ipaddress.IPv4Address(address).packed for address in addresses}
    with Socket(NETLINK_NETFILTER) as sock:
        doomed = []
        for kind, payload in sock.ask(Request(IPCTNL_MSG_CT_GET, NLM_F_DUMP, _NFGEN, "list connections")):
            if kind != IPCTNL_MSG_CT_NEW:
                continue
            found = dict(attributes(payload[4:]))
            original = found.get(CTA_TUPLE_ORIG, b"")
            if wanted & (_addresses(original) | _addresses(found.get(CTA_TUPLE_REPLY, b""))):
                body = _NFGEN + attribute(CTA_TUPLE_ORIG | 0x8000, original)
                if CTA_ID in found:
                    body += attribute(CTA_ID, found[CTA_ID])
                if CTA_ZONE in found:
                    body += attribute(CTA_ZONE, found[CTA_ZONE])
                doomed.append(Request(IPCTNL_MSG_CT_DELETE, 0, body, "forget a connection", tolerated=(errno.ENOENT,)))
        for request in doomed:
            sock.ask(request)
    return len(doomed)
