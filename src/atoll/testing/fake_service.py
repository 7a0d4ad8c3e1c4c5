"""`Service` in memory: what the API's tests, and any client's, run against when they need no hosts.

It keeps the promises of `control/service.py`: teams see their own things only, request ids are idempotent per team, lists have pages,
ends are observed when somebody looks. What it does not have is hosts: a sandbox is ready as soon as it is accepted, unless `gate` is
closed. `fail_next` makes the next create fail the way the real one does, with nothing left behind.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import ClientId, HostId, PlacementId, Prefix, SandboxId, TeamId, TemplateId, new_id
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.control.artifacts.layers import TemplateImage, TemplateLayer
from atoll.control.service import (
    EVERY_TEAM,
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
    revision_mismatch,
)
from atoll.domain.command import digest
from atoll.domain.deployment import ClientLimits, Deployment, TeamLimits
from atoll.domain.host import Admin, AdminEvent, Host, health, step
from atoll.domain.importing import Import, ImportRequest
from atoll.domain.importing import State as ImportState
from atoll.domain.machine import IllegalMove
from atoll.domain.sandbox import LIVING, STARTING, TERMINAL, Condition, Sandbox, State
from atoll.domain.template import Template
from atoll.domain.tenancy import Client, Role, Team, key_digest
from atoll.planning.placing import Advert, explain
from atoll.planning.resolve import CreateRequest, class_of, resolve, template_of
from atoll.testing.fake_keeping import FakeKeeping
from atoll.testing.fake_resting import FakeResting
from atoll.testing.fake_warmth import FakeWarmth
from atoll.wire import agent as wire
from atoll.wire import deployment as deployment_document
from atoll.wire import normal_form
from atoll.wire.document import NotADocument

VISIBLE: Final = LIVING - STARTING - {State.RELEASING}
BASE: Final = Template(
    id=TemplateId("tpl_basebasebasebasebase"),
    team_id=None,
    name="base",
    aliases=("base",),
    public=True,
    build_id="0b5c1c5e-3c0e-4f53-9b7e-6d2f9f1f0a01",
    image="sha256:" + "ab" * 32,
    cpu_millis=1000,
    memory_mib=512,
    disk_mib=2048,
    default_user="user",
    default_workdir=None,
    created_at=1_700_000_000.0,
    updated_at=1_700_000_100.0,
)


@dataclass
class FakeService(FakeResting, FakeKeeping):
    """See the module. `now` is wall time; tests move it."""

    now: Callable[[], float]
    seed: int = 0
    templates_known: list[Template] = field(default_factory=lambda: [BASE])
    imports_known: list[Import] = field(default_factory=list)
    console: bytes = b"guest is up\n"

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_next: AtollError | None = None
        self.requests: list[CreateRequest] = []
        """Every create that was asked for, as the API understood it."""
        self._teams: dict[str, Team] = {}
        self._clients: dict[str, Client] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._warmth = FakeWarmth()
        self.unresponsive = set()
        self.kept = {}
        self.recorded: list[EventRecord] = []
        """Every event, of all teams."""
        self.host_view = self._make_host()
        self.deployment = Deployment()
        self._configs = [ConfigView(0, normal_form.BUILT_IN, None, None)]

    def dice(self, count: int) -> bytes:
        """Seeded chance, so that two runs are the same."""
        return self._random.randbytes(count)

    def add_team(self, name: str, *, role: Role = Role.MEMBER, max_sandboxes: int | None = None) -> tuple[Team, str]:
        """A team and a key of it."""
        team = Team(TeamId(new_id(Prefix.TEAM, self.dice)), name)
        if max_sandboxes is not None:
            limits = replace(self.deployment.team, sandboxes=max_sandboxes)
            self.deployment = replace(self.deployment, teams={**self.deployment.teams, name: limits})
        self._teams[team.id] = team
        return team, self._add_key(team, f"first of {name}", role).key.reveal()

    def end(self, sandbox_id: str, *, state: State = State.RELEASED, reason: str = "GUEST_EXITED") -> None:
        """What a host would report: it is gone."""
        one = self._sandboxes[sandbox_id]
        self._put(replace(one, state=state, reason=one.reason or reason, released_at=self.now()), f"sandbox.{state.value}")

    def set_state(self, sandbox_id: str, state: State) -> None:
        """Put it into a state that this release cannot reach through the API."""
        self._put(replace(self._sandboxes[sandbox_id], state=state), f"sandbox.{state.value}")

    def change(self, sandbox_id: str, **fields: Any) -> None:
        """Any other change of its row."""
        self._put(replace(self._sandboxes[sandbox_id], **fields), "sandbox.changed")

    # Service
    async def authenticate(self, key: Secret) -> Caller:
        wanted = key_digest(key.reveal())
        for client in self._clients.values():
            if client.key_digest == wanted and client.revoked_at is None:
                return Caller(self._teams[client.team_id], client)
        raise Refused(Code.UNAUTHENTICATED, "unknown key")

    async def create(self, caller: Caller, request: CreateRequest) -> Sandbox:
        self.requests.append(request)
        body_digest = _request_digest(request)
        earlier = self._earlier(caller, request, body_digest)
        if earlier is not None:
            return earlier
        if self.fail_next is not None:
            failure, self.fail_next = self.fail_next, None
            raise failure
        policy = class_of(request, self.deployment)
        template = await self.template(caller, template_of(request, policy))
        spec = resolve(request, template=template, policy=policy)
        living = sum(one.state in LIVING for one in self._of(caller))
        most = self.deployment.of_team(caller.team.name).sandboxes
        if most is not None and living >= most:
            raise Refused(Code.TEAM_SANDBOX_QUOTA, f"the team has {living} sandboxes and may have {most}")
        at = self.now()
        sandbox = Sandbox(
            id=SandboxId(new_id(Prefix.SANDBOX, self.dice)),
            revision=1,
            team_id=caller.team.id,
            client_id=caller.client.id,
            state=State.PENDING,
            spec=spec,
            generation=1,
            created_at=at,
            end_at=at + spec.timeout_s,
            end_revision=1,
            request_id=request.request_id,
            request_digest=body_digest,
            alias=template.aliases[0] if template.aliases else None,
            metadata=dict(request.metadata),
            secured=request.secured,
        )
        self._put(sandbox, "sandbox.accepted")
        if not request.wait:
            return self._sandboxes[sandbox.id]
        return await self._make_ready(sandbox.id)

    async def _make_ready(self, sandbox_id: str) -> Sandbox:
        await self.gate.wait()
        one = self._sandboxes[sandbox_id]
        at = self.now()
        ready = replace(
            one,
            state=State.READY,
            started_at=at,
            end_at=at + one.spec.timeout_s,
            host_id=self.host_view.host.id,
            placement_id=PlacementId(new_id(Prefix.PLACEMENT, self.dice)),
        )
        return self._put(ready, "sandbox.ready")

    def _earlier(self, caller: Caller, request: CreateRequest, body_digest: str) -> Sandbox | None:
        if request.request_id is None:
            return None
        for one in self._of(caller):
            if one.request_id == request.request_id:
                if one.request_digest != body_digest:
                    raise Refused(Code.REQUEST_MISMATCH, "this request id was used with another body")
                if one.state in STARTING:
                    raise Refused(Code.REQUEST_IN_PROGRESS, "the first request with this id is still running")
                return one
        return None

    async def get(self, caller: Caller, sandbox_id: str, *, ended: bool = False, every_team: bool = False) -> Sandbox:
        one = self._find(caller, sandbox_id, every_team=every_team)
        if not ended and one.state not in VISIBLE:
            raise _missing(sandbox_id)
        return one

    async def find(self, caller: Caller, query: Query) -> Page[Sandbox]:
        mine = self._of(caller, query.team)
        scope = {"visible": VISIBLE, "living": LIVING, "all": frozenset(State)}[query.scope]
        found = sorted((one for one in mine if one.state in scope and _matches(one, query)), key=_order, reverse=not query.ascending)
        if query.cursor is not None:
            last = _read_cursor(query.cursor)
            found = [one for one in found if (_order(one) > last if query.ascending else _order(one) < last)]
        items = found[: query.limit]
        more = len(found) > query.limit
        running = sum(one.state is State.READY and _matches(one, replace(query, states=frozenset())) for one in mine)
        return Page(items, _cursor(items[-1]) if more else None, running)

    async def release(
        self, caller: Caller, sandbox_id: str, *, reason: str = "RELEASE_REQUESTED", every_team: bool = False, revision: int | None = None
    ) -> Sandbox:
        one = self._find(caller, sandbox_id, every_team=every_team)
        if one.state is State.RELEASING or one.state in TERMINAL:
            raise _missing(sandbox_id)
        _still_at(revision, one.revision)
        return self._put(replace(one, state=State.RELEASING, reason=reason, release_requested_at=self.now()), "sandbox.releasing")

    async def set_end(
        self, caller: Caller, sandbox_id: str, *, timeout_s: float, only_extend: bool, revision: int | None = None
    ) -> Sandbox:
        one = await self.get(caller, sandbox_id)
        _still_at(revision, one.revision)
        if one.state is not State.READY and one.state not in STARTING:
            raise Refused(Code.ILLEGAL_STATE, f"sandbox {one.id} is {one.state}: its end counts from when it is resumed")
        longest = one.spec.timeout_s_max
        if timeout_s > longest:
            raise Refused(Code.CLASS_LIMIT, f"timeout {timeout_s:g} s is longer than {longest} s")
        if timeout_s <= 0 and not only_extend:
            return await self.release(caller, sandbox_id, reason="END_REACHED")
        end_at = self.now() + timeout_s
        if only_extend and one.end_at is not None:
            end_at = max(end_at, one.end_at)
        if end_at == one.end_at:
            return one
        return self._put(replace(one, end_at=end_at, end_revision=one.end_revision + 1), "sandbox.end_moved")

    async def authorize_replacement(self, caller: Caller, sandbox_id: str, *, generation: int, statement: str = "") -> Sandbox:
        one = self._sandboxes.get(sandbox_id)
        if one is None or (one.team_id != caller.team.id and not caller.operator):
            raise _missing(sandbox_id)
        if one.generation > generation and Condition.REPLACEMENT_BLOCKED not in one.conditions:
            return one
        if one.generation != generation or Condition.REPLACEMENT_BLOCKED not in one.conditions:
            raise Refused(Code.REPLACEMENT_NOT_BLOCKED, f"generation {generation} waits for no replacement")
        after = replace(one, state=State.PENDING, generation=generation + 1, conditions=frozenset(), placement_id=None, host_id=None)
        return self._put(after, "sandbox.replacement_authorized")

    async def events(
        self, caller: Caller, sandbox_id: str, *, after: int = 0, limit: int = 100, every_team: bool = False
    ) -> Sequence[EventRecord]:
        self._find(caller, sandbox_id, every_team=every_team)
        return [event for event in self.recorded if event.sandbox_id == sandbox_id and event.seq > after][:limit]

    async def follow(self, caller: Caller, sandbox_id: str, *, after: int = 0) -> AsyncIterator[Sequence[EventRecord]]:
        """What there is, and the end: nobody waits for more in a test without hosts."""
        found = await self.events(caller, sandbox_id, after=after, limit=1000, every_team=True)

        async def batches() -> AsyncIterator[Sequence[EventRecord]]:
            yield found
            yield []

        return batches()

    async def logs(self, caller: Caller, sandbox_id: str, *, every_team: bool = False) -> bytes:
        self._find(caller, sandbox_id, every_team=every_team)
        return self.console

    async def usage(self, caller: Caller, sandbox_id: str, *, every_team: bool = False) -> tuple[Sandbox, Sequence[UsagePoint]]:
        one = await self.get(caller, sandbox_id, every_team=every_team)
        began = one.started_at if one.started_at is not None else one.created_at
        count = min(60, 1 + int((self.now() - began) // 5))
        return one, [UsagePoint(one.id, began + 5 * n, 12.5, (20 + n) << 20, 4 << 20, 1 << 20) for n in range(count)]

    async def usages(self, caller: Caller, sandbox_ids: Sequence[str]) -> Sequence[tuple[Sandbox, UsagePoint]]:
        mine = {one.id: one for one in self._of(caller) if one.state is State.READY}
        found = [await self.usage(caller, given) for given in sandbox_ids if given in mine]
        return [(one, points[-1]) for one, points in found]

    async def usage_of(self, sandboxes: Sequence[Sandbox]) -> Mapping[str, UsagePoint]:
        return {one.id: UsagePoint(one.id, self.now(), 12.5, 20 << 20, 4 << 20, 1 << 20) for one in sandboxes if one.state is State.READY}

    async def why(self, caller: Caller, sandbox_id: str) -> Why:
        one = self._sandboxes.get(sandbox_id)
        if one is None or (one.team_id != caller.team.id and not caller.operator):
            raise _missing(sandbox_id)
        told = explain([self._advert()], one.spec, sandbox_id=one.id, now=self.now(), holds=one.host_id)
        return Why(one.spec, told, one, shows_hosts=caller.operator)

    async def why_request(self, caller: Caller, request: CreateRequest) -> Why:
        policy = class_of(request, self.deployment)
        spec = resolve(request, template=await self.template(caller, template_of(request, policy)), policy=policy)
        return Why(spec, explain([self._advert()], spec, sandbox_id="", now=self.now()), None, shows_hosts=caller.operator)

    def _advert(self) -> Advert:
        used = sum((one.spec.vector() for one in self._sandboxes.values() if one.state in LIVING), Vector())
        return Advert(replace(self.host_view.host, seen_at=self.now()), used)

    async def begin_import(self, caller: Caller, request: ImportRequest) -> Import:
        at = self.now()
        one = Import(f"imp_{len(self.imports_known):020d}", caller.team.id, request.name, request.source, ImportState.RUNNING, at)
        self.imports_known.append(one)
        return one

    async def find_import(self, caller: Caller, import_id: str) -> Import:
        for one in await self.imports(caller):
            if one.id == import_id:
                return one
        raise Refused(Code.IMPORT_NOT_FOUND, f"import {import_id[:80]!r} was not found")

    async def imports(self, caller: Caller) -> Sequence[Import]:
        return [one for one in self.imports_known if one.team_id == caller.team.id]

    async def template_image(self, caller: Caller, reference: str) -> TemplateImage:
        one = await self.template(caller, reference)
        return TemplateImage(
            one.image, (TemplateLayer("sha256:" + "1" * 64, "application/vnd.oci.image.layer.v1.tar", 0, "sha256:" + "1" * 64),)
        )

    async def template_layer(self, caller: Caller, reference: str, digest: str) -> Path:
        await self.template(caller, reference)
        raise Refused(Code.IMAGE_UNAVAILABLE, f"there is no layer {digest[:80]!r}")

    async def delete_template(self, caller: Caller, reference: str) -> Template:
        one = await self.template(caller, reference)
        if one.team_id != caller.team.id:
            raise Refused(Code.FORBIDDEN, f"template {one.name!r} is not this team's")
        self.templates_known.remove(one)
        return one

    async def templates(self, caller: Caller) -> Sequence[Template]:
        return [one for one in self.templates_known if one.team_id in (None, caller.team.id) or one.public]

    async def template(self, caller: Caller, reference: str) -> Template:
        name, colon, tag = reference.partition(":")
        if colon and not tag:
            raise Refused(Code.INVALID_REQUEST, "the tag is empty")
        for one in await self.templates(caller):
            if name in (one.id, one.name, *one.aliases) and tag in ("", "default"):
                return one
        raise Refused(Code.TEMPLATE_NOT_FOUND, f"template {reference[:80]!r} was not found")

    def isolated_by(self, sandbox: Sandbox) -> str | None:
        return "fake full" if sandbox.host_id is not None else None

    async def warm_policies(self, caller: Caller) -> Sequence[WarmView]:
        return self._warmth.all(caller)

    async def keep_warm(self, caller: Caller, reference: str, request: CreateRequest, *, count: int) -> WarmView:
        template = await self.template(caller, reference)
        return self._warmth.put(caller, template, request, count=count, now=self.now())

    async def hosts(self, caller: Caller) -> Sequence[HostView]:
        if not caller.operator:
            raise Refused(Code.FORBIDDEN, "hosts are the operator's")
        held = [one for one in self._sandboxes.values() if one.state in LIVING]
        used = sum((one.spec.vector() for one in held), Vector())
        host = replace(self.host_view.host, seen_at=self.now())
        return [HostView(host, health(host, now=self.now()), used, len(held))]

    async def host(self, caller: Caller, host_id: str) -> HostView:
        for view in await self.hosts(caller):
            if host_id in (view.host.id, view.host.name):
                return view
        raise Refused(Code.HOST_NOT_FOUND, f"host {host_id[:80]!r} was not found")

    async def set_host_admin(
        self, caller: Caller, host_id: str, event: AdminEvent, *, off: bool = False, revision: int | None = None
    ) -> HostView:
        view = await self.host(caller, host_id)
        _still_at(revision, view.host.revision)
        try:
            admin = step(view.host.admin, event)
        except IllegalMove:
            raise Refused(Code.ILLEGAL_STATE, "a disabled host is reset, then enrolled again") from None
        lease_until = None if off else view.host.lease_until
        changed = replace(self.host_view.host, admin=admin, lease_until=lease_until, revision=view.host.revision + 1)
        self.host_view = replace(self.host_view, host=changed)
        return await self.host(caller, host_id)

    async def register_host(self, caller: Caller, registration: wire.Registration) -> HostView:
        await self.hosts(caller)
        raise Refused(Code.NOT_SUPPORTED, f"this service has the one host that it has, and not {registration.name!r}")

    async def recount_host(self, caller: Caller, host_id: str) -> HostView:
        return await self.host(caller, host_id)

    async def create_enrollment_token(self, caller: Caller, *, host_name: str, life_s: float = 3600.0) -> NewToken:
        if not caller.operator:
            raise Refused(Code.FORBIDDEN, "hosts are the operator's")
        return NewToken(Secret("et_" + secrets.token_hex(32)), host_name, self.now() + life_s)

    async def config(self, caller: Caller, revision: int | None = None) -> ConfigView:
        self._operators_only(caller)
        wanted = len(self._configs) - 1 if revision is None else revision
        if not 0 <= wanted < len(self._configs):
            raise Refused(Code.CONFIG_NOT_FOUND, f"there is no revision {wanted}")
        return self._configs[wanted]

    async def config_history(self, caller: Caller, *, before: int | None = None, limit: int = 100) -> Sequence[ConfigView]:
        self._operators_only(caller)
        return [one for one in reversed(self._configs[1:]) if before is None or one.revision < before][:limit]

    async def check_config(self, caller: Caller, text: str) -> CheckedConfig:
        self._operators_only(caller)
        try:
            changes = normal_form.changes(self.deployment, deployment_document.read(text))
        except NotADocument as refused:
            return CheckedConfig(len(self._configs) - 1, tuple(refused.problems), ())
        return CheckedConfig(len(self._configs) - 1, (), tuple(changes))

    async def apply_config(self, caller: Caller, text: str, *, revision: int) -> ConfigView:
        self._operators_only(caller)
        try:
            meant = deployment_document.read(text)
        except NotADocument as refused:
            raise Refused(Code.CONFIG_INVALID, f"the document is not valid: {refused}") from None
        if revision == len(self._configs) - 2 and self._configs[-1].document == text:
            return self._configs[-1]
        if revision != len(self._configs) - 1:
            raise Refused(Code.CONFIG_CONFLICT, f"the document is at revision {len(self._configs) - 1}")
        self.deployment = meant
        self._configs.append(ConfigView(revision + 1, text, self.now(), caller.client.id))
        return self._configs[-1]

    def limits(self, caller: Caller) -> tuple[ClientLimits, TeamLimits]:
        return self.deployment.client, self.deployment.of_team(caller.team.name)

    @staticmethod
    def _operators_only(caller: Caller) -> None:
        if not caller.operator:
            raise Refused(Code.FORBIDDEN, "the document is the operator's")

    async def keys(self, caller: Caller) -> Sequence[Client]:
        return [one for one in self._clients.values() if one.team_id == caller.team.id]

    async def create_key(self, caller: Caller, *, name: str, role: Role = Role.MEMBER, team: str | None = None) -> NewKey:
        if not caller.operator and (role is Role.OPERATOR or team not in (None, caller.team.name, caller.team.id)):
            raise Refused(Code.FORBIDDEN, "only operators give that")
        owner = caller.team
        if team is not None:
            named = [one for one in self._teams.values() if team in (one.id, one.name)]
            owner = named[0] if named else self.add_team(team)[0]
        return self._add_key(owner, name, role)

    async def revoke_key(self, caller: Caller, client_id: str) -> Client:
        client = self._clients.get(client_id)
        if client is None or (client.team_id != caller.team.id and not caller.operator) or client.revoked_at is not None:
            raise Refused(Code.KEY_NOT_FOUND, f"key {client_id[:80]!r} was not found")
        revoked = replace(client, revoked_at=self.now())
        self._clients[client.id] = revoked
        return revoked

    def access_token(self, sandbox: Sandbox) -> str | None:
        if not sandbox.secured:
            return None
        return hashlib.sha256(f"access {sandbox.id}".encode()).hexdigest()

    def traffic_token(self, sandbox: Sandbox) -> str | None:
        if sandbox.spec.network.public_traffic:
            return None
        return hashlib.sha256(f"traffic {sandbox.id}".encode()).hexdigest()

    def _find(self, caller: Caller, sandbox_id: str, *, every_team: bool = False) -> Sandbox:
        one = self._sandboxes.get(sandbox_id)
        if one is None or (one.team_id != caller.team.id and not (every_team and caller.operator)):
            raise _missing(sandbox_id)
        return self._looked_at(one)

    def _of(self, caller: Caller, team: str | None = None) -> list[Sandbox]:
        known = list(self._sandboxes.values())
        if team is None or team in (caller.team.id, caller.team.name):
            return [self._looked_at(one) for one in known if one.team_id == caller.team.id]
        if not caller.operator:
            raise Refused(Code.FORBIDDEN, "other teams' sandboxes are theirs")
        named = [one.id for one in self._teams.values() if team in (one.id, one.name)]
        if team != EVERY_TEAM and not named:
            raise Refused(Code.INVALID_REQUEST, f"there is no team {team[:80]!r}")
        return [self._looked_at(one) for one in known if team == EVERY_TEAM or one.team_id in named]

    def _looked_at(self, one: Sandbox) -> Sandbox:
        if one.state in VISIBLE and one.end_at is not None and one.end_at <= self.now():
            return self._put(replace(one, state=State.RELEASED, reason="END_REACHED", released_at=one.end_at), "sandbox.released")
        return one

    def _put(self, sandbox: Sandbox, event: str, data: Mapping[str, str | int | float | None] | None = None) -> Sandbox:
        before = self._sandboxes.get(sandbox.id)
        stored = replace(sandbox, revision=1 if before is None else before.revision + 1)
        self._sandboxes[sandbox.id] = stored
        self.recorded.append(
            EventRecord(
                seq=len(self.recorded) + 1,
                id=new_id(Prefix.EVENT, self.dice),
                at=self.now(),
                type=event,
                sandbox_id=sandbox.id,
                team_id=sandbox.team_id,
                generation=sandbox.generation,
                state=sandbox.state.value,
                reason=sandbox.reason,
                data=data or {},
            )
        )
        return stored

    def _add_key(self, team: Team, name: str, role: Role) -> NewKey:
        key = "e2b_" + self.dice(20).hex()
        client = Client(
            id=ClientId(new_id(Prefix.CLIENT, self.dice)),
            team_id=team.id,
            name=name,
            role=role,
            key_digest=key_digest(key),
            key_hint=key[-4:],
            created_at=self.now(),
        )
        self._clients[client.id] = client
        return NewKey(client, Secret(key))

    def _make_host(self) -> HostView:
        host = Host(
            id=HostId(new_id(Prefix.HOST, self.dice)),
            revision=1,
            name="local",
            admin=Admin.ACTIVE,
            capacity=Vector(32_000, 16_384, 200_000, 256),
            arch="x86_64",
            region="local",
            isolations=frozenset({"gvisor", "shared-kernel"}),
            agent_version="0.1.0",
            facts={"kernel": "test"},
        )
        return HostView(host, health(host, now=self.now()), Vector(), 0)


def _still_at(wanted: int | None, revision: int) -> None:
    if wanted is not None and wanted != revision:
        raise revision_mismatch("it", revision)


def _missing(sandbox_id: str) -> Refused:
    return Refused(Code.SANDBOX_NOT_FOUND, f"sandbox {sandbox_id[:80]!r} was not found")


def _request_digest(request: CreateRequest) -> str:
    network = request.network
    content: dict[str, object] = {
        "template": request.template, "timeout_s": request.timeout_s, "class": request.class_name,
        "metadata": dict(request.metadata), "env": dict(request.env), "cpu": request.cpu_millis, "memory": request.memory_mib,
        "disk": request.disk_mib, "secured": request.secured, "require_host": request.require_host,
        "network": [
            network.internet, list(network.allow_out), list(network.deny_out), network.public_traffic, network.mask_request_host,
        ],
    }  # fmt: skip
    return digest(content)


def _matches(one: Sandbox, query: Query) -> bool:
    started = one.started_at if one.started_at is not None else one.created_at
    return (
        (not query.states or one.state in query.states)
        and all(one.metadata.get(name) == value for name, value in (query.metadata or {}).items())
        and query.template in (None, one.spec.template_id, one.alias)
        and (query.started_after is None or started >= query.started_after)
    )


def _order(one: Sandbox) -> tuple[float, str]:
    return (one.started_at if one.started_at is not None else one.created_at, one.id)


def _cursor(one: Sandbox) -> str:
    at, given = _order(one)
    return base64.urlsafe_b64encode(f"{at!r}__{given}".encode()).decode()


def _read_cursor(cursor: str) -> tuple[float, str]:
    try:
        at, _, given = base64.urlsafe_b64decode(cursor.encode()).decode().partition("__")
        return float(at), given
    except ValueError as error:
        raise Refused(Code.INVALID_REQUEST, "the cursor is not one of ours") from error
