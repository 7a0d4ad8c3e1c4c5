"""Signed manifests: what control says of one version of a template, and hosts believe before they use any layer of it.

Theory of operation. A manifest is written once, in one form (`canonical`), and named by the SHA-256 of these bytes; commands name it by
that. It lies in the artifact store within an envelope, beside signatures of it, which change when keys do; its name does not. What is
signed is the form, the length and the bytes, so that a signature of one kind of document is none of another. Which keys count, hosts are
told when they join; later key sets count only with a signature by a key that counted before.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import BaseModel, Field, ValidationError

from atoll.base.errors import Code, Refused
from atoll.wire.agent import Message

IMAGE_FORM: Final = "atoll.image/1"
MACHINE_FORM: Final = "atoll.machine/1"
KEYS_FORM: Final = "atoll.image-keys/1"
ENVELOPE_FORM: Final = "atoll.signed/1"
BYTES_MAX: Final = 1 << 20
"""Of an envelope, and of all key sets together."""
DIGEST: Final = r"^sha256:[0-9a-f]{64}$"
KEY_ID: Final = r"^ik_[0-9a-f]{32}$"
_KEYS_MAX: Final = 16


class Part(Message):
    """A blob of an image. *Units*: bytes."""

    digest: str = Field(pattern=DIGEST)
    size: int = Field(ge=0)
    media_type: str = Field(default="", max_length=256)
    diff_id: str = Field(default="", max_length=80)
    """Of a layer: the digest of its tar, not compressed."""


class ImageManifest(Message):
    """One version of a template, as hosts may start it."""

    form: Literal["atoll.image/1"] = "atoll.image/1"
    image: str = Field(pattern=DIGEST)
    """Digest of the image's own manifest."""
    architecture: str = Field(max_length=32)
    """In the kernel's words: x86_64, aarch64."""
    base: str | None = Field(default=None, pattern=DIGEST)
    """The ready-made image below the layers."""
    config: Part
    layers: list[Part] = Field(max_length=128)
    command: list[str] = Field(default_factory=list)
    command_user: str = ""
    ready_command: list[str] = Field(default_factory=list)
    source: str = ""
    """Where the image came from."""
    protocol_min: int = Field(ge=1)
    """Of the guest's protocol: a host that speaks none of the range does not start it."""
    protocol_max: int = Field(ge=1)


class MachineFile(Message):
    """A file that virtual machines boot by. *Units*: bytes."""

    name: Literal["vmlinuz", "vmlinux", "initrd"]
    digest: str = Field(pattern=DIGEST)
    size: int = Field(ge=1)


class MachineManifest(Message):
    """What a deployment's virtual machines boot by: a kernel, in the forms that there are of it, and the first file system."""

    form: Literal["atoll.machine/1"] = "atoll.machine/1"
    revision: int = Field(ge=1)
    """The newest counts: a host that has seen one takes none before it."""
    architecture: str = Field(max_length=32)
    version: str = Field(min_length=1, max_length=128)
    """Of the kernel."""
    release: str = Field(max_length=64)
    """Of the guest program in the first file system."""
    image: str = Field(pattern=DIGEST)
    """The image in whose one layer the files are."""
    files: list[MachineFile] = Field(min_length=2, max_length=3)
    protocol_min: int = Field(ge=1)
    """Of the guest's protocol, as for images."""
    protocol_max: int = Field(ge=1)


class PublicKey(Message):
    """A key that counts."""

    id: str = Field(pattern=KEY_ID)
    public_key: str = Field(max_length=64)
    """base64 of the raw Ed25519 key."""


class KeySet(Message):
    """Which keys count from this revision on."""

    form: Literal["atoll.image-keys/1"] = "atoll.image-keys/1"
    revision: int = Field(ge=1)
    keys: list[PublicKey] = Field(min_length=1, max_length=_KEYS_MAX)

    def usable(self) -> dict[str, Ed25519PublicKey]:
        """By id. *Errors*: Refused IMAGE_UNTRUSTED when one is no key, or goes by another's id."""
        found = {}
        for one in self.keys:
            try:
                key = Ed25519PublicKey.from_public_bytes(base64.b64decode(one.public_key, validate=True))
            except (ValueError, binascii.Error) as error:
                raise Refused(Code.IMAGE_UNTRUSTED, f"{one.id} is no Ed25519 key") from error
            if key_id(key) != one.id:
                raise Refused(Code.IMAGE_UNTRUSTED, f"a key goes by the name {one.id}, which is another's")
            found[one.id] = key
        return found


class Signature(Message):
    """By whom, and base64 of the signature."""

    key: str = Field(max_length=64)
    signature: str = Field(max_length=128)


class Envelope(Message):
    """A document and its signatures, as they lie in the store."""

    form: Literal["atoll.signed/1"] = "atoll.signed/1"
    payload: str
    """base64 of the canonical bytes."""
    signatures: list[Signature] = Field(max_length=_KEYS_MAX)


class KeyChain(Message):
    """Every key set that there was, oldest first: a host that was away goes from one to the next."""

    sets: list[Envelope] = Field(max_length=256)


def canonical(document: BaseModel) -> bytes:
    """The one form in which a document is named and signed: JSON with sorted keys, no spaces, ASCII."""
    return json.dumps(document.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def digest_of(payload: bytes) -> str:
    """What the document is named by."""
    return f"sha256:{hashlib.sha256(payload).hexdigest()}"


def raw(key: Ed25519PublicKey) -> bytes:
    """The key's 32 bytes."""
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def key_id(key: Ed25519PublicKey) -> str:
    """The key's name: it follows from the key."""
    return f"ik_{hashlib.sha256(raw(key)).hexdigest()[:32]}"


def shown(key: Ed25519PublicKey) -> PublicKey:
    """The key as documents hold it."""
    return PublicKey(id=key_id(key), public_key=base64.b64encode(raw(key)).decode())


def sealed(payload: bytes, form: str, keys: Iterable[Ed25519PrivateKey], *, before: Sequence[Signature] = ()) -> Envelope:
    """The envelope with a signature by each key. `before`: signatures to keep, where none of the keys has made them."""
    made = {
        key_id(key.public_key()): Signature(
            key=key_id(key.public_key()), signature=base64.b64encode(key.sign(_signed(payload, form))).decode()
        )
        for key in keys
    }
    kept = [one for one in before if one.key not in made]
    return Envelope(payload=base64.b64encode(payload).decode(), signatures=[*made.values(), *kept][:_KEYS_MAX])


def _signed(payload: bytes, form: str) -> bytes:
    return f"{form}\n{len(payload)}\n".encode() + payload


def opened(content: bytes) -> tuple[Envelope, bytes]:
    """An envelope and its payload, of which nothing is known yet. *Errors*: Refused IMAGE_CORRUPT when it is none, or too long."""
    if len(content) > BYTES_MAX:
        raise Refused(Code.IMAGE_CORRUPT, f"a signed document has more than {BYTES_MAX} bytes")
    try:
        envelope = Envelope.model_validate_json(content)
        return envelope, base64.b64decode(envelope.payload, validate=True)
    except (ValidationError, ValueError) as error:
        raise Refused(Code.IMAGE_CORRUPT, "what should be a signed document is none") from error


def signer_of(envelope: Envelope, payload: bytes, form: str, keys: Mapping[str, Ed25519PublicKey]) -> str:
    """The id of a key that counts and has signed. *Errors*: Refused IMAGE_UNTRUSTED when there is none."""
    known = [one for one in envelope.signatures if one.key in keys]
    if not known:
        named = ", ".join(one.key[:40] for one in envelope.signatures) or "nobody"
        raise Refused(Code.IMAGE_UNTRUSTED, f"it is signed by {named}, and none of these keys counts here")
    for one in known:
        try:
            keys[one.key].verify(base64.b64decode(one.signature, validate=True), _signed(payload, form))
        except (InvalidSignature, ValueError):
            continue
        return one.key
    raise Refused(Code.IMAGE_UNTRUSTED, f"the signature by {known[0].key} is not of this document")


def read_manifest(content: bytes, digest: str, keys: Mapping[str, Ed25519PublicKey]) -> ImageManifest:
    """The manifest of an envelope, once digest and signature hold.

    *Errors*: Refused IMAGE_CORRUPT (cut, spoilt, another document), IMAGE_UNTRUSTED (no signature that counts).
    """
    envelope, payload = opened(content)
    if digest_of(payload) != digest:
        raise Refused(Code.IMAGE_CORRUPT, f"manifest {digest} was asked for, what came is {digest_of(payload)}")
    signer_of(envelope, payload, IMAGE_FORM, keys)
    try:
        return ImageManifest.model_validate_json(payload)
    except ValidationError as error:
        raise Refused(Code.IMAGE_CORRUPT, f"manifest {digest} is of a form that this release does not know") from error


def read_machine(content: bytes, keys: Mapping[str, Ed25519PublicKey]) -> MachineManifest:
    """What machines boot by, once its signature holds. *Errors*: as `read_manifest`."""
    envelope, payload = opened(content)
    signer_of(envelope, payload, MACHINE_FORM, keys)
    try:
        return MachineManifest.model_validate_json(payload)
    except ValidationError as error:
        raise Refused(Code.IMAGE_CORRUPT, "what machines boot by is of a form that this release does not know") from error


def advanced(known: KeySet, chain: KeyChain) -> KeySet:
    """The newest key set that follows from the one that is known, each signed by a key that counted before it."""
    for envelope in chain.sets:
        try:
            payload = base64.b64decode(envelope.payload, validate=True)
            told = KeySet.model_validate_json(payload)
            if told.revision <= known.revision:
                continue
            signer_of(envelope, payload, KEYS_FORM, known.usable())
            told.usable()
        except (ValueError, Refused):
            # One that cannot be believed is as none: what follows it may be signed by a key that counts.
            continue
        known = told
    return known
