"""Steps on benches: what one does to the files of an image, as a new image with one layer more.

Theory of operation. Whatever a step takes from elsewhere is one archive in control's folder: the client has sent it, or a bench on the other
stage's image packs it, for as long as this step needs it. No two benches are open for one step at a time, so a build that may have one bench
only gets on, too. What a RUN mounts is put at its place before it and taken away after it (`mounting.py`), within its bench. Files are put
into an image that begins with nothing on a bench that has a shell (`furnished`), as one archive of its whole root, until something runs in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from atoll.base.errors import AtollError, Code
from atoll.control.builds import scripts
from atoll.control.builds.journal import Page
from atoll.control.builds.mounting import Caches, Missing, Mounting, Secrets
from atoll.control.builds.port import Bench, Layer, Workshop
from atoll.domain.building import SCRATCH, Build
from atoll.planning.recipes import Action, Context, Copy, MakeDirectory, Run

ROOT: Final = "root"
SHELL: Final = ("/bin/bash", "-c")
"""No login shell: /etc/profile would set PATH anew, whatever ENV says."""
PASSING: Final = ".passing-"
"""How files begin that are on their way from one stage to another."""


class StepFailed(Exception):
    """A step did not succeed; its message is for the client."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Takes steps of one stage."""

    build: Build
    workshop: Workshop
    archive: Callable[[str, str], Path]
    room: asyncio.Semaphore
    """Held while a bench is open."""
    origins: Mapping[int, str]
    """The images of the stages that the step takes files of."""
    page: Page
    secrets: Secrets
    furnished: str | None = None
    """An image with a shell, for steps that put files into one that begins with nothing."""

    async def take(self, action: Action, context: Context, image: str) -> str:
        """The image after a step. *Errors*: StepFailed; those of the workshop."""
        async with contextlib.AsyncExitStack() as kept:
            archives = [await kept.enter_async_context(self._archive(*one)) for one in _needs(action)]
            if self.furnished is not None and not isinstance(action, Run):
                return await self._compose(action, image, archives, self.furnished)
            if image == SCRATCH:
                raise StepFailed("nothing runs in an image that begins with nothing (FROM scratch) before files are copied into it")
            layer = await self._layer(action, context, image, archives, last=False) or await self._layer(
                action, context, image, archives, last=True
            )
        assert layer is not None
        return await self.workshop.extend(image, layer) if layer.entries else image

    async def _layer(self, action: Action, context: Context, image: str, archives: Sequence[Path], *, last: bool) -> Layer | None:
        """What a step changes, done on a fresh bench. None, unless it is the `last` try: its bench went while that was handed out, as it
        may when its host's agent is killed, and nothing that anybody could use has come of it.
        """
        async with self.room, self.workshop.bench(self.build, image) as bench:
            match action:
                case Run():
                    await self._run(bench, action, context, archives)
                case Copy() | MakeDirectory():
                    await self._put(bench, action, archives)
            try:
                return await bench.layer()
            except AtollError as error:
                if last or error.code is not Code.PLACEMENT_LOST:
                    raise
                self.page.say(f"its sandbox went before its files could be had ({error.message.splitlines()[0][:200]}): once more")
                return None

    async def _compose(self, action: Copy | MakeDirectory, image: str, archives: Sequence[Path], furnished: str) -> str:
        """The image that began with nothing, with what a step puts into it."""
        before = None if image == SCRATCH else await self.workshop.root_of(image)
        packed = await asyncio.to_thread(_passing, self.archive, self.build)
        try:
            async with self.room, self.workshop.bench(self.build, furnished) as bench:
                if before is not None:
                    await bench.put(scripts.ARCHIVE, before)
                await self._script(bench, scripts.SEED, [], "the root of the image")
                await self._put(bench, _below(scripts.ROOT, action), archives)
                await self._script(bench, scripts.PACK, [], "the root of the image")
                await bench.get(scripts.ARCHIVE, packed)
            return await self.workshop.compose(packed)
        finally:
            packed.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def _archive(self, source: str, files_hash: str | None, from_stage: int | None) -> AsyncIterator[Path]:
        """The files that a step takes from elsewhere, here for as long as it needs them."""
        if from_stage is None:
            path = self.archive(self.build.team_id, files_hash or "")
            if not await self.workshop.bring(path):
                raise StepFailed(f"the files of COPY {source} were not uploaded ({files_hash})")
            yield path
            return
        if self.origins[from_stage] == SCRATCH:
            raise StepFailed(f"there is no /{source}: that stage has no files")
        path = await asyncio.to_thread(_passing, self.archive, self.build)
        try:
            async with self.room, self.workshop.bench(self.build, self.origins[from_stage]) as bench:
                await self._script(bench, scripts.EXPORT, [source], f"what is copied from {source!r} of another stage")
                await bench.get(scripts.ARCHIVE, path)
            yield path
        finally:
            path.unlink(missing_ok=True)

    async def _put(self, bench: Bench, action: Copy | MakeDirectory, archives: Sequence[Path]) -> None:
        match action:
            case Copy():
                await self._copy(bench, action, archives[0])
            case MakeDirectory():
                await self._script(bench, scripts.MAKE_DIRECTORY, [action.path, action.owner], f"the directory {action.path!r}")

    async def _run(self, bench: Bench, action: Run, context: Context, archives: Sequence[Path]) -> None:
        caches = Caches(self.archive(self.build.team_id, "").parent / "caches", self.workshop)
        mounting = Mounting(bench, action, self.page, self._script, self.secrets, caches)
        try:
            await mounting.begin(archives)
        except Missing as error:
            raise StepFailed(str(error)) from error
        env = {**context.env, **mounting.env}
        ended = await bench.run([*SHELL, action.command], user=action.user, cwd=context.workdir, env=env, told=self.page.told)
        if ended.error is not None:
            raise StepFailed(f"failed to run command '{action.command}': command failed: {ended.error}")
        if ended.status != 0:
            raise StepFailed(f"failed to run command '{action.command}': exit status {ended.status}")
        await mounting.end()

    async def _copy(self, bench: Bench, action: Copy, archive: Path) -> None:
        await bench.put(scripts.ARCHIVE, archive)
        target = posixpath.normpath(action.target)
        if action.unpacked and not action.owner and action.mode is None:
            await self._script(bench, scripts.UNPACK, [target], f"ADD to {target}")
            return
        arguments = [action.source, action.target, action.owner, action.mode or ""]
        await self._script(bench, scripts.COPY, arguments, f"COPY {action.source} {target}")

    async def _script(self, bench: Bench, script: str, arguments: list[str], what: str) -> None:
        said: list[str] = []

        def told(level: str, line: str) -> None:
            said.append(line)
            self.page.told(level, line)

        ended = await bench.run(["/bin/sh", "-c", script, "sh", *arguments], user=ROOT, cwd="/", env={}, told=told)
        if ended.error is not None or ended.status != 0:
            raise StepFailed(f"{what} failed: {ended.error or '; '.join(said[-3:]) or f'exit status {ended.status}'}")


def _below(root: str, action: Copy | MakeDirectory) -> Copy | MakeDirectory:
    if isinstance(action, Copy):
        return replace(action, target=root + action.target)
    return replace(action, path=root + action.path)


def _needs(action: Action) -> list[tuple[str, str | None, int | None]]:
    """(source, files_hash, from_stage) of each archive that a step needs, in order."""
    match action:
        case Copy():
            return [(action.source, action.files_hash, action.from_stage)]
        case Run():
            return [(one.source, one.files_hash, one.from_stage) for one in action.mounts if one.source is not None]
        case MakeDirectory():
            return []


def _passing(archive: Callable[[str, str], Path], build: Build) -> Path:
    folder = archive(build.team_id, PASSING).parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o750)
    handle, name = tempfile.mkstemp(dir=folder, prefix=f"{PASSING}{build.id}-")
    os.close(handle)
    return Path(name)


def forget_passing(archive: Callable[[str, str], Path], build: Build) -> None:
    """Throw away what an earlier run of this build, cut off in the middle, has left on its way. *Idempotency*: a second time finds nothing."""
    for path in archive(build.team_id, PASSING).parent.glob(f"{PASSING}{build.id}-*"):
        path.unlink(missing_ok=True)
