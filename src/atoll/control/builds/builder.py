"""One run of one build: from its recipe to a result, step by step, with what earlier builds have made used again.

Theory of operation. Nothing here is remembered between runs but the cache of steps: a run that was cut off is repeated from the first step,
and finds what was done. A step that changes files is taken on a bench that stands on the image so far; what it changed becomes the next
image's last layer. A step's key follows from the key before it, so a step is found again exactly when all before it are the same, too.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused
from atoll.control.builds import scripts
from atoll.control.builds.journal import Journal
from atoll.control.builds.port import Bench, Workshop
from atoll.control.imports import environment
from atoll.control.service import Caller
from atoll.control.templates import Templates
from atoll.domain.building import Build, Recipe, Result
from atoll.planning import recipes
from atoll.planning.recipes import Action, Context, Copy, MakeDirectory, Run
from atoll.store import builds as stored
from atoll.store.engine import Store

ROOT: Final = "root"
SHELL: Final = ("/bin/bash", "-c")
"""No login shell: /etc/profile would set PATH anew, whatever ENV says."""
BASE: Final = "base"
FINALIZE: Final = "finalize"
DEFAULT_IMAGES: Final = ("e2bdev/base", "docker.io/e2bdev/base")
"""What E2B's clients begin with when nothing is said: here it is the ready-made template of that purpose."""
DEFAULT_TEMPLATE: Final = "base"


class StepFailed(Exception):
    """A step did not succeed; its message is for the client."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a build begins with."""

    image: str
    context: Context
    command: tuple[str, ...] = ()
    command_user: str = ""
    ready_command: tuple[str, ...] = ()


@dataclass(slots=True)
class Builder:
    """Runs builds; one for each control process."""

    store: Store
    clock: Clock
    templates: Templates
    workshop: Workshop
    archive: Callable[[str, str], Path]
    """`archive(team_id, files_hash)`: where what a COPY copies was sent to."""
    making: WeakValueDictionary[tuple[str, str], asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """Steps that are under way here: builds with the same one take it once."""

    async def run(self, build: Build, caller: Caller, credentials: Mapping[str, str], journal: Journal) -> Result:
        """Carry the build out. *Errors*: StepFailed; those of the workshop. What went wrong is in the log, too."""
        recipe = build.recipe
        assert recipe is not None
        try:
            return await self._run(build, recipe, caller, credentials, journal)
        except StepFailed as error:
            journal.say(str(error), level="error")
            raise
        except AtollError as error:
            journal.say(f"{error.code}: {error.message}", level="error")
            raise

    async def _run(self, build: Build, recipe: Recipe, caller: Caller, credentials: Mapping[str, str], journal: Journal) -> Result:
        start = await self._begin(recipe, caller, credentials, journal)
        image, context = start.image, start.context
        key, fresh = recipes.base_key(image, context), recipe.force
        for number, step in enumerate(recipe.steps, 1):
            journal.step = str(number)
            before = context
            context, action = recipes.follow(context, step)
            key, fresh = recipes.step_key(key, step), fresh or step.force
            name = f"[{number}/{len(recipe.steps)}] {recipes.describe(step)}"
            if action is None:
                journal.say(name)
            else:
                image = await self._step(build, action, before, image, key, journal, name=name, fresh=fresh)
        journal.step = FINALIZE
        result = _result(recipe, start, image, context)
        if result.command or result.ready_command:
            journal.say(f"starting: {recipe.start_command or result.command[-1]}")
            await self.workshop.try_out(build, result)
        journal.say(f"the template is ready: image {image}")
        return result

    async def _begin(self, recipe: Recipe, caller: Caller, credentials: Mapping[str, str], journal: Journal) -> Start:
        journal.step = BASE
        reference = recipe.from_template
        if recipe.from_image is not None and recipe.from_image.partition(":")[0] in DEFAULT_IMAGES:
            reference = DEFAULT_TEMPLATE
        if reference is not None:
            journal.say(f"FROM template {reference}")
            found = await self.templates.get(caller, reference)
            if not found.image:
                raise Refused(Code.TEMPLATE_NOT_FOUND, f"template {reference[:128]!r} has no build that is ready")
            context = Context(found.default_user, found.default_workdir, dict(found.env))
            return Start(found.image, context, found.command, found.command_user, found.ready_command)
        assert recipe.from_image is not None
        journal.say(f"FROM image {recipe.from_image}")
        pulled = await self.workshop.pull(f"registry:{recipe.from_image}", caller, credentials, journal.told)
        return Start(pulled.image, Context(env=dict(environment(pulled.env))))

    async def _step(
        self, build: Build, action: Action, context: Context, image: str, key: str, journal: Journal, *, name: str, fresh: bool
    ) -> str:
        """The image after a step, from the cache or newly made."""
        lock = self.making.setdefault((build.team_id, key), asyncio.Lock())
        async with lock:
            known = None if fresh else await self.store.read(lambda conn: stored.step(conn, build.team_id, key))
            if known is not None and await self.workshop.has(known):
                journal.say(f"CACHED {name}")
            else:
                journal.say(name)
                known = await self._take(build, action, context, image, journal)
            made, now = known, self.clock.now()
            await self.store.write(lambda conn: stored.keep_step(conn, build.team_id, key, made, now=now))
            return made

    async def _take(self, build: Build, action: Action, context: Context, image: str, journal: Journal) -> str:
        async with self.workshop.bench(build, image) as bench:
            match action:
                case Run():
                    await _run(bench, action, context, journal)
                case Copy():
                    archive = self.archive(build.team_id, action.files_hash)
                    if not await self.workshop.bring(archive):
                        raise StepFailed(f"the files of COPY {action.source} were not uploaded ({action.files_hash})")
                    await _copy(bench, action, archive, journal)
                case MakeDirectory():
                    await _script(bench, scripts.MAKE_DIRECTORY, [action.path, action.owner], f"the directory {action.path!r}", journal)
            layer = await bench.layer()
        return await self.workshop.extend(image, layer) if layer.entries else image


async def _run(bench: Bench, action: Run, context: Context, journal: Journal) -> None:
    ended = await bench.run([*SHELL, action.command], user=action.user, cwd=context.workdir, env=context.env, told=journal.told)
    if ended.error is not None:
        raise StepFailed(f"failed to run command '{action.command}': command failed: {ended.error}")
    if ended.status != 0:
        raise StepFailed(f"failed to run command '{action.command}': exit status {ended.status}")


async def _copy(bench: Bench, action: Copy, archive: Path, journal: Journal) -> None:
    await bench.put(scripts.ARCHIVE, archive)
    arguments = [action.source, action.target, action.owner, action.mode or ""]
    await _script(bench, scripts.COPY, arguments, f"COPY {action.source} {posixpath.normpath(action.target)}", journal)


async def _script(bench: Bench, script: str, arguments: list[str], what: str, journal: Journal) -> None:
    said: list[str] = []

    def told(level: str, line: str) -> None:
        said.append(line)
        journal.told(level, line)

    ended = await bench.run(["/bin/sh", "-c", script, "sh", *arguments], user=ROOT, cwd="/", env={}, told=told)
    if ended.error is not None or ended.status != 0:
        raise StepFailed(f"{what} failed: {ended.error or '; '.join(said[-3:]) or f'exit status {ended.status}'}")


def _result(recipe: Recipe, start: Start, image: str, context: Context) -> Result:
    command, user, ready = start.command, start.command_user, start.ready_command
    if recipe.start_command is not None:
        command, user, ready = (*SHELL, recipe.start_command), context.user, ()
    if recipe.ready_command is not None:
        ready = (*SHELL, recipe.ready_command)
    return Result(
        image=image,
        env=tuple(sorted(context.env.items())),
        default_user=context.user,
        default_workdir=context.workdir,
        command=command,
        command_user=user or (context.user if ready else ""),
        ready_command=ready,
    )
