"""What a client says about a sandbox's network, checked; both APIs use the same words for it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.domain.spec import NetworkSpec

ALL_TRAFFIC: Final = "0.0.0.0/0"
ENTRIES_MAX: Final = 256
_DOMAIN: Final = re.compile(r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z][A-Za-z0-9-]{0,62}\.?")
_MASK_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:([0-9]{1,5}|\$\{PORT\}))?")


def unsupported(option: str, why: str = "") -> Refused:
    """The refusal of an option that this release cannot honour."""
    return Refused(Code.NOT_SUPPORTED, f"option {option!r} is not supported by this release{why}", option=option)


def network_spec(
    *,
    internet: bool,
    allow_out: Sequence[str],
    deny_out: Sequence[str],
    public_traffic: bool,
    mask_request_host: str | None,
) -> NetworkSpec:
    """Egress and ingress as asked for. *Errors*: INVALID_REQUEST, NOT_SUPPORTED."""
    if any(_is_domain(entry) for entry in deny_out):
        raise Refused(Code.INVALID_REQUEST, "denyOut takes IP addresses and CIDR blocks only, not domains")
    if any(_is_domain(entry) for entry in allow_out):
        if ALL_TRAFFIC not in deny_out and internet:
            raise Refused(Code.INVALID_REQUEST, f'domains in allowOut need denyOut ["{ALL_TRAFFIC}"], to close everything else')
        raise unsupported("network.allowOut", " for domains: use IP addresses and CIDR blocks")
    if mask_request_host is not None and not _MASK_HOST.fullmatch(mask_request_host):
        raise Refused(Code.INVALID_REQUEST, "maskRequestHost is not a host name with an optional port")
    return NetworkSpec(
        internet=internet,
        allow_out=_addresses("allowOut", allow_out),
        deny_out=_addresses("denyOut", deny_out),
        public_traffic=public_traffic,
        mask_request_host=mask_request_host,
    )


def _addresses(name: str, entries: Sequence[str]) -> tuple[str, ...]:
    """The IPv4 entries, canonical where they are networks."""
    if len(entries) > ENTRIES_MAX:
        raise Refused(Code.INVALID_REQUEST, f"{name} has {len(entries)} entries, at most {ENTRIES_MAX} are allowed")
    kept: list[str] = []
    for entry in entries:
        network = _network(entry)
        if network is None:
            raise Refused(Code.INVALID_REQUEST, f"{name}: {_shown(entry)} is not an IP address or a CIDR block")
        if network.version == 4:
            kept.append(str(network) if "/" in entry else entry)
        elif name == "allowOut":
            raise unsupported("network.allowOut", " for IPv6: sandboxes have IPv4 egress only")
        # A denied IPv6 range is closed already: there is no IPv6 egress to cut.
    return tuple(kept)


def _is_domain(entry: str) -> bool:
    return len(entry) <= 255 and _network(entry) is None and _DOMAIN.fullmatch(entry) is not None


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def _shown(entry: str) -> str:
    return ascii(entry[:80])
