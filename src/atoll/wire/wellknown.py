"""`GET /.well-known/atoll`: what a machine needs to know before it may join. For everybody to read, so there is no secret in it.

Nothing in it is to be trusted by itself when it was read without a verified certificate: `ca_pem` only counts with the fingerprint that an
operator has handed over (`atoll agent join --ca-pin`).
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from atoll.wire.agent import Message
from atoll.wire.manifests import KeySet

PATH: Final = "/.well-known/atoll"
FORM: Final = 1
BYTES_MAX: Final = 256 * 1024


class ProtocolRange(Message):
    """Versions of the agent protocol that control speaks."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)


class VerificationKey(Message):
    """A public key, and what it verifies."""

    use: Literal["guest-tokens"]
    algorithm: Literal["Ed25519"]
    public_key: str
    """base64 of the raw key."""


class HostRules(Message):
    """What holds for every host. *Units*: seconds, bytes."""

    lease_s: float
    park_s_max: float
    clock_skew_s_max: float
    message_bytes_max: int


class WellKnown(Message):
    """The document."""

    form: int = Field(ge=1)
    """Of this document; grows when a reader must know more to understand it."""
    install_id: str
    version: str
    region: str
    """Of hosts that name none."""
    protocol: ProtocolRange
    agents_urls: list[str] = Field(default_factory=list, max_length=16)
    """Where agents dial, every replica; empty: where this was read."""
    rules: HostRules
    keys: list[VerificationKey] = Field(default_factory=list, max_length=16)
    image_keys: KeySet | None = None
    """By which hosts believe signed manifests; None: of an older control."""
    slots_taken: list[str] = Field(default_factory=list, max_length=1024)
    """Address ranges that other hosts have for their sandboxes, as CIDR: a joining host chooses another."""
    ca_pem: str | None = Field(default=None, max_length=65536)
    """The authority that has signed what `agents_urls` show; None: one that every machine knows."""
    now: float
    """Control's wall clock."""
