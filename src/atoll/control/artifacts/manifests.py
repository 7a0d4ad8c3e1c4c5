"""Signing manifests of templates' versions, and giving them to hosts.

Theory of operation. A manifest follows from what is on record (image, start command, source) and from the image's own documents, whose
digests hold; so it is made again whenever it is wanted, with the same name, also for what was built before there were any. It is signed
by the key that signs now, when a version is made, or first used by this process, or first used since keys changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from atoll.base.errors import AtollError, Code, Refused
from atoll.domain.template import Template
from atoll.images import artifacts, signing
from atoll.images.artifacts import BLOBS, MANIFESTS, Artifacts, key_of
from atoll.images.assembling import BASE
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import guest, manifests
from atoll.wire.manifests import ImageManifest, KeyChain, KeySet, Part

LOG = get_logger()

_MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
LOOK_S: Final = 10.0
_KNOWN_MAX: Final = 4096
_Version = tuple[str, tuple[str, ...], str, tuple[str, ...], str]


@dataclass(slots=True)
class Manifests:
    """Of one control process."""

    secrets: Path
    store: Artifacts
    _signed: dict[_Version, str] = field(default_factory=dict)
    _keys: signing.Keys | None = None
    _keys_seen: tuple[int, int] | None = None

    async def of(self, template: Template) -> str:
        """The digest of the version's signed manifest; empty for ready-made images, which hosts make by a recipe of their own.

        *Errors*: Refused IMAGE_CORRUPT (a document of the store is not what its name says), SETUP_FAILED (no key); those of Artifacts.
        *Idempotency*: the same version has the same manifest.
        """
        if template.team_id is None and not template.source:
            return ""
        keys = self.keys()
        version = (template.image, template.command, template.command_user, template.ready_command, template.source)
        known = self._signed.get(version)
        if known is None:
            made = await self._made(template)
            if made is None:
                return ""
            known = await self._sign(manifests.canonical(made), keys)
            if len(self._signed) >= _KNOWN_MAX:
                self._signed.clear()
            self._signed[version] = known
        return known

    def keys(self) -> signing.Keys:
        """The deployment's keys, read again when their files have changed. *Errors*: Refused SETUP_FAILED."""
        try:
            seen = (self.secrets / signing.CHAIN_FILE).stat().st_mtime_ns, (self.secrets / signing.KEY_FILE).stat().st_mtime_ns
        except OSError as error:
            raise Refused(Code.SETUP_FAILED, f"{error.filename} is missing", hint="Run `atoll up`, which makes what is missing.") from error
        if self._keys is None or seen != self._keys_seen:
            self._keys, self._keys_seen = signing.load(self.secrets), seen
            self._signed.clear()
        return self._keys

    def current(self) -> KeySet:
        """Which keys count now."""
        return self.keys().current

    def chain(self) -> KeyChain:
        """Every key set that there was."""
        return self.keys().chain

    async def give(self, digest: str) -> bytes:
        """A manifest's envelope, signed by the key that signs now. *Errors*: Refused IMAGE_UNAVAILABLE (there is none), IMAGE_UNTRUSTED."""
        key = key_of(MANIFESTS, digest)
        try:
            content = await self.store.read(key, bytes_max=manifests.BYTES_MAX)
        except Refused as error:
            if error.code is not Code.ARTIFACT_NOT_FOUND:
                raise
            raise Refused(Code.IMAGE_UNAVAILABLE, f"there is no manifest {digest}") from error
        keys = self.keys()
        try:
            envelope, payload = manifests.opened(content)
            if keys.id in {one.key for one in envelope.signatures} or manifests.digest_of(payload) != digest:
                return content  # the host says what is wrong with it
            manifests.signer_of(envelope, payload, manifests.IMAGE_FORM, keys.current.usable())
        except Refused:
            return content
        # What an older key has signed that still counts the newer one signs, too: then the older one can be retired.
        await self._sign(payload, keys)
        return await self.store.read(key, bytes_max=manifests.BYTES_MAX)

    async def sign_again(self) -> int:
        """Have everything in the store signed by the key that signs now, as far as it is signed by one that counts; how many there are."""
        count = 0
        async for info in self.store.list(MANIFESTS):
            await self.give(f"sha256:{info.key.rpartition('/')[2]}")
            count += 1
        return count

    async def run(self) -> None:
        """Sign again what there is when the keys have changed, until cancelled."""
        signs: str | None = None
        while True:
            try:
                now = self.keys().id
                if signs is not None and now != signs:
                    await self.sign_again()
                signs = now
            except AtollError as error:
                LOG.warning(names.MANIFEST_REFUSED, code=error.code, error=error.message)
            await asyncio.sleep(LOOK_S)

    async def _sign(self, payload: bytes, keys: signing.Keys) -> str:
        digest = manifests.digest_of(payload)
        key = key_of(MANIFESTS, digest)
        before: list[manifests.Signature] = []
        try:
            envelope, found = manifests.opened(await self.store.read(key, bytes_max=manifests.BYTES_MAX))
            if found == payload:
                before = [one for one in envelope.signatures if one.key in keys.current.usable()]
                manifests.signer_of(envelope, payload, manifests.IMAGE_FORM, {keys.id: keys.signing.public_key()})
                return digest
        except (Refused, ValidationError):
            pass  # none, a broken one, or one that the key has not signed
        made = manifests.sealed(payload, manifests.IMAGE_FORM, [keys.signing], before=before)
        await self.store.write(key, made.model_dump_json().encode())
        LOG.info(names.MANIFEST_SIGNED, digest=digest, key=keys.id)
        return digest

    async def _made(self, template: Template) -> ImageManifest | None:
        """None: the store has no such image, and its hosts will say so."""
        document = await self._document(template.image)
        if document is None:
            return None
        config = await self._document(str(document["config"]["digest"]))
        if config is None:
            return None
        try:
            return ImageManifest(
                image=template.image,
                architecture=_MACHINES.get(str(config["architecture"]), str(config["architecture"])),
                base=document.get("annotations", {}).get(BASE),
                config=_part(document["config"]),
                layers=[
                    _part(layer, diff_id=str(diff_id))
                    for layer, diff_id in zip(document["layers"], config["rootfs"]["diff_ids"], strict=True)
                ],
                command=list(template.command),
                command_user=template.command_user,
                ready_command=list(template.ready_command),
                source=template.source,
                protocol_min=guest.PROTOCOL,
                protocol_max=guest.PROTOCOL,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused(
                Code.IMAGE_CORRUPT, f"the documents of image {template.image} make no manifest: {type(error).__name__}"
            ) from error

    async def _document(self, digest: str) -> Mapping[str, Any] | None:
        try:
            content = await self.store.read(key_of(BLOBS, digest), bytes_max=artifacts.DOCUMENT_BYTES_MAX)
        except Refused as error:
            if error.code is Code.ARTIFACT_NOT_FOUND:
                return None
            raise
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest or not isinstance(found, dict):
            raise Refused(Code.IMAGE_CORRUPT, f"document {digest} of the image store is not what its name says")
        return found


def _part(descriptor: Mapping[str, Any], *, diff_id: str = "") -> Part:
    return Part(
        digest=str(descriptor["digest"]), size=int(descriptor["size"]), media_type=str(descriptor.get("mediaType", "")), diff_id=diff_id
    )
