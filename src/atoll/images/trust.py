"""A host's trust: before an image is used, the manifest that the command names holds: its digest, and a signature by a key that counts.

Theory of operation. Which keys count is in a file of root's (`image-keys.json`), told when the machine joined; a newer set is taken when
it is signed by a key of the older one, and asked for when a signature is by a key that does not count. Manifests that held are kept beside
it, so that a restart needs nobody. An image without manifest is only started from what the machine has ready: made here by a recipe, or
made of blobs before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from pydantic import ValidationError

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.domain.spec import Spec
from atoll.images.whole import write_whole
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire import manifests
from atoll.wire.guest import PROTOCOL
from atoll.wire.manifests import ImageManifest, KeyChain, KeySet, MachineManifest

KEYS_FILE: Final = "image-keys.json"
KEPT: Final = "manifests"
_KNOWN_MAX: Final = 1024

log = get_logger()


class Source(Protocol):
    """Control, as far as it tells of manifests and keys. *Errors*: those of the transport."""

    async def manifest(self, digest: str) -> bytes:
        """The envelope of a manifest. *Errors*: Refused IMAGE_UNAVAILABLE when there is none."""
        ...

    async def key_chain(self) -> KeyChain: ...

    async def first_keys(self) -> KeySet:
        """Which keys count, for a host that has never been told."""
        ...


class Trust:
    """One for each host. `directory` is root's."""

    def __init__(self, directory: Path, source: Source, *, machine: Callable[[], str] = lambda: os.uname().machine) -> None:
        self._directory = directory
        self._source = source
        self._machine = machine
        self._held: dict[str, tuple[ImageManifest, str]] = {}
        """By digest: manifests that held, and the key by which they did."""
        self._keys: KeySet | None = None
        self._keys_version: tuple[int, int] | None = None

    async def check(self, spec: Spec, *, ready: Callable[[], bool]) -> None:
        """See that the spec's image may be started. `ready`: whether the machine has the image ready.

        *Errors*: Refused IMAGE_UNTRUSTED, IMAGE_CORRUPT, PROTOCOL_UNSUPPORTED; Unavailable IMAGE_UNAVAILABLE when nobody can be asked.
        """
        try:
            await self._check(spec, ready)
        except Refused as refusal:
            log.warning(events.IMAGE_REFUSED, image=spec.image, digest=spec.manifest, code=refusal.code, error=refusal.message)
            raise

    async def _check(self, spec: Spec, ready: Callable[[], bool]) -> None:
        if not spec.manifest:
            if not ready():
                raise Refused(Code.IMAGE_UNTRUSTED, f"image {spec.image} comes without a signed manifest, and is not ready on this host")
            return
        manifest = await self._manifest(spec.manifest)
        if manifest.image != spec.image:
            raise Refused(Code.IMAGE_UNTRUSTED, f"manifest {spec.manifest} is of image {manifest.image}, not of {spec.image}")
        runs = (tuple(manifest.command), manifest.command_user, tuple(manifest.ready_command))
        if runs != (spec.command, spec.command_user, spec.ready_command):
            raise Refused(Code.IMAGE_UNTRUSTED, f"manifest {spec.manifest} signs another start command than the one that is to run")
        if manifest.architecture != self._machine():
            raise Refused(Code.IMAGE_REFUSED, f"the image is for {manifest.architecture}, this host is {self._machine()}")
        if not manifest.protocol_min <= PROTOCOL <= manifest.protocol_max:
            raise Refused(
                Code.PROTOCOL_UNSUPPORTED,
                f"the image needs guest protocol {manifest.protocol_min} to {manifest.protocol_max}, this host speaks {PROTOCOL}",
            )

    async def _manifest(self, digest: str) -> ImageManifest:
        keys = await self._current()
        known = self._held.get(digest)
        if known is not None and known[1] in {one.id for one in keys.keys}:
            return known[0]
        try:
            return self._believe(self._kept(digest).read_bytes(), digest, keys)
        except (OSError, Refused):
            pass  # not here, spoilt, or by a key that counts no more: control's may be better
        content = await self._asked(digest)
        try:
            found = self._believe(content, digest, keys)
        except Refused as refusal:
            if refusal.code is not Code.IMAGE_UNTRUSTED:
                raise
            found = self._believe(content, digest, await self._follow(keys))
        self._write(self._kept(digest), content)
        return found

    async def machine(self, content: bytes) -> MachineManifest:
        """What machines boot by, once it can be believed. *Errors*: Refused IMAGE_UNTRUSTED, IMAGE_CORRUPT; those of the source."""
        keys = await self._current()
        try:
            return manifests.read_machine(content, keys.usable())
        except Refused as refusal:
            if refusal.code is not Code.IMAGE_UNTRUSTED:
                raise
        return manifests.read_machine(content, (await self._follow(keys)).usable())

    def _believe(self, content: bytes, digest: str, keys: KeySet) -> ImageManifest:
        usable = keys.usable()
        found = manifests.read_manifest(content, digest, usable)
        envelope, payload = manifests.opened(content)
        if len(self._held) >= _KNOWN_MAX:
            self._held.clear()
        self._held[digest] = found, manifests.signer_of(envelope, payload, manifests.IMAGE_FORM, usable)
        return found

    async def _asked(self, digest: str) -> bytes:
        try:
            return await self._source.manifest(digest)
        except Refused as error:
            if error.code is Code.IMAGE_UNAVAILABLE:
                raise Refused(Code.IMAGE_UNTRUSTED, f"there is no signed manifest {digest}") from error
            raise
        except AtollError as error:
            raise Unavailable(Code.IMAGE_UNAVAILABLE, f"manifest {digest} could not be asked for: {error.message}") from error

    async def _current(self) -> KeySet:
        path = self._directory / KEYS_FILE
        try:
            info = path.stat()
        except FileNotFoundError:
            told = await self._source.first_keys()
            told.usable()
            keep_keys(self._directory, told)
            return await self._current()
        version = (info.st_ino, info.st_mtime_ns)
        if self._keys is None or version != self._keys_version:
            try:
                self._keys, self._keys_version = KeySet.model_validate_json(path.read_bytes()), version
            except (ValidationError, OSError) as error:
                raise Refused(Code.SETUP_FAILED, f"{path} cannot be used: {type(error).__name__}") from error
        return self._keys

    async def _follow(self, known: KeySet) -> KeySet:
        following = manifests.advanced(known, await self._source.key_chain())
        if following.revision > known.revision:
            keep_keys(self._directory, following)
            log.info(events.IMAGE_KEYS_FOLLOWED, revision=following.revision)
        return following

    async def follow(self) -> None:
        """Take newer key sets over, so that a key that was retired counts no more."""
        await self._follow(await self._current())

    def _kept(self, digest: str) -> Path:
        return self._directory / KEPT / digest.removeprefix("sha256:")

    def _write(self, path: Path, content: bytes) -> None:
        # Kept for a restart without control; a full disk keeps nothing, and costs a question.
        with contextlib.suppress(OSError):
            _whole(path, content)


def keep_keys(directory: Path, keys: KeySet) -> None:
    """Have a host's file of keys that count, 0600."""
    _whole(directory / KEYS_FILE, keys.model_dump_json(indent=1).encode() + b"\n")


def _whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, content)
