"""Agent ↔ control: HTTPS JSON, and only the agent dials.

| call | who answers | what for |
|---|---|---|
| POST /agent/v1/enroll | anyone with a one-use token | a host, and its credential |
| POST /agent/v1/identity | a host with its credential | who it is; how it finds out whether an enrolment without answer was one |
| POST /agent/v1/poll | parked <= 25 s | renews the lease, carries health and observations, returns commands and ends |
| POST /agent/v1/observe | at once | observations that cannot wait for the poll |
| POST /agent/v1/collected | at once | the end of a guest's console that control asked for, or why what it asked for cannot be had |
| PUT /agent/v1/layers/{id} | at once | a layer that control asked for: its bytes, with their number of entries in Atoll-Entries |
| POST /agent/v1/accounts | at once | what the host has, for a control whose store was taken back to a backup |
| GET /agent/v1/blobs/{digest} | at once | a blob of an image, from any byte on, or (307) where it is to be fetched without credentials |
| GET /agent/v1/manifests/{digest}, /agent/v1/image-keys | at once | signed manifests, and which keys count (wire/manifests.py) |
| POST /agent/v1/payloads | at once | payloads by reference, when their guests are there to take them; guest tokens, for a run that has lost them |

Everything that expires travels as remaining seconds, counted on CLOCK_BOOTTIME from when the agent *sent* the request.
Errors: `{"code": <base.errors.Code>, "message", "hint"}` with 401 (credential), 409 (STALE_*, OVERLAPPING_*), 400, 413, 429, 503.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from atoll.base.units import Vector
from atoll.domain import account
from atoll.domain.command import Kind
from atoll.domain.moment import Moment
from atoll.domain.placement import Observed
from atoll.domain.spec import OnEnd, OnLeaseExpiry, SaveMode, Spec

PROTOCOL: Final = 1
MESSAGE_BYTES_MAX: Final = 256 * 1024
COMMANDS_PER_POLL_MAX: Final = 16
OBSERVATIONS_PER_MESSAGE_MAX: Final = 256
POLL_PARK_S_MAX: Final = 25.0
ACCOUNTS_PER_MESSAGE_MAX: Final = 32
COLLECT_BYTES_MAX: Final = 128 * 1024
HOST_NAME_MAX: Final = 128
CONSOLE: Final = "console"
USAGE: Final = "usage"
LAYER: Final = "layer"
"""What has changed in a placement's files: sent to /layers/{id}, or /collected says why not. The guest need not survive it."""
SAMPLED_MAX: Final = 1000
POINTS_MAX: Final = 300


MOMENT: Final = r"^sha256:[0-9a-f]{64}$"
SNAPSHOTS_MAX: Final = 64
"""Orders or words of snapshots in one message; more come with the next."""


class SnapshotWish(StrEnum):
    """What is wanted of a snapshot."""

    KEEP = "keep"
    DROP = "drop"


class SnapshotState(StrEnum):
    """What a host has of a snapshot."""

    KEPT = "kept"
    FAILED = "failed"
    ABSENT = "absent"


def moment_of(digest: str | None, size: int, kind: str) -> Moment | None:
    """What three fields of a message say of a moment in the store; None: none is there."""
    return Moment(digest, size, kind) if digest is not None else None


class Message(BaseModel):
    """Base of every message: unknown fields are ignored, known ones are checked."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class HostFacts(Message):
    """What the agent found out about its host; registered once, reported again with every session."""

    arch: str
    kernel: str = ""
    cpu_count: int = Field(ge=1)
    memory_mib: int = Field(ge=1)
    disk_mib: int = Field(ge=1)
    claims: bool = False
    """Whether the agent knows what `Command.claimed` asks; one that does not would call a guest ready that has got nothing."""
    boot_id: str = ""
    """Of the kernel; a change means that every sandbox of the host is gone."""


class Overcommit(Message):
    """How many times what a machine has may be promised."""

    cpu: float = Field(default=1.0, gt=0, le=1000)
    memory: float = Field(default=1.0, gt=0, le=1000)
    disk: float = Field(default=1.0, gt=0, le=1000)


class Registration(Message):
    """What a host registers. `capacity` is what it grants: of what the facts say, without the reserve, times the overcommit, or less."""

    name: str = Field(min_length=1, max_length=HOST_NAME_MAX)
    capacity: Vector
    facts: HostFacts
    reserve: Vector | None = None
    """What the operator keeps back; None: nothing is known of reserve and overcommit, and the capacity stands as it is."""
    overcommit: Overcommit | None = None
    slots: str | None = Field(default=None, max_length=64)
    """The range of its sandboxes' addresses, as CIDR."""
    region: str = Field(default="local", max_length=64)
    labels: dict[str, str] = Field(default_factory=dict, max_length=64)
    protocol_min: int = PROTOCOL
    protocol_max: int = PROTOCOL
    agent_version: str = ""
    credential_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the credential that the host has made and keeps, so that a lost answer loses nothing; None: control makes one."""


class Enroll(Registration):
    """Body of /enroll."""

    token: str = Field(repr=False)


class Enrolled(Message):
    """Answer of /enroll. `credential`: the one that control made, shown this once; empty where the host has its own."""

    host_id: str
    credential: str = Field(default="", repr=False)
    credential_version: int
    install_id: str


class Known(Message):
    """Answer of /identity: whose credential it is."""

    host_id: str
    name: str
    credential_version: int
    install_id: str


class Check(Message):
    """One self-check of the host (the doctor's registry)."""

    id: str
    ok: bool
    detail: str = ""
    fatal: bool = False
    """A failed fatal check makes the host unschedulable."""
    fix: str = ""
    """What to do when it failed."""


class ImageCacheState(Message):
    """A host's own images. *Units*: bytes."""

    trees: int = 0
    tree_bytes: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    quarantined: int = 0
    """Blobs that were not what their names said."""
    pinned: int = 0
    hits: int = 0
    """Starts that found their image ready, since the agent began."""
    fetches: int = 0
    """Images that were fetched since then."""


class DriverState(Message):
    """What gives a host one of its isolations."""

    isolation: str
    name: str
    saves: str | None = None
    """What a suspend keeps: `full` or `filesystem`."""


class HostHealth(Message):
    """What changes between polls."""

    checks: list[Check] = Field(default_factory=list)
    isolations: list[str] = Field(default_factory=list)
    drivers: Annotated[list[DriverState], Field(max_length=16)] = Field(default_factory=list)
    """Of these isolations."""
    images: list[str] = Field(default_factory=list)
    """Digests of images held ready."""
    quarantined: list[str] = Field(default_factory=list)
    slots_ready: int = 0
    disk_free_mib: int = 0
    moments: list[str] = Field(default_factory=list, max_length=16)
    """Kinds of moments that this host can go on from when they are fetched from the store (`domain.moment.kind`). Empty: none, as with agents
    that know of no moments; such a host is given nothing that it would have to fetch."""
    image_cache: ImageCacheState | None = None


class Observation(Message):
    """A placement's whole state, resent until acknowledged. Source of domain.placement.Report."""

    placement_id: str
    sandbox_id: str
    generation: int
    seq: int = Field(ge=1)
    observed: Observed
    applied_revision: int = 0
    failed_revision: int = 0
    """Of a command that was tried in vain and is not tried again."""
    ready: bool = False
    address: str | None = None
    reason: str | None = None
    detail: str | None = Field(default=None, max_length=2000)
    save_mode: SaveMode | None = None
    """Of what is saved."""
    unresponsive: bool = False
    """The guest did not answer when it was saved."""
    moment: str | None = Field(default=None, pattern=MOMENT)
    """Of what is saved now: the digest of its manifest, once all of it is in the store. Never that of an earlier save."""
    moment_size: int = Field(default=0, ge=0)
    """What it takes of the store. *Units*: bytes."""
    moment_kind: str = Field(default="", max_length=256)
    """Which hosts can go on from it: those that name it in `HostHealth.moments`."""
    guest_version: str | None = None
    end_revision: int = 0
    ended_by: str | None = None
    """`end_at`, `lease`, `exit`, `command`: who made it absent."""


class SnapshotSeen(Message):
    """What became of a snapshot's order. *Units*: bytes."""

    id: str
    state: SnapshotState
    save_mode: SaveMode | None = None
    """Of one that is kept."""
    size_bytes: int = Field(default=0, ge=0)
    moment: str | None = Field(default=None, pattern=MOMENT)
    """Of one that is kept, said once more when all of it is in the store; with the next two as in `Observation`."""
    moment_size: int = Field(default=0, ge=0)
    moment_kind: str = Field(default="", max_length=256)
    code: str | None = None
    """Why it could not be kept; nothing of it is left then."""
    message: str = Field(default="", max_length=2000)


class Poll(Message):
    """Body of /poll. The newest `poll_seq` of a session is the only one that is answered."""

    protocol: int = PROTOCOL
    host_id: str
    epoch: str
    previous_epoch: str | None = None
    poll_seq: int = Field(ge=1)
    incarnation: str | None = None
    """Of the store that this host has settled with; None: it has not heard of any."""
    agent_version: str
    facts: HostFacts
    health: HostHealth
    observations: list[Observation] = Field(default_factory=list, max_length=OBSERVATIONS_PER_MESSAGE_MAX)
    since: int | None = None
    """The earlier poll that control has taken in (`PollAnswer.told`): `holds`, `end_revisions` and `dropped` are what has changed since.
    None: they are the whole, or as much of it as fits."""
    holds: dict[str, int] = Field(default_factory=dict)
    """placement_id → highest desired_revision accepted, for placements in the agent's database that are not absent."""
    end_revisions: dict[str, int] = Field(default_factory=dict)
    """placement_id → revision of the end that the agent enforces; one that `holds` names and this does not has none."""
    dropped: list[str] = Field(default_factory=list)
    """Placements that are held no longer."""
    tombstones: list[str] = Field(default_factory=list)
    """Absent placements that control has not confirmed yet."""
    snapshots: dict[str, SnapshotWish] = Field(default_factory=dict, max_length=SNAPSHOTS_MAX)
    """snapshot id → what of it is under way here, or done and not heard yet."""
    kept: list[str] = Field(default_factory=list, max_length=SNAPSHOTS_MAX)
    """Snapshots that are here, told by each run and now and then, in turns: control orders those away that nobody has any more."""
    sent_at: float | None = None
    """The host's wall clock when it sent this: tells how far it is from control's."""
    park_s: float = Field(default=POLL_PARK_S_MAX, ge=0, le=POLL_PARK_S_MAX)
    """How long the agent wants to wait for news; 0 answers at once."""


class InitPayload(Message):
    """What the guest gets by init, from memory only: never in a command row, a config file or a database in clear."""

    env: dict[str, str] = Field(default_factory=dict, repr=False)
    access_token: str | None = Field(default=None, repr=False)
    files: list[dict[str, str]] = Field(default_factory=list, repr=False)
    """`{"path", "content", "mode"}`."""


class Command(Message):
    """What control asks about one placement. `id` and `digest` are those of domain.command."""

    id: str
    kind: Kind
    placement_id: str
    sandbox_id: str
    team_id: str
    generation: int
    desired_revision: int
    digest: str
    epoch: str
    spec: Spec | None = None
    """For ensure_present and ensure_running."""
    nonce: str | None = None
    guest_public_key: str | None = None
    """base64 of the raw Ed25519 key."""
    guest_token: str | None = Field(default=None, repr=False)
    """JWT of scope control for this placement's guest."""
    hostname: str | None = None
    payload_ref: str | None = None
    payload_digest: str | None = None
    reason: str | None = None
    save_mode: SaveMode | None = None
    """For ensure_suspended: what to save. For ensure_running: what to go on from, where something is saved."""
    strict: bool = False
    """For ensure_suspended: only if the guest answers."""
    moment: str | None = None
    """For ensure_running: what to go on from, fetched from the store, as long as this machine has nothing of the placement, and `carried_out`
    is false. What is saved of it here is newer. A snapshot's is in `spec.origin`: for a machine that has no copy of the snapshot."""
    ready_s: float = 60.0
    """How long the guest may take until it is ready: to answer, and for its start command after that."""
    timeout_s: float | None = Field(default=None, ge=0)
    """How long the guest lives from when it is ready: counted by the agent, which ends it by itself where control names no newer end.
    None: it has been ready before, and keeps the end that it has. One that comes back from rest has a new one."""
    claimed: bool = False
    """For ensure_running: the guest runs already, made ahead and for nobody. It gets this command's payload by another init, and its life
    counts from then."""
    carried_out: bool = False
    """Control has seen it carried out: an agent that does not know it has lost its memory, and takes the guest over or says that it is
    lost, but begins no other in its place. Not part of the digest, as `moment` is not: it is about control's knowledge, not about what is
    wanted."""


class End(Message):
    """When the agent ends a placement by itself."""

    placement_id: str
    revision: int
    remaining_s: float
    action: OnEnd = OnEnd.KILL
    on_lease_expiry: OnLeaseExpiry = OnLeaseExpiry.END


class Collect(Message):
    """A wish for something of a placement's, or for what several have used; not repeated, a lost one is asked for again by its reader."""

    id: str
    placement_id: str
    """Whose console or layer; empty where usage is wished for."""
    bytes_max: int = Field(default=65536, ge=1, le=COLLECT_BYTES_MAX)
    what: str = CONSOLE
    placements: list[str] = Field(default_factory=list, max_length=SAMPLED_MAX)
    """Whose usage."""
    points_max: int = Field(default=1, ge=1, le=POINTS_MAX)
    """The newest so many of each."""


class SnapshotOrder(Message):
    """What control wants of one snapshot; said with each answer until the agent says that it is at it, or control has heard how it went.

    Kept: the moment of a running placement's guest, which goes on. *Idempotency*: one that is there already is told of again.
    """

    id: str
    wish: SnapshotWish
    placement_id: str
    save_mode: SaveMode = SaveMode.FULL


class PollAnswer(Message):
    """Answer of /poll; the lease it renews is committed before it is sent."""

    lease_s: float
    commands: list[Command] = Field(default_factory=list, max_length=COMMANDS_PER_POLL_MAX)
    ends: list[End] = Field(default_factory=list)
    payloads: dict[str, InitPayload] = Field(default_factory=dict)
    """payload_ref → payload, for commands of this answer whose payload gives no power outside. Others are asked for: see /payloads."""
    acknowledged: dict[str, int] = Field(default_factory=dict)
    """placement_id → highest sequence number that control has committed."""
    forget: list[str] = Field(default_factory=list)
    """Tombstones that control has confirmed; the agent drops them."""
    unknown: list[str] = Field(default_factory=list)
    """Held placements that control has no row for: the agent quarantines and reports them, never deletes on its own."""
    collect: list[Collect] = Field(default_factory=list, max_length=COMMANDS_PER_POLL_MAX)
    """Consoles that somebody wants to read now; not repeated, a lost one is asked for again by its reader."""
    snapshots: list[SnapshotOrder] = Field(default_factory=list, max_length=SNAPSHOTS_MAX)
    moments: bool = False
    """Whether what is saved or kept here is to be sent to the store. An older control says nothing, and has no place for it."""
    moment_bytes_max: int = Field(default=0, ge=0)
    """What takes more of this host's disk is not sent; 0: everything is."""
    incarnation: str
    """Of the store; raised by a restore from backup."""
    told: int | None = None
    """The `poll_seq` up to which control knows what the host holds; None: the next poll tells the whole."""


class Observe(Message):
    """Body of /observe: observations that cannot wait."""

    host_id: str
    epoch: str
    observations: list[Observation] = Field(max_length=OBSERVATIONS_PER_MESSAGE_MAX)
    snapshots: list[SnapshotSeen] = Field(default_factory=list, max_length=SNAPSHOTS_MAX)
    """Heard, when this is answered."""


class ObserveAnswer(Message):
    """Answer of /observe."""

    acknowledged: dict[str, int] = Field(default_factory=dict)
    forget: list[str] = Field(default_factory=list)
    ends: list[End] = Field(default_factory=list)
    """Ends that these observations changed, e.g. of a sandbox that has just become ready."""


class PayloadsWanted(Message):
    """Body of /payloads."""

    host_id: str
    epoch: str
    refs: list[str] = Field(max_length=COMMANDS_PER_POLL_MAX)
    placements: list[str] = Field(default_factory=list, max_length=COMMANDS_PER_POLL_MAX)
    """Placements under way whose guest token the agent has lost with its memory."""
    missing: list[str] = Field(default_factory=list, max_length=COMMANDS_PER_POLL_MAX)
    """Placements of claimed guests that have said themselves that what the create brought has not reached them. Such a placement has one
    guest, ever: to give it there once more is not to give it to two."""


class Payloads(Message):
    """Answer of /payloads: what was asked for and is still wanted."""

    payloads: dict[str, InitPayload] = Field(default_factory=dict)
    refused: list[str] = Field(default_factory=list, max_length=COMMANDS_PER_POLL_MAX)
    """References whose payload was given to another run, or is a guest's already: nobody gets it again."""
    guest_tokens: dict[str, str] = Field(default_factory=dict, repr=False)
    """placement_id → JWT of scope control, as in `Command.guest_token`."""


class Account(Message):
    """What a host has of one placement, for a control whose store was taken back to a backup. Source of domain.account.Account."""

    placement_id: str
    sandbox_id: str
    team_id: str
    generation: int
    kind: Kind
    desired_revision: int
    spec: Spec | None = None
    nonce: str | None = None
    ready: bool = False
    observed: Observed = Observed.UNKNOWN
    save_mode: SaveMode | None = None
    """Of what is saved."""
    moment: str | None = Field(default=None, pattern=MOMENT)
    """As in `Observation`, with the next two."""
    moment_size: int = Field(default=0, ge=0)
    moment_kind: str = Field(default="", max_length=256)
    address: str | None = None
    end_revision: int = 0
    remaining_s: float | None = None
    """Until the end that the agent enforces."""

    def told(self) -> account.Account:
        """As control reasons about it."""
        return account.Account(
            placement_id=self.placement_id,
            sandbox_id=self.sandbox_id,
            team_id=self.team_id,
            generation=self.generation,
            desired=self.kind,
            desired_revision=self.desired_revision,
            spec=self.spec,
            nonce=self.nonce,
            ready=self.ready,
            observed=self.observed,
            save_mode=self.save_mode,
            moment=moment_of(self.moment, self.moment_size, self.moment_kind),
            address=self.address,
            end_revision=self.end_revision,
            remaining_s=self.remaining_s,
        )


class Accounts(Message):
    """Body of /accounts: a part of all that a host has and that is not gone. `incarnation`: of the poll's answer that made it necessary."""

    host_id: str
    epoch: str
    incarnation: str
    accounts: list[Account] = Field(max_length=ACCOUNTS_PER_MESSAGE_MAX)


class AccountsAnswer(Message):
    """Answer of /accounts."""

    known: list[str] = Field(default_factory=list)
    """Placements that are on record, or are again."""
    unknown: list[str] = Field(default_factory=list)
    """Placements that fit nothing on record: the agent quarantines and reports them."""


class Sample(Message):
    """What a placement used at one moment."""

    age_s: float
    """How long before this was sent."""
    cpu_pct: float
    """Of the CPU that it may use, since the sample before."""
    memory_bytes: int
    cache_bytes: int
    disk_bytes: int


class Collected(Message):
    """Body of /collected; answered by 204. `code` is set when there is nothing to read."""

    host_id: str
    epoch: str
    id: str
    placement_id: str
    console_base64: str = ""
    code: str | None = None
    samples: dict[str, list[Sample]] = Field(default_factory=dict)
    """placement_id → what it used, oldest first."""
    message: str = ""


class ErrorBody(Message):
    """Body of every refusal."""

    code: str
    message: str
    hint: str = ""
