"""Control's images: the folder that the image program works in, and the artifact store that hosts and other replicas have them from.

Theory of operation. In a folder both are the same files, and everything here is nothing. With a bucket the folder is a bench: what was
pulled or captured goes up before anything on record names it (an image's manifest last, so that one in the bucket says that all of it is
there), and what another replica made comes down when it is wanted here. Blobs are collected where they are kept: what no record needs, and
what is old enough that nobody is still about to record it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.images import assembling, blobs
from atoll.images.artifacts import BLOBS, DOCUMENT_BYTES_MAX, MACHINES, MANIFESTS, UPLOADS, Artifacts, Info, key_of
from atoll.wire import manifests

SIDE_BY_SIDE: Final = 4
FRESH_S: Final = 3600.0
"""What is younger in a bucket is not collected: a replica may be about to record it."""
UPLOADS_KEPT_S: Final = 7 * 86400.0
BENCH_MIB: Final = 10 * 1024
"""Of blobs in the folder beside a bucket, before those that came first go."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What went, or would go. *Units*: bytes."""

    keys: tuple[str, ...]
    size: int


@dataclass(slots=True)
class Library:
    """Of one control process."""

    bench: Path
    artifacts: Artifacts
    now: Callable[[], float]
    """Wall seconds."""
    _published: set[str] = field(default_factory=set)

    @property
    def shared(self) -> bool:
        """Whether the store is elsewhere."""
        return self.artifacts.local is None

    async def publish(self, image: str) -> None:
        """Have all of an image of the bench in the store. *Errors*: those of Artifacts; Refused IMAGE_CORRUPT.

        *Idempotency*: what is there with its size is not sent again.
        """
        if not self.shared or image in self._published:
            return
        path = self._path(image)
        document = _document(await asyncio.to_thread(path.read_bytes), image)
        room = asyncio.Semaphore(SIDE_BY_SIDE)
        failed: BaseException | None = None

        async def send(part: dict[str, Any]) -> None:
            async with room:
                await self._send(str(part["digest"]), int(part["size"]))

        try:
            async with asyncio.TaskGroup() as group:
                for part in (document["config"], *document["layers"]):
                    group.create_task(send(part))
        except* AtollError as failures:
            failed = failures.exceptions[0]
        if failed is not None:
            raise failed
        await self._send(image, path.stat().st_size)
        self._published.add(image)

    async def _send(self, digest: str, size: int) -> None:
        key = key_of(BLOBS, digest)
        known = await self.artifacts.head(key)
        if known is None or known.size != size:
            path = self._path(digest)
            if not await asyncio.to_thread(path.is_file):
                raise Refused(Code.IMAGE_UNAVAILABLE, f"blob {digest} is not in the store")
            await self.artifacts.put(key, path)

    async def documents(self, image: str) -> None:
        """Have manifest and configuration of an image on the bench, where the store has them. *Errors*: as `publish`."""
        if not self.shared:
            return
        document = await self._bring(image)
        if document is not None:
            await self._bring(str(document["config"]["digest"]))

    async def _bring(self, digest: str) -> dict[str, Any] | None:
        path = self._path(digest)
        if path.exists():
            return _document(await asyncio.to_thread(path.read_bytes), digest)
        try:
            content = await self.artifacts.read(key_of(BLOBS, digest))
        except Refused as error:
            if error.code is Code.ARTIFACT_NOT_FOUND:
                return None
            raise
        document = _document(content, digest)
        await asyncio.to_thread(assembling.keep_document, self.bench, content)
        return document

    async def blob(self, digest: str) -> Path:
        """Where the bytes of one blob are on the bench. *Errors*: Refused IMAGE_UNAVAILABLE, ARTIFACT_NOT_FOUND; those of Artifacts."""
        path = self._path(digest)
        if not await asyncio.to_thread(path.is_file):
            if not self.shared:
                raise Refused(Code.IMAGE_UNAVAILABLE, f"blob {digest} is not in the store")
            await self.artifacts.get(key_of(BLOBS, digest), path)
        return path

    async def has(self, image: str) -> bool:
        """Whether hosts can have all of an image. *Errors*: those of Artifacts."""
        if self.shared:
            return await self.artifacts.head(key_of(BLOBS, image)) is not None
        return await asyncio.to_thread(assembling.is_whole, self.bench, image)

    async def keep_upload(self, path: Path, *, name: Path) -> None:
        """Have a file in the store before it has its name on the bench, which is below its `uploads`. *Errors*: those of Artifacts."""
        if self.shared:
            await self.artifacts.put(self._upload(name), path)

    async def bring_upload(self, path: Path) -> bool:
        """Have it on the bench, where it was sent to another replica; whether it is there. *Errors*: those of Artifacts."""
        if await asyncio.to_thread(path.is_file):
            return True
        if not self.shared:
            return False
        try:
            await self.artifacts.get(self._upload(path), path)
        except Refused as error:
            if error.code is Code.ARTIFACT_NOT_FOUND:
                return False
            raise
        return True

    async def drop_upload(self, path: Path) -> None:
        """Have it nowhere."""
        await asyncio.to_thread(path.unlink, missing_ok=True)
        if self.shared:
            await self.artifacts.delete(self._upload(path))

    async def bring_cache(self, path: Path) -> None:
        """Have the newest of a build's cache that any replica has kept on the bench, below its `uploads`; where none has, what is there stays.

        *Errors*: those of Artifacts; then what is there stays, too.
        """
        if not self.shared:
            return
        known = await self.artifacts.head(self._upload(path))
        if known is None or await asyncio.to_thread(_is_of, path, known):
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        await self.artifacts.get(known.key, path)
        await asyncio.to_thread(_mark, path, known)

    async def share_cache(self, path: Path, *, folder_bytes_max: int) -> None:
        """Have what the bench has of a cache be every replica's; of its folder those that came first go where there are too many bytes.

        *Errors*: those of Artifacts.
        """
        if not self.shared:
            return
        key = self._upload(path)
        await self.artifacts.put(key, path)
        if (kept := await self.artifacts.head(key)) is not None:
            await asyncio.to_thread(_mark, path, kept)
        found = sorted([info async for info in self.artifacts.list(key.rpartition("/")[0])], key=lambda info: info.changed_at)
        total = sum(info.size for info in found)
        for info in found:
            if total <= folder_bytes_max:
                break
            await self.artifacts.delete(info.key)
            total -= info.size

    def _upload(self, path: Path) -> str:
        return f"{UPLOADS}/{path.relative_to(self.bench / UPLOADS)}"

    async def collect(self, wanted: Iterable[str], *, dry_run: bool = False) -> Collected:
        """Remove what no wanted image needs: its blobs and signed manifests, and uploads that are old. The caller sees to it that nobody
        of this process is about to record more; of others' only what is older than FRESH_S goes.

        *Errors*: those of Artifacts: then nothing more went. *Idempotency*: a second time finds nothing.
        """
        named = [*wanted, *[await self._image_of(info.key) async for info in self.artifacts.list(MACHINES)]]
        # A template whose first build is under way has no image yet.
        wanted = {image for image in named if image}
        kept: set[str] = set()
        for image in wanted:
            await self.documents(image)
            kept |= await asyncio.to_thread(blobs.blobs_of, self.bench, image)
        going = [info async for info in self._unwanted(wanted, kept)]
        if not dry_run:
            for info in going:
                await self.artifacts.delete(info.key)
            self._published &= wanted
            await self.tidy()
            if self.shared:
                await asyncio.to_thread(blobs.trim, self.bench, size_bytes_max=BENCH_MIB << 20)
        return Collected(tuple(sorted(info.key for info in going)), sum(info.size for info in going))

    async def tidy(self, *, idle_s: float = blobs.IDLE_S) -> None:
        """Throw away what runs that were killed have left unfinished on the bench. Call it while nothing is being pulled.

        *Units*: see blobs.clear_unfinished. *Idempotency*: a second time finds nothing.
        """
        await asyncio.to_thread(blobs.clear_unfinished, self.bench, before=self.now() - idle_s)

    async def _unwanted(self, wanted: set[str], kept: set[str]) -> AsyncIterator[Info]:
        now = self.now()
        young = now - FRESH_S if self.shared else float("inf")
        async for info in self.artifacts.list(BLOBS):
            if info.key.rpartition("/")[2] not in kept and info.changed_at < young:
                yield info
        async for info in self.artifacts.list(MANIFESTS):
            if info.changed_at < now - FRESH_S and await self._image_of(info.key) not in wanted:
                yield info
        if self.shared:
            async for info in self.artifacts.list(UPLOADS):
                if info.changed_at < now - UPLOADS_KEPT_S:
                    yield info

    async def _image_of(self, key: str) -> str:
        """The image that a signed manifest says that it is of; of a broken one none. What it says decides only when it goes."""
        try:
            _, payload = manifests.opened(await self.artifacts.read(key, bytes_max=manifests.BYTES_MAX))
            return str(json.loads(payload)["image"])
        except (AtollError, ValueError, KeyError, TypeError):
            return ""

    def _path(self, digest: str) -> Path:
        return self.bench / key_of(BLOBS, digest)


def marks(path: Path) -> Path:
    """Beside a cache on the bench: which of the store's it is."""
    return path.with_suffix(".of")


def _is_of(path: Path, info: Info) -> bool:
    try:
        return path.is_file() and marks(path).read_text() == _said(info)
    except OSError:
        return False


def _mark(path: Path, info: Info) -> None:
    marks(path).write_text(_said(info))


def _said(info: Info) -> str:
    return f"{info.size} {info.changed_at}"


def _document(content: bytes, digest: str) -> dict[str, Any]:
    if len(content) <= DOCUMENT_BYTES_MAX and f"sha256:{hashlib.sha256(content).hexdigest()}" == digest:
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
    raise Refused(Code.IMAGE_CORRUPT, f"document {digest} of the image store is not what its name says")
