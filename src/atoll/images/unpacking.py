"""An instance's own images: made of blobs when they are first wanted, and removed when nothing needs them.

Theory of operation. `ensure` has one run for each digest, however many wait for it; the tree appears by one rename. `collect` removes
the least recently used trees until they fit the limit. What is in use is asked for right before each removal, and whoever is about to
use an image holds a `pin` from before its look-up until its use is on record: so nothing that a sandbox stands on goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from atoll.images import assembling, blobs
from atoll.images.cache import OWN, CachedImage, ImageCache
from atoll.images.carrier import Carrier
from atoll.images.policy import BLOBS_MIB_MAX, SIZE_MIB_MAX, Policy, load
from atoll.images.shares import held
from atoll.images.trust import Trust

DOOMED: Final = ".doomed-"
UNFINISHED: Final = ".unfinished-"
LOCK: Final = ".lock-"
"""As `atoll-io` names them (`native/internal/images/cache.go`)."""

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
        policy: Path | None = None,
    ) -> None:
        """`objects`: where to fetch what the carrier's store has not; None: control itself fills that store.

        `policy`: the file with limits and pins, which is read at each collection; None: the limits that are given, and no pins.

        `trust`: what says which images may be started; None, for tests of single parts: all.
        """
        self.trust = trust
        self._policy = policy
        self.hits = 0
        """Starts that found their tree."""
        self.fetches = 0
        """Images that were fetched."""
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

    def is_pinned(self, digest: str) -> bool:
        """Whether somebody is about to use it."""
        return digest in self._pins

    @property
    def store(self) -> Path:
        """Where its blobs are."""
        return self._carrier.store

    @property
    def fetching(self) -> bool:
        """Whether blobs are fetched, and so this host's own to keep or not."""
        return self._objects is not None

    @property
    def program(self) -> Path:
        """`atoll-io`."""
        return self._carrier.program

    def base_of(self, digest: str) -> str | None:
        """The ready-made image that an image stands on; None when it stands on none."""
        return assembling.base_of(self._carrier.store, digest)

    async def have(self, digest: str) -> None:
        """Have what `base_of` and `ensure` need of the image, where it is fetched from elsewhere. *Errors*: those of `Carrier.fetch`; Unavailable.

        *Idempotency*: of many that want one image, one fetches it; what is there is not fetched again.
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
            self.fetches += 1
            await self._carrier.fetch(digest, await asyncio.to_thread(objects))

    async def ensure(self, digest: str, *, base: tuple[str, Path] | None = None) -> None:
        """Have the image's tree, and fetch what the store has not of its layers. `base`: digest and tree of what `base_of` names.

        *Errors*: those of `Carrier.unpack`. *Idempotency*: a tree that is there stays.
        """
        task = self._running.get(digest)
        if task is None:
            task = self._running[digest] = asyncio.create_task(self._unpack(digest, base), name=f"unpack {digest}")
            task.add_done_callback(lambda _task: self._running.pop(digest, None))
        # Who stops waiting does not stop the others.
        await asyncio.shield(task)

    async def _unpack(self, digest: str, base: tuple[str, Path] | None) -> None:
        objects = None if self._objects is None else await asyncio.to_thread(self._objects)
        await self._carrier.unpack(digest, self.directory, base=base, objects=objects)
        if self._objects is not None:
            await asyncio.to_thread(blobs.used, self._carrier.store, digest)

    async def close(self) -> None:
        """End what runs; nothing half-made is left in use."""
        tasks = [*self._running.values(), *self._fetching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def collect(
        self, cache: ImageCache, in_use: Callable[[], set[str]], *, policy: Policy | None = None, dry_run: bool = False, made: str = ""
    ) -> list[str]:
        """Remove what nothing uses and nobody has pinned, used longest ago first, until the limits hold. Answers the digests of the trees
        that went, or would go. `made`: the image that the caller has pinned and whose tree is ready. *Errors*: Refused SETUP_FAILED when the policy's file is broken: then nothing went.
        """
        policy = policy or self._limits()
        known = await asyncio.to_thread(lambda: {image.digest: image for image in cache.all()})
        own = [image for image in known.values() if image.directory.parent == self.directory / OWN]
        removed: list[str] = []
        for image in sorted(own, key=_used_at):
            # At 0 all goes: also what shares every byte with another, and so counts for nothing.
            if policy.trees_mib_max and self._held(known) <= policy.trees_mib_max << 20:
                break
            # No await from here to the rename: nobody can pin the image, look it up and note its use in between.
            if image.digest in policy.pins or image.digest in self._pins or image.digest in in_use():
                continue
            if not dry_run:
                await asyncio.to_thread(shutil.rmtree, self.doom(image))
            del known[image.digest]
            removed.append(image.digest)
        if self._objects is not None and not dry_run and not self._running and not self._fetching and not self._pins.keys() - {made}:
            # Whoever has pinned an image may be between its blobs and its tree: nobody is now.
            kept = {name for digest in policy.pins for name in blobs.blobs_of(self._carrier.store, digest)}
            blobs.trim(self._carrier.store, size_bytes_max=policy.blobs_mib_max << 20, kept=kept)
        return removed

    def _held(self, known: Mapping[str, CachedImage]) -> int:
        """What the instance's own trees take of the disk, each file once."""
        sizes = held(known.values())
        return sum(sizes[digest] for digest, image in known.items() if image.directory.parent == self.directory / OWN)

    def _limits(self) -> Policy:
        if self._policy is not None:
            return load(self._policy)
        return Policy(self._size_bytes_max >> 20, self._blobs_bytes_max >> 20)

    def doom(self, image: CachedImage) -> Path:
        """Take a tree out of use at once; what is to be removed then. The caller has seen that nothing uses it."""
        doomed = image.directory.with_name(DOOMED + image.directory.name)
        image.directory.rename(doomed)
        return doomed

    def sweep(self) -> None:
        """Finish removals that were cut short, and remove what killed runs left of images that nobody may want again; blocks.

        What is being unpacked is under its lock and stays.
        """
        place = self.directory / OWN
        if not place.is_dir():
            return
        for path in place.glob(f"{DOOMED}*"):
            shutil.rmtree(path, ignore_errors=True)
        for name in {path.name.removeprefix(prefix) for prefix in (UNFINISHED, LOCK) for path in place.glob(f"{prefix}*")}:
            _remove_unfinished(place, name)


def _remove_unfinished(place: Path, name: str) -> None:
    """Unless a program still makes it: one whose agent was killed goes on. The lock is as in `native/internal/images/lock.go`."""
    lock = place / f"{LOCK}{name}"
    with contextlib.suppress(OSError), os.fdopen(os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), lock.lstat()):
            shutil.rmtree(place / f"{UNFINISHED}{name}", ignore_errors=True)
            lock.unlink()


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
