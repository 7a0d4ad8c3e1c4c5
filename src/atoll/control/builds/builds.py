"""Builds, as APIs ask for them: begun, followed, cancelled, published under tags.

Theory of operation. `request` makes a WAITING build (and the template, when it is new); `start` gives it its recipe and makes this process
its owner. The owner beats every few seconds and ties each commit to the revision that it has read. A build whose owner is silent for
ABANDONED_S is taken over by whoever looks next (`run`), ATTEMPTS_MAX times; a process that stops in order lets go of its builds, so that the
next one takes them at once. Where only this process uses the store, every owned build that it finds at its start is an orphan.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import Dice, Prefix, TemplateId, new_id
from atoll.control.artifacts.imports import CPU_MILLIS, DISK_MIB, MEMORY_MIB, NAME
from atoll.control.artifacts.own_registry import OwnRegistry
from atoll.control.artifacts.templates import Templates
from atoll.control.builds import mounting
from atoll.control.builds.builder import ABANDONED_S, Builder
from atoll.control.builds.journal import Journal
from atoll.control.builds.mounting import Secrets
from atoll.control.builds.port import Workshop
from atoll.control.builds.steps import StepFailed
from atoll.control.builds.workshop import on_behalf
from atoll.control.service import Caller
from atoll.domain.building import DEFAULT_TAG, MOVES, Build, BuildRequest, Event, Line, Recipe, Result, State, Tag, version
from atoll.domain.deployment import BuildLimits
from atoll.domain.machine import step
from atoll.domain.operations import Act, Action
from atoll.domain.template import Template
from atoll.planning import recipes
from atoll.store import builds as stored
from atoll.store import operations, step_locks, tenancy
from atoll.store.engine import Store
from atoll.store.sealing import Sealer
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

TABLE: Final = "template_builds"
TAG: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
BEAT_S: Final = 5.0
LOOK_S: Final = 10.0
ATTEMPTS_MAX: Final = 3
WAITING_S: Final = 3600.0
KEPT_S: Final = 7 * 24 * 3600.0
COLLECT_S: Final = 3600.0
TEAM_BUILDS_MAX: Final = 20
TAGS_MAX: Final = 32


@dataclass(slots=True)
class Builds:
    """Part of control. `owner` is this process's run; `uploads` holds what clients have sent: `TEAM/files/HASH`."""

    store: Store
    clock: Clock
    dice: Dice
    sealer: Sealer
    templates: Templates
    workshop: Workshop | None
    uploads: Path
    owner: str
    own: OwnRegistry | None = None
    limits: Callable[[], BuildLimits] = BuildLimits
    """As they are now: a build keeps to those of when it begins to run."""
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    running: dict[str, Build] = field(default_factory=dict)
    secrets: dict[str, Secrets] = field(default_factory=dict, repr=False)
    """Of the builds that run here, and nowhere else: not even sealed."""
    builder: Builder | None = None
    collected_at: float = 0.0
    """Boot seconds, when what nothing needs was thrown away last."""

    def __post_init__(self) -> None:
        if self.workshop is not None:
            self.builder = Builder(self.store, self.clock, self.templates, self.workshop, self.archive)

    def archive(self, team_id: str, files_hash: str) -> Path:
        """Where what a COPY copies is kept; its name has been checked."""
        return self.uploads / team_id / "files" / files_hash

    # life

    async def open(self, *, alone: bool) -> None:
        """Take over what earlier processes left; `alone`: nobody else uses this store."""
        await self._take_over(0.0 if alone else ABANDONED_S)

    async def run(self) -> None:
        """Take over what is abandoned, and forget what is old, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._take_over(ABANDONED_S)
                await self._tidy()
                if self.clock.boot() - self.collected_at > COLLECT_S and self.workshop is not None:
                    self.collected_at = self.clock.boot()
                    await self.workshop.collect()
            except AtollError as error:
                LOG.warning(names.BUILD_FAILED, code=error.code, error=error.message)

    async def close(self) -> None:
        """Let go of what runs; the next process takes it over."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # asking

    async def request(self, caller: Caller, asked: BuildRequest) -> tuple[Template, Build]:
        """A build that waits for its steps. *Errors*: Refused INVALID_REQUEST, FORBIDDEN, NOT_SUPPORTED, BUILD_QUOTA."""
        if self.workshop is None:
            raise Refused(Code.NOT_SUPPORTED, "this control process cannot build: it has no store for images")
        name, tags = self._names(caller, asked)
        now = self.clock.now()
        fresh_id = TemplateId(new_id(Prefix.TEMPLATE, self.dice).removeprefix(Prefix.TEMPLATE))
        build_id = str(uuid.UUID(bytes=self.dice(16), version=4))

        def work(conn: sa.Connection) -> tuple[Template, Build]:
            going = [one for one in stored.unended(conn, team_id=caller.team.id) if one.state is State.BUILDING]
            if len(going) >= TEAM_BUILDS_MAX:
                raise Refused(Code.BUILD_QUOTA, f"the team has {len(going)} builds under way, at most {TEAM_BUILDS_MAX} are allowed")
            template = _own(conn, caller, name)
            template_id = template.id if template else fresh_id
            build = Build(
                id=build_id,
                revision=1,
                template_id=template_id,
                team_id=caller.team.id,
                name=template.name if template else name,
                tags=tags,
                state=State.WAITING,
                cpu_millis=asked.cpu_millis or CPU_MILLIS,
                memory_mib=asked.memory_mib or MEMORY_MIB,
                disk_mib=asked.disk_mib or DISK_MIB,
                created_at=now,
                recipe=self._pushed(asked, template_id, build_id),
            )
            if template is None:
                template = _unbuilt(build)
                tenancy.put_template(conn, template)
                self._note(conn, caller, Action.TEMPLATE_CREATE, template)
            stored.add(conn, build)
            return template, build

        return await self.store.write(work)

    def _names(self, caller: Caller, asked: BuildRequest) -> tuple[str, tuple[str, ...]]:
        whole, _, tag = asked.name.partition(":")
        namespace, slash, name = whole.rpartition("/")
        if slash and namespace != caller.team.name:
            raise Refused(Code.FORBIDDEN, f"{namespace[:80]!r} is another team's name")
        if NAME.fullmatch(name) is None:
            raise Refused(Code.INVALID_REQUEST, f"{name[:80]!r} is no name for a template: lower-case letters, digits, - and _")
        return name, checked_tags([*([tag] if tag else []), *asked.tags]) or (DEFAULT_TAG,)

    def _pushed(self, asked: BuildRequest, template_id: str, build_id: str) -> Recipe | None:
        if asked.pushed is None:
            return None
        if self.own is None:
            raise Refused(Code.NOT_SUPPORTED, "this control process has no registry to push to")
        return replace(asked.pushed, from_image=self.own.pushed(template_id, build_id))

    def _note(self, conn: sa.Connection, caller: Caller, action: Action, template: Template, **data: str) -> None:
        """Keep who did it, in the commit that does it."""
        act = Act(caller.actor(), action, template.id, data={"name": template.name, **data})
        operations.audit(conn, act, at=self.clock.now())

    async def start_pushed(self, caller: Caller, reference: str, build_id: str) -> Build:
        """Begin a build of an image that was pushed for it. *Errors*: as `start`; INVALID_REQUEST when its steps are still to come."""
        found = await self.get(caller, reference, build_id)
        if found.recipe is None:
            raise Refused(
                Code.INVALID_REQUEST, f"build {build_id} waits for its steps: POST /v2/templates/{{id}}/builds/{{id}} brings them"
            )
        return await self.start(caller, reference, build_id, found.recipe)

    async def start(
        self,
        caller: Caller,
        reference: str,
        build_id: str,
        recipe: Recipe,
        credentials: Mapping[str, str] | None = None,
        secrets: Mapping[str, bytes] | None = None,
    ) -> Build:
        """Give a build its recipe, and begin it. Older ones of the same template and tag are cancelled. `secrets` stay in memory.

        *Errors*: Refused BUILD_NOT_FOUND, TEMPLATE_NOT_FOUND, INVALID_REQUEST (a step, or not waiting any more).
        """
        recipes.check(recipe)
        found = await self.get(caller, reference, build_id)
        if found.state is not State.WAITING:
            raise Refused(Code.INVALID_REQUEST, f"build {build_id} is {found.state}: it has its steps already")
        now = self.clock.now()
        clear = json.dumps(dict(credentials or {})).encode()
        sealed = self.sealer.seal(clear, table=TABLE, row=build_id) if credentials else None
        begun = replace(
            found, state=step(MOVES, found.state, Event.BEGUN), recipe=recipe, owner=self.owner, beat_at=now, attempts=1, started_at=now
        )

        def work(conn: sa.Connection) -> tuple[Build, list[str]]:
            committed = stored.commit(conn, begun)
            if committed is None:
                raise Refused(Code.INVALID_REQUEST, f"build {build_id} was begun, or cancelled, meanwhile")
            stored.seal(conn, build_id, sealed)
            data = {"name": found.name, "build": build_id, "tags": ",".join(found.tags)}
            operations.audit(conn, Act(caller.actor(), Action.TEMPLATE_BUILD, found.template_id, data=data), at=now)
            older = [
                one
                for one in stored.unended(conn, template_id=found.template_id)
                if one.id != build_id and one.state is State.BUILDING and set(one.tags) & set(found.tags)
            ]
            reason = f"build {build_id} of the same template was begun"
            return committed, [one.id for one in older if self._cancel(conn, one, reason)]

        build, cancelled = await self.store.write(work)
        self._stop(cancelled)
        self.secrets[build.id] = Secrets(dict(secrets or {}))
        self._spawn(build)
        return build

    async def get(self, caller: Caller, reference: str, build_id: str) -> Build:
        """One of the team's builds. *Errors*: Refused BUILD_NOT_FOUND, TEMPLATE_NOT_FOUND."""
        template = await self.templates.get(caller, reference)
        found = await self.store.read(lambda conn: stored.get(conn, build_id))
        if found is None or found.template_id != template.id or found.team_id != caller.team.id:
            raise Refused(Code.BUILD_NOT_FOUND, f"build {build_id[:80]!r} of template {reference[:80]!r} was not found")
        return found

    async def log(self, build: Build, *, levels: Sequence[str] | None = None, offset: int = 0, limit: int | None = None) -> Sequence[Line]:
        """A build's log, oldest first; of these levels, without the first `offset` lines, `limit` at most."""
        return await self.store.read(lambda conn: stored.lines(conn, build.id, levels=levels, offset=offset, limit=limit))

    async def why(self, build: Build, *, limit: int) -> Sequence[Line]:
        """The end of what the step has said that a build failed at."""
        if build.state is not State.FAILED:
            return ()
        return await self.store.read(
            lambda conn: stored.last_lines(conn, build.id, build.failed_step, levels=("warn", "error"), limit=limit)
        )

    async def of_template(self, template: Template) -> Sequence[Build]:
        """A template's newest builds."""
        return await self.store.read(lambda conn: stored.of_template(conn, template.id))

    async def summary(self, caller: Caller) -> Mapping[str, tuple[int, State]]:
        """Of each of the team's templates that was ever built: how many builds, and the state of the newest."""
        return await self.store.read(lambda conn: stored.summary(conn, caller.team.id))

    # tags

    async def tags(self, caller: Caller, reference: str) -> Sequence[Tag]:
        """A template's tags. One that was not built from steps has its one version."""
        template = await self.templates.get(caller, reference)
        found = await self.store.read(lambda conn: stored.tags(conn, template.id))
        implied = [Tag(DEFAULT_TAG, template.build_id, template.updated_at)]
        return found if not template.image or any(one.name == DEFAULT_TAG for one in found) else [*implied, *found]

    async def assign(self, caller: Caller, target: str, tags: Sequence[str]) -> Build:
        """More tags for the build that `name[:tag]` names. *Errors*: Refused INVALID_REQUEST, FORBIDDEN, TEMPLATE_NOT_FOUND, BUILD_NOT_FOUND."""
        wanted = checked_tags(tags)
        if not wanted:
            raise Refused(Code.INVALID_REQUEST, "no tag is named")
        name, _, tag = target.partition(":")
        template = await self._owned(caller, name)

        def work(conn: sa.Connection) -> Build:
            build = stored.tagged(conn, template.id, tag or DEFAULT_TAG)
            if build is None or build.result is None:
                raise Refused(Code.BUILD_NOT_FOUND, f"template {name[:80]!r} has no build with tag {tag or DEFAULT_TAG!r}")
            self._name(conn, template, build, build.result, wanted)
            self._note(conn, caller, Action.TEMPLATE_TAG, template, build=build.id, tags=",".join(wanted))
            return build

        return await self.store.write(work)

    async def remove_tags(self, caller: Caller, name: str, tags: Sequence[str]) -> None:
        """Take tags away; `default` stays. *Errors*: as `assign`."""
        wanted = checked_tags(tags)
        if DEFAULT_TAG in wanted:
            raise Refused(Code.INVALID_REQUEST, f"the tag {DEFAULT_TAG!r} cannot be removed")
        template = await self._owned(caller, name)

        def work(conn: sa.Connection) -> None:
            stored.untag(conn, template.id, wanted)
            self._note(conn, caller, Action.TEMPLATE_UNTAG, template, tags=",".join(wanted))

        await self.store.write(work)

    async def set_public(self, caller: Caller, reference: str, *, public: bool) -> Template:
        """Whether other teams may use a template. *Errors*: Refused FORBIDDEN (not the team's; public without being an operator)."""
        template = await self._owned(caller, reference)
        if public and not caller.operator:
            raise Refused(Code.FORBIDDEN, "only an operator may make a template everybody's")
        changed = replace(template, public=public)

        def work(conn: sa.Connection) -> None:
            tenancy.put_template(conn, changed)
            self._note(conn, caller, Action.TEMPLATE_PUBLISH if public else Action.TEMPLATE_UNPUBLISH, template)

        await self.store.write(work)
        return changed

    def drop(self, template: Template) -> None:
        """A template is gone, with its builds on record: what is under way here ends."""
        self._stop([build_id for build_id, build in self.running.items() if build.template_id == template.id])

    async def _owned(self, caller: Caller, reference: str) -> Template:
        template = await self.templates.get(caller, reference)
        if template.team_id != caller.team.id:
            raise Refused(Code.FORBIDDEN, f"template {reference[:80]!r} is not this team's")
        return template

    # running

    def _spawn(self, build: Build) -> None:
        task = asyncio.create_task(self._run(build), name=f"build {build.id}")
        self.tasks[build.id], self.running[build.id] = task, build
        task.add_done_callback(
            lambda _done: (self.tasks.pop(build.id, None), self.running.pop(build.id, None), self.secrets.pop(build.id, None))
        )

    def _stop(self, build_ids: Sequence[str]) -> None:
        for build_id in build_ids:
            if task := self.tasks.get(build_id):
                task.cancel()

    async def _run(self, build: Build) -> None:
        """Build, and say how it ended. Cancelled: somebody else has ended it, or this process stops and lets go of it."""
        assert self.workshop is not None
        beating = asyncio.create_task(self._beat(build, asyncio.current_task()))
        try:
            await self.workshop.clear(build)
            await self._ended(build, await self._made(build))
            await self.workshop.retire()
            await self.workshop.tidy()
        except asyncio.CancelledError:
            await asyncio.shield(self._let_go(build))
            raise
        except AtollError as error:
            # The store does not answer, or somebody else has it now: it is taken over, or has ended.
            LOG.warning(names.BUILD_FAILED, build_id=build.id, code=error.code, error=error.message)
        except Exception:
            LOG.exception(names.BUILD_FAILED, build_id=build.id, code=Code.INTERNAL)
        finally:
            beating.cancel()

    async def _made(self, build: Build) -> Build:
        """The build as it ended."""
        assert self.builder is not None
        assert self.workshop is not None
        caller = await self._on_behalf(build)
        credentials = await self._credentials(build)
        secrets = self.secrets.get(build.id, Secrets(known=False))
        async with Journal(self.store, self.clock, build.id, hidden=secrets.lines()) as journal, self.workshop.keeping():
            if build.attempts > 1:
                journal.say("control was stopped meanwhile: going on from what was done", level="warn")
            whole_s = self.limits().whole_s
            limit = asyncio.timeout(whole_s)
            try:
                async with limit:
                    result = await self.builder.run(build, caller, credentials, journal, secrets)
                return replace(build, state=step(MOVES, build.state, Event.DONE), result=result, finished_at=self.clock.now())
            except StepFailed as error:
                return self._failed(build, Code.BUILD_FAILED, str(error), journal.step)
            except AtollError as error:
                return self._failed(build, error.code, error.message, journal.step)
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    message = f"the build took longer than {whole_s:g} s"
                    journal.say(message, level="error")
                    return self._failed(build, Code.BUILD_TIMEOUT, message, journal.step)
                LOG.exception(names.BUILD_FAILED, build_id=build.id, code=Code.INTERNAL)
                journal.say("unexpected failure; control's log says more", level="error")
                return self._failed(build, Code.INTERNAL, "unexpected failure; control's log says more", journal.step)

    def _failed(self, build: Build, code: Code, message: str, failed_step: str | None) -> Build:
        state = step(MOVES, build.state, Event.BROKE)
        return replace(build, state=state, code=code.value, message=message[:4000], failed_step=failed_step, finished_at=self.clock.now())

    async def _ended(self, build: Build, ended: Build) -> None:
        """Record the end, and for a good one what its tags name from now on, in one commit: or nothing, when it is ours no more."""

        def work(conn: sa.Connection) -> bool:
            if stored.commit(conn, replace(ended, owner=None, beat_at=None)) is None:
                return False
            stored.seal(conn, build.id, None)
            if ended.result is not None:
                template = tenancy.template(conn, build.template_id)
                if template is not None:
                    self._name(conn, template, ended, ended.result, build.tags)
            return True

        if await self.store.write(work):
            event = names.TEMPLATE_REGISTERED if ended.result is not None else names.BUILD_FAILED
            LOG.info(event, build_id=build.id, name=build.name, code=ended.code, image=ended.result.image if ended.result else None)

    def _name(self, conn: sa.Connection, template: Template, build: Build, result: Result, tags: Sequence[str]) -> None:
        now = self.clock.now()
        for name in tags:
            stored.tag(conn, template.id, name, build.id, now=now)
        if DEFAULT_TAG in tags:
            tenancy.put_template(conn, version(template, build, result, now=now))

    def _cancel(self, conn: sa.Connection, build: Build, reason: str) -> bool:
        ended = replace(
            build,
            state=step(MOVES, build.state, Event.CANCELLED),
            code=Code.BUILD_CANCELLED.value,
            message=reason,
            owner=None,
            beat_at=None,
            finished_at=self.clock.now(),
        )
        stored.seal(conn, build.id, None)
        return stored.commit(conn, ended) is not None

    async def _beat(self, build: Build, running: asyncio.Task[None] | None) -> None:
        """Say that it is being built here, and end the work when it is not ours any more."""
        while True:
            await asyncio.sleep(BEAT_S)
            now = self.clock.now()
            try:
                ours = await self.store.write(lambda conn, now=now: stored.beat(conn, build.id, owner=self.owner, now=now))  # type: ignore[misc]
            except AtollError:
                continue
            if not ours and running is not None:
                running.cancel()
                return

    async def _let_go(self, build: Build) -> None:
        """The next process may have it at once, and what it has on hosts ends."""
        assert self.workshop is not None
        with contextlib.suppress(AtollError):
            await self.store.write(lambda conn: stored.commit(conn, replace(build, owner=None, beat_at=None)))
            await self.workshop.clear(build)
        # A pull in the middle of which it was cancelled has been killed.
        await self.workshop.tidy()

    # other processes' builds

    async def _take_over(self, silent_s: float) -> None:
        if self.workshop is None:
            return
        now = self.clock.now()

        def work(conn: sa.Connection) -> list[Build]:
            taken = []
            for build in stored.unended(conn):
                if build.state is State.BUILDING and build.id not in self.tasks and (build.beat_at or 0.0) <= now - silent_s:
                    mine = replace(build, owner=self.owner, beat_at=now, attempts=build.attempts + 1)
                    if build.attempts >= ATTEMPTS_MAX:
                        stored.commit(conn, self._interrupted(build))
                    elif (committed := stored.commit(conn, mine)) is not None:
                        taken.append(committed)
            return taken

        for build in await self.store.write(work):
            LOG.info(names.BUILD_TAKEN_OVER, build_id=build.id, attempts=build.attempts)
            self._spawn(build)

    def _interrupted(self, build: Build) -> Build:
        message = f"control was stopped {build.attempts} times while it built this"
        return replace(self._failed(build, Code.BUILD_INTERRUPTED, message, None), owner=None, beat_at=None)

    async def _tidy(self) -> None:
        """End builds whose steps never came; forget old builds, steps and uploads."""
        now = self.clock.now()

        def work(conn: sa.Connection) -> None:
            for build in stored.unended(conn):
                if build.state is State.WAITING and build.created_at < now - WAITING_S:
                    self._cancel(conn, build, "its steps never came")
            stored.forget(conn, before=now - KEPT_S)
            stored.forget_steps(conn, before=now - KEPT_S)
            step_locks.sweep(conn)

        await self.store.write(work)
        if self.workshop is not None:
            await self.workshop.release_orphans()
            await self.workshop.retire()
        await asyncio.to_thread(_sweep, self.uploads, now - KEPT_S)
        await asyncio.to_thread(mounting.forget, self.uploads, before=now - KEPT_S)

    async def _on_behalf(self, build: Build) -> Caller:
        """Whose things a build may use: its team's."""
        name = await self.store.read(lambda conn: tenancy.team_name(conn, build.team_id))
        return on_behalf(build, name or "")

    async def _credentials(self, build: Build) -> Mapping[str, str]:
        sealed = await self.store.read(lambda conn: stored.sealed(conn, build.id))
        if sealed is None:
            return {}
        clear: dict[str, str] = json.loads(self.sealer.open(sealed, table=TABLE, row=build.id))
        return clear


def checked_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Each once, in their order. *Errors*: Refused INVALID_REQUEST."""
    for one in tags:
        if TAG.fullmatch(one) is None:
            raise Refused(Code.INVALID_REQUEST, f"{one[:80]!r} is no tag: lower-case letters, digits, ., - and _")
    if len(tags) > TAGS_MAX:
        raise Refused(Code.INVALID_REQUEST, f"at most {TAGS_MAX} tags are named at once")
    return tuple(dict.fromkeys(tags))


def _unbuilt(build: Build) -> Template:
    return Template(
        id=build.template_id,
        team_id=build.team_id,
        name=build.name,
        aliases=(build.name,),
        public=False,
        build_id=build.id,
        image="",
        cpu_millis=build.cpu_millis,
        memory_mib=build.memory_mib,
        disk_mib=build.disk_mib,
        default_user=recipes.USER,
        default_workdir=None,
        created_at=build.created_at,
        updated_at=build.created_at,
    )


def _own(conn: sa.Connection, caller: Caller, name: str) -> Template | None:
    """The team's template of that name. *Errors*: Refused FORBIDDEN when it is everybody's."""
    for one in stored.templates_of(conn, caller.team.id, name):
        if one.team_id is None:
            raise Refused(Code.FORBIDDEN, f"{name!r} is a ready-made template: choose another name")
        return one
    return None


def _sweep(uploads: Path, before: float) -> None:
    for path in uploads.glob("*/files/*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before:
                path.unlink()
