"""The nftables table of one instance: written once at its start; after that only set elements change.

| set | key | means |
|---|---|---|
| slots | interface . source | this slot exists, and this is the only address that it may send from |
| open4 | source | it may reach public addresses |
| allow4 | source . destination | it may reach these whatever open4 and deny4 say |
| deny4 | source . destination | it may not reach these |
| closed4 | destination | nobody may: private, shared, link-local, metadata, multicast, reserved, and the operator's own ranges |

Order of a guest's packet: raw prerouting drops IPv6 and every source but the slot's own; to the host itself only DNS at the gateway
passes; forwarded, closed4 and port 53 come first, then allow4, deny4, open4, and what is left is dropped. To a guest only answers pass, and what
the host itself opens (the output path is not restricted). A slot without elements reaches nothing.
Source: DESIGN section 7; research/isolation.md A3.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.drivers.oci.config import Names

CLOSED: Final = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
EGRESS_SETS: Final = ("open4", "allow4", "deny4")
"""What slots may reach beyond the closed ranges; their keys begin with the slot's address."""
SETS: Final = ("slots", *EGRESS_SETS)
"""The sets whose elements belong to single slots."""
CONNECTIONS_PER_SLOT_MAX: Final = 16_384
"""The kernel's table of connections is shared by all guests: one of them must not fill it."""


@dataclass(frozen=True, slots=True)
class Egress:
    """What one slot may reach beyond the closed ranges."""

    internet: bool
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    @classmethod
    def of(cls, *, internet: bool, allow: Iterable[str], deny: Iterable[str]) -> Egress:
        """Normalised: whole networks, none inside another.

        *Errors*: Refused(NOT_SUPPORTED) for what is no IPv4 address or network, such as a host name.
        """
        return cls(internet, _networks(allow), _networks(deny))


def _networks(texts: Iterable[str]) -> tuple[str, ...]:
    found = []
    for text in texts:
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise Refused(Code.NOT_SUPPORTED, f"egress rule {text!r} is no IPv4 address or network") from None
        if isinstance(network, ipaddress.IPv6Network):
            continue  # guests have no IPv6 here: it is closed anyhow
        found.append(network)
    return tuple(str(network) for network in ipaddress.collapse_addresses(found))


def table_text(names: Names, *, subnet: str, gateway: str, closed: Sequence[str] = ()) -> str:
    """Commands that make the table from nothing, in one transaction; an older table of this name is replaced."""
    wild = f'"{names.link_prefix}*"'
    everything = ", ".join(_networks([*CLOSED, *closed]))
    return f"""
table {names.table} {{}}
delete table {names.table}
table {names.table} {{
  set slots {{ type ifname . ipv4_addr; }}
  set open4 {{ type ipv4_addr; }}
  set allow4 {{ type ipv4_addr . ipv4_addr; flags interval; }}
  set deny4 {{ type ipv4_addr . ipv4_addr; flags interval; }}
  set closed4 {{ type ipv4_addr; flags interval; auto-merge; elements = {{ {everything} }}; }}
  set busy4 {{ type ipv4_addr; flags dynamic; size 65535; }}
  chain from_slot {{
    meta nfproto ipv6 drop
    iifname . ip saddr @slots return
    drop
  }}
  chain antispoof {{
    type filter hook prerouting priority raw; policy accept;
    iifname {wild} jump from_slot
  }}
  chain to_host {{
    ct state established accept
    ct state related meta l4proto icmp accept
    ip daddr {gateway} meta l4proto {{ tcp, udp }} th dport 53 accept
    drop
  }}
  chain guard_host {{
    type filter hook input priority filter - 5; policy accept;
    iifname {wild} jump to_host
  }}
  chain outward {{
    oifname {wild} drop
    tcp flags syn tcp option maxseg size set rt mtu
    ip daddr @closed4 drop
    meta l4proto {{ tcp, udp }} th dport 53 drop
    ct state established,related accept
    ct state new add @busy4 {{ ip saddr ct count over {CONNECTIONS_PER_SLOT_MAX} }} drop
    ip saddr . ip daddr @allow4 accept
    ip saddr . ip daddr @deny4 drop
    ip saddr @open4 accept
    drop
  }}
  chain inward {{
    ct state established,related accept
    drop
  }}
  chain guard_forward {{
    type filter hook forward priority filter - 5; policy accept;
    iifname {wild} jump outward
    oifname {wild} jump inward
  }}
  chain masquerade_out {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {subnet} oifname != {wild} oifname != "lo" masquerade
  }}
}}
"""


def _elements(names: Names, verb: str, name: str, keys: Iterable[str]) -> str:
    listed = ", ".join(keys)
    return f"{verb} element {names.table} {name} {{ {listed} }}\n" if listed else ""


def slot_elements(names: Names, verb: str, slots: Iterable[tuple[str, str]]) -> str:
    """Add or delete slots, given as (interface, address)."""
    return _elements(names, verb, "slots", (f'"{link}" . {address}' for link, address in slots))


def egress_elements(names: Names, verb: str, address: str, egress: Egress) -> str:
    """Add or delete what one slot may reach."""
    return (
        _elements(names, verb, "allow4", (f"{address} . {network}" for network in egress.allow))
        + _elements(names, verb, "deny4", (f"{address} . {network}" for network in egress.deny))
        + _elements(names, verb, "open4", [address] if egress.internet else [])
    )


def element_text(element: object) -> str:
    """An element of nft's JSON as nft's own language has it: what was listed can be added or deleted again."""
    match element:
        case {"elem": {"val": value}}:
            return element_text(value)
        case {"concat": [*parts]}:
            return " . ".join(element_text(part) for part in parts)
        case {"prefix": {"addr": address, "len": length}}:
            return f"{address}/{length}"
        case {"range": [first, last]}:
            return f"{first}-{last}"
        case _:
            return str(element)


def _quoted(text: str) -> str:
    """Interface names need quotes when nft reads them back; addresses must not have any."""
    return " . ".join(part if part[:1].isdigit() else f'"{part}"' for part in text.split(" . "))


def keep_elements(names: Names, name: str, texts: Iterable[str]) -> str:
    """Add listed elements again."""
    return _elements(names, "add", name, map(_quoted, texts))


def drop_elements(names: Names, name: str, texts: Iterable[str]) -> str:
    """Delete listed elements."""
    return _elements(names, "delete", name, map(_quoted, texts))
