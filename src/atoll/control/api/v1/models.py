"""The objects of `/v1`. Names are camelCase on the wire; times are RFC 3339 in UTC; units are in the names.

What comes in is refused when it has a member that we do not know; what goes out may gain members, so clients ignore those that they do
not know.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from atoll.base.errors import Code
from atoll.domain.sandbox import Condition, State
from atoll.domain.spec import Isolation, OnEnd, PlacementPolicy, SaveMode
from atoll.domain.tenancy import Role
from atoll.planning.placing import Filter
from atoll.wire.document import TEXT_BYTES_MAX

INT32_MAX = 2**31 - 1

Text = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f]*$")]
Whole = Annotated[int, Field(ge=0, le=INT32_MAX)]
Labels = Annotated[dict[str, str], Field(max_length=512)]


class Incoming(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel, populate_by_name=True)


def like(*examples: JsonDict) -> ConfigDict:
    """What an object may look like, for the document."""
    return ConfigDict(json_schema_extra={"examples": list(examples)})


class Outgoing(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class SizeRequest(Incoming):
    """What differs from the template's size."""

    model_config = like({"cpuMillis": 2000, "memoryMib": 1024})

    cpu_millis: Whole | None = None
    memory_mib: Whole | None = None
    disk_mib: Whole | None = None


class NetworkRequest(Incoming):
    """Egress and ingress. `allowOut` wins over `denyOut`; private ranges are closed whatever these say."""

    model_config = like({"internet": False, "allowOut": ["198.51.100.7"]})

    internet: bool = True
    allow_out: Annotated[list[str], Field(max_length=256)] = Field(default_factory=list)
    deny_out: Annotated[list[str], Field(max_length=256)] = Field(default_factory=list)
    public_traffic: bool = True
    mask_request_host: str | None = None


class NewSandbox(Incoming):
    """What a create asks for; None: as class and template say."""

    model_config = like(
        {"template": "base", "timeoutSeconds": 600},
        {
            "template": "base",
            "clientRequestId": "build-4711",
            "class": "default",
            "size": {"cpuMillis": 2000},
            "metadata": {"commit": "3f1c"},
            "env": {"CI": "true"},
            "wait": False,
        },
    )

    template: Annotated[
        Text | None, Field(min_length=1, description="Id, alias or namespace/alias, with an optional :tag; else the class's, else base.")
    ] = None
    client_request_id: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9._:-]{1,255}$", description="Idempotency key, per team: sent again, it gives the same sandbox."),
    ] = None
    class_name: Annotated[Text | None, Field(alias="class", description="The operator's policy for this kind of workload.")] = None
    size: SizeRequest = Field(default_factory=SizeRequest)
    timeout_seconds: Annotated[int | None, Field(ge=1, le=INT32_MAX, description="Else the class's.")] = None
    metadata: Labels = Field(default_factory=dict)
    env: Labels = Field(default_factory=dict, repr=False)
    network: NetworkRequest = Field(default_factory=NetworkRequest)
    secured: Annotated[bool, Field(description="Whether the guest demands its access token.")] = True
    require_host: Annotated[Text | None, Field(description="Only this host, by id.")] = None
    prefer_host: Annotated[Text | None, Field(description="Ask this host first, by id or name; another one where it does not fit.")] = None
    wait: Annotated[bool, Field(description="Answer when it is ready (201), or when it is accepted (202).")] = True


class Search(BaseModel):
    """The query of a list of sandboxes."""

    model_config = ConfigDict(frozen=True)

    scope: Annotated[Literal["living", "visible", "all"], Field(description="`visible`: ready and beyond; `all`: ended ones too")] = (
        "living"
    )
    state: Annotated[str | None, Field(description="Comma-separated states", max_length=256)] = None
    metadata: Annotated[str | None, Field(description="name=value&name=value, each part URL-encoded", max_length=8192)] = None
    template: Annotated[str | None, Field(description="Id or alias", max_length=256)] = None
    started_after: Annotated[str | None, Field(alias="startedAfter", description="RFC 3339, inclusive", max_length=64)] = None
    order: Annotated[Literal["asc", "desc"], Field(description="By start; newest first unless `asc`")] = "desc"
    limit: Annotated[int, Field(ge=1, le=100)] = 100
    cursor: Annotated[str | None, Field(description="`nextCursor` of the page before", max_length=512)] = None
    usage: Annotated[bool, Field(description="With what each uses now, as far as its host answers")] = False
    team: Annotated[
        str | None, Field(description="For operators: another team's, by name or id, or `*` for every team's", min_length=1, max_length=256)
    ] = None


class NewEnd(Incoming):
    """When a sandbox should end, from now; 0 ends it."""

    model_config = like({"timeoutSeconds": 600, "onlyExtend": True})

    timeout_seconds: Whole
    only_extend: Annotated[bool, Field(description="Never move the end nearer.")] = False


class Suspension(Incoming):
    """What to save. Where a host cannot save memory, files are saved alone, and `saveMode` of the answer says so."""

    model_config = like({"memory": True})

    memory: Annotated[bool, Field(description="Memory and files of one moment; false: files alone, and it boots anew.")] = True
    require_healthy_guest: Annotated[bool, Field(description="Refuse when its guest does not answer.")] = False


class Resumption(Incoming):
    """How long it lives from when it is ready, otherwise as it was created."""

    model_config = like({"timeoutSeconds": 600})

    timeout_seconds: Whole | None = None
    reboot: Annotated[bool, Field(description="From its files alone, though its memory is saved, too.")] = False


class ReplacementAuthorization(Incoming):
    """The client's certificate that what the guest of this generation was given (keys, tokens, access elsewhere) is revoked.

    `statement` is recorded with it.
    """

    model_config = like({"generation": 1, "statement": "deploy key revoked"})

    generation: Annotated[int, Field(ge=1, le=INT32_MAX)]
    statement: Annotated[str, Field(max_length=500, pattern=r"^[^\x00-\x1f]*$")] = ""


class NewKey(Incoming):
    """`role` and `team` are for operators."""

    model_config = like({"name": "ci"}, {"name": "operations", "role": "operator", "team": "platform"})

    name: Annotated[Text, Field(min_length=1)]
    role: Literal["member", "operator"] = "member"
    team: Annotated[Text | None, Field(min_length=1)] = None


class ConfigText(Incoming):
    """A deployment document, to be read."""

    model_config = like({"document": "version: 1\nclasses:\n  ci: {lifetime: {max: 2h}}\n"})

    document: Annotated[str, Field(max_length=TEXT_BYTES_MAX)]


class NewConfig(ConfigText):
    """A deployment document, to be applied. `revision` is that of the document that it replaces; 0: the built-in one."""

    model_config = like({"document": "version: 1\nclasses:\n  ci: {lifetime: {max: 2h}}\n", "revision": 0})

    revision: Whole


class Size(Outgoing):
    cpu_millis: int
    memory_mib: int
    disk_mib: int


class Amount(Outgoing):
    """Capacity as a vector."""

    cpu_millis: int
    memory_mib: int
    disk_mib: int
    slots: int


class Network(Outgoing):
    internet: bool
    allow_out: list[str]
    deny_out: list[str]
    public_traffic: bool
    mask_request_host: str | None


class TemplateRef(Outgoing):
    id: str
    name: str


class Origin(Outgoing):
    """The snapshot that it began from."""

    snapshot_id: str
    mode: SaveMode


class Placement(Outgoing):
    """Where the present generation is."""

    id: str
    host_id: str


class Stored(Outgoing):
    """What the artifact store has of it, by which any host that fits can go on. `bytes`: what that takes of the store."""

    moment: str
    bytes: int


class Machine(Outgoing):
    """What a sandbox runs on."""

    driver: Annotated[str | None, Field(description="What its host isolates it by; null in lists, and before its host has said.")]
    hardware: Annotated[Literal["virtualized", "emulated"] | None, Field(description="Of virtual machines; null of all others.")]
    saves: Annotated[SaveMode | None, Field(description="What a suspend keeps at most; null where nothing, or not known.")]


class Usage(Outgoing):
    """What a sandbox used at one moment, beside what it may use. `cacheBytes` could be dropped at once and are not in `memoryBytes`."""

    at: str
    cpu_percent: float
    cpu_millis: int
    memory_bytes: int
    cache_bytes: int
    memory_mib: int
    disk_bytes: int
    disk_mib: int


class Sandbox(Outgoing):
    """A sandbox. `reason` says why it ends or ended. Its ports are at `{port}-{id}.{domain}`, or at the edge with the headers
    `E2b-Sandbox-Id` and `E2b-Sandbox-Port`. The tokens are in answers about one sandbox that has not ended, never in lists.
    `bootstrap_exposed`: what the create brought (its environment) has left for the present generation's guest.
    """

    id: str
    revision: int
    team_id: str
    generation: int
    state: State
    reason: str | None
    detail: str | None
    conditions: list[Condition]
    bootstrap_exposed: bool
    template: TemplateRef
    origin: Origin | None
    class_name: Annotated[str, Field(alias="class")]
    isolation: Isolation
    machine: Machine
    size: Size
    network: Network
    metadata: dict[str, str]
    client_request_id: str | None
    timeout_seconds: int
    on_end: OnEnd
    created_at: str
    started_at: str | None
    end_at: Annotated[str | None, Field(description="null while it is at rest: it does not end then.")]
    save_mode: Annotated[SaveMode | None, Field(description="What of it was saved last.")]
    stored: Annotated[Stored | None, Field(description="What is saved of it, once that is in the artifact store.")]
    release_requested_at: str | None
    released_at: str | None
    placement: Annotated[Placement | None, Field(description="null while it rests in the artifact store alone, or waits for a host.")]
    domain: str
    access_token: str | None
    traffic_token: str | None
    usage: Usage | None


class Objection(Outgoing):
    filter: Filter
    detail: str


class Verdict(Outgoing):
    """One host's part. `rank`: in which place it would be asked; null: it would not be. `free` may be less than nothing after a host shrank."""

    host_id: str
    name: str
    rank: int | None
    refused: bool
    has_image: bool
    free: Amount
    objections: list[Objection]


class Removed(Outgoing):
    """How many hosts a filter removes; `alone`: how many that nothing else speaks against."""

    filter: Filter
    hosts: int
    alone: int


class Why(Outgoing):
    """Placing explained, as the hosts are now. `verdicts` are for operators; the candidates come first, in their order."""

    sandbox_id: str | None
    state: State | None
    placement: Placement | None
    class_name: Annotated[str, Field(alias="class")]
    policy: PlacementPolicy
    need: Amount
    summary: str
    hosts: int
    candidates: int
    removed: list[Removed]
    verdicts: list[Verdict] | None


class SandboxPage(Outgoing):
    items: list[Sandbox]
    next_cursor: str | None
    total_running: int


class Event(Outgoing):
    """One entry of a sandbox's history; `seq` grows over the whole deployment. `requestId` is the client's request that caused it, `commandId`
    what control wanted of the placement by then. Events of hosts and alerts have no sandbox and no team.
    """

    seq: int
    id: str
    at: str
    type: str
    sandbox_id: str | None
    team_id: str | None
    generation: int
    state: str
    reason: str | None
    data: dict[str, str | int | float | None]
    host_id: str | None
    placement_id: str | None
    command_id: str | None
    request_id: str | None


class EventPage(Outgoing):
    """`nextAfter` is what to send as `after` for what comes later."""

    items: list[Event]
    next_after: int


class UsageList(Outgoing):
    items: list[Usage]


class Template(Outgoing):
    id: str
    name: str
    aliases: list[str]
    public: bool
    build_id: str
    image: str
    size: Size
    default_user: str
    default_workdir: str | None
    env: dict[str, str]
    start_command: list[str]
    source: str
    created_at: str
    updated_at: str
    spawn_count: int
    last_spawned_at: str | None


class TemplateLayer(Outgoing):
    digest: str
    media_type: str
    size_bytes: int
    tar_digest: str


class TemplateImage(Outgoing):
    """`base`: a ready-made image below the layers, which hosts bring along; null: none."""

    base: str | None
    architecture: str
    layers: list[TemplateLayer]


class TemplateList(Outgoing):
    items: list[Template]
    next_cursor: str | None


class Key(Outgoing):
    id: str
    name: str
    role: Role
    hint: str
    created_at: str
    last_used_at: str | None
    revoked_at: str | None


class KeyList(Outgoing):
    items: list[Key]
    next_cursor: str | None


class MadeKey(Outgoing):
    """A key, shown this once."""

    key: Key
    secret: str


class TeamLimits(Outgoing):
    """null: without limit."""

    max_sandboxes: int | None
    max_records: int | None
    requests_per_second: float | None


class ClientLimits(Outgoing):
    """null: without limit of its own."""

    max_sandboxes: int | None
    requests_per_second: float | None


class Team(Outgoing):
    id: str
    name: str
    limits: TeamLimits


class Config(Outgoing):
    """One revision of the deployment document. Revision 0 is what applies until one was applied."""

    revision: int
    document: str
    applied_at: str | None
    applied_by: str | None


class ConfigList(Outgoing):
    """`nextBefore` is what to send as `before` for older ones; null on the last page."""

    items: list[Config]
    next_before: int | None


class ConfigProblem(Outgoing):
    """`line` and `column` count from 1; null: of the document as a whole."""

    line: int | None
    column: int | None
    path: str
    message: str
    hint: str


class ConfigChange(Outgoing):
    """null: it is not there."""

    path: str
    before: str | None
    after: str | None


class CheckedConfig(Outgoing):
    """`changes` are those of the document that applies now, which is at `revision`."""

    valid: bool
    revision: int
    problems: list[ConfigProblem]
    changes: list[ConfigChange]


class ClientRef(Outgoing):
    id: str
    name: str
    role: Role
    limits: ClientLimits


class Whoami(Outgoing):
    team: Team
    client: ClientRef


class HostCounts(Outgoing):
    total: int
    active: int
    healthy: int


class Replica(Outgoing):
    """One control process. `answering`: the one that gives this answer."""

    id: str
    address: str
    machine: str
    version: str
    started_at: str
    seen_at: str
    healthy: bool
    answering: bool


class Status(Outgoing):
    """The deployment, for operators."""

    version: str
    install_id: str
    domain: str
    ready: bool
    hosts: HostCounts
    capacity: Amount
    used: Amount
    sandboxes: int
    replicas: list[Replica]


class Failure(Outgoing):
    """`code` never changes its meaning; `hint` says what to do."""

    code: Code
    message: str
    hint: str
    detail: dict[str, str | int | float | None]
    request_id: str


class ErrorBody(Outgoing):
    model_config = like(
        {
            "error": {
                "code": "SANDBOX_NOT_FOUND",
                "message": "sandbox 'i0123456789abcdefghij' was not found",
                "hint": "It has ended, or it belongs to another team; `atoll sandbox list` shows yours.",
                "detail": {},
                "requestId": "3f1c0a9b7e5d2846",
            }
        }
    )

    error: Failure
