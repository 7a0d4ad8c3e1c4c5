"""The Service, put together from its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from atoll.base.errors import AtollError, Code, Refused
from atoll.base.secret import Secret
from atoll.control.artifacts.imports import Imports
from atoll.control.artifacts.layers import Layers, TemplateImage
from atoll.control.artifacts.templates import Templates
from atoll.control.builds.builds import Builds
from atoll.control.configuration import Configuration
from atoll.control.hosts.enrollment import TOKEN_LIFE_S
from atoll.control.hosts.hosts import Hosts
from atoll.control.keys import Keys
from atoll.control.sandboxes.forks import Forks
from atoll.control.sandboxes.resting import Resting
from atoll.control.sandboxes.sandboxes import Sandboxes
from atoll.control.sandboxes.snapshots import Taking
from atoll.control.sandboxes.warming import Warming
from atoll.control.sandboxes.whys import Whys
from atoll.control.service import (
    Caller,
    CheckedConfig,
    ConfigView,
    EventRecord,
    HostView,
    NewKey,
    NewToken,
    Page,
    Query,
    UsagePoint,
    WarmView,
    Why,
)
from atoll.control.tokens import Tokens
from atoll.domain.deployment import ClientLimits, TeamLimits
from atoll.domain.host import DRIVER_FACT, AdminEvent
from atoll.domain.importing import Import, ImportRequest
from atoll.domain.sandbox import Sandbox
from atoll.domain.snapshot import Snapshot
from atoll.domain.spec import SaveMode
from atoll.domain.template import Template
from atoll.domain.tenancy import Client, Role
from atoll.planning.resolve import CreateRequest
from atoll.wire import agent as wire


class Facade:
    """Implements control.service.Service."""

    def __init__(  # noqa: PLR0913 - a composition root's arguments
        self,
        *,
        keys: Keys,
        sandboxes: Sandboxes,
        templates: Templates,
        imports: Imports,
        builds: Builds,
        hosts: Hosts,
        tokens: Tokens,
        configuration: Configuration,
        whys: Whys,
        warming: Warming,
    ) -> None:
        self._warming = warming
        self._whys = whys
        self._configuration = configuration
        self._keys = keys
        self._sandboxes = sandboxes
        self._resting = Resting(sandboxes)
        self._snapshots = sandboxes.snapshots
        self._forks = Forks(sandboxes)
        self._templates = templates
        self._imports = imports
        self._builds = builds
        self._hosts = hosts
        self._tokens = tokens

    async def authenticate(self, key: Secret) -> Caller:
        return await self._keys.authenticate(key)

    async def create(self, caller: Caller, request: CreateRequest) -> Sandbox:
        return await self._sandboxes.create(caller, request)

    async def get(self, caller: Caller, sandbox_id: str, *, ended: bool = False, every_team: bool = False) -> Sandbox:
        return await self._sandboxes.get(caller, sandbox_id, ended=ended, every_team=every_team)

    def isolated_by(self, sandbox: Sandbox) -> str | None:
        host = None if sandbox.host_id is None else self._sandboxes.reconciler.directory.host(sandbox.host_id)
        return None if host is None else host.facts.get(f"{DRIVER_FACT}.{sandbox.spec.isolation}")

    async def find(self, caller: Caller, query: Query) -> Page[Sandbox]:
        return await self._sandboxes.find(caller, query)

    async def release(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        reason: str = Code.RELEASE_REQUESTED,
        every_team: bool = False,
        revision: int | None = None,
    ) -> Sandbox:
        return await self._sandboxes.release(caller, sandbox_id, reason=reason, every_team=every_team, revision=revision)

    async def set_end(
        self, caller: Caller, sandbox_id: str, *, timeout_s: float, only_extend: bool, revision: int | None = None
    ) -> Sandbox:
        return await self._sandboxes.set_end(caller, sandbox_id, timeout_s=timeout_s, only_extend=only_extend, revision=revision)

    async def pause(self, caller: Caller, sandbox_id: str, *, revision: int | None = None) -> Sandbox:
        return await self._resting.pause(caller, sandbox_id, revision=revision)

    async def suspend(
        self, caller: Caller, sandbox_id: str, *, mode: SaveMode = SaveMode.FULL, strict: bool = False, revision: int | None = None
    ) -> Sandbox:
        return await self._resting.suspend(caller, sandbox_id, mode=mode, strict=strict, revision=revision)

    async def resume(
        self, caller: Caller, sandbox_id: str, *, timeout_s: float | None = None, reboot: bool = False, revision: int | None = None
    ) -> tuple[Sandbox, bool]:
        return await self._resting.resume(caller, sandbox_id, timeout_s=timeout_s, reboot=reboot, revision=revision)

    async def snapshot(self, caller: Caller, sandbox_id: str, *, mode: SaveMode = SaveMode.FULL, name: str | None = None) -> Snapshot:
        return await self._snapshots.take(caller, sandbox_id, Taking(mode, name))

    async def snapshots(
        self, caller: Caller, *, sandbox_id: str | None = None, name: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> Page[Snapshot]:
        return await self._snapshots.find(caller, sandbox_id=sandbox_id, name=name, limit=limit, cursor=cursor)

    async def find_snapshot(self, caller: Caller, reference: str) -> Snapshot:
        return await self._snapshots.get(caller, reference)

    async def delete_snapshot(self, caller: Caller, reference: str) -> Snapshot:
        return await self._snapshots.delete(caller, reference)

    async def fork(
        self, caller: Caller, sandbox_id: str, *, count: int = 1, timeout_s: int | None = None, request_id: str | None = None
    ) -> Sequence[Sandbox | AtollError]:
        return await self._forks.fork(caller, sandbox_id, count=count, timeout_s=timeout_s, request_id=request_id)

    async def events(
        self, caller: Caller, sandbox_id: str, *, after: int = 0, limit: int = 100, every_team: bool = False
    ) -> Sequence[EventRecord]:
        return await self._sandboxes.events(caller, sandbox_id, after=after, limit=limit, every_team=every_team)

    async def authorize_replacement(self, caller: Caller, sandbox_id: str, *, generation: int, statement: str = "") -> Sandbox:
        return await self._sandboxes.authorize_replacement(caller, sandbox_id, generation=generation, statement=statement)

    async def follow(self, caller: Caller, sandbox_id: str, *, after: int = 0) -> AsyncIterator[Sequence[EventRecord]]:
        return await self._sandboxes.follow(caller, sandbox_id, after=after)

    async def logs(self, caller: Caller, sandbox_id: str, *, every_team: bool = False) -> bytes:
        return await self._sandboxes.logs(caller, sandbox_id, every_team=every_team)

    async def usage(self, caller: Caller, sandbox_id: str, *, every_team: bool = False) -> tuple[Sandbox, Sequence[UsagePoint]]:
        found = await self._sandboxes.get(caller, sandbox_id, every_team=every_team)
        return found, await self._sandboxes.usages.course(found)

    async def usages(self, caller: Caller, sandbox_ids: Sequence[str]) -> Sequence[tuple[Sandbox, UsagePoint]]:
        found = await self._sandboxes.some(caller, sandbox_ids)
        latest = await self._sandboxes.usages.latest(found)
        return [(one, latest[one.id]) for one in found if one.id in latest]

    async def usage_of(self, sandboxes: Sequence[Sandbox]) -> Mapping[str, UsagePoint]:
        return await self._sandboxes.usages.latest(sandboxes)

    async def why(self, caller: Caller, sandbox_id: str) -> Why:
        return await self._whys.of_sandbox(caller, sandbox_id)

    async def why_request(self, caller: Caller, request: CreateRequest) -> Why:
        return await self._whys.of_request(caller, request)

    async def begin_import(self, caller: Caller, request: ImportRequest) -> Import:
        return await self._imports.begin(caller, request)

    async def find_import(self, caller: Caller, import_id: str) -> Import:
        return await self._imports.get(caller, import_id)

    async def imports(self, caller: Caller) -> Sequence[Import]:
        return await self._imports.all(caller)

    async def delete_template(self, caller: Caller, reference: str) -> Template:
        template = await self._templates.get(caller, reference)
        await self._imports.delete(caller, template)
        self._builds.drop(template)
        await self._sandboxes.snapshots.retire()
        return template

    async def templates(self, caller: Caller) -> Sequence[Template]:
        return await self._templates.all(caller)

    async def template(self, caller: Caller, reference: str) -> Template:
        return await self._templates.get(caller, reference)

    async def template_image(self, caller: Caller, reference: str) -> TemplateImage:
        return await self._layers().of(await self._templates.get(caller, reference))

    async def template_layer(self, caller: Caller, reference: str, digest: str) -> Path:
        return await self._layers().file(await self._templates.get(caller, reference), digest)

    def _layers(self) -> Layers:
        if self._imports.library is None:
            raise Refused(Code.NOT_SUPPORTED, "this control process has no store for images")
        return Layers(self._imports.library)

    async def warm_policies(self, caller: Caller) -> Sequence[WarmView]:
        return await self._warming.all(caller)

    async def keep_warm(self, caller: Caller, reference: str, request: CreateRequest, *, count: int) -> WarmView:
        return await self._warming.put(caller, reference, request, count=count)

    async def hosts(self, caller: Caller) -> Sequence[HostView]:
        return await self._hosts.all(caller)

    async def host(self, caller: Caller, host_id: str) -> HostView:
        return await self._hosts.get(caller, host_id)

    async def set_host_admin(
        self, caller: Caller, host_id: str, event: AdminEvent, *, off: bool = False, revision: int | None = None
    ) -> HostView:
        return await self._hosts.set_admin(caller, host_id, event, off=off, revision=revision)

    async def register_host(self, caller: Caller, registration: wire.Registration) -> HostView:
        return await self._hosts.register(caller, registration)

    async def recount_host(self, caller: Caller, host_id: str) -> HostView:
        return await self._hosts.recount(caller, host_id)

    async def create_enrollment_token(self, caller: Caller, *, host_name: str, life_s: float = TOKEN_LIFE_S) -> NewToken:
        return await self._hosts.create_token(caller, host_name=host_name, life_s=life_s)

    async def config(self, caller: Caller, revision: int | None = None) -> ConfigView:
        return await self._configuration.show(caller, revision)

    async def config_history(self, caller: Caller, *, before: int | None = None, limit: int = 100) -> Sequence[ConfigView]:
        return await self._configuration.history(caller, before=before, limit=limit)

    async def check_config(self, caller: Caller, text: str) -> CheckedConfig:
        return await self._configuration.check(caller, text)

    async def apply_config(self, caller: Caller, text: str, *, revision: int) -> ConfigView:
        return await self._configuration.apply(caller, text, revision=revision)

    def limits(self, caller: Caller) -> tuple[ClientLimits, TeamLimits]:
        current = self._configuration.current
        return current.client, current.of_team(caller.team.name)

    async def keys(self, caller: Caller) -> Sequence[Client]:
        return await self._keys.all(caller)

    async def create_key(self, caller: Caller, *, name: str, role: Role = Role.MEMBER, team: str | None = None) -> NewKey:
        return await self._keys.create(caller, name=name, role=role, team=team)

    async def revoke_key(self, caller: Caller, client_id: str) -> Client:
        return await self._keys.revoke(caller, client_id)

    def access_token(self, sandbox: Sandbox) -> str | None:
        return self._tokens.access(sandbox.id) if sandbox.secured else None

    def traffic_token(self, sandbox: Sandbox) -> str | None:
        return None if sandbox.spec.network.public_traffic else self._tokens.traffic(sandbox.id)
