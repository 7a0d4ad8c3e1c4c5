"""A machine's way into its slot: a TAP device in the slot's namespace, and a translation of one fixed address to the slot's. Blocking.

Theory of operation. Every machine believes to be at the same address, so that one that was saved goes on in any slot. The slot's namespace
forwards between the slot's interface and the TAP device and writes the addresses into the packets, both ways, without keeping track of
connections: the host's own rules do that, and a guest has nothing here that it could fill. A packet from another source address is
dropped here, as is all that is meant for the namespace itself. A machine's program gets the device as a descriptor, or is the one user who
may open it; it has no right to make another.
What is not translated is what an ICMP error quotes.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from atoll.drivers.oci.slotworks import GUEST_LINK
from atoll.hostops import links
from atoll.hostops.netlink import Socket
from atoll.hostops.nft import Nft

DEVICE: Final = Path("/dev/net/tun")
TAP: Final = "tap0"
GUEST: Final = "192.0.0.2"
"""Of the range that RFC 7335 sets aside for hosts behind a translator: nobody is there that a guest could want to reach."""
ROUTER: Final = "192.0.0.1"
PREFIX: Final = 29
GUEST_MAC: Final = "02:a7:c0:00:00:02"
ROUTER_MAC: Final = "02:a7:c0:00:00:01"
_TUNSETIFF: Final = 0x400454CA
_TUNSETPERSIST: Final = 0x400454CB
_TUNSETOWNER: Final = 0x400454CC
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000


def rules(address: str) -> str:
    """What the namespace of a slot does with packets."""
    return f"""
table ip machine {{
  chain inward {{
    type filter hook prerouting priority raw; policy accept;
    iifname "{GUEST_LINK}" ip daddr {address} ip daddr set {GUEST}
    iifname "{TAP}" ip saddr != {GUEST} drop
  }}
  chain own {{ type filter hook input priority filter; policy drop; }}
  chain answers {{ type filter hook output priority filter; policy drop; }}
  chain outward {{
    type filter hook postrouting priority srcnat; policy accept;
    oifname "{GUEST_LINK}" ip saddr {GUEST} ip saddr set {address}
  }}
}}
table ip6 machine {{
  chain inward {{ type filter hook prerouting priority raw; policy drop; }}
  chain answers {{ type filter hook output priority filter; policy drop; }}
}}
"""


def make_for(user: int, address: str) -> None:
    """As `make`, for a program that opens the device by its name, as this user: it stays as long as its namespace. *Errors*: OSError."""
    fd = make(address)
    try:
        fcntl.ioctl(fd, _TUNSETOWNER, user)
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)


def make(address: str) -> int:
    """Make the device in the calling thread's network namespace, which is the slot's; its descriptor. *Errors*: OSError."""
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", TAP.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
        nft = Nft()
        try:
            nft.run(rules(address))
        finally:
            nft.close()
        with Socket() as route:
            tap = next(link.index for link in links.list_all(route) if link.name == TAP)
            route.batch(
                [
                    links.set_hardware(tap, ROUTER_MAC),
                    links.no_ipv6_address(tap),
                    links.set_up(tap),
                    links.add_address(tap, ROUTER),
                    links.add_route(tap, GUEST),
                    links.add_neighbour(tap, GUEST, GUEST_MAC),
                ]
            )
        # Of the calling thread's namespace, as everything below /proc/sys/net.
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    except BaseException:
        os.close(fd)
        raise
    return fd
