"""The deployment's keys for signed manifests: one that signs, and the chain of key sets that tells hosts which count.

`SECRETS/image-ed25519` (PKCS 8 in PEM, 0600) is the key; `SECRETS/image-keys.json` the chain, public. A rotation writes the new key with a
set that has both, signed by both; `retire` one without the older, signed by the key that stays. Hosts follow from set to set (`trust.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from pydantic import ValidationError

from atoll.base.errors import Code, Refused
from atoll.wire import manifests
from atoll.wire.manifests import KeyChain, KeySet

KEY_FILE: Final = "image-ed25519"
CHAIN_FILE: Final = "image-keys.json"

Write = Callable[[str, bytes], None]
"""`write(name, content)`: have a file of the secrets whole and private, or not at all."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The key that signs, and every set of keys that hosts were told."""

    signing: Ed25519PrivateKey
    chain: KeyChain

    @property
    def current(self) -> KeySet:
        """Which keys count now."""
        return KeySet.model_validate_json(manifests.opened(self.chain.sets[-1].model_dump_json().encode())[1])

    @property
    def id(self) -> str:
        """Of the key that signs."""
        return manifests.key_id(self.signing.public_key())


def new_key() -> bytes:
    """A key as its file holds it."""
    return _pem(Ed25519PrivateKey.generate())


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def first_chain(pem: bytes) -> bytes:
    """The chain of a deployment whose key is new, as its file holds it."""
    key = _key(pem)
    chain = KeyChain(sets=[_set([key], KeySet(revision=1, keys=[manifests.shown(key.public_key())]))])
    return chain.model_dump_json(indent=1).encode() + b"\n"


def _set(signers: list[Ed25519PrivateKey], keys: KeySet) -> manifests.Envelope:
    return manifests.sealed(manifests.canonical(keys), manifests.KEYS_FORM, signers)


def _key(pem: bytes) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(pem, password=None)
    except ValueError as error:
        raise Refused(Code.SETUP_FAILED, f"{KEY_FILE} is no key in PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise Refused(Code.SETUP_FAILED, f"{KEY_FILE} is not an Ed25519 key")
    return key


def load(secrets: Path) -> Keys:
    """*Errors*: Refused SETUP_FAILED when key or chain is missing or broken, or they do not belong together."""
    try:
        signing = _key((secrets / KEY_FILE).read_bytes())
        chain = KeyChain.model_validate_json((secrets / CHAIN_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise Refused(
            Code.SETUP_FAILED, f"{secrets / CHAIN_FILE} or {KEY_FILE} cannot be read: {type(error).__name__}", hint="Run `atoll up`."
        ) from error
    keys = Keys(signing, chain)
    if not chain.sets or keys.id not in keys.current.usable():
        raise Refused(Code.SETUP_FAILED, f"{secrets / CHAIN_FILE} does not have the key in {KEY_FILE}")
    return keys


def rotate(secrets: Path, write: Write) -> Keys:
    """Sign with a new key from now on; the older ones count until they are retired.

    A run that ends in between leaves the older key signing, with a set that has the newer one too.
    """
    keys = load(secrets)
    made = Ed25519PrivateKey.generate()
    told = keys.current
    following = KeySet(revision=told.revision + 1, keys=[*told.keys, manifests.shown(made.public_key())])
    chain = KeyChain(sets=[*keys.chain.sets, _set([keys.signing, made], following)])
    write(CHAIN_FILE, chain.model_dump_json(indent=1).encode() + b"\n")
    write(KEY_FILE, _pem(made))
    return Keys(made, chain)


def retire(secrets: Path, key_id: str, write: Write) -> Keys:
    """Have a key not count any more. *Errors*: Refused KEY_NOT_FOUND, INVALID_REQUEST (it is the one that signs)."""
    keys = load(secrets)
    told = keys.current
    if key_id not in {one.id for one in told.keys}:
        raise Refused(Code.KEY_NOT_FOUND, f"{key_id[:80]!r} is no key that counts", hint="`atoll image key show` names them.")
    if key_id == keys.id:
        raise Refused(Code.INVALID_REQUEST, "it is the key that signs", hint="`atoll image key rotate` makes another one sign.")
    following = KeySet(revision=told.revision + 1, keys=[one for one in told.keys if one.id != key_id])
    chain = KeyChain(sets=[*keys.chain.sets, _set([keys.signing], following)])
    write(CHAIN_FILE, chain.model_dump_json(indent=1).encode() + b"\n")
    return Keys(keys.signing, chain)
