"""Tokens of the registry: what control signs and the registry's engine verifies.

Theory of operation. A client shows its team's key to control and gets a token that says what it may do with which repositories, for a few
minutes, and how much its team may keep. The engine knows a public key only. The key pair is derived from the deployment's token key, so
every replica of control has it and nothing new is to be kept or backed up. A repository belongs to the team that its first part names; one
of E2B's names, under which its older command line pushes a template's image, to the team of the template.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Collection, Iterator, Sequence
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
_E2B_PREFIX: Final = "e2b/custom-envs/"
_E2B: Final = re.compile(re.escape(_E2B_PREFIX) + r"([a-z0-9]{1,64})")


@dataclass(frozen=True, slots=True)
class Access:
    """What may be done with one repository."""

    name: str
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """How much a team may keep in all of its repositories; None: as much as there is room for."""

    team: str
    bytes_max: int | None


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


def asked(scopes: Sequence[str]) -> Iterator[Access]:
    """What a client asks for, as far as it can be read."""
    for scope in " ".join(scopes).split()[:SCOPES_MAX]:
        kind, _, rest = scope.partition(":")
        name, _, wanted = rest.rpartition(":")
        actions = tuple(action for action in ACTIONS if action in wanted.split(",") or wanted == "*")
        if kind == "repository" and actions and len(name) <= _NAME_MAX and _NAME.fullmatch(name) is not None:
            yield Access(name, actions)


def template_of(name: str) -> str | None:
    """The id of the template whose image a repository of E2B's names takes; None: it is no such name."""
    found = _E2B.fullmatch(name)
    return found[1] if found else None


def repository_of(template_id: str) -> str:
    """The repository of E2B's names that takes a template's image."""
    return f"{_E2B_PREFIX}{template_id}"


def is_public(name: str, public: Collection[str]) -> bool:
    """Whether anybody may pull a repository, by the operator's list of `TEAM/NAME` and `TEAM/NAME/*`."""
    parts = name.split("/")
    return name in public or any("/".join((*parts[:length], "*")) in public for length in range(1, len(parts)))


def granted(
    team: str | None, scopes: Sequence[str], *, public: Collection[str] = (), templates: Collection[str] = ()
) -> tuple[Access, ...]:
    """Of what a client asks for, what it has: everything in its team's repositories, pulls of `public` ones, nothing elsewhere.

    `team` is None for a client that has shown no key; `templates` are those of its team.

    A scope is `repository:NAME:ACTION,...`, several in one string are parted by spaces. What cannot be read is left out, as the
    protocol wants: the engine then says what is missing.
    """
    found: list[Access] = []
    for one in asked(scopes):
        if team is not None and _owns(team, one.name, templates):
            found.append(one)
        elif "pull" in one.actions and is_public(one.name, public):
            found.append(Access(one.name, ("pull",)))
    return tuple(found)


def _owns(team: str, name: str, templates: Collection[str]) -> bool:
    # A team may be called `e2b`: its name gives it none of the others'.
    return template_of(name) in templates if name.startswith(_E2B_PREFIX) else name.partition("/")[0] == team


def claims(
    client_id: str, access: Sequence[Access], *, now: float, token_id: str, lasts_s: int = TOKEN_S, store: Store | None = None
) -> dict[str, Any]:
    """A token's content. Times in wall seconds. *Source*: the distribution project's token specification; `atoll` is our own."""
    ours = {} if store is None else {"atoll": {"team": store.team, "storage_bytes": store.bytes_max}}
    return {
        **ours,
        "iss": ISSUER,
        "sub": client_id,
        "aud": SERVICE,
        "iat": int(now),
        "nbf": int(now) - 60,
        "exp": int(now) + lasts_s,
        "jti": token_id,
        "access": [{"type": "repository", "name": one.name, "actions": list(one.actions)} for one in access],
    }
