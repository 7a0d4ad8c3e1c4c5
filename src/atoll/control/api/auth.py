"""Who asks: the key in `X-API-KEY`, or as a bearer token."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from typing import Final

from starlette.types import Scope

from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret
from atoll.control.service import Caller, Service

KEY_LENGTH_MAX: Final = 256
ACCESS_TOKEN_PREFIX: Final = "sk_e2b_"  # noqa: S105 - a prefix, not a secret


def presented_key(headers: Mapping[bytes, bytes]) -> str:
    """The key that a request shows, unchecked.

    E2B's command line insists that its access token begins with `sk_e2b_`; one of our keys with `sk_` put before it serves there.
    *Errors*: UNAUTHENTICATED when there is none, or nothing that could be one.
    """
    raw = headers.get(b"x-api-key")
    if raw is None:
        scheme, _, raw = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raw = b""
    raw = raw.strip()
    if not raw:
        raise Refused(Code.UNAUTHENTICATED, "no API key: send it in the X-API-KEY header")
    if len(raw) > KEY_LENGTH_MAX or not raw.isascii() or not raw.decode("ascii").isprintable():
        raise Refused(Code.UNAUTHENTICATED, "the API key is not valid")
    key = raw.decode("ascii")
    return key.removeprefix("sk_") if key.startswith(ACCESS_TOKEN_PREFIX) else key


def address(scope: Scope, headers: Mapping[bytes, bytes]) -> str | None:
    """Where a request came from. The edge adds whom it has spoken with as the last of a chain; what stands before that is hearsay."""
    chain = headers.get(b"x-forwarded-for", b"").decode("latin-1")
    last = chain.rpartition(",")[2].strip()
    peer = scope.get("client")
    return (_canonical(last) if last else None) or (str(peer[0])[:64] if peer else None)


@functools.lru_cache(maxsize=4096)
def _canonical(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


async def authenticate(service: Service, key: str) -> Caller:
    """The caller that `key` belongs to. *Errors*: UNAUTHENTICATED, with one message for unknown and revoked keys."""
    try:
        return await service.authenticate(Secret(key))
    except Refused as error:
        if error.code is Code.UNAUTHENTICATED:
            raise Refused(Code.UNAUTHENTICATED, "the API key is not valid") from error
        raise
