"""Imports: images become templates.

Theory of operation. `begin` commits a RUNNING import and answers; a task pulls the image into the store with `atoll-io` (which checks
every blob down to the last entry of its archive) and commits the template's new build together with READY, or FAILED with a code. What
is under way is known to this process only, with its log and its credentials. Blobs are collected when nothing is being pulled.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import Dice, Prefix, TemplateId, new_id
from atoll.control.artifacts.own_registry import OwnRegistry
from atoll.control.operations import CollectedArtifacts
from atoll.control.service import Caller
from atoll.domain.building import DEFAULT_TAG
from atoll.domain.importing import MOVES, Event, Import, ImportRequest, State
from atoll.domain.machine import step
from atoll.domain.operations import Act, Action
from atoll.domain.template import Template
from atoll.domain.tenancy import Role
from atoll.images.carrier import Carrier
from atoll.images.library import Collected, Library
from atoll.store import builds, operations, tenancy
from atoll.store import imports as stored
from atoll.store.engine import Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
ARCHIVE: Final = re.compile(r"archive:sha256:(?P<hex>[0-9a-f]{64})(?P<tag>:[\w][\w.-]{0,127})?")
SIDE_BY_SIDE: Final = 2
RUNNING_MAX: Final = 16
IMPORT_S: Final = 1800.0
KEPT_S: Final = 7 * 24 * 3600.0
ENV_BYTES_MAX: Final = 32 << 10
CPU_MILLIS: Final = 1000
MEMORY_MIB: Final = 512
DISK_MIB: Final = 2048


@dataclass(slots=True)
class Imports:
    """Part of the Service. `uploads` holds archives that teams have sent: `TEAM/HEX.tar`."""

    store: Store
    clock: Clock
    dice: Dice
    carrier: Carrier | None
    uploads: Path
    library: Library | None = None
    """With the carrier: where its images are kept."""
    own: OwnRegistry | None = None
    logs: dict[str, list[str]] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    holders: int = 0
    """Builds under way: they count on blobs that nothing on record names yet."""
    collecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SIDE_BY_SIDE))

    async def open(self, *, alone: bool) -> None:
        """End what an earlier process left under way; `alone`: nobody else uses this store, nor what is unfinished beside it."""

        def work(conn: sa.Connection) -> None:
            for one in stored.running(conn):
                stored.end(conn, self._failed(one, Code.IMPORT_INTERRUPTED, "control was stopped while it imported"))

        await self.store.write(work)
        if self.library is not None and alone:
            await self.library.tidy(idle_s=0.0)

    async def close(self) -> None:
        """Break off what runs; the next start says so of it."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def begin(self, caller: Caller, request: ImportRequest) -> Import:
        """Accept an import. *Errors*: Refused INVALID_REQUEST, FORBIDDEN, NOT_SUPPORTED, RATE_LIMITED."""
        if self.carrier is None:
            raise Refused(Code.NOT_SUPPORTED, "this control process has no store for images")
        if NAME.fullmatch(request.name) is None:
            raise Refused(Code.INVALID_REQUEST, f"{request.name[:80]!r} is no name for a template: lower-case letters, digits, - and _")
        if request.public and caller.client.role is not Role.OPERATOR:
            raise Refused(Code.FORBIDDEN, "only an operator may make a template everybody's")
        if len(self.tasks) >= RUNNING_MAX:
            raise Refused(Code.RATE_LIMITED, f"{RUNNING_MAX} imports are under way")
        source = await self._source(caller, request.source)
        one = Import(
            id=new_id(Prefix.IMPORT, self.dice),
            team_id=caller.team.id,
            name=request.name,
            source=request.source,
            state=State.RUNNING,
            created_at=self.clock.now(),
        )
        await self.store.write(lambda conn: self._accept(conn, caller, one))
        self.logs[one.id] = []
        task = asyncio.create_task(self._run(one, request, source, caller.team.name), name=f"import {one.id}")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return one

    def _accept(self, conn: sa.Connection, caller: Caller, one: Import) -> None:
        for known in tenancy.templates_for(conn, one.team_id):
            if known.team_id is None and one.name in (known.name, *known.aliases):
                raise Refused(Code.INVALID_REQUEST, f"{one.name!r} is a ready-made template: choose another name")
        stored.forget(conn, before=one.created_at - KEPT_S)
        stored.add(conn, one)
        act = Act(caller.actor(), Action.TEMPLATE_IMPORT, one.id, data={"name": one.name, "source": one.source})
        operations.audit(conn, act, at=one.created_at)

    async def _source(self, caller: Caller, text: str) -> str:
        """What the program is told. Only registries and the team's own uploads: no path comes from a client."""
        if text.startswith("registry:") and len(text) > len("registry:"):
            return text
        match = ARCHIVE.fullmatch(text)
        if match is None:
            raise Refused(Code.INVALID_REQUEST, "the source is registry:REFERENCE or archive:sha256:DIGEST[:TAG] of an uploaded archive")
        path = self.uploads / caller.team.id / f"{match['hex']}.tar"
        if self.library is None or not await self.library.bring_upload(path):
            raise Refused(Code.INVALID_REQUEST, f"the team has uploaded no archive sha256:{match['hex']}")
        return f"archive:{path}{match['tag'] or ''}"

    async def get(self, caller: Caller, import_id: str) -> Import:
        """One of the team's imports, with its log so far. *Errors*: Refused IMPORT_NOT_FOUND."""
        for one in await self.all(caller):
            if one.id == import_id:
                return one
        raise Refused(Code.IMPORT_NOT_FOUND, f"import {import_id[:80]!r} was not found")

    async def all(self, caller: Caller) -> Sequence[Import]:
        """The team's newest imports."""
        found = await self.store.read(lambda conn: stored.of_team(conn, caller.team.id))
        return [replace(one, log=tuple(self.logs.get(one.id, one.log))) for one in found]

    async def delete(self, caller: Caller, template: Template) -> None:
        """Take a template away. *Errors*: Refused FORBIDDEN (not the team's), TEMPLATE_IN_USE."""
        if template.team_id != caller.team.id:
            raise Refused(Code.FORBIDDEN, f"template {template.name!r} is not this team's")

        def work(conn: sa.Connection) -> None:
            if count := stored.sandboxes_on(conn, template.id):
                raise Refused(Code.TEMPLATE_IN_USE, f"{count} sandbox(es) use template {template.name!r}")
            stored.remove_template(conn, template.id)
            builds.remove_of_template(conn, template.id)
            operations.audit(
                conn, Act(caller.actor(), Action.TEMPLATE_DELETE, template.id, data={"name": template.name}), at=self.clock.now()
            )

        await self.store.write(work)
        LOG.info(names.TEMPLATE_REMOVED, name=template.name, image=template.image)
        await self.collect()

    @contextlib.asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """While this is open no blob is removed."""
        self.holders += 1
        try:
            # What is being removed is gone before anybody counts on it.
            async with self.collecting:
                pass
            yield
        finally:
            self.holders -= 1

    async def collect(self) -> None:
        """Remove the blobs that no template and no living sandbox needs, when nothing is being pulled: whoever begins to waits meanwhile."""
        try:
            await self._collect(dry_run=False)
        except AtollError as error:
            LOG.warning(names.ARTIFACTS_NOT_COLLECTED, code=error.code, error=error.message)

    async def _collect(self, *, dry_run: bool) -> Collected:
        if self.library is None or self._busy():
            return Collected((), 0)
        async with self.collecting:
            wanted = await self.store.read(lambda conn: stored.images_wanted(conn) | builds.images_wanted(conn))
            return Collected((), 0) if self._busy() else await self.library.collect(wanted, dry_run=dry_run)

    async def collected(self, dry_run: bool) -> CollectedArtifacts:  # noqa: FBT001 - it is the one thing that is said
        """As Operations.collect. *Errors*: those of the artifact store."""
        if self._busy():
            return CollectedArtifacts((), 0, busy=True)
        found = await self._collect(dry_run=dry_run)
        return CollectedArtifacts(found.keys, found.size)

    async def tidy(self) -> None:
        """Remove what pulls that were killed have left unfinished, when nothing is being pulled. Unlike `collect` it looks at no blob."""
        if self.library is None or self._busy():
            return
        async with self.collecting:
            # Whoever waited for the lock as well may have begun meanwhile.
            if not self._busy():
                await self.library.tidy()

    def _busy(self) -> bool:
        return bool(self.holders or self.tasks - {asyncio.current_task()})

    async def _run(self, one: Import, request: ImportRequest, source: str, team: str) -> None:
        try:
            ended = await self._pull(one, request, source, team)
        except AtollError as error:
            ended = self._failed(one, error.code, error.message)
        except TimeoutError:
            ended = self._failed(one, Code.IMAGE_UNAVAILABLE, f"it took longer than {IMPORT_S:g} s")
        except Exception:
            LOG.exception(names.TEMPLATE_REFUSED, name=one.name, code=Code.INTERNAL)
            ended = self._failed(one, Code.INTERNAL, "unexpected failure; control's log says more")
        if ended is not None:
            LOG.warning(names.TEMPLATE_REFUSED, name=one.name, code=ended.code, error=ended.message)
            await self.store.write(lambda conn: stored.end(conn, ended))
        self.logs.pop(one.id, None)
        if source.startswith("archive:"):
            with contextlib.suppress(OSError, AtollError):
                if self.library is not None:
                    await self.library.drop_upload(self._upload_of(one))
        await self.collect()

    async def login(self, team_id: str, team: str, source: str) -> Mapping[str, str]:
        """What a pull without credentials is given: the team's right, where the source is an image of its own in our registry."""
        if self.own is None:
            return {}
        reference = source.removeprefix("registry:")
        named = self.own.template_of(reference)
        owned = await self.store.read(lambda conn: tenancy.owned(conn, team_id, {named})) if named else ()
        return self.own.login(team, reference, templates=owned)

    def _upload_of(self, one: Import) -> Path:
        match = ARCHIVE.fullmatch(one.source)
        assert match is not None
        return self.uploads / one.team_id / f"{match['hex']}.tar"

    async def _pull(self, one: Import, request: ImportRequest, source: str, team: str) -> Import | None:
        """None when the template is there; else how it failed."""
        assert self.carrier is not None
        log = self.logs[one.id]

        def told(line: Mapping[str, Any]) -> None:
            log.append(f"{line['event']} layer {int(line['layer']) + 1}: {line['digest']}, {line['size']} bytes")

        async with self.room, asyncio.timeout(IMPORT_S):
            log.append(f"pulling {one.source}")
            async with self.collecting:
                pass
            record = await self.carrier.pull(source, options=request.credentials or await self.login(one.team_id, team, source), told=told)
            if self.library is not None:
                await self.library.publish(str(record["digest"]))
        log.append(f"image {record['digest']}, {len(record['layers'])} layers, {record['bytes']} bytes")
        await self.store.write(lambda conn: self._publish(conn, one, request, record, tuple(log)))
        LOG.info(names.TEMPLATE_REGISTERED, name=one.name, image=record["digest"])
        return None

    def _publish(self, conn: sa.Connection, one: Import, request: ImportRequest, record: Mapping[str, Any], log: tuple[str, ...]) -> None:
        """The template's new build and the import's end, in one commit."""
        now = self.clock.now()
        known = next((t for t in tenancy.templates_for(conn, one.team_id) if t.team_id == one.team_id and t.name == one.name), None)
        template = Template(
            id=known.id if known else TemplateId(new_id(Prefix.TEMPLATE, self.dice).removeprefix(Prefix.TEMPLATE)),
            team_id=one.team_id,
            name=one.name,
            aliases=(one.name,),
            public=request.public,
            build_id=str(uuid.UUID(bytes=self.dice(16), version=4)),
            image=str(record["digest"]),
            cpu_millis=request.cpu_millis or CPU_MILLIS,
            memory_mib=request.memory_mib or MEMORY_MIB,
            disk_mib=request.disk_mib or DISK_MIB,
            default_user=str(record["user"] or "user"),
            default_workdir=str(record["workingDir"]) or None,
            created_at=known.created_at if known else now,
            updated_at=now,
            env=environment(record["env"] or ()),
            command=("/bin/sh", "-c", request.start_command) if request.start_command else (),
            source=one.source,
        )
        ended = replace(
            one,
            state=step(MOVES, one.state, Event.DONE),
            log=log,
            template_id=template.id,
            image=template.image,
            finished_at=now,
        )
        if stored.end(conn, ended):
            tenancy.put_template(conn, template)
            builds.untag(conn, template.id, [DEFAULT_TAG])

    def _failed(self, one: Import, code: Code, message: str) -> Import:
        log = (*self.logs.get(one.id, one.log), f"failed: {code}: {message}")
        state = step(MOVES, one.state, Event.BROKE)
        return replace(one, state=state, log=log, code=code.value, message=message, finished_at=self.clock.now())


def environment(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """An image's environment as pairs. *Errors*: Refused IMAGE_REFUSED when there is too much of it."""
    if sum(len(line.encode()) for line in lines) > ENV_BYTES_MAX:
        raise Refused(Code.IMAGE_REFUSED, f"the image's environment has more than {ENV_BYTES_MAX} bytes")
    pairs = [line.partition("=") for line in lines]
    return tuple((name, value) for name, sign, value in pairs if name and sign and "\0" not in value)


def free_bytes(directory: Path) -> int:
    """Room for what is uploaded."""
    return shutil.disk_usage(directory).free
