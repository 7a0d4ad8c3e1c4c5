"""The Service, put together from its parts."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret
from atoll.control.keys import Keys
from atoll.control.sandboxes import Sandboxes
from atoll.control.service import Caller, EventRecord, HostView, NewKey, Page, Query
from atoll.control.templates import Templates
from atoll.control.tokens import Tokens
from atoll.domain.host import health
from atoll.domain.sandbox import Sandbox
from atoll.domain.template import Template
from atoll.domain.tenancy import Client, Role
from atoll.planning.resolve import CreateRequest
from atoll.store import facts, hosts
from atoll.store.engine import Store


class Facade:
    """Implements control.service.Service."""

    def __init__(self, *, store: Store, clock: Clock, keys: Keys, sandboxes: Sandboxes, templates: Templates, tokens: Tokens) -> None:
        self._store = store
        self._clock = clock
        self._keys = keys
        self._sandboxes = sandboxes
        self._templates = templates
        self._tokens = tokens

    async def authenticate(self, key: Secret) -> Caller:
        return await self._keys.authenticate(key)

    async def create(self, caller: Caller, request: CreateRequest) -> Sandbox:
        return await self._sandboxes.create(caller, request)

    async def get(self, caller: Caller, sandbox_id: str, *, ended: bool = False) -> Sandbox:
        return await self._sandboxes.get(caller, sandbox_id, ended=ended)

    async def find(self, caller: Caller, query: Query) -> Page[Sandbox]:
        return await self._sandboxes.find(caller, query)

    async def release(self, caller: Caller, sandbox_id: str, *, reason: str = Code.RELEASE_REQUESTED) -> Sandbox:
        return await self._sandboxes.release(caller, sandbox_id, reason=reason)

    async def set_end(self, caller: Caller, sandbox_id: str, *, timeout_s: float, only_extend: bool) -> Sandbox:
        return await self._sandboxes.set_end(caller, sandbox_id, timeout_s=timeout_s, only_extend=only_extend)

    async def events(self, caller: Caller, sandbox_id: str, *, after: int = 0, limit: int = 100) -> Sequence[EventRecord]:
        return await self._sandboxes.events(caller, sandbox_id, after=after, limit=limit)

    async def logs(self, caller: Caller, sandbox_id: str) -> bytes:
        return await self._sandboxes.logs(caller, sandbox_id)

    async def templates(self, caller: Caller) -> Sequence[Template]:
        return await self._templates.all(caller)

    async def template(self, caller: Caller, reference: str) -> Template:
        return await self._templates.get(caller, reference)

    async def hosts(self, caller: Caller) -> Sequence[HostView]:
        self._operator(caller)
        found = await self._store.read(
            lambda conn: [(h, facts.used(conn, h.id), hosts.placements_held(conn, h.id)) for h in hosts.all_hosts(conn)]
        )
        return [HostView(host, health(host, now=self._clock.now()), used, count) for host, used, count in found]

    async def host(self, caller: Caller, host_id: str) -> HostView:
        for view in await self.hosts(caller):
            if host_id in (view.host.id, view.host.name):
                return view
        raise Refused(Code.HOST_NOT_FOUND, f"host {host_id[:64]!r} was not found")

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

    @staticmethod
    def _operator(caller: Caller) -> None:
        if not caller.operator:
            raise Refused(Code.FORBIDDEN, "only operators see hosts")
