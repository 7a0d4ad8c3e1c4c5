"""The driver port: what the agent may ask of an isolation technology.

Theory of operation. Every verb is idempotent by placement and may be repeated after a crash at any point: `prepare` and `start`
find what an earlier run left and go on or begin anew; `remove` succeeds when nothing is left and raises when something still is.
`inspect` is a direct look-up by placement, never a list, so that "I see nothing" is a fact. What a driver makes on the machine
carries the mark (install id, host id, placement id); things with others' marks are never touched. A driver holds no policy: it does
not decide when. It declares what it can, and the conformance suite (`atoll.testing.conformance`) tests exactly that.

A fork is one `snapshot` and several `start`s from it. A verb enters the port with the first driver that needs it: displays are not here yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from atoll.domain import moment
from atoll.domain.spec import Isolation, SaveMode, Spec


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a driver promises; each flag switches its part of the conformance suite on."""

    name: str
    isolation: Isolation
    arch: str
    os: str = "linux"
    real_kernel_limits: bool = True
    """Memory, processes and disk are enforced and can be tested from inside."""
    network_slots: bool = True
    stop_keeps_disk: bool = False
    pauses: bool = False
    """A guest can be frozen where it is (`pause`, `resume`)."""
    saves: SaveMode | None = None
    """What can be saved of a guest (`save`, `restore`): memory and files, or files alone."""

    @property
    def saves_files(self) -> bool:
        return self.saves is not None

    @property
    def saves_memory(self) -> bool:
        return self.saves is SaveMode.FULL

    snapshots: bool = False
    """What can be saved can also be kept while its guest goes on, and others begun from it (`snapshot`)."""
    portable: bool = False
    """What is saved or kept here can be gone on from at another host (`pack_list`, `receive`)."""
    survives_agent: bool = True
    """Sandboxes go on while the agent is away, and are adopted."""
    metered: bool = False
    """What a placement uses can be told (Metered)."""
    layers: bool = False
    """It hands out what has changed in a placement's files (`capture`)."""
    guest_handshake: bool = True
    """A running guest answers GET /atoll/hello; False (fakes): it is ready as soon as it runs."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Whose thing it is."""

    install_id: str
    host_id: str


@dataclass(frozen=True, slots=True)
class Order:
    """All that a driver needs to make one placement. Holds no secret."""

    placement_id: str
    sandbox_id: str
    generation: int
    spec: Spec
    nonce: str
    guest_public_key: str
    hostname: str


class Power(StrEnum):
    """What a direct look finds of a placement."""

    ABSENT = "absent"
    """No process, mount, cgroup, slot, file or disk of it is left."""
    PREPARED = "prepared"
    """Files or a slot exist, no guest runs."""
    RUNNING = "running"
    FROZEN = "frozen"
    """Its guest is there, and nothing of it runs."""
    SAVED = "saved"
    """Its guest has ended, and what was saved of it is there, whole: it goes on from that."""
    STOPPED = "stopped"
    """It ran and its guest has ended; files are kept until `remove`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What `inspect` saw."""

    power: Power
    address: str | None = None
    """Where the guest listens (port wire.guest.GUEST_PORT), for a placement whose guest runs or is frozen."""
    pid: int | None = None
    reason: str | None = None
    """For STOPPED: how it ended, e.g. `exit 1`, `signal 9`, `oom`."""
    leftovers: tuple[str, ...] = ()
    """Names of what is left, for people."""

    @property
    def lives(self) -> bool:
        """Whether there is a guest, running or frozen."""
        return self.power in (Power.RUNNING, Power.FROZEN)


@dataclass(frozen=True, slots=True)
class Held:
    """Something on the machine that carries our mark."""

    placement_id: str
    sandbox_id: str | None
    generation: int | None
    what: tuple[str, ...]
    """E.g. `process 4711`, `cgroup memory/...`, `slot 12`, `disk /...`."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One self-check of a driver; ids are stable."""

    id: str
    ok: bool
    detail: str
    fix: str = ""
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class Image:
    """An image that is ready on this host."""

    digest: str
    name: str
    size_bytes: int = 0
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a running placement uses. *Units*: seconds since its start, bytes."""

    cpu_s: float
    memory_bytes: int
    """Without what the kernel could drop at once."""
    cache_bytes: int
    disk_bytes: int
    """Of the host's disk."""


@dataclass(frozen=True, slots=True)
class Change:
    """What has changed in a placement's files since its image: a layer, as a tar that is not compressed. *Units*: bytes."""

    digest: str
    size: int
    entries: int
    """Names in it; 0: nothing has changed."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved of a placement. *Units*: bytes on the host's disk."""

    mode: SaveMode
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MomentFacts:
    """What is to be known of a moment besides its bytes: by which host it can be gone on from."""

    driver: str
    isolation: Isolation
    arch: str
    mode: SaveMode
    image: str
    """Digest of the image that its files are written above."""
    runtime: str = ""
    """What wrote it, with its version: what memory looks like differs between versions."""
    cpu: tuple[str, ...] = ()
    """What its memory may rely on of the processor; a host that has less cannot go on from it."""
    notes: tuple[tuple[str, str], ...] = ()
    """The driver's own words to itself."""

    @property
    def kind(self) -> str:
        """What hosts must share to go on from it (`domain.moment.kind`); what only a host can tell is told by `Driver.suits`."""
        return moment.kind(self.driver, str(self.isolation), self.arch, self.runtime)


@dataclass(frozen=True, slots=True)
class PackList:
    """Where the files of a moment are, and what is to be known of them. They do not change as long as they are there."""

    facts: MomentFacts
    directory: Path
    files: tuple[str, ...] = ()
    """Names in the directory; none: all that there is to it is in the facts (fakes)."""
    size_bytes: int = 0
    """What they take of the host's disk."""


OnExit = Callable[[str, str], Awaitable[None]]
"""`await on_exit(placement_id, reason)`: called once when a running guest ends without `stop` or `remove` having been asked."""


@runtime_checkable
class Metered(Protocol):
    """A driver whose placements can be measured; `capabilities.metered` says that it is one."""

    async def usage(self, placement_ids: Sequence[str]) -> Mapping[str, Usage]:
        """What they use now; those that do not run, or have just ended, are left out. Cheap: it is asked for all, every few seconds."""
        ...


class Driver(Protocol):
    """Errors of every verb: `base.errors.Refused` (HOST_DISK_FULL, IMAGE_UNAVAILABLE, IMAGE_CORRUPT, RUNTIME_MISSING, START_FAILED),
    `Unavailable` (nothing happened), `OutcomeUnknown`; `remove` raises CLEANUP_FAILED with what is left after having done every
    step that it could.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def open(self, on_exit: OnExit) -> None:
        """Begin: make what is shared by all placements (parent cgroup, nftables table, slot pool) and find what already exists."""
        ...

    async def close(self) -> None:
        """End: give back what is shared and no sandbox uses. Running sandboxes go on."""
        ...

    # life
    async def prepare(self, order: Order) -> None:
        """Make files, disk and slot; nothing runs yet. Checks the image."""
        ...

    async def start(self, order: Order) -> Seen:
        """Start the guest, from its spec's origin if there is one, and say where it will listen; does not wait until it answers.

        *Errors*: Refused SNAPSHOT_UNAVAILABLE when this machine does not have its origin whole.
        """
        ...

    async def stop(self, placement_id: str, *, grace_s: float = 0.0) -> None:
        """End the guest; files stay."""
        ...

    async def remove(self, placement_id: str) -> None:
        """Remove all of it; after success `inspect` says ABSENT."""
        ...

    # time
    async def pause(self, placement_id: str) -> Seen:
        """Freeze the guest where it is: it keeps its memory, files, slot and connections, and uses no CPU.

        What is frozen is told from the machine, so it is known whatever becomes of this process. *Errors*: Refused PLACEMENT_LOST (there
        is no guest), PAUSE_FAILED (it goes on), NOT_SUPPORTED.
        """
        ...

    async def resume(self, placement_id: str) -> Seen:
        """Let a frozen guest go on. *Errors*: as `pause`, with RESUME_FAILED (it is still frozen)."""
        ...

    async def save(self, order: Order, mode: SaveMode) -> Saved:
        """Save a guest that runs or is frozen, and end it: memory and files of one moment, or files alone.

        What is saved appears whole or not at all, and the guest ends only after that. It is kept until `discard`, `remove` or the next
        save. Where it is there already and a guest lives, that guest has not been used since, and is ended. *Errors*: Refused
        PLACEMENT_LOST; SAVE_FAILED, HOST_DISK_FULL, with which the guest goes on.
        """
        ...

    async def restore(self, order: Order, *, reboot: bool = False) -> Seen:
        """Begin a guest from what was saved, in a slot of its own. Nobody may use it before `discard`. `reboot`: from its files alone.

        *Errors*: Refused RESUME_FAILED, with which what was saved is still there; and as `start`.
        """
        ...

    async def discard(self, placement_id: str) -> None:
        """What was saved is the past now: the guest that was restored from it is about to be used."""
        ...

    async def snapshot(self, order: Order, snapshot_id: str, mode: SaveMode) -> Saved:
        """Keep what a running guest is at one moment, beside it and for longer than it; the guest goes on.

        What is kept appears whole or not at all. An order whose spec names it as its origin begins from it (`start`): that is another
        guest, which finds its own name. *Idempotency*: one that is there already is told of, whoever it is of. *Errors*: Refused
        PLACEMENT_LOST, ILLEGAL_STATE (it does not run); SAVE_FAILED, HOST_DISK_FULL; NOT_SUPPORTED. In any case the guest goes on.
        """
        ...

    async def drop(self, snapshot_id: str) -> None:
        """Nothing is kept under this id any more. *Idempotency*: one that is not there is no error."""
        ...

    async def snapshots(self) -> Sequence[str]:
        """What is kept here, by id."""
        ...

    # elsewhere
    async def pack_list(self, name: str) -> PackList:
        """What is saved of a placement, or kept as a snapshot, by either's id; on the disk by now, whatever becomes of the host's power.

        *Errors*: Refused PLACEMENT_LOST (nothing is saved or kept under this id), ILLEGAL_STATE (a snapshot that came from the store itself),
        RESUME_FAILED (it is not whole), NOT_SUPPORTED.
        """
        ...

    def inbox(self, name: str) -> Path:
        """Where files for `receive` are to be fetched to: a directory that is not there yet, beside what is saved, by an id of ours."""
        ...

    async def kinds(self) -> Sequence[str]:
        """Kinds of moments that this host can go on from (`MomentFacts.kind`)."""
        ...

    async def suits(self, facts: MomentFacts) -> None:
        """Whether this host can go on from such a moment. *Errors*: Refused MOMENT_UNSUITABLE."""
        ...

    async def receive(self, order: Order, facts: MomentFacts, directory: Path, *, snapshot_id: str | None = None) -> None:
        """Have what was fetched into the inbox as what is saved of this order's placement, which `restore` goes on from; or, with an id, as a
        snapshot that is kept here. It appears whole or not at all, and is on the disk.

        *Idempotency*: what is saved or kept already stays. *Errors*: as `suits`; Refused MOMENT_CORRUPT, HOST_DISK_FULL, NOT_SUPPORTED.
        """
        ...

    # look
    async def inspect(self, placement_id: str) -> Seen:
        """Look at this placement directly."""
        ...

    async def held(self) -> Sequence[Held]:
        """Everything on the machine with this host's mark, read from the machine, not from memory."""
        ...

    async def adopt(self, placement_id: str) -> Seen:
        """Take a placement of an earlier run over: watch its guest again. Same answer as `inspect`."""
        ...

    async def probe(self) -> Sequence[Probe]:
        """Self-checks, of which one starts a real guest."""
        ...

    # own
    async def images(self) -> Sequence[Image]:
        """Images held ready, verified as far as is cheap."""
        ...

    async def console(self, placement_id: str, *, bytes_max: int = 65536) -> bytes:
        """The last output of the guest's console; empty when there is none."""
        ...

    async def capture(self, placement_id: str, target: Path) -> Change:
        """Write what has changed in its files to a new file. The guest may be ended by it, which is no news then.

        *Errors*: Refused NOT_SUPPORTED, PLACEMENT_LOST (there is nothing to capture), IMAGE_REFUSED (no layer can hold it), HOST_DISK_FULL.
        """
        ...
