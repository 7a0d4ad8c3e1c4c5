"""The `fake` driver.

Theory of operation. The machine is a `FakeMachine`: a table of placements that outlives the driver, as real processes outlive an agent,
so a test can drop a driver, make another on the same machine and see what it adopts. Each verb first waits as long as its `Weather` says,
then fails if the weather says so, then changes the table. Time comes from a sleep function, so that a simulator's clock can rule.
Its guests answer nothing: `capabilities.guest_handshake` is False, and an agent takes a running guest for ready at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.base.errors import Code, Refused
from atoll.domain.spec import Isolation, SaveMode
from atoll.drivers.port import (
    Capabilities,
    Change,
    Held,
    Image,
    Mark,
    MomentFacts,
    OnExit,
    Order,
    PackList,
    Power,
    Probe,
    Saved,
    Seen,
    Usage,
)

ADDRESS = "127.0.0.1"

Sleep = Callable[[float], Awaitable[None]]


@dataclass(slots=True)
class FakePlacement:
    """One placement on a fake machine."""

    mark: Mark
    order: Order
    power: Power
    reason: str | None = None
    stuck: bool = False
    """A part that cannot be removed: `remove` reports it until a test clears this."""
    console: bytes = b""
    saved: SaveMode | None = None
    memory: str = ""
    """What its guest remembers: a test's own words, which a snapshot keeps and a guest that begins from it has."""
    usage: Usage = field(default_factory=lambda: Usage(0.0, 32 << 20, 4 << 20, 1 << 20))


@dataclass(frozen=True, slots=True)
class FakeSnapshot:
    """What is kept of a guest."""

    mode: SaveMode
    memory: str
    image: str = ""
    received: bool = False
    """It came from the store."""


@dataclass(slots=True)
class FakeMachine:
    """What outlives a driver."""

    placements: dict[str, FakePlacement] = field(default_factory=dict)
    images: list[Image] = field(default_factory=lambda: [Image("sha256:" + "0" * 64, "base", labels={"arch": "x86_64"})])
    corrupt: set[str] = field(default_factory=set)
    """Digests whose files do not match their manifest."""
    disk_full: bool = False
    kept: dict[str, FakeSnapshot] = field(default_factory=dict)
    inbox: Path = Path("/nonexistent")
    """Where what is fetched for it would be; there are no files."""

    def changed(self, placement_id: str) -> None:
        """A placement was made, moved or removed; for machines that write it down."""


@dataclass(slots=True)
class Weather:
    """Latencies and faults, by verb (`prepare`, `start`, `stop`, `remove`, `inspect`, `held`, `adopt`, `probe`, `pause`, `resume`, `save`, `restore`,
    `discard`, `snapshot`, `drop`, `pack_list`, `receive`). *Units*: seconds.
    """

    delay_s: dict[str, float] = field(default_factory=dict)
    fail: dict[str, list[BaseException]] = field(default_factory=dict)
    """Errors to raise, one per call, in order."""
    fail_after: dict[str, list[BaseException]] = field(default_factory=dict)
    """The same, but after the verb has done its work: the caller does not know that it was done."""


class FakeDriver:
    """Driver of a `FakeMachine`."""

    def __init__(
        self,
        mark: Mark,
        *,
        machine: FakeMachine | None = None,
        weather: Weather | None = None,
        isolation: Isolation = Isolation.GVISOR,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.machine = machine or FakeMachine()
        self.weather = weather or Weather()
        self._mark = mark
        self._sleep = sleep
        self._on_exit: OnExit | None = None
        self._watched: set[str] = set()
        self._ending: set[str] = set()
        self._capabilities = Capabilities(
            name="fake",
            isolation=isolation,
            arch="x86_64",
            real_kernel_limits=False,
            network_slots=False,
            stop_keeps_disk=True,
            pauses=True,
            saves=SaveMode.FULL,
            snapshots=True,
            portable=True,
            guest_handshake=False,
            metered=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def open(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit

    async def close(self) -> None:
        self._on_exit = None
        self._watched.clear()

    # -- life

    async def prepare(self, order: Order) -> None:
        await self._before("prepare")
        self._prepare(order)
        self._after("prepare")

    def _prepare(self, order: Order) -> None:
        machine = self.machine
        if machine.disk_full:
            raise Refused(Code.HOST_DISK_FULL, "the fake machine's disk is full")
        if order.spec.image in machine.corrupt:
            raise Refused(Code.IMAGE_CORRUPT, f"{order.spec.image} does not match its manifest")
        if not any(
            image.digest == order.spec.image or (not order.spec.image and image.name == order.spec.image_name) for image in machine.images
        ):
            raise Refused(Code.IMAGE_UNAVAILABLE, f"no image {order.spec.image} ({order.spec.image_name})")
        there, origin = machine.placements.get(order.placement_id), order.spec.origin
        if origin is not None and origin.snapshot_id not in machine.kept and (there is None or there.power is Power.PREPARED):
            raise Refused(Code.SNAPSHOT_UNAVAILABLE, f"{origin.snapshot_id} is not here")
        if there is None:
            machine.placements[order.placement_id] = FakePlacement(self._mark, order, Power.PREPARED)
        elif there.power not in (Power.RUNNING, Power.FROZEN):
            there.order, there.power, there.reason = order, Power.PREPARED, None
        machine.changed(order.placement_id)

    async def start(self, order: Order) -> Seen:
        await self._before("start")
        placement = self.machine.placements.get(order.placement_id)
        if placement is None or placement.power not in (Power.RUNNING, Power.FROZEN):
            self._prepare(order)
            placement = self.machine.placements[order.placement_id]
            placement.power, placement.reason = Power.RUNNING, None
            origin = order.spec.origin
            kept = self.machine.kept.get(origin.snapshot_id) if origin is not None else None
            placement.memory = "" if kept is None else kept.memory
            placement.console += b"fake guest started\n"
            self.machine.changed(order.placement_id)
        self._watched.add(order.placement_id)
        self._ending.discard(order.placement_id)
        self._after("start")
        return self._seen(order.placement_id)

    async def stop(self, placement_id: str, *, grace_s: float = 0.0) -> None:
        await self._before("stop")
        placement = self.machine.placements.get(placement_id)
        if placement is not None and placement.power in (Power.RUNNING, Power.FROZEN):
            self._ending.add(placement_id)
            placement.power, placement.reason = Power.STOPPED, "signal 15" if grace_s > 0 else "signal 9"
            self.machine.changed(placement_id)
        self._after("stop")

    async def remove(self, placement_id: str) -> None:
        await self._before("remove")
        self._ending.add(placement_id)
        placement = self.machine.placements.get(placement_id)
        if placement is not None and placement.stuck:
            placement.power = Power.STOPPED
            raise Refused(Code.CLEANUP_FAILED, f"{placement_id}: a part that does not go")
        self.machine.placements.pop(placement_id, None)
        self.machine.changed(placement_id)
        self._watched.discard(placement_id)
        self._ending.discard(placement_id)
        self._after("remove")

    # -- time

    async def pause(self, placement_id: str) -> Seen:
        return await self._turn("pause", placement_id, Power.FROZEN)

    async def resume(self, placement_id: str) -> Seen:
        return await self._turn("resume", placement_id, Power.RUNNING)

    async def save(self, order: Order, mode: SaveMode) -> Saved:
        await self._before("save")
        machine = self.machine
        placement = machine.placements.get(order.placement_id)
        if placement is None or (placement.saved is None and placement.power not in (Power.RUNNING, Power.FROZEN)):
            raise Refused(Code.PLACEMENT_LOST, f"{order.placement_id} has no guest that could be saved")
        if machine.disk_full and placement.saved is None:
            raise Refused(Code.HOST_DISK_FULL, "the fake machine's disk is full")
        placement.saved = placement.saved or mode
        self._ending.add(order.placement_id)
        placement.power = Power.SAVED
        machine.changed(order.placement_id)
        self._after("save")
        return Saved(placement.saved, 1 << 20)

    async def restore(self, order: Order, *, reboot: bool = False) -> Seen:
        await self._before("restore")
        placement = self.machine.placements.get(order.placement_id)
        if placement is None or placement.saved is None:
            raise Refused(Code.RESUME_FAILED, f"nothing is saved of {order.placement_id}")
        if reboot:
            placement.saved = SaveMode.FILES
        placement.order, placement.power = order, Power.RUNNING
        self._watched.add(order.placement_id)
        self._ending.discard(order.placement_id)
        self.machine.changed(order.placement_id)
        self._after("restore")
        return self._seen(order.placement_id)

    async def discard(self, placement_id: str) -> None:
        await self._before("discard")
        if (placement := self.machine.placements.get(placement_id)) is not None:
            placement.saved = None
            self.machine.changed(placement_id)
        self._after("discard")

    async def snapshot(self, order: Order, snapshot_id: str, mode: SaveMode) -> Saved:
        await self._before("snapshot")
        machine = self.machine
        placement = machine.placements.get(order.placement_id)
        if snapshot_id not in machine.kept:
            if placement is None or placement.power not in (Power.RUNNING, Power.FROZEN):
                raise Refused(Code.PLACEMENT_LOST, f"{order.placement_id} has no guest that could be kept")
            if placement.power is Power.FROZEN:
                raise Refused(Code.ILLEGAL_STATE, f"{order.placement_id} is paused")
            if machine.disk_full:
                raise Refused(Code.HOST_DISK_FULL, "the fake machine's disk is full")
            machine.kept[snapshot_id] = FakeSnapshot(mode, placement.memory, placement.order.spec.image)
        self._after("snapshot")
        return Saved(machine.kept[snapshot_id].mode, 1 << 20)

    async def drop(self, snapshot_id: str) -> None:
        await self._before("drop")
        self.machine.kept.pop(snapshot_id, None)
        self._after("drop")

    async def snapshots(self) -> Sequence[str]:
        return sorted(self.machine.kept)

    # -- elsewhere

    async def pack_list(self, name: str) -> PackList:
        await self._before("pack_list")
        there, kept = self.machine.placements.get(name), self.machine.kept.get(name)
        if there is not None and there.saved is not None:
            mode, memory, image = there.saved, there.memory, there.order.spec.image
        elif kept is not None:
            if kept.received:
                raise Refused(Code.ILLEGAL_STATE, f"{name} came from the store")
            mode, memory, image = kept.mode, kept.memory, kept.image
        else:
            raise Refused(Code.PLACEMENT_LOST, f"nothing is saved or kept as {name}")
        isolation, arch = self._capabilities.isolation, self._capabilities.arch
        return PackList(
            MomentFacts("fake", isolation, arch, mode, image, notes=(("memory", memory),)), self.inbox(name), size_bytes=1 << 20
        )

    def inbox(self, name: str) -> Path:
        return self.machine.inbox / name

    async def kinds(self) -> Sequence[str]:
        return [MomentFacts("fake", self._capabilities.isolation, self._capabilities.arch, SaveMode.FULL, "").kind]

    async def suits(self, facts: MomentFacts) -> None:
        if facts.driver != "fake":
            raise Refused(Code.MOMENT_UNSUITABLE, f"it is {facts.driver}'s")

    async def receive(self, order: Order, facts: MomentFacts, directory: Path, *, snapshot_id: str | None = None) -> None:
        del directory
        await self._before("receive")
        await self.suits(facts)
        machine, memory = self.machine, dict(facts.notes).get("memory", "")
        if machine.disk_full:
            raise Refused(Code.HOST_DISK_FULL, "the fake machine's disk is full")
        if snapshot_id is not None:
            machine.kept.setdefault(snapshot_id, FakeSnapshot(facts.mode, memory, facts.image, received=True))
        else:
            there = machine.placements.get(order.placement_id)
            if there is None or (there.saved is None and there.power is Power.PREPARED):
                machine.placements[order.placement_id] = FakePlacement(self._mark, order, Power.SAVED, saved=facts.mode, memory=memory)
                machine.changed(order.placement_id)
        self._after("receive")

    async def _turn(self, verb: str, placement_id: str, power: Power) -> Seen:
        await self._before(verb)
        placement = self.machine.placements.get(placement_id)
        if placement is None or placement.power not in (Power.RUNNING, Power.FROZEN):
            raise Refused(Code.PLACEMENT_LOST, f"{placement_id} has no guest that could be frozen or thawed")
        placement.power = power
        self.machine.changed(placement_id)
        self._after(verb)
        return self._seen(placement_id)

    # -- look

    async def inspect(self, placement_id: str) -> Seen:
        await self._before("inspect")
        return self._seen(placement_id)

    async def held(self) -> Sequence[Held]:
        await self._before("held")
        return [
            Held(placement_id, placement.order.sandbox_id, placement.order.generation, (f"fake {placement.power}",))
            for placement_id, placement in sorted(self.machine.placements.items())
            if placement.mark == self._mark
        ]

    async def adopt(self, placement_id: str) -> Seen:
        await self._before("adopt")
        placement = self.machine.placements.get(placement_id)
        if placement is not None and placement.saved is not None and placement.power in (Power.RUNNING, Power.FROZEN):
            # Not used since it was saved, or since it was restored.
            placement.power = Power.SAVED
        seen = self._seen(placement_id)
        if seen.lives:
            self._watched.add(placement_id)
        return seen

    async def probe(self) -> Sequence[Probe]:
        await self._before("probe")
        full = self.machine.disk_full
        return [
            Probe("runtime.fake.boot", ok=True, detail="a fake guest starts"),
            Probe("disk.space", ok=not full, detail="full" if full else "plenty", fix="clear FakeMachine.disk_full"),
            Probe("image.cache", ok=bool(self.machine.images), detail=f"{len(self.machine.images)} images", fix="add a FakeMachine image"),
        ]

    # -- own

    async def images(self) -> Sequence[Image]:
        return [image for image in self.machine.images if image.digest not in self.machine.corrupt]

    async def usage(self, placement_ids: Sequence[str]) -> Mapping[str, Usage]:
        await self._before("usage")
        known = self.machine.placements
        return {one: known[one].usage for one in placement_ids if one in known and known[one].power is Power.RUNNING}

    async def capture(self, placement_id: str, target: Path) -> Change:
        raise Refused(Code.NOT_SUPPORTED, f"{placement_id} has no files, and {target} none of its")

    async def console(self, placement_id: str, *, bytes_max: int = 65536) -> bytes:
        placement = self.machine.placements.get(placement_id)
        return b"" if placement is None else placement.console[-bytes_max:]

    # -- for tests

    async def end_guest(self, placement_id: str, reason: str = "exit 0") -> None:
        """Let a running guest end by itself; whoever watches is told, once."""
        placement = self.machine.placements[placement_id]
        placement.power, placement.reason = Power.STOPPED, reason
        self.machine.changed(placement_id)
        if placement_id in self._watched and placement_id not in self._ending and self._on_exit is not None:
            self._watched.discard(placement_id)
            await self._on_exit(placement_id, reason)

    # -- small things

    def _seen(self, placement_id: str) -> Seen:
        placement = self.machine.placements.get(placement_id)
        if placement is None:
            return Seen(Power.ABSENT)
        lives = placement.power in (Power.RUNNING, Power.FROZEN)
        leftovers = () if lives else (f"fake {placement.power}",)
        return Seen(placement.power, address=ADDRESS if lives else None, reason=placement.reason, leftovers=leftovers)

    async def _before(self, verb: str) -> None:
        delay = self.weather.delay_s.get(verb, 0.0)
        if delay > 0:
            await self._sleep(delay)
        self._raise_next(self.weather.fail, verb)

    def _after(self, verb: str) -> None:
        self._raise_next(self.weather.fail_after, verb)

    @staticmethod
    def _raise_next(faults: dict[str, list[BaseException]], verb: str) -> None:
        waiting = faults.get(verb)
        if waiting:
            raise waiting.pop(0)
