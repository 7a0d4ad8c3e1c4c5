"""Signed manifests: one form, golden bytes, and nothing believed that no key has signed that counts."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel

from atoll.base.errors import Code, Refused
from atoll.wire import manifests
from atoll.wire.manifests import Envelope, ImageManifest, KeyChain, KeySet

GOLDEN = Path(manifests.__file__).parent / "golden" / "manifests"
KEY, OTHER, THIRD = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2, 3))


def keys(*private: Ed25519PrivateKey, revision: int = 1) -> KeySet:
    return KeySet(revision=revision, keys=[manifests.shown(one.public_key()) for one in private])


def envelope(document: BaseModel, form: str, *signers: Ed25519PrivateKey) -> Envelope:
    return manifests.sealed(manifests.canonical(document), form, signers)


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.json").read_bytes()


def refusal(content: bytes, digest: str, known: KeySet) -> Code:
    with pytest.raises(Refused) as caught:
        manifests.read_manifest(content, digest, known.usable())
    return caught.value.code


def test_the_golden_manifest_has_its_bytes_name_and_signature() -> None:
    """Were any of it to change, hosts would refuse what is in stores."""
    content = golden("envelope")
    payload = base64.b64decode(json.loads(content)["payload"])
    digest = json.loads(golden("digest"))["manifest"]
    assert manifests.digest_of(payload) == digest
    read = manifests.read_manifest(content, digest, keys(KEY).usable())
    assert manifests.canonical(read) == payload
    assert read.model_dump(mode="json") == json.loads(golden("image"))
    assert manifests.sealed(payload, manifests.IMAGE_FORM, [KEY]).model_dump(mode="json") == json.loads(content)


def test_the_golden_key_chain_is_followed() -> None:
    chain = KeyChain.model_validate_json(golden("key_chain"))
    assert manifests.advanced(keys(KEY), chain) == keys(OTHER, revision=3)


@pytest.fixture
def made() -> tuple[bytes, str]:
    payload = manifests.canonical(ImageManifest.model_validate_json(golden("image")))
    return manifests.sealed(payload, manifests.IMAGE_FORM, [KEY]).model_dump_json().encode(), manifests.digest_of(payload)


def test_what_is_spoilt_cut_or_another_document_is_corrupt(made: tuple[bytes, str]) -> None:
    content, digest = made
    known = keys(KEY)
    assert manifests.read_manifest(content, digest, known.usable()).source == "registry:example.org/app:1"
    assert refusal(content[:-20], digest, known) is Code.IMAGE_CORRUPT
    assert refusal(b"", digest, known) is Code.IMAGE_CORRUPT
    assert refusal(content + b" " * manifests.BYTES_MAX, digest, known) is Code.IMAGE_CORRUPT
    assert refusal(content, "sha256:" + "0" * 64, known) is Code.IMAGE_CORRUPT
    changed = json.loads(content)
    payload = base64.b64decode(changed["payload"]).replace(b"example.org", b"evil.org___")
    changed["payload"] = base64.b64encode(payload).decode()
    assert refusal(json.dumps(changed).encode(), digest, known) is Code.IMAGE_CORRUPT
    # Named as what it now is, it is signed by nobody.
    assert refusal(json.dumps(changed).encode(), manifests.digest_of(payload), known) is Code.IMAGE_UNTRUSTED


def test_a_wrong_key_an_unknown_key_and_no_key_are_untrusted(made: tuple[bytes, str]) -> None:
    content, digest = made
    assert refusal(content, digest, keys(OTHER)) is Code.IMAGE_UNTRUSTED
    told = json.loads(content)
    told["signatures"] = []
    assert refusal(json.dumps(told).encode(), digest, keys(KEY)) is Code.IMAGE_UNTRUSTED
    payload = base64.b64decode(told["payload"])
    # The right name over another key's signature.
    signature = manifests.sealed(payload, manifests.IMAGE_FORM, [OTHER]).signatures[0].signature
    told["signatures"] = [{"key": manifests.key_id(KEY.public_key()), "signature": signature}]
    assert refusal(json.dumps(told).encode(), digest, keys(KEY)) is Code.IMAGE_UNTRUSTED
    told["signatures"] = [{"key": manifests.key_id(KEY.public_key()), "signature": "no base64"}]
    assert refusal(json.dumps(told).encode(), digest, keys(KEY)) is Code.IMAGE_UNTRUSTED


def test_a_signature_of_one_kind_of_document_is_none_of_another(made: tuple[bytes, str]) -> None:
    content, digest = made
    payload = base64.b64decode(json.loads(content)["payload"])
    as_keys = manifests.sealed(payload, manifests.KEYS_FORM, [KEY]).model_dump_json().encode()
    assert refusal(as_keys, digest, keys(KEY)) is Code.IMAGE_UNTRUSTED


def test_a_key_under_another_s_name_is_no_key() -> None:
    told = keys(KEY).model_dump(mode="json")
    told["keys"][0]["id"] = manifests.key_id(OTHER.public_key())
    with pytest.raises(Refused):
        KeySet.model_validate(told).usable()


def chain(*sets: tuple[KeySet, tuple[Ed25519PrivateKey, ...]]) -> KeyChain:
    return KeyChain(sets=[envelope(told, manifests.KEYS_FORM, *signers) for told, signers in sets])


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        pytest.param([(keys(KEY, OTHER, revision=2), (KEY, OTHER))], 2, id="signed by the one that counts"),
        pytest.param([(keys(OTHER, revision=2), (OTHER,))], 1, id="signed by itself alone"),
        pytest.param([(keys(KEY, OTHER, revision=2), (KEY,)), (keys(OTHER, revision=3), (OTHER,))], 3, id="from one to the next"),
        pytest.param([(keys(OTHER, revision=3), (OTHER,)), (keys(KEY, OTHER, revision=2), (KEY,))], 2, id="out of order"),
        pytest.param([(keys(KEY, OTHER, revision=1), (KEY,))], 1, id="not newer"),
        pytest.param([(keys(THIRD, revision=2), (THIRD,)), (keys(KEY, OTHER, revision=2), (KEY,))], 2, id="a stranger in between"),
    ],
)
def test_key_sets_follow_by_signature(sets: list[Any], expected: int) -> None:
    assert manifests.advanced(keys(KEY), chain(*sets)).revision == expected
