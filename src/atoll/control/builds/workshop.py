"""The real workshop: benches are ordinary sandboxes of the build's team, placed, started and ended like any other.

They are found again by their client, which is the build, and kept out of the team's lists by it. What runs inside is spoken to by the guest's
contract (`Inside`, given by the program); what has changed comes from the sandbox's host (`captures.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.control.artifacts.imports import IMPORT_S, Imports
from atoll.control.builds.amazon import KEYS, Amazon
from atoll.control.builds.port import Bench, Ended, Layer, Pulled, Told
from atoll.control.sandboxes.sandboxes import Sandboxes
from atoll.control.sandboxes.snapshots import Taking
from atoll.control.service import Caller
from atoll.control.sessions.captures import Captures
from atoll.domain.building import Build, Result, client_of, version
from atoll.domain.deployment import BuildLimits
from atoll.domain.sandbox import Sandbox
from atoll.domain.snapshot import Purpose
from atoll.domain.spec import NetworkSpec, SaveMode, Spec
from atoll.domain.template import Template
from atoll.domain.tenancy import Client, Role, Team
from atoll.images import assembling
from atoll.images.library import Library
from atoll.planning.beginning import Beginning
from atoll.planning.resolve import CreateRequest
from atoll.planning.stimuli import ReleaseRequested
from atoll.store import builds, tenancy
from atoll.store import sandboxes as stored
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

DISK_MIB: Final = 8192
"""Of a bench, within its class: what steps write, several times over."""
PATIENCE_S: Final = 900.0
"""How long it waits for a sandbox, besides for what starts in it: the first one on a host waits for the image to be unpacked."""
SPARE_S: Final = 60.0
"""A sandbox of a build lives so much longer than a build may take, should nobody end it."""


class Inside(Protocol):
    """The inside of one sandbox."""

    async def run(
        self, command: Sequence[str], *, user: str, cwd: str | None, env: Mapping[str, str], timeout_s: float, told: Told
    ) -> Ended:
        """Run a command to its end. *Errors*: Refused SANDBOX_NOT_FOUND; Unavailable."""
        ...

    async def put(self, path: str, source: Path) -> None:
        """Write a file, root's. *Errors*: as `run`."""
        ...

    async def get(self, path: str, target: Path) -> None:
        """Read a file, as root. *Errors*: as `run`; Refused HOST_DISK_FULL when it does not fit here."""
        ...

    async def close(self) -> None: ...


Connect = Callable[[str, str], Inside]
"""`connect(sandbox_id, access_token)`."""


@dataclass(slots=True)
class SandboxWorkshop:
    """Implements port.Workshop."""

    sandboxes: Sandboxes
    imports: Imports
    captures: Captures
    connect: Connect
    amazon: Amazon

    async def pull(self, source: str, caller: Caller, credentials: Mapping[str, str], told: Told) -> Pulled:
        """See Workshop."""
        assert self.imports.carrier is not None
        if KEYS[0] in credentials:
            credentials = await self.amazon.login(credentials)
        credentials = credentials or await self.imports.login(caller.team.id, caller.team.name, source)
        async with self.imports.room, _within(IMPORT_S):
            record = await self.imports.carrier.pull(
                source,
                options=credentials,
                told=lambda line: told("info", f"{line['event']} layer {int(line['layer']) + 1}: {line['digest']}"),
            )
            await self._library.publish(str(record["digest"]))
        return Pulled(str(record["digest"]), tuple(record["env"] or ()))

    @contextlib.asynccontextmanager
    async def bench(self, build: Build, image: str) -> AsyncIterator[Bench]:
        """See Workshop."""
        async with self._sandbox(build, _plain(build, image), tmp_on_disk=True) as sandbox:
            inside = self.connect(sandbox.id, self.sandboxes.tokens.access(sandbox.id))
            try:
                yield SandboxBench(inside, sandbox, self.captures, self._limits.step_s)
            finally:
                await inside.close()

    async def try_out(self, build: Build, result: Result) -> str:
        """See Workshop."""
        template = version(_plain(build, result.image), build, result, now=build.created_at)
        # As every sandbox of it will be: nothing that a step has left in the guest's tmp is there any more.
        async with self._sandbox(build, template, tmp_on_disk=False, disk_mib=build.disk_mib) as sandbox:
            return await self._keep(build, sandbox)

    async def _keep(self, build: Build, sandbox: Sandbox) -> str:
        """Keep what runs in it for sandboxes of this build to begin from; that is no condition of a build. What came of it."""
        snapshots = self.sandboxes.snapshots
        try:
            taken = await snapshots.take(await self._caller(build), sandbox.id, Taking(SaveMode.FULL, purpose=Purpose.TEMPLATE))
        except AtollError as error:
            return f"the start command is ready; each sandbox begins it anew ({error.code}: {error.message.splitlines()[0][:300]})"
        if taken.mode is not SaveMode.FULL:
            await snapshots.let_go(taken.id)
            return f"the start command is ready; each sandbox begins it anew ({sandbox.spec.isolation} keeps no memory)"
        return f"the start command is ready and kept as it runs ({-(-taken.size_bytes >> 20)} MiB): sandboxes begin with it"

    async def retire(self) -> None:
        """See Workshop."""
        await self.sandboxes.snapshots.retire()

    async def extend(self, image: str, layer: Layer) -> str:
        """See Workshop."""
        library = self._library
        await library.documents(image)
        made = await asyncio.to_thread(assembling.extend, library.bench, image, layer=layer.digest, size=layer.size)
        await library.publish(made)
        return made

    async def compose(self, root: Path) -> str:
        """See Workshop."""
        library = self._library
        made = await asyncio.to_thread(assembling.compose, library.bench, root)
        await library.publish(made)
        return made

    async def root_of(self, image: str) -> Path:
        """See Workshop."""
        await self._library.documents(image)
        (digest,) = await asyncio.to_thread(assembling.layers_of, self._library.bench, image)
        return await self._library.blob(digest)

    async def has(self, image: str) -> bool:
        """See Workshop."""
        return await self._library.has(image)

    async def bring(self, archive: Path) -> bool:
        """See Workshop."""
        return await self._library.bring_upload(archive)

    async def bring_cache(self, archive: Path) -> None:
        """See Workshop."""
        await self._library.bring_cache(archive)

    async def share_cache(self, archive: Path, *, team_bytes_max: int) -> None:
        """See Workshop."""
        await self._library.share_cache(archive, folder_bytes_max=team_bytes_max)

    def keeping(self) -> AbstractAsyncContextManager[None]:
        """See Workshop."""
        return self.imports.keeping()

    async def release_orphans(self) -> None:
        """See Workshop."""
        for sandbox_id in await self.sandboxes.store.read(builds.orphans):
            await self._release(sandbox_id)

    async def tidy(self) -> None:
        """See Workshop."""
        await self.imports.tidy()

    async def collect(self) -> None:
        """See Workshop."""
        await self.imports.collect()

    async def clear(self, build: Build) -> None:
        """See Workshop."""
        client_id = client_of(build.id)
        for sandbox_id in await self.sandboxes.store.read(lambda conn: stored.living_of(conn, client_id)):
            await self._release(sandbox_id)

    @property
    def _limits(self) -> BuildLimits:
        return self.sandboxes.configuration.current.builds

    @property
    def _library(self) -> Library:
        assert self.imports.library is not None
        return self.imports.library

    @contextlib.asynccontextmanager
    async def _sandbox(self, build: Build, template: Template, *, tmp_on_disk: bool, disk_mib: int | None = None) -> AsyncIterator[Sandbox]:
        caller = await self._caller(build)
        policy = self.sandboxes.configuration.current.classes[self.sandboxes.configuration.current.default_class]
        limits = self._limits
        request = CreateRequest(
            cpu_millis=build.cpu_millis,
            memory_mib=build.memory_mib,
            disk_mib=min(disk_mib or max(build.disk_mib, DISK_MIB), policy.disk_mib.max),
            network=NetworkSpec(public_traffic=False),
        )

        def patient(spec: Spec) -> Spec:
            # A class's longest life is for what its users begin: a step may take as long as its build.
            life_s = int(limits.whole_s + SPARE_S)
            patience_s = PATIENCE_S + limits.start_s
            return replace(
                spec, tmp_on_disk=tmp_on_disk, create_patience_s=patience_s, start_s=limits.start_s, timeout_s=life_s, timeout_s_max=life_s
            )

        sandbox = await self.sandboxes.create(caller, request, begun=Beginning(request, template, patient, on_record=False))
        try:
            yield sandbox
        finally:
            await asyncio.shield(self._release(sandbox.id))

    async def _release(self, sandbox_id: str) -> None:
        try:
            await self.sandboxes.reconciler.apply(sandbox_id, ReleaseRequested(Code.RELEASE_REQUESTED))
        except AtollError as error:
            # It ends by itself at its end, or when the build is taken over.
            LOG.warning(names.BUILD_FAILED, sandbox_id=sandbox_id, code=error.code, error=error.message)

    async def _caller(self, build: Build) -> Caller:
        name = await self.sandboxes.store.read(lambda conn: tenancy.team_name(conn, build.team_id))
        return on_behalf(build, name or "")


@dataclass(slots=True)
class SandboxBench:
    """Implements port.Bench."""

    inside: Inside
    sandbox: Sandbox
    captures: Captures
    step_s: float

    async def run(self, command: Sequence[str], *, user: str, cwd: str | None, env: Mapping[str, str], told: Told) -> Ended:
        """See Bench."""
        return await self.inside.run(command, user=user, cwd=cwd, env=env, timeout_s=self.step_s, told=told)

    async def put(self, path: str, source: Path) -> None:
        """See Bench."""
        await self.inside.put(path, source)

    async def get(self, path: str, target: Path) -> None:
        """See Bench."""
        await self.inside.get(path, target)

    async def layer(self) -> Layer:
        """See Bench."""
        if self.sandbox.host_id is None or self.sandbox.placement_id is None:
            raise Refused(Code.SANDBOX_NOT_FOUND, "the sandbox of the step is on no host")
        found = await self.captures.take(host_id=self.sandbox.host_id, placement_id=self.sandbox.placement_id)
        return Layer(found.digest, found.size, found.entries)


@contextlib.asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    """*Errors*: Unavailable IMAGE_UNAVAILABLE when it takes longer: that is not the build's own limit."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise Unavailable(Code.IMAGE_UNAVAILABLE, f"the image was not there within {seconds:g} s", retry_after_s=60.0) from error


def on_behalf(build: Build, team: str) -> Caller:
    """Who a build acts for: its team; by this client its sandboxes are found again, and hidden."""
    client = Client(client_of(build.id), build.team_id, "build", Role.MEMBER, "", "", build.created_at)
    return Caller(Team(build.team_id, team), client)


def _plain(build: Build, image: str) -> Template:
    """What a step stands on: an image, and nothing of a template's."""
    return Template(
        id=build.template_id,
        team_id=build.team_id,
        name=build.name,
        aliases=(),
        public=False,
        build_id=build.id,
        image=image,
        cpu_millis=build.cpu_millis,
        memory_mib=build.memory_mib,
        disk_mib=build.disk_mib,
        default_user="root",
        default_workdir=None,
        created_at=build.created_at,
        updated_at=build.created_at,
    )
