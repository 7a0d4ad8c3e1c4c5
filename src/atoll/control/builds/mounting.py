"""What a RUN has beside the files of its image: files from elsewhere, caches of its team, secrets and keys for ssh.

Theory of operation. All of it is put in its place before the command and taken away after it, within its bench, so that none of it is in the
layer. Secrets and keys come from memory, go to the guest as files, and are nowhere else: not in a record, a log or a command's words. A
cache is one archive in control's folder for each id of a team: it is put in place before the command, and what the command has left there
takes its place when that has ended well; of two at once the later one stays. Where replicas of control share a bucket it is there, too, and the
newest is had from there before it is used. Losing one costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from atoll.base.errors import AtollError
from atoll.control.builds import scripts
from atoll.control.builds.journal import Page
from atoll.control.builds.port import Bench
from atoll.domain.building import Mount, MountKind
from atoll.planning.recipes import Run

CACHE_BYTES_MAX: Final = 2 << 30
TEAM_BYTES_MAX: Final = 8 << 30
_SSH: Final = "ssh:"
_FILE: Final = "secret"


class Missing(Exception):
    """A secret that a step cannot do without; its message is for the client."""


class Script(Protocol):
    """Runs one of `scripts` on the bench, as root. *Errors*: StepFailed."""

    async def __call__(self, bench: Bench, script: str, arguments: list[str], what: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Secrets:
    """What a client has brought for one build, in memory alone. `known`: this process has it, however little that is."""

    values: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    known: bool = True

    def of(self, mount: Mount) -> bytes | None:
        """Its value; None where it was not brought and need not be. *Errors*: Missing."""
        name = f"{_SSH}{mount.id}" if mount.kind is MountKind.SSH else mount.id
        found = self.values.get(name)
        if found is None and not self.known:
            raise Missing(f"the secrets of this build went with the control process that had them: build again (it wanted {mount.id!r})")
        if found is None and (mount.required or mount.kind is MountKind.SSH):
            option = f"--ssh {mount.id}=KEYFILE" if mount.kind is MountKind.SSH else f"--secret id={mount.id},src=FILE"
            raise Missing(f"{mount.kind.value} {mount.id!r} was not given to this build: {option}")
        return found

    def lines(self) -> tuple[str, ...]:
        """What must not be in a log, longest first."""
        texts = (line.strip() for value in self.values.values() for line in value.decode(errors="replace").splitlines())
        return tuple(sorted({text for text in texts if len(text) >= 6}, key=len, reverse=True))


class Shared(Protocol):
    """What control's replicas have in common. *Errors*: those of `images.artifacts.Artifacts`."""

    async def bring_cache(self, archive: Path) -> None: ...

    async def share_cache(self, archive: Path, *, team_bytes_max: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Caches:
    """A team's, in a folder of their own."""

    folder: Path
    shared: Shared

    def path(self, mount: Mount) -> Path:
        """Where the cache of this id is kept."""
        return self.folder / f"{hashlib.sha256(mount.id.encode()).hexdigest()}.tar"

    def fresh(self) -> Path:
        """A private file for what becomes a cache."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".coming-")
        os.close(handle)
        return Path(name)

    def keep(self, path: Path, mount: Mount) -> None:
        """It is the cache of this id from now on; those that were not used for longest go where there are too many bytes."""
        path.replace(self.path(mount))
        found = sorted((one.stat().st_mtime, one.stat().st_size, one) for one in self.folder.glob("*.tar"))
        total = sum(size for _, size, _ in found)
        for _, size, one in found:
            if total <= TEAM_BYTES_MAX:
                break
            one.unlink(missing_ok=True)
            total -= size

    async def bring(self, mount: Mount) -> None:
        """Have the newest of this id here that any replica has kept. *Errors*: those of Shared."""
        await self.shared.bring_cache(self.path(mount))

    async def share(self, mount: Mount) -> None:
        """Have what is here of this id be every replica's. *Errors*: those of Shared."""
        await self.shared.share_cache(self.path(mount), team_bytes_max=TEAM_BYTES_MAX)

    def use(self, mount: Mount) -> Path | None:
        """The archive of this id, which counts as used now; None: there is none yet."""
        path = self.path(mount)
        try:
            os.utime(path)
        except OSError:
            return None
        return path


@dataclass(slots=True)
class Mounting:
    """The mounts of one RUN on one bench."""

    bench: Bench
    action: Run
    page: Page
    script: Script
    secrets: Secrets
    caches: Caches
    env: dict[str, str] = field(default_factory=dict)
    """What the command's environment has because of them."""
    placed: list[tuple[int, Mount]] = field(default_factory=list)

    async def begin(self, archives: Sequence[Path]) -> None:
        """Put everything in its place. `archives`: of those that take files from elsewhere, in order. *Errors*: Missing; StepFailed."""
        waiting = list(archives)
        for number, mount in enumerate(self.action.mounts):
            match mount.kind:
                case MountKind.SECRET:
                    await self._secret(number, mount)
                case MountKind.SSH:
                    await self._ssh(number, mount)
                case MountKind.CACHE:
                    await self._cache(number, mount)
                case MountKind.FILES:
                    how = "" if mount.source is None else "-o" if mount.from_stage is None else "-p"
                    await self._place(number, mount, waiting.pop(0) if mount.source is not None else None, how)

    async def _place(self, number: int, mount: Mount, archive: Path | None, how: str) -> None:
        if archive is not None:
            await self.bench.put(scripts.ARCHIVE, archive)
        arguments = [str(number), mount.target, mount.source or ".", how, mount.owner, mount.mode]
        await self.script(self.bench, scripts.MOUNT, arguments, f"the mount at {mount.target!r}")
        self.placed.append((number, mount))

    async def _cache(self, number: int, mount: Mount) -> None:
        try:
            await self.caches.bring(mount)
        except (AtollError, OSError) as error:
            self.page.say(f"the cache at {mount.target} may be an older one: {getattr(error, 'message', error)}", level="warn")
        found = await asyncio.to_thread(self.caches.use, mount)
        await self._place(number, mount, found, "-p" if found is not None else "")

    async def _secret(self, number: int, mount: Mount) -> None:
        value = self.secrets.of(mount)
        if value is None:
            return
        if mount.env:
            self.env[mount.env] = value.decode(errors="replace")
        if not mount.target:
            return
        user, _, group = (mount.owner or "0:0").partition(":")
        info = tarfile.TarInfo(_FILE)
        info.size, info.mode, info.uid, info.gid = len(value), int(mount.mode or "400", 8), int(user), int(group or user)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.addfile(info, io.BytesIO(value))
        with _in_memory(packed.getvalue()) as path:
            await self.bench.put(scripts.ARCHIVE, path)
        await self.script(self.bench, scripts.MOUNT, [str(number), mount.target, _FILE, "-p", "", ""], f"the mount at {mount.target!r}")
        self.placed.append((number, mount))

    async def _ssh(self, number: int, mount: Mount) -> None:
        value = self.secrets.of(mount)
        assert value is not None
        with _in_memory(value if value.endswith(b"\n") else value + b"\n") as path:
            await self.bench.put(scripts.SSH_KEY, path)
        await self.script(self.bench, scripts.SSH_BEGIN, [str(number), self.action.user], f"the agent with ssh key {mount.id!r}")
        self.env["SSH_AUTH_SOCK"] = scripts.SSH_SOCKET.format(number)
        self.placed.append((number, mount))

    async def end(self) -> None:
        """Take everything away again, after the command has ended well; caches are kept before."""
        for number, mount in reversed(self.placed):
            if mount.kind is MountKind.SSH:
                await self.script(self.bench, scripts.SSH_END, [str(number)], "the end of the agent with ssh keys")
                continue
            if mount.kind is MountKind.CACHE:
                await self._keep(mount)
            await self.script(self.bench, scripts.UNMOUNT, [str(number), mount.target], f"the mount at {mount.target!r}")

    async def _keep(self, mount: Mount) -> None:
        most = CACHE_BYTES_MAX >> 10
        ended = await self.bench.run(
            ["/bin/sh", "-c", scripts.KEEP, "sh", mount.target, str(most)], user="root", cwd="/", env={}, told=self.page.told
        )
        if ended.error is not None or ended.status != 0:
            self.page.say(f"the cache at {mount.target} is not kept", level="warn")
            return
        path = await asyncio.to_thread(self.caches.fresh)
        try:
            await self.bench.get(scripts.ARCHIVE, path)
            await asyncio.to_thread(self.caches.keep, path, mount)
        except (AtollError, OSError) as error:
            self.page.say(f"the cache at {mount.target} is not kept: {getattr(error, 'message', error)}", level="warn")
            return
        finally:
            path.unlink(missing_ok=True)
        try:
            await self.caches.share(mount)
        except (AtollError, OSError) as error:
            self.page.say(f"the cache at {mount.target} is kept here alone: {getattr(error, 'message', error)}", level="warn")


@contextlib.contextmanager
def _in_memory(value: bytes) -> Iterator[Path]:
    """A file that is on no disk."""
    handle = os.memfd_create("atoll-secret", os.MFD_CLOEXEC)
    try:
        os.write(handle, value)
        os.lseek(handle, 0, os.SEEK_SET)
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


def forget(uploads: Path, *, before: float) -> None:
    """Throw away caches that were not used since, and what killed builds have left half come. *Units*: wall seconds."""
    for path in uploads.glob("*/caches/*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before:
                path.unlink()
