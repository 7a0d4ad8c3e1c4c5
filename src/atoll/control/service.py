"""What every API may ask of control, in Atoll's words. `api/e2b` and `api/v1` translate; `sandboxes.py` and others do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Literal, Protocol, TypeVar

from atoll.base.errors import AtollError, Code, Refused
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.control.artifacts.layers import TemplateImage
from atoll.domain.deployment import ClientLimits, TeamLimits
from atoll.domain.host import AdminEvent, Health, Host
from atoll.domain.importing import Import, ImportRequest
from atoll.domain.operations import Actor
from atoll.domain.sandbox import Sandbox
from atoll.domain.snapshot import Snapshot
from atoll.domain.spec import SaveMode, Spec
from atoll.domain.template import Template
from atoll.domain.tenancy import Client, Role, Team
from atoll.domain.warmth import WarmPolicy
from atoll.planning.placing import Explanation
from atoll.planning.resolve import CreateRequest
from atoll.wire import agent as wire
from atoll.wire.document import Problem
from atoll.wire.normal_form import Change

T = TypeVar("T")

EVERY_TEAM: Final = "*"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks; every read and change is limited to its team, unless it is an operator where the method says so."""

    team: Team
    client: Client
    address: str | None = None
    """Where the request came from, as far as it is known."""
    request_id: str | None = None

    @property
    def operator(self) -> bool:
        return self.client.role is Role.OPERATOR

    def actor(self) -> Actor:
        """The caller as the audit knows it."""
        return Actor(self.team.id, self.client.id, self.address, self.request_id)


def revision_mismatch(what: str, revision: int) -> Refused:
    """Somebody else was faster."""
    return Refused(Code.REVISION_MISMATCH, f"{what} is at revision {revision} by now", revision=revision)


@dataclass(frozen=True, slots=True)
class Query:
    """Which sandboxes. Of a team, those that its APIs show: `visible` = ready and beyond, not ending; `all` = ended ones too."""

    scope: Literal["visible", "living", "all"] = "visible"
    states: frozenset[str] = frozenset()
    """Of domain.sandbox.State; empty = no filter."""
    metadata: Mapping[str, str] | None = None
    template: str | None = None
    started_after: float | None = None
    ascending: bool = False
    limit: int = 100
    cursor: str | None = None
    """Opaque, from `Page.next_cursor`."""
    team: str | None = None
    """Another team's, by name or id, or every team's (EVERY_TEAM); for operators."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list; `next_cursor` is None on the last."""

    items: Sequence[T]
    next_cursor: str | None = None
    total_running: int = 0
    """How many that match the query are ready, whatever states it names and however long its pages are."""


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One entry of a sandbox's history. `seq` grows over the whole deployment. `data` never holds a secret.

    Among the deployment's events are some of hosts and alerts; their `sandbox_id` and `team_id` are empty.
    """

    seq: int
    id: str
    at: float
    type: str
    """E.g. `sandbox.accepted`, `sandbox.ready`, `sandbox.released`."""
    sandbox_id: str
    team_id: str
    generation: int
    state: str
    reason: str | None
    data: Mapping[str, str | int | float | None]
    host_id: str | None = None
    placement_id: str | None = None
    command_id: str | None = None
    """What control wanted of the placement when this was recorded."""
    request_id: str | None = None
    """The client's request that caused it; None: nobody asked."""


@dataclass(frozen=True, slots=True)
class UsagePoint:
    """What a sandbox used at one moment. *Units*: wall seconds, percent of the CPU that it may use, bytes."""

    sandbox_id: str
    at: float
    cpu_pct: float
    memory_bytes: int
    cache_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class HostView:
    """A host with what is used of it."""

    host: Host
    health: Health
    used: Vector
    sandboxes: int
    warm: int = 0
    """Of them, guests that are made ahead and nobody's."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key, shown this once."""

    client: Client
    key: Secret


@dataclass(frozen=True, slots=True)
class NewToken:
    """An enrolment token, shown this once. *Units*: wall seconds."""

    token: Secret
    host_name: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class Why:
    """Placing explained. `sandbox`: None for one that was only asked about. Only operators are shown the hosts."""

    spec: Spec
    explanation: Explanation
    sandbox: Sandbox | None
    shows_hosts: bool


@dataclass(frozen=True, slots=True)
class ConfigView:
    """One revision of the deployment document; 0 is the built-in one, which nobody applied. *Units*: wall seconds."""

    revision: int
    document: str
    applied_at: float | None
    client_id: str | None


@dataclass(frozen=True, slots=True)
class CheckedConfig:
    """What is wrong with a document, or what it would change of the one that applies, which is at `revision`."""

    revision: int
    problems: Sequence[Problem]
    changes: Sequence[Change]


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One control process. *Units*: wall seconds."""

    id: str
    address: str
    machine: str
    version: str
    started_at: float
    seen_at: float
    healthy: bool
    answering: bool


@dataclass(frozen=True, slots=True)
class WarmView:
    """A policy and how it is kept. `problem`: why there are fewer than wanted, where that is known."""

    policy: WarmPolicy
    template: str
    ready: int
    starting: int


class Service(Protocol):
    """*Errors* of all: Refused and Unavailable of base.errors. A stranger's sandbox is SANDBOX_NOT_FOUND, like one that never was.

    `every_team`: an operator may mean another team's sandbox, too. `revision`: only if the object is still at it, else REVISION_MISMATCH.
    """

    async def authenticate(self, key: Secret) -> Caller: ...

    async def create(self, caller: Caller, request: CreateRequest) -> Sandbox:
        """Accept, place, and (request.wait) answer when ready.

        *Idempotency*: by `request_id`: the same body gives the same sandbox; REQUEST_MISMATCH, or REQUEST_IN_PROGRESS while the first is
        not ready. *Errors*: NO_CAPACITY / CREATE_TIMEOUT (Unavailable) after the class's patience, with the sandbox released and the key
        forgotten; the sandbox's own failure reason (START_FAILED...) as Unavailable.
        """
        ...

    async def get(self, caller: Caller, sandbox_id: str, *, ended: bool = False, every_team: bool = False) -> Sandbox:
        """One sandbox that is visible (ready, paused...); with `ended`, also starting and ended ones."""
        ...

    async def find(self, caller: Caller, query: Query) -> Page[Sandbox]:
        """*Errors*: FORBIDDEN and INVALID_REQUEST for another team's, or a team that there is not."""
        ...

    async def release(
        self, caller: Caller, sandbox_id: str, *, reason: str = "RELEASE_REQUESTED", every_team: bool = False, revision: int | None = None
    ) -> Sandbox:
        """End it, from every state; returns at once when the intent is committed. SANDBOX_NOT_FOUND when it is ending already or ended."""
        ...

    async def set_end(
        self, caller: Caller, sandbox_id: str, *, timeout_s: float, only_extend: bool, revision: int | None = None
    ) -> Sandbox:
        """Let it end `timeout_s` from now. Only-extend never shortens. 0 ends it now. Waits for the agent's word when the old end is near."""
        ...

    async def pause(self, caller: Caller, sandbox_id: str, *, revision: int | None = None) -> Sandbox:
        """Freeze it where it is: it keeps memory, disk, slot and connections, and gives its CPU back. Paused already: as it is.

        *Errors*: ILLEGAL_STATE; NOT_SUPPORTED; PAUSE_FAILED, PAUSE_TIMEOUT, with which it goes on; OutcomeUnknown.
        """
        ...

    async def suspend(
        self, caller: Caller, sandbox_id: str, *, mode: SaveMode = SaveMode.FULL, strict: bool = False, revision: int | None = None
    ) -> Sandbox:
        """Save it, and give its CPU, memory and slot back. `save_mode` of the answer says what was saved. Suspended already: as it is.

        `strict`: only if its guest answers (GUEST_UNRESPONSIVE). *Errors*: as `pause`, with SAVE_FAILED and SAVE_TIMEOUT.
        """
        ...

    async def resume(
        self, caller: Caller, sandbox_id: str, *, timeout_s: float | None = None, reboot: bool = False, revision: int | None = None
    ) -> tuple[Sandbox, bool]:
        """Let one that is paused, suspended or stopped go on, and say whether it was at rest; it lives `timeout_s` from when it is ready.

        One that runs is answered as it is; one that is on a way is waited for. `reboot`: from its files alone. *Errors*: INSUFFICIENT_*
        (its host has no room; it stays as it was), RESUME_FAILED, RESUME_TIMEOUT; CLASS_LIMIT; OutcomeUnknown.
        """
        ...

    async def snapshot(self, caller: Caller, sandbox_id: str, *, mode: SaveMode = SaveMode.FULL, name: str | None = None) -> Snapshot:
        """Keep what a running sandbox is at one moment; it goes on. The answer's `mode` says what its host could keep.

        `name`: `name[:tag]`; the next of that name is its next version. *Errors*: ILLEGAL_STATE (it does not run), NOT_SUPPORTED,
        INVALID_REQUEST (a template's name), RECORDS_QUOTA, INSUFFICIENT_DISK, HOST_DISK_FULL, SAVE_FAILED, SAVE_TIMEOUT; OutcomeUnknown.
        """
        ...

    async def snapshots(
        self, caller: Caller, *, sandbox_id: str | None = None, name: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> Page[Snapshot]:
        """The team's, newest first."""
        ...

    async def find_snapshot(self, caller: Caller, reference: str) -> Snapshot:
        """By id, or `name[:tag]`: the newest of that. *Errors*: SNAPSHOT_NOT_FOUND."""
        ...

    async def delete_snapshot(self, caller: Caller, reference: str) -> Snapshot:
        """Take it away, in whatever state it is. *Errors*: SNAPSHOT_NOT_FOUND; SNAPSHOT_IN_USE while sandboxes that began from it live."""
        ...

    async def fork(
        self, caller: Caller, sandbox_id: str, *, count: int = 1, timeout_s: int | None = None, request_id: str | None = None
    ) -> Sequence[Sandbox | AtollError]:
        """Clones of a running sandbox from one moment of it, in their order; each is there, or says why it is not.

        *Idempotency*: by `request_id`: said again once all are there, the same ones; what is missing begins from another moment.
        *Errors*: of the moment, as `snapshot`; INVALID_REQUEST.
        """
        ...

    async def authorize_replacement(self, caller: Caller, sandbox_id: str, *, generation: int, statement: str = "") -> Sandbox:
        """The caller certifies that what the guest of this generation was given is revoked outside: the next one may begin.

        Operators may say so for every team. *Idempotency*: said again, the sandbox as it is. *Errors*: REPLACEMENT_NOT_BLOCKED.
        """
        ...

    async def events(
        self, caller: Caller, sandbox_id: str, *, after: int = 0, limit: int = 100, every_team: bool = False
    ) -> Sequence[EventRecord]: ...

    async def follow(self, caller: Caller, sandbox_id: str, *, after: int = 0) -> AsyncIterator[Sequence[EventRecord]]:
        """A sandbox's history after `after`, and then what comes, in batches, until it has ended; an empty batch says that the stream lives.

        An operator may mean another team's sandbox. *Errors*: SANDBOX_NOT_FOUND, and Unavailable RATE_LIMITED (too many streams), at the call.
        """
        ...

    async def logs(self, caller: Caller, sandbox_id: str, *, every_team: bool = False) -> bytes:
        """The guest's console, as far as its host still has it."""
        ...

    async def usage(self, caller: Caller, sandbox_id: str, *, every_team: bool = False) -> tuple[Sandbox, Sequence[UsagePoint]]:
        """A sandbox that is visible and what it has used over its life, oldest first; empty while it does not run.

        *Errors*: OutcomeUnknown when its host does not answer in time.
        """
        ...

    async def usages(self, caller: Caller, sandbox_ids: Sequence[str]) -> Sequence[tuple[Sandbox, UsagePoint]]:
        """What these use now, as far as they are the caller's, run, and their hosts answer."""
        ...

    async def usage_of(self, sandboxes: Sequence[Sandbox]) -> Mapping[str, UsagePoint]:
        """What these use now, by id, as far as they run and their hosts answer. For who has got them from `find` or `get`."""
        ...

    async def why(self, caller: Caller, sandbox_id: str) -> Why:
        """Why it is where it is, or nowhere, as the hosts are now. Operators may ask about every team's."""
        ...

    async def why_request(self, caller: Caller, request: CreateRequest) -> Why:
        """Where a sandbox of this request would be placed now; nothing is made. *Errors*: as create, but for quotas."""
        ...

    async def begin_import(self, caller: Caller, request: ImportRequest) -> Import:
        """Accept an image to be made a template. *Errors*: INVALID_REQUEST, FORBIDDEN, NOT_SUPPORTED, RATE_LIMITED."""
        ...

    async def find_import(self, caller: Caller, import_id: str) -> Import:
        """One of the team's imports. *Errors*: IMPORT_NOT_FOUND."""
        ...

    async def imports(self, caller: Caller) -> Sequence[Import]: ...

    async def delete_template(self, caller: Caller, reference: str) -> Template:
        """Take it away. *Errors*: TEMPLATE_NOT_FOUND, FORBIDDEN (not the team's), TEMPLATE_IN_USE."""
        ...

    async def templates(self, caller: Caller) -> Sequence[Template]: ...

    async def template(self, caller: Caller, reference: str) -> Template:
        """By id, alias or `namespace/alias[:tag]`. *Errors*: TEMPLATE_NOT_FOUND, INVALID_REQUEST."""
        ...

    async def template_image(self, caller: Caller, reference: str) -> TemplateImage:
        """What its files are made of. *Errors*: as `template`; NOT_SUPPORTED."""
        ...

    async def template_layer(self, caller: Caller, reference: str, digest: str) -> Path:
        """The file of one of its layers. *Errors*: as `template_image`; IMAGE_UNAVAILABLE."""
        ...

    async def warm_policies(self, caller: Caller) -> Sequence[WarmView]:
        """What is kept warm; operators only (FORBIDDEN)."""
        ...

    async def keep_warm(self, caller: Caller, reference: str, request: CreateRequest, *, count: int) -> WarmView:
        """Keep so many guests of this template ready, of the class and size that `request` names; 0: none any more. Operators only.

        *Idempotency*: the last word counts. *Errors*: TEMPLATE_NOT_FOUND, CLASS_LIMIT, INVALID_REQUEST, NOT_SUPPORTED, WARM_QUOTA.
        """
        ...

    async def hosts(self, caller: Caller) -> Sequence[HostView]:
        """Operators only (FORBIDDEN)."""
        ...

    async def host(self, caller: Caller, host_id: str) -> HostView:
        """By id or name; operators only."""
        ...

    async def set_host_admin(
        self, caller: Caller, host_id: str, event: AdminEvent, *, off: bool = False, revision: int | None = None
    ) -> HostView:
        """Activate, drain, disable or reset; operators only. Disabling is a fence: see control.hosts.hosts. `off`: the machine is known to be
        off, so its last lease needs no waiting for. *Errors*: ILLEGAL_STATE for a disabled host, which is reset and enrolled again instead.
        """
        ...

    async def register_host(self, caller: Caller, registration: wire.Registration) -> HostView:
        """Make a host without a token; operators only. *Idempotency*: the same again is fine. *Errors*: ENROLLMENT_CONFLICT, HOST_QUOTA."""
        ...

    async def recount_host(self, caller: Caller, host_id: str) -> HostView:
        """Let the host grant what its machine has now; operators only. *Errors*: ILLEGAL_STATE (nothing known, or less than is in use)."""
        ...

    async def create_enrollment_token(self, caller: Caller, *, host_name: str, life_s: float = 3600.0) -> NewToken:
        """A one-use token by which a host of this name enrols; operators only. *Units*: seconds, at most an hour."""
        ...

    async def config(self, caller: Caller, revision: int | None = None) -> ConfigView:
        """The deployment document, the newest or one revision of it; operators only. *Errors*: CONFIG_NOT_FOUND."""
        ...

    async def config_history(self, caller: Caller, *, before: int | None = None, limit: int = 100) -> Sequence[ConfigView]:
        """Applied revisions below `before`, newest first; operators only."""
        ...

    async def check_config(self, caller: Caller, text: str) -> CheckedConfig:
        """Read a document without applying it; operators only."""
        ...

    async def apply_config(self, caller: Caller, text: str, *, revision: int) -> ConfigView:
        """Make it the revision after `revision`, which must be the newest; operators only. Sandboxes that there are keep their specs.

        *Idempotency*: the same text for the same revision gives the same answer. *Errors*: CONFIG_INVALID, CONFIG_CONFLICT.
        """
        ...

    def limits(self, caller: Caller) -> tuple[ClientLimits, TeamLimits]:
        """What the caller's key and team may use."""
        ...

    async def keys(self, caller: Caller) -> Sequence[Client]: ...

    async def create_key(self, caller: Caller, *, name: str, role: Role = Role.MEMBER, team: str | None = None) -> NewKey:
        """A key of the caller's team. Only operators may give OPERATOR or name another team (made when it does not exist)."""
        ...

    async def revoke_key(self, caller: Caller, client_id: str) -> Client:
        """Refuse it from now on. Operators: any team's. *Errors*: KEY_NOT_FOUND."""
        ...

    def isolated_by(self, sandbox: Sandbox) -> str | None:
        """The driver that holds it, and what a suspend of it keeps (`firecracker full`); None where its host has not said."""
        ...

    def access_token(self, sandbox: Sandbox) -> str | None:
        """The guest's access token (derived, never stored); None for an unsecured sandbox."""
        ...

    def traffic_token(self, sandbox: Sandbox) -> str | None:
        """The token that public ports demand; None where traffic is public."""
        ...
