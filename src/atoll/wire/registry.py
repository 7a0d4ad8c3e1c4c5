"""Tokens of the registry: what control signs and the registry's engine verifies.

Theory of operation. A client shows its team's key to control and gets a token that says what it may do with which repositories, for a few
minutes. The engine knows a public key only. The key pair is derived from the deployment's token key, so every replica of control has it
and nothing new is to be kept or backed up. A repository belongs to the team that its first part names.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

SERVICE: Final = "atoll-registry"
ISSUER: Final = "atoll-control"
TOKEN_PATH: Final = "/registry/token"  # noqa: S105 - a path
TOKEN_S: Final = 300
ACTIONS: Final = ("pull", "push", "delete")
SCOPES_MAX: Final = 32
_NAME: Final = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)+")
_NAME_MAX: Final = 255


@dataclass(frozen=True, slots=True)
class Access:
    """What may be done with one repository."""

    name: str
    actions: tuple[str, ...]


def signing_key(root: bytes) -> Ed25519PrivateKey:
    """The key pair of the registry's tokens, from the deployment's token key."""
    return Ed25519PrivateKey.from_private_bytes(hmac.new(root, b"registry|signing|1", hashlib.sha256).digest())


def _public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def key_id(key: Ed25519PrivateKey) -> str:
    """The public key's name in tokens and key set."""
    return hashlib.sha256(_public(key)).hexdigest()[:32]


def key_set(key: Ed25519PrivateKey) -> dict[str, Any]:
    """The public key as a JWKS. *Source*: RFC 8037."""
    shown = base64.urlsafe_b64encode(_public(key)).rstrip(b"=").decode()
    return {"keys": [{"kty": "OKP", "crv": "Ed25519", "x": shown, "kid": key_id(key), "alg": "EdDSA", "use": "sig"}]}


def granted(team: str, scopes: Sequence[str]) -> tuple[Access, ...]:
    """Of what a client asks for, what its team has: everything in its own repositories, nothing elsewhere.

    A scope is `repository:NAME:ACTION,...`, several in one string are parted by spaces. What cannot be read is left out, as the
    protocol wants: the engine then says what is missing.
    """
    found: list[Access] = []
    for scope in " ".join(scopes).split()[:SCOPES_MAX]:
        kind, _, rest = scope.partition(":")
        name, _, wanted = rest.rpartition(":")
        own = len(name) <= _NAME_MAX and _NAME.fullmatch(name) is not None and name.partition("/")[0] == team
        actions = tuple(action for action in ACTIONS if action in wanted.split(",") or wanted == "*")
        if kind == "repository" and own and actions:
            found.append(Access(name, actions))
    return tuple(found)


def claims(client_id: str, access: Sequence[Access], *, now: float, token_id: str, lasts_s: int = TOKEN_S) -> dict[str, Any]:
    """A token's content. Times in wall seconds. *Source*: the distribution project's token specification."""
    return {
        "iss": ISSUER,
        "sub": client_id,
        "aud": SERVICE,
        "iat": int(now),
        "nbf": int(now) - 60,
        "exp": int(now) + lasts_s,
        "jti": token_id,
        "access": [{"type": "repository", "name": one.name, "actions": list(one.actions)} for one in access],
    }
