"""What a build needs of the world: benches (a sandbox with a step in it), images from outside, and images made of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from atoll.control.service import Caller
from atoll.domain.building import Build, Result

Told = Callable[[str, str], None]
"""`told(level, line)`: something for the build's log."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A change of files, as a blob of the image store. *Units*: bytes."""

    digest: str
    size: int
    entries: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """An image from outside, whose blobs are in the store."""

    image: str
    env: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. `error` says why there is no status: it could not be begun, or was cut off."""

    status: int | None
    error: str | None = None


class Bench(Protocol):
    """One sandbox with an image, in which one step is taken.

    *Errors* of every call: those of `base.errors`; SANDBOX_NOT_FOUND when the sandbox has gone.
    """

    async def run(self, command: Sequence[str], *, user: str, cwd: str | None, env: Mapping[str, str], told: Told) -> Ended:
        """Run a command to its end; what it writes is told line by line."""
        ...

    async def put(self, path: str, source: Path) -> None:
        """Write a file inside, root's."""
        ...

    async def get(self, path: str, target: Path) -> None:
        """Read a file from inside into one that is there. *Errors*: Refused HOST_DISK_FULL when it does not fit here."""
        ...

    async def layer(self) -> Layer:
        """What has changed in its files since it began. Nothing is done on the bench after this."""
        ...


class Workshop(Protocol):
    """Where builds work."""

    async def pull(self, source: str, caller: Caller, credentials: Mapping[str, str], told: Told) -> Pulled:
        """Have an image in the store. *Errors*: as images.carrier.Carrier.pull."""
        ...

    def bench(self, build: Build, image: str) -> AbstractAsyncContextManager[Bench]:
        """A sandbox of the build's team, hidden from its lists, which ends with the context."""
        ...

    async def try_out(self, build: Build, result: Result) -> str:
        """Begin a sandbox of what was built, keep it as it is then where its host can, and end it again; what the build's log says of that.

        *Errors*: why it did not get ready, e.g. START_COMMAND_FAILED.
        """
        ...

    async def retire(self) -> None:
        """Let go of what builds have kept of sandboxes that nothing names any more. *Idempotency*: a second time finds nothing."""
        ...

    async def extend(self, image: str, layer: Layer) -> str:
        """The image with one layer more, and all of it where hosts have it from. *Errors*: Refused IMAGE_REFUSED when it has too many."""
        ...

    async def compose(self, root: Path) -> str:
        """An image of one layer, which is this archive; all of it is where hosts have it from, and the archive is gone. *Errors*: as `extend`."""
        ...

    async def root_of(self, image: str) -> Path:
        """The archive that `compose` has made an image of. *Errors*: Refused IMAGE_UNAVAILABLE."""
        ...

    async def has(self, image: str) -> bool:
        """Whether the store has all of an image, or its host's cache brings it."""
        ...

    async def bring(self, archive: Path) -> bool:
        """Have what a client has sent here, whoever it was sent to; whether it is there."""
        ...

    async def bring_cache(self, archive: Path) -> None:
        """Have the newest of a cache that any replica has kept here; what is here stays where there is none. *Errors*: as Library.bring_cache."""
        ...

    async def share_cache(self, archive: Path, *, team_bytes_max: int) -> None:
        """Have what is here of a cache be every replica's, within so much a team. *Errors*: as Library.share_cache."""
        ...

    def keeping(self) -> AbstractAsyncContextManager[None]:
        """While this is open nothing of the store is thrown away."""
        ...

    async def release_orphans(self) -> None:
        """End what serves builds that have ended. *Idempotency*: a second time finds nothing."""
        ...

    async def tidy(self) -> None:
        """Throw away what pulls that ended early have left unfinished. *Idempotency*: a second time finds nothing."""
        ...

    async def collect(self) -> None:
        """Throw away what neither templates nor builds nor cached steps need."""
        ...

    async def clear(self, build: Build) -> None:
        """End what an earlier run of this build left. *Idempotency*: a second time finds nothing."""
        ...
