"""One run of one build: from its recipe to a result, step by step, with what earlier builds have made used again.

Theory of operation. Nothing here is remembered between runs but the cache of steps: a run that was cut off is repeated from the first step,
and finds what was done. A step that changes files is taken on a bench that stands on the image so far (`steps.py`); what it changed becomes
the next image's last layer. A step's key follows from the key before it, so a step is found again exactly when all before it are the same,
too; one that takes files of another stage has that stage's image in its key. Stages that do not need each other go on side by side; the
first one that fails ends the others. Who takes a step holds it in the store (`store/step_locks.py`), so that builds at several control
processes share what they do, as those at one do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused
from atoll.control.artifacts.imports import environment
from atoll.control.artifacts.templates import Templates
from atoll.control.builds.journal import Journal, Page
from atoll.control.builds.mounting import Secrets
from atoll.control.builds.port import Workshop
from atoll.control.builds.steps import SHELL, StepFailed, Steps, forget_passing
from atoll.control.service import Caller
from atoll.domain.building import SCRATCH, Build, Recipe, Result, Stage
from atoll.planning import recipes
from atoll.planning.recipes import Action, Context, Run
from atoll.store import builds as stored
from atoll.store import step_locks
from atoll.store.engine import Store
from atoll.store.step_locks import Held

BASE: Final = "base"
FINALIZE: Final = "finalize"
LOOK_S: Final = 0.5
"""How often a build looks at a step that another process takes."""
ABANDONED_S: Final = 30.0
"""A build whose owner is silent for so long is taken over, and holds no steps."""
PARALLEL_MAX: Final = 3
"""Benches of one build at once: a build is one of many of a team's."""
DEFAULT_IMAGES: Final = ("e2bdev/base", "docker.io/e2bdev/base")
"""What E2B's clients begin with when nothing is said: here it is the ready-made template of that purpose."""
DEFAULT_TEMPLATE: Final = "base"


@dataclass(frozen=True, slots=True)
class Start:
    """What a stage begins with, or has become."""

    image: str
    context: Context
    command: tuple[str, ...] = ()
    command_user: str = ""
    ready_command: tuple[str, ...] = ()
    bare: bool = False
    """It began with nothing, and nothing has run in it: whether it has a shell is not known."""


@dataclass(slots=True)
class Work:
    """One run of one build."""

    build: Build
    recipe: Recipe
    caller: Caller
    credentials: Mapping[str, str]
    """For the registry of the image that the recipe begins with, else of the first stage's that begins with one; others are asked without."""
    journal: Journal
    secrets: Secrets = field(default_factory=Secrets)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL_MAX))
    made: list[asyncio.Task[Start]] = field(default_factory=list)
    """The stages, in their order."""
    failed_at: str | None = None
    """The step at which the first stage that failed did so."""


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
    """Steps that are under way here, besides the store's locks: builds of one process wait for each other without looking."""

    async def run(
        self, build: Build, caller: Caller, credentials: Mapping[str, str], journal: Journal, secrets: Secrets | None = None
    ) -> Result:
        """Carry the build out. *Errors*: StepFailed; those of the workshop. What went wrong is in the log, too."""
        recipe = build.recipe
        assert recipe is not None
        work = Work(build, recipe, caller, credentials, journal, secrets or Secrets())
        await asyncio.to_thread(forget_passing, self.archive, build)
        try:
            return await self._run(work)
        except StepFailed as error:
            journal.step = work.failed_at or journal.step
            journal.say(str(error), level="error")
            raise
        except AtollError as error:
            journal.step = work.failed_at or journal.step
            journal.say(f"{error.code}: {error.message}", level="error")
            raise

    async def _run(self, work: Work) -> Result:
        made = await self._stages(work)
        page = Page(work.journal)
        page.begin(FINALIZE)
        if made.image == SCRATCH:
            raise StepFailed("the template begins with nothing (FROM scratch), and nothing was copied into it")
        result = _result(work.recipe, made)
        if result.command or result.ready_command:
            page.say(f"starting: {work.recipe.start_command or result.command[-1]}")
            page.say(await self.workshop.try_out(work.build, result))
        page.say(f"the template is ready: image {result.image}")
        return result

    async def _stages(self, work: Work) -> Start:
        """What has become of the recipe, after all the stages that it needs."""
        try:
            async with asyncio.TaskGroup() as group:
                for stage in work.recipe.stages:
                    work.made.append(group.create_task(self._stage(work, stage, Page(work.journal, stage.name))))
                ended = group.create_task(self._stage(work, work.recipe, Page(work.journal)))
        except BaseExceptionGroup as failed:
            # The others were ended because of the first one, or wait for it and have failed with it.
            raise failed.exceptions[0] from None
        return ended.result()

    async def _stage(self, work: Work, stage: Recipe | Stage, page: Page) -> Start:
        try:
            start = await self._begin(work, stage, page)
            image, context, bare = start.image, start.context, start.bare
            key, fresh = recipes.base_key(image, context), work.recipe.force
            for number, step in enumerate(stage.steps, 1):
                origins = {origin: (await work.made[origin]).image for origin in recipes.origins(step)}
                page.begin(str(number))
                before = context
                context, action = recipes.follow(context, step)
                key, fresh = recipes.step_key(key, step, list(origins.values())), fresh or step.force
                name = f"[{page.stage}{' ' if page.stage else ''}{number}/{len(stage.steps)}] {recipes.describe(step)}"
                if action is None:
                    page.say(name)
                else:
                    furnished = (await self.templates.get(work.caller, DEFAULT_TEMPLATE)).image if bare else None
                    steps = Steps(work.build, self.workshop, self.archive, work.room, origins, page, work.secrets, furnished)
                    image = await self._step(steps, action, before, image, key, name=name, fresh=fresh)
                    bare = bare and not isinstance(action, Run)
            return Start(image, context, start.command, start.command_user, start.ready_command, bare)
        except (StepFailed, AtollError):
            work.failed_at = work.failed_at or page.step
            raise

    async def _begin(self, work: Work, stage: Recipe | Stage, page: Page) -> Start:
        if stage.from_stage is not None:
            return await work.made[stage.from_stage]
        page.begin(BASE)
        reference = stage.from_template
        if stage.from_image is not None and stage.from_image.partition(":")[0] in DEFAULT_IMAGES:
            reference = DEFAULT_TEMPLATE
        if reference is not None:
            page.say(f"FROM template {reference}")
            found = await self.templates.get(work.caller, reference)
            if not found.image:
                raise Refused(Code.TEMPLATE_NOT_FOUND, f"template {reference[:128]!r} has no build that is ready")
            context = Context(found.default_user, found.default_workdir, dict(found.env))
            return Start(found.image, context, found.command, found.command_user, found.ready_command)
        assert stage.from_image is not None
        if stage.from_image == SCRATCH:
            page.say("FROM nothing")
            return Start(SCRATCH, Context(), bare=True)
        page.say(f"FROM image {stage.from_image}")
        credentials = work.credentials if recipes.registry_of(stage.from_image) == recipes.credentials_for(work.recipe) else {}
        pulled = await self.workshop.pull(f"registry:{stage.from_image}", work.caller, credentials, page.told)
        return Start(pulled.image, Context(env=dict(environment(pulled.env))))

    async def _step(self, steps: Steps, action: Action, context: Context, image: str, key: str, *, name: str, fresh: bool) -> str:
        """The image after a step, from the cache or newly made."""
        team_id = steps.build.team_id
        lock = self.making.setdefault((team_id, key), asyncio.Lock())
        async with lock:
            told = False
            while True:
                known = None if fresh else await self._known(team_id, key)
                if known is not None:
                    steps.page.say(f"CACHED {name}")
                    return known
                held = await self._hold(steps.build, key)
                if held is not None:
                    try:
                        # Between the look and the hold another may have been done with it.
                        if not fresh and (known := await self._known(team_id, key)) is not None:
                            steps.page.say(f"CACHED {name}")
                            return known
                        steps.page.say(name)
                        made, now = await steps.take(action, context, image), self.clock.now()
                        if await self.store.write(lambda conn, held=held, made=made, now=now: step_locks.keep(conn, held, made, now=now)):  # type: ignore[misc]
                            return made
                    finally:
                        await asyncio.shield(self._let_go(held))
                elif not told:
                    told = True
                    steps.page.say(f"another build takes it: waiting for {name}")
                await asyncio.sleep(LOOK_S)

    async def _known(self, team_id: str, key: str) -> str | None:
        """What a step has made that is still there; it counts as used now."""
        known = await self.store.read(lambda conn: stored.step(conn, team_id, key))
        if known is None or not await self.workshop.has(known):
            return None
        now = self.clock.now()
        await self.store.write(lambda conn: stored.keep_step(conn, team_id, key, known, now=now))
        return known

    async def _hold(self, build: Build, key: str) -> Held | None:
        before = self.clock.now() - ABANDONED_S
        return await self.store.write(
            lambda conn: step_locks.take(conn, build.team_id, key, build_id=build.id, owner=build.owner or "", silent_before=before)
        )

    async def _let_go(self, held: Held) -> None:
        # What cannot be said now is so when the build ends.
        with contextlib.suppress(AtollError):
            await self.store.write(lambda conn: step_locks.release(conn, held))


def _result(recipe: Recipe, made: Start) -> Result:
    command, user, ready = made.command, made.command_user, made.ready_command
    if recipe.start_command is not None:
        command, user, ready = (*SHELL, recipe.start_command), made.context.user, ()
    if recipe.ready_command is not None:
        ready = (*SHELL, recipe.ready_command)
    return Result(
        image=made.image,
        env=tuple(sorted(made.context.env.items())),
        default_user=made.context.user,
        default_workdir=made.context.workdir,
        command=command,
        command_user=user or (made.context.user if ready else ""),
        ready_command=ready,
    )
