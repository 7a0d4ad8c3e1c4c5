"""An instance's own images: made of blobs when they are first wanted, and removed when nothing needs them.

Theory of operation. `ensure` has one run for each digest, however many wait for it; the tree appears by one rename. `collect` removes
the least recently used trees until they fit the limit. What is in use is asked for right before each removal, and whoever is about to
use an image holds a `pin` from before its look-up until its use is on record: so nothing that a sandbox stands on goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from atoll.images import assembling, blobs
from atoll.images.cache import OWN, CachedImage, ImageCache
from atoll.images.carrier import Carrier
from atoll.images.trust import Trust

DOOMED: Final = ".doomed-"
SIZE_MIB_MAX: Final = 50 * 1024
BLOBS_MIB_MAX: Final = 10 * 1024
"""Of blobs that were fetched: what images share is not fetched again, and trees need none of them any more."""

Objects = Callable[[], Mapping[str, Any]]
"""Where images are fetched from, as `Carrier.fetch` is told; it may hold a credential, so it is read each time."""


class Unpacking:
    """One for each instance, shared by its drivers."""

    def __init__(
        self,
        carrier: Carrier,
        directory: Path,
        *,
        size_mib_max: int = SIZE_MIB_MAX,
        objects: Objects | None = None,
        blobs_mib_max: int = BLOBS_MIB_MAX,
        trust: Trust | None = None,
    ) -> None:
        """`objects`: where to fetch what the carrier's store has not; None: control itself fills that store.

        `trust`: what says which images may be started; None, for tests of single parts: all.
        """
        self.trust = trust
        self._carrier = carrier
        self._objects = objects
        self._blobs_bytes_max = blobs_mib_max << 20
        self.directory = directory
        self._size_bytes_max = size_mib_max << 20
        self._running: dict[str, asyncio.Task[None]] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._pins: Counter[str] = Counter()

    @contextlib.contextmanager
    def pin(self, digest: str) -> Iterator[None]:
        """Keep an image from being collected while this is open."""
        self._pins[digest] += 1
        try:
            yield
        finally:
            self._pins[digest] -= 1
            if self._pins[digest] <= 0:
                del self._pins[digest]

    @property
    def program(self) -> Path:
        """`atoll-io`."""
        return self._carrier.program

    def base_of(self, digest: str) -> str | None:
        """The ready-made image that an image stands on; None when it stands on none."""
        return assembling.base_of(self._carrier.store, digest)

    async def have(self, digest: str) -> None:
        """Have the image's blobs, where they are fetched from elsewhere. *Errors*: those of `Carrier.fetch`; Unavailable.

        *Idempotency*: of many that want one image, one fetches it; blobs that are there are not fetched again.
        """
        if self._objects is None:
            return
        task = self._fetching.get(digest)
        if task is None:
            task = self._fetching[digest] = asyncio.create_task(self._fetch(digest, self._objects), name=f"fetch {digest}")
            task.add_done_callback(lambda _task: self._fetching.pop(digest, None))
        await asyncio.shield(task)

    async def _fetch(self, digest: str, objects: Objects) -> None:
        if not await asyncio.to_thread(assembling.is_whole, self._carrier.store, digest):
            await self._carrier.fetch(digest, await asyncio.to_thread(objects))

    async def ensure(self, digest: str, *, base: tuple[str, Path] | None = None) -> None:
        """Have the image's tree. `base`: digest and tree of what `base_of` names.

        *Errors*: those of `Carrier.unpack`. *Idempotency*: a tree that is there stays.
        """
        task = self._running.get(digest)
        if task is None:
            task = self._running[digest] = asyncio.create_task(self._unpack(digest, base), name=f"unpack {digest}")
            task.add_done_callback(lambda _task: self._running.pop(digest, None))
        # Who stops waiting does not stop the others.
        await asyncio.shield(task)

    async def _unpack(self, digest: str, base: tuple[str, Path] | None) -> None:
        await self._carrier.unpack(digest, self.directory, base=base)

    async def close(self) -> None:
        """End what runs; nothing half-made is left in use."""
        tasks = [*self._running.values(), *self._fetching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def collect(self, cache: ImageCache, in_use: Callable[[], set[str]]) -> list[str]:
        """Remove what nothing uses, least recently used first, until the limit holds. Answers the removed digests."""
        own = await asyncio.to_thread(lambda: [image for image in cache.all() if image.directory.parent == self.directory / OWN])
        total = sum(image.own_bytes for image in own)
        removed: list[str] = []
        for image in sorted(own, key=_used_at):
            if total <= self._size_bytes_max:
                break
            # No await from here to the rename: nobody can pin the image, look it up and note its use in between.
            if image.digest in self._pins or image.digest in in_use():
                continue
            doomed = image.directory.with_name(DOOMED + image.directory.name)
            image.directory.rename(doomed)
            await asyncio.to_thread(shutil.rmtree, doomed)
            total -= image.own_bytes
            removed.append(image.digest)
        if self._objects is not None and not self._running and not self._fetching and len(self._pins) <= 1:
            # Whoever has pinned an image may be between its blobs and its tree: but for the caller, nobody is.
            blobs.trim(self._carrier.store, size_bytes_max=self._blobs_bytes_max)
        return removed

    def sweep(self) -> None:
        """Finish removals that were cut short; blocks. What is being unpacked is under its lock and stays."""
        place = self.directory / OWN
        for path in place.glob(f"{DOOMED}*") if place.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True)


def _used_at(image: CachedImage) -> float:
    """When it was last given to a sandbox, or made."""
    try:
        return image.directory.stat().st_mtime
    except OSError:
        return 0.0


def touch(image: CachedImage) -> None:
    """Note that an image is used now: by its directory's time, since reading a file may change when that was last read."""
    with contextlib.suppress(OSError):
        os.utime(image.directory)
