"""Interfaces, addresses, routes and neighbours, by rtnetlink.

Pure functions build the requests; `netlink.Socket` sends them. A veth pair is made with its far end already inside another namespace.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from dataclasses import dataclass
from typing import Final

from atoll.hostops.netlink import (
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Request,
    Socket,
    attribute,
    nested,
    only,
)

RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_GETLINK: Final = 18
RTM_SETLINK: Final = 19
RTM_NEWADDR: Final = 20
RTM_NEWROUTE: Final = 24
RTM_NEWNEIGH: Final = 28

IFLA_ADDRESS: Final = 1
IFLA_IFNAME: Final = 3
IFLA_MTU: Final = 4
IFLA_LINKINFO: Final = 18
IFLA_IFALIAS: Final = 20
IFLA_AF_SPEC: Final = 26
IFLA_NET_NS_FD: Final = 28
IFLA_TXQLEN: Final = 13
IFLA_EXT_MASK: Final = 29
IFLA_INFO_KIND: Final = 1
IFLA_INFO_DATA: Final = 2
VETH_INFO_PEER: Final = 1
IFLA_INET6_ADDR_GEN_MODE: Final = 8
ADDR_GEN_NONE: Final = 1

IFF_UP: Final = 1
NUD_PERMANENT: Final = 0x80
RT_TABLE_MAIN: Final = 254
RTPROT_STATIC: Final = 4
SCOPE_UNIVERSE: Final = 0
SCOPE_LINK: Final = 253

_IFINFO: Final = struct.Struct("=BxHiII")
_IFADDR: Final = struct.Struct("=BBBBI")
_ROUTE: Final = struct.Struct("=BBBBBBBBI")
_NEIGHBOUR: Final = struct.Struct("=BxxxiHBB")


def _text(value: str) -> bytes:
    return value.encode() + b"\0"


def mac(text: str) -> bytes:
    """`02:00:...` as six bytes."""
    return bytes.fromhex(text.replace(":", ""))


def _packed(address: str) -> bytes:
    return ipaddress.IPv4Address(address).packed


def no_ipv6_address(index: int) -> Request:
    """Have the device give itself no IPv6 address when it comes up. Only possible once it exists; fine where the kernel has no IPv6."""
    mode = attribute(IFLA_INET6_ADDR_GEN_MODE, bytes([ADDR_GEN_NONE]))
    body = _IFINFO.pack(0, 0, index, 0, 0) + nested(IFLA_AF_SPEC, nested(socket.AF_INET6, mode))
    return Request(RTM_SETLINK, 0, body, f"no IPv6 address for {index}", tolerated=(errno.EAFNOSUPPORT,))


@dataclass(frozen=True, slots=True)
class End:
    """One end of a veth pair."""

    name: str
    mac: str


def add_veth(near: End, far: End, far_namespace_fd: int, *, mtu: int = 1500) -> Request:
    """Make a pair: `near` here, `far` in the other namespace, both down."""
    peer = b"".join(
        (
            _IFINFO.pack(0, 0, 0, 0, 0),
            attribute(IFLA_IFNAME, _text(far.name)),
            attribute(IFLA_ADDRESS, mac(far.mac)),
            attribute(IFLA_MTU, struct.pack("=I", mtu)),
            attribute(IFLA_NET_NS_FD, struct.pack("=I", far_namespace_fd)),
        )
    )
    body = b"".join(
        (
            _IFINFO.pack(0, 0, 0, 0, 0),
            attribute(IFLA_IFNAME, _text(near.name)),
            attribute(IFLA_ADDRESS, mac(near.mac)),
            attribute(IFLA_MTU, struct.pack("=I", mtu)),
            nested(
                IFLA_LINKINFO,
                attribute(IFLA_INFO_KIND, b"veth"),
                nested(IFLA_INFO_DATA, attribute(VETH_INFO_PEER | 0x8000, peer)),
            ),
        )
    )
    return Request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body, f"add veth {near.name}")


def add_link(name: str, kind: str) -> Request:
    """Make a device of a kind without options (`dummy`, `bridge`), down."""
    body = (
        _IFINFO.pack(0, 0, 0, 0, 0) + attribute(IFLA_IFNAME, _text(name)) + nested(IFLA_LINKINFO, attribute(IFLA_INFO_KIND, kind.encode()))
    )
    return Request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body, f"add {kind} {name}", tolerated=(errno.EEXIST,))


def delete_link(name: str) -> Request:
    """Remove a device; of a veth pair both ends go. Succeeds where there is none."""
    body = _IFINFO.pack(0, 0, 0, 0, 0) + attribute(IFLA_IFNAME, _text(name))
    return Request(RTM_DELLINK, 0, body, f"delete link {name}", tolerated=(errno.ENODEV,))


def set_up(index: int) -> Request:
    return Request(RTM_SETLINK, 0, _IFINFO.pack(0, 0, index, IFF_UP, IFF_UP), f"set link {index} up")


def set_hardware(index: int, address: str) -> Request:
    """Give a device its hardware address."""
    body = _IFINFO.pack(0, 0, index, 0, 0) + attribute(IFLA_ADDRESS, mac(address))
    return Request(RTM_SETLINK, 0, body, f"set hardware address of {index}")


def set_alias(name: str, alias: str) -> Request:
    """Write a note on a device: whose it is."""
    body = _IFINFO.pack(0, 0, 0, 0, 0) + attribute(IFLA_IFNAME, _text(name)) + attribute(IFLA_IFALIAS, alias.encode())
    return Request(RTM_SETLINK, 0, body, f"set alias of {name}")


def add_address(index: int, address: str, prefix: int = 32) -> Request:
    raw = _packed(address)
    body = _IFADDR.pack(socket.AF_INET, prefix, 0, SCOPE_UNIVERSE, index) + attribute(2, raw) + attribute(1, raw)
    return Request(RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, body, f"add address {address}/{prefix}")


def add_route(index: int, destination: str | None, *, via: str | None = None, prefix: int = 32) -> Request:
    """A route over a device: to one destination, or the default one (None)."""
    scope = SCOPE_UNIVERSE if via else SCOPE_LINK
    length = 0 if destination is None else prefix
    body = _ROUTE.pack(socket.AF_INET, length, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, 1, 0)
    if destination is not None:
        body += attribute(1, _packed(destination))
    if via:
        body += attribute(5, _packed(via))
    body += attribute(4, struct.pack("=i", index))
    return Request(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, body, f"add route {destination or 'default'}")


def add_neighbour(index: int, address: str, hardware: str) -> Request:
    """A neighbour that needs no ARP: the first packet to a new guest is not delayed by a lost question."""
    body = _NEIGHBOUR.pack(socket.AF_INET, index, NUD_PERMANENT, 0, 0) + attribute(1, _packed(address)) + attribute(2, mac(hardware))
    return Request(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, body, f"add neighbour {address}")


_OF_LINK: Final = frozenset((IFLA_IFNAME, IFLA_IFALIAS))
# RTEXT_FILTER_SKIP_STATS: the kernel need not gather counters that nobody reads.
_ALL_LINKS: Final = _IFINFO.pack(0, 0, 0, 0, 0) + attribute(IFLA_EXT_MASK, struct.pack("=I", 1 << 3))


@dataclass(frozen=True, slots=True)
class Link:
    """A device that exists."""

    index: int
    name: str
    alias: str


def _link(payload: bytes) -> Link:
    _family, _kind, index, _flags, _change = _IFINFO.unpack_from(payload)
    found = only(payload, _IFINFO.size, _OF_LINK)
    return Link(
        index, found.get(IFLA_IFNAME, b"").rstrip(b"\0").decode(), found.get(IFLA_IFALIAS, b"").rstrip(b"\0").decode(errors="replace")
    )


def find(sock: Socket, name: str) -> Link | None:
    """The device of this name, or None."""
    body = _IFINFO.pack(0, 0, 0, 0, 0) + attribute(IFLA_IFNAME, _text(name))
    try:
        answer = sock.ask(Request(RTM_GETLINK, 0, body, f"find link {name}"))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return None
        raise
    return _link(answer[0][1])


def list_all(sock: Socket) -> list[Link]:
    """Every device of the namespace."""
    return [_link(payload) for kind, payload in sock.ask(Request(RTM_GETLINK, NLM_F_DUMP, _ALL_LINKS, "list links")) if kind == RTM_NEWLINK]
