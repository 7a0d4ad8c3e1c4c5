"""A host's own images, for people: what there is, whether it is whole, what goes next, and what stays because somebody has said so.

Theory of operation. Trees and blobs are each kept within a limit, and what was used longest ago goes first (`unpacking.py` notes each use by the
time of the file or directory). Never do what a placement stands on, what is about to be used, and what is pinned. Limits and pins are in
one file of root's, which is read again at each look. The running agent is asked to change anything (`programs/image_socket.py`); where none
runs, whoever holds its lock does it.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.images.cache import OWN, CachedImage, ImageCache, verify
from atoll.images.policy import Policy, load, save
from atoll.images.shares import held
from atoll.images.unpacking import Unpacking

PINS_MAX: Final = 1000
CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """An image that is ready on this host. *Units*: bytes, wall seconds."""

    digest: str
    name: str
    """Of the recipe that it was made by; `sha256`: made of blobs."""
    size_bytes: int
    own_bytes: int
    """What it holds of the disk: what several share is held by one of them."""
    used_at: float
    pinned: bool
    in_use: bool
    own: bool
    """Of this instance; False: ready-made, shared by all instances of the machine, and never removed here."""


@dataclass(frozen=True, slots=True)
class Sum:
    """*Units*: bytes."""

    trees: int
    tree_bytes: int
    blobs: int
    blob_bytes: int
    quarantined: int
    pinned: int
    hits: int
    """Starts that found the tree, since the agent began."""
    fetches: int
    """Images that were fetched since then."""


class Shelf:
    """One for each host."""

    def __init__(self, unpacking: Unpacking, cache: ImageCache, policy: Path, in_use: Callable[[], set[str]]) -> None:
        self._unpacking = unpacking
        self._cache = cache
        self._policy = policy
        self._in_use = in_use

    def entries(self) -> list[Entry]:
        """All that is ready, used last first; blocks."""
        policy, used, known = load(self._policy), self._in_use(), list(self._cache.all())
        sizes = held(known)
        found = [
            Entry(
                digest=image.digest,
                name=image.name,
                size_bytes=image.size_bytes,
                own_bytes=sizes[image.digest],
                used_at=_mtime(image.directory),
                pinned=image.digest in policy.pins,
                in_use=image.digest in used or self._unpacking.is_pinned(image.digest),
                own=image.directory.parent.name == OWN,
            )
            for image in known
        ]
        return sorted(found, key=lambda one: (-one.used_at, one.digest))

    def sum(self) -> Sum:
        """For gauges; blocks."""
        own = [one for one in self.entries() if one.own]
        stored = self._files("blobs/sha256")
        return Sum(
            trees=len(own),
            tree_bytes=sum(one.own_bytes for one in own),
            blobs=len(stored),
            blob_bytes=sum(_size(path) for path in stored),
            quarantined=len(self._files("quarantine")),
            pinned=sum(one.pinned for one in own),
            hits=self._unpacking.hits,
            fetches=self._unpacking.fetches,
        )

    async def verify(self) -> list[str]:
        """Count every tree and digest every blob: what is wrong, one line each.

        A blob that is not what its name says goes to quarantine; a tree that is not, and that nothing uses, is made anew when it is wanted.
        """
        said: list[str] = []
        for image in await asyncio.to_thread(lambda: list(self._cache.all())):
            try:
                await asyncio.to_thread(verify, image)
            except (Refused, OSError) as error:
                said.append(str(error) + await self._set_aside(image))
        # Blobs of control's own folder are control's: it has its own checks, and hosts digest what they get.
        for path in self._files("blobs/sha256") if self._unpacking.fetching else ():
            if await asyncio.to_thread(_digest, path) not in (path.name, None):
                aside = self._unpacking.store / "quarantine"
                aside.mkdir(exist_ok=True, mode=0o750)
                path.replace(aside / path.name)
                said.append(f"blob sha256:{path.name} is not what its name says: it is in {aside} now")
        return said + await asyncio.to_thread(self._cache.problems)

    async def _set_aside(self, image: CachedImage) -> str:
        if image.directory.parent.name != OWN:
            return ": run `make up`, which makes it anew"
        if image.digest in self._in_use() or self._unpacking.is_pinned(image.digest):
            return ": sandboxes use it, so it stays until they have ended"
        # No await since it was looked who uses it: nobody can have begun to.
        doomed = self._unpacking.doom(image)
        await asyncio.to_thread(shutil.rmtree, doomed)
        return ": it is removed, and made anew when it is wanted"

    async def prune(self, *, everything: bool = False, dry_run: bool = False) -> list[Entry]:
        """Remove what does not fit the limits, used longest ago first; `everything`: all that is not in use or pinned. What went, or would.

        *Idempotency*: a second time finds nothing.
        """
        policy = load(self._policy)
        if everything:
            policy = replace(policy, trees_mib_max=0, blobs_mib_max=0)
        before = {one.digest: one for one in await asyncio.to_thread(self.entries)}
        went = await self._unpacking.collect(self._cache, self._in_use, policy=policy, dry_run=dry_run)
        return [before[digest] for digest in went if digest in before]

    def pin(self, digest: str) -> None:
        """Keep an image of this host. *Errors*: Refused IMAGE_UNAVAILABLE (it has none of this digest), INVALID_REQUEST (too many)."""
        policy = load(self._policy)
        if digest not in {one.digest for one in self.entries()}:
            raise Refused(Code.IMAGE_UNAVAILABLE, f"this host has no image {digest[:80]!r}", hint="`atoll image ls` shows what it has.")
        if len(policy.pins | {digest}) > PINS_MAX:
            raise Refused(Code.INVALID_REQUEST, f"{PINS_MAX} images are pinned, which is the most")
        save(self._policy, replace(policy, pins=policy.pins | {digest}))

    def unpin(self, digest: str) -> bool:
        """Keep it no more than others; whether it was pinned."""
        policy = load(self._policy)
        save(self._policy, replace(policy, pins=policy.pins - {digest}))
        return digest in policy.pins

    def limit(self, *, trees_mib: int | None, blobs_mib: int | None) -> Policy:
        """Set what is given; what holds then. *Errors*: Refused INVALID_REQUEST."""
        if any(given is not None and (type(given) is not int or given < 0) for given in (trees_mib, blobs_mib)):
            raise Refused(Code.INVALID_REQUEST, "a limit is a whole number of MiB, 0 or more")
        policy = load(self._policy)
        policy = replace(
            policy,
            trees_mib_max=policy.trees_mib_max if trees_mib is None else trees_mib,
            blobs_mib_max=policy.blobs_mib_max if blobs_mib is None else blobs_mib,
        )
        save(self._policy, policy)
        return policy

    async def asked(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out what a command asks, as JSON. *Errors*: Refused INVALID_REQUEST; those of what is asked for."""
        match request.get("do"):
            case "ls":
                found, summed = await asyncio.to_thread(lambda: (self.entries(), self.sum()))
                return {"images": [asdict(one) for one in found], "sum": asdict(summed), "limits": _limits(load(self._policy))}
            case "verify":
                return {"problems": await self.verify()}
            case "prune":
                before = await asyncio.to_thread(lambda: list(self._cache.all()))
                went = await self.prune(everything=bool(request.get("all")), dry_run=bool(request.get("dry_run")))
                rest = [image for image in before if image.digest not in {one.digest for one in went}]
                freed = sum(held(before).values()) - sum(held(rest).values())
                return {"images": [asdict(one) for one in went], "bytes": freed}
            case "pin":
                self.pin(str(request.get("digest")))
                return {"pinned": True}
            case "unpin":
                return {"wasPinned": self.unpin(str(request.get("digest")))}
            case "limit":
                return _limits(self.limit(trees_mib=request.get("trees_mib"), blobs_mib=request.get("blobs_mib")))
            case other:
                raise Refused(Code.INVALID_REQUEST, f"{str(other)[:40]!r} is nothing that images can be asked for")

    def _files(self, place: str) -> list[Path]:
        directory = self._unpacking.store / place
        return [path for path in directory.iterdir() if path.is_file()] if directory.is_dir() else []


def _limits(policy: Policy) -> dict[str, int]:
    return {"treesMib": policy.trees_mib_max, "blobsMib": policy.blobs_mib_max}


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _digest(path: Path) -> str | None:
    """None: it is gone by now."""
    total = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                total.update(part)
    except FileNotFoundError:
        return None
    return total.hexdigest()
