"""What a container stands on: an image of the cache, made of blobs first when this instance has it as blobs only."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from atoll.base.errors import Code, Refused
from atoll.domain.spec import Spec
from atoll.drivers.oci import record as records
from atoll.drivers.oci.config import OciConfig
from atoll.images.cache import CachedImage, ImageCache
from atoll.images.unpacking import Unpacking, touch
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

LOG = get_logger()
T = TypeVar("T")

BASE_NAME = "base"
"""Where a ready-made image is looked for first; any other name may have it."""


class Blocking(Protocol):
    """Runs work that blocks in a thread."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class Images:
    """One driver's view of the images."""

    def __init__(self, config: OciConfig, blocking: Blocking) -> None:
        self._unpacking = config.unpacking
        self._state_dir = config.state_dir
        self._blocking = blocking
        self.cache = ImageCache(config.image_cache, config.unpacking.directory if config.unpacking is not None else None)

    def pin(self, spec: Spec) -> contextlib.AbstractContextManager[None]:
        """Keeps the image of a spec, until the placement's record says that it is used."""
        return contextlib.nullcontext() if self._unpacking is None else self._unpacking.pin(spec.image)

    async def root_of(self, spec: Spec) -> Path:
        """The root of the spec's image, verified; call it with the image pinned.

        *Errors*: Refused IMAGE_UNAVAILABLE, IMAGE_UNTRUSTED, IMAGE_CORRUPT, IMAGE_REFUSED, HOST_DISK_FULL.
        """
        if self._unpacking is not None and self._unpacking.trust is not None:
            await self._unpacking.trust.check(spec, ready=lambda: self._is_ready(spec))
        try:
            image = await self._verified(spec)
            if self._unpacking is not None:
                self._unpacking.hits += 1
        except Refused as missing:
            if self._unpacking is None or missing.code is not Code.IMAGE_UNAVAILABLE or not spec.image:
                raise
            image = await self._made(spec, missing)
        touch(image)
        return image.rootfs

    def ready_root(self, spec: Spec) -> Path:
        """The root of an image that has been looked at: what `root_of` has given. *Errors*: Refused IMAGE_UNAVAILABLE, IMAGE_CORRUPT."""
        return self.cache.look_up(spec.image, spec.image_name).rootfs

    def _is_ready(self, spec: Spec) -> bool:
        try:
            self.cache.look_up(spec.image, spec.image_name)
        except Refused:
            return False
        return True

    async def _base(self, unpacking: Unpacking, digest: str) -> tuple[str, Path] | None:
        """Digest and tree of the ready-made image below, which is counted first: what is made of a broken one would be broken, too."""
        base = await self._blocking(lambda: unpacking.base_of(digest))
        if base is None:
            return None
        return base, (await self._blocking(lambda: self.cache.verified(base, BASE_NAME))).rootfs

    async def _verified(self, spec: Spec) -> CachedImage:
        return await self._blocking(lambda: self.cache.verified(spec.image, spec.image_name))

    async def _made(self, spec: Spec, missing: Refused) -> CachedImage:
        assert self._unpacking is not None
        try:
            await self._unpacking.have(spec.image)
            await self._unpacking.ensure(spec.image, base=await self._base(self._unpacking, spec.image))
        except Refused as error:
            if error.code in (Code.IMAGE_UNAVAILABLE, Code.INVALID_REQUEST):
                raise missing from error
            raise
        try:
            await self._unpacking.collect(self.cache, self._in_use, made=spec.image)
        except Refused as refusal:
            # What is pinned is not known, so nothing goes; what is to be started has its tree.
            LOG.warning(events.CHECK_FAILED, check="image.policy", detail=refusal.message)
        return await self._verified(spec)

    def _in_use(self) -> set[str]:
        return in_use(self._state_dir)

    async def open(self) -> None:
        """Finish what an earlier run was removing."""
        if self._unpacking is not None:
            await self._blocking(self._unpacking.sweep)

    async def close(self) -> None:
        """End what is being unpacked."""
        if self._unpacking is not None:
            await self._unpacking.close()


def in_use(state_dir: Path) -> set[str]:
    """What the placements of an instance stand on, by their records."""
    found = (records.read(path) for path in state_dir.iterdir() if path.is_dir())
    return {record.image for record in found if record is not None}
