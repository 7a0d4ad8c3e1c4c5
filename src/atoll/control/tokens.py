"""Tokens that are derived or signed, never stored.

Access tokens are HMAC(key, sandbox, purpose, version): the same for a sandbox's whole life, different for each, and gone from nowhere
when the database leaks. Guest tokens are JWTs signed by the deployment's Ed25519 key for one placement's guest.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from atoll.domain.placement import Placement
from atoll.wire import guest

_VERSION: Final = "1"


class Tokens:
    """Made from the deployment's secrets; both keys never leave this object."""

    def __init__(self, *, root: bytes, signing: Ed25519PrivateKey) -> None:
        self._root = root
        self._signing = signing
        raw = signing.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.guest_public_key = base64.b64encode(raw).decode()

    def access(self, sandbox_id: str) -> str:
        """What the guest demands in X-Access-Token."""
        return "ea_" + self._derive(sandbox_id, "access")

    def traffic(self, sandbox_id: str) -> str:
        """What ports demand where traffic is not public."""
        return "ta_" + self._derive(sandbox_id, "traffic")

    def request_digest(self, content: bytes) -> str:
        """What is kept of a request's body, to know it again: without the key nobody can try out what was in it."""
        return hmac.new(self._root, b"request|" + content, hashlib.sha256).hexdigest()

    def upload(self, team_id: str, files_hash: str, until: int) -> str:
        """The signature of a link for sending files until a moment (wall seconds)."""
        return hmac.new(self._root, f"upload|{team_id}|{files_hash}|{until}".encode(), hashlib.sha256).hexdigest()

    def is_upload(self, team_id: str, files_hash: str, until: int, signature: str) -> bool:
        """Whether a signature is ours, for this."""
        return hmac.compare_digest(self.upload(team_id, files_hash, until).encode(), signature.encode())

    def replica(self, said: str) -> str:
        """The signature of a call from one replica to another."""
        return hmac.new(self._root, f"replica|{said}".encode(), hashlib.sha256).hexdigest()

    def is_replica(self, said: str, signature: str) -> bool:
        """Whether a signature is a replica's, of this call."""
        return hmac.compare_digest(self.replica(said).encode(), signature.encode())

    def guest(self, placement: Placement, scope: str) -> str:
        """A token for one placement's guest. *Idempotency*: the same placement and scope give the same token."""
        claims = guest.claims(
            sandbox_id=placement.sandbox_id,
            placement_id=placement.id,
            generation=placement.generation,
            nonce=placement.nonce,
            scope=scope,
        )
        return jwt.encode(claims, self._signing, algorithm="EdDSA")

    def _derive(self, sandbox_id: str, purpose: str) -> str:
        message = f"{sandbox_id}|{purpose}|{_VERSION}".encode()
        return hmac.new(self._root, message, hashlib.sha256).hexdigest()[:40]
