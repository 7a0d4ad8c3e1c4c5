"""Sealed columns: AES-256-GCM with a key that is kept apart from the database (file of mode 0600).

The associated data names table and row, so that a sealed value copied to another row does not open.
"""

from __future__ import annotations

import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from atoll.base.errors import Bug, Code

_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12
KEY_BYTES: Final = 32


class Sealer:
    """Seals and opens column values."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise Bug(Code.INTERNAL, f"a sealing key has {KEY_BYTES} bytes, not {len(key)}")
        self._aead = AESGCM(key)

    def seal(self, clear: bytes, *, table: str, row: str) -> bytes:
        """Version, nonce and ciphertext, as one value."""
        nonce = os.urandom(_NONCE_BYTES)
        return _VERSION + nonce + self._aead.encrypt(nonce, clear, f"{table}/{row}".encode())

    def open(self, sealed: bytes, *, table: str, row: str) -> bytes:
        """The clear value. *Errors*: Bug (INTERNAL) when it is not ours, not of this row, or the key is another."""
        if sealed[:1] != _VERSION:
            raise Bug(Code.INTERNAL, f"sealed value of {table}/{row} has an unknown version")
        nonce, body = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            return self._aead.decrypt(nonce, body, f"{table}/{row}".encode())
        except (InvalidTag, ValueError):  # ValueError: too short to hold a nonce
            raise Bug(Code.INTERNAL, f"sealed value of {table}/{row} does not open with this key") from None
