"""A machine that outlives its agent's runs, its driver, and the guests on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.agent.handshake import lacks_init
from atoll.base.errors import Code, Refused
from atoll.domain.spec import Isolation, SaveMode
from atoll.drivers.port import Capabilities, Held, Image, MomentFacts, Order, PackList, Power, Probe, Saved, Seen
from atoll.wire.agent import InitPayload
from atoll.wire.guest import Hello


class Crash(BaseException):
    """The process is gone at this very instant."""


class Fuse:
    """Counts boundaries; at the one it is set for, and at every one after it, it ends the process."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0
        self.blown = False
        self.name = ""

    def pass_(self, name: str) -> None:
        if self.blown:
            raise Crash(name)
        self.count += 1
        if self.at is not None and self.count >= self.at:
            self.blown = True
            self.name = name
            raise Crash(name)


class FakeClock:
    """Real speed, but it can jump: `boot` as after a suspend, `wall` as by a clock step."""

    def __init__(self) -> None:
        self.skipped = 0.0
        self.wall = 1_800_000_000.0

    def now(self) -> float:
        return self.wall

    def boot(self) -> float:
        return asyncio.get_event_loop().time() + self.skipped


@dataclass
class Thing:
    """What a machine holds of one placement."""

    order: Order
    power: Power = Power.PREPARED
    initialised: bool = False
    saved: SaveMode | None = None
    asleep: bool = False
    memory: str = ""
    """What its guest remembers: a test's own words."""
    inits: list[InitPayload] = field(default_factory=list)
    revision: int = 0
    """Of the last init."""


class Machine:
    """What survives the agent."""

    def __init__(self) -> None:
        self.things: dict[str, Thing] = {}
        self.stray: list[Held] = []
        self.kept: set[str] = set()
        self.history: list[tuple[str, str]] = []
        self.started: dict[str, int] = {}
        self.restored: dict[str, int] = {}


class MachineDriver:
    """A driver of the machine, one an agent's run."""

    def __init__(self, machine: Machine, fuse: Fuse, *, keeps_disk: bool = False) -> None:
        self.machine = machine
        self.fuse = fuse
        self.capabilities = Capabilities(
            name="machine",
            isolation=Isolation.GVISOR,
            arch="x86_64",
            stop_keeps_disk=keeps_disk,
            pauses=True,
            saves=SaveMode.FULL,
            portable=True,
        )
        self.on_exit: Callable[[str, str], object] | None = None
        self.fail: dict[str, list[Exception]] = {}
        self.gate: dict[str, asyncio.Event] = {}
        self.probes = [Probe("machine.start", True, "a guest starts")]
        self.running = 0
        self.running_max = 0

    async def _verb(self, name: str, placement_id: str) -> None:
        self.fuse.pass_(f"before {name}")
        self.machine.history.append((name, placement_id))
        if self.fail.get(name):
            raise self.fail[name].pop(0)
        if name in self.gate:
            await self.gate[name].wait()
        else:
            await asyncio.sleep(0)

    async def open(self, on_exit: Callable[[str, str], object]) -> None:
        self.on_exit = on_exit

    async def close(self) -> None:
        return None

    async def prepare(self, order: Order) -> None:
        await self._verb("prepare", order.placement_id)
        self.machine.things.setdefault(order.placement_id, Thing(order))
        self.fuse.pass_("after prepare")

    async def start(self, order: Order) -> Seen:
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await self._verb("start", order.placement_id)
        finally:
            self.running -= 1
        thing = self.machine.things.setdefault(order.placement_id, Thing(order))
        if thing.power not in (Power.RUNNING, Power.FROZEN, Power.SAVED):
            thing.power = Power.RUNNING
            self.machine.started[order.placement_id] = self.machine.started.get(order.placement_id, 0) + 1
        self.fuse.pass_("after start")
        return Seen(thing.power, address="10.64.0.2")

    async def pause(self, placement_id: str) -> Seen:
        return await self._turn("pause", placement_id, Power.FROZEN)

    async def resume(self, placement_id: str) -> Seen:
        return await self._turn("resume", placement_id, Power.RUNNING)

    async def save(self, order: Order, mode: SaveMode) -> Saved:
        await self._verb("save", order.placement_id)
        thing = self.machine.things.get(order.placement_id)
        if thing is None or (thing.saved is None and thing.power not in (Power.RUNNING, Power.FROZEN)):
            raise Refused(Code.PLACEMENT_LOST, "there is no guest")
        thing.saved = thing.saved or mode
        self.fuse.pass_("after naming the save")
        thing.power = Power.SAVED
        self.fuse.pass_("after save")
        return Saved(thing.saved, 1)

    async def restore(self, order: Order, *, reboot: bool = False) -> Seen:
        await self._verb("restore", order.placement_id)
        thing = self.machine.things.get(order.placement_id)
        if thing is None or thing.saved is None:
            raise Refused(Code.RESUME_FAILED, "nothing is saved")
        thing.power = Power.RUNNING
        self.machine.restored[order.placement_id] = self.machine.restored.get(order.placement_id, 0) + 1
        self.fuse.pass_("after restore")
        return Seen(Power.RUNNING, address="10.64.0.2")

    async def discard(self, placement_id: str) -> None:
        await self._verb("discard", placement_id)
        if (thing := self.machine.things.get(placement_id)) is not None:
            thing.saved = None
        self.fuse.pass_("after discard")

    async def _turn(self, verb: str, placement_id: str, power: Power) -> Seen:
        await self._verb(verb, placement_id)
        thing = self.machine.things.get(placement_id)
        if thing is None or thing.power not in (Power.RUNNING, Power.FROZEN):
            raise Refused(Code.PLACEMENT_LOST, "there is no guest")
        thing.power = power
        self.fuse.pass_(f"after {verb}")
        return Seen(power, address="10.64.0.2")

    async def stop(self, placement_id: str, *, grace_s: float = 0.0) -> None:
        await self._verb("stop", placement_id)
        if thing := self.machine.things.get(placement_id):
            thing.power = Power.STOPPED
        self.fuse.pass_("after stop")

    async def remove(self, placement_id: str) -> None:
        await self._verb("remove", placement_id)
        self.machine.things.pop(placement_id, None)
        self.machine.stray = [held for held in self.machine.stray if held.placement_id != placement_id]
        self.fuse.pass_("after remove")

    async def inspect(self, placement_id: str) -> Seen:
        await self._verb("inspect", placement_id)
        thing = self.machine.things.get(placement_id)
        if thing is None:
            return Seen(Power.ABSENT)
        return Seen(thing.power, address="10.64.0.2" if thing.power in (Power.RUNNING, Power.FROZEN) else None, leftovers=("disk",))

    async def snapshots(self) -> list[str]:
        return sorted(self.machine.kept)

    async def drop(self, snapshot_id: str) -> None:
        self.machine.kept.discard(snapshot_id)

    async def pack_list(self, name: str) -> PackList:
        await self._verb("pack_list", name)
        thing = self.machine.things.get(name)
        if thing is None or thing.saved is None:
            raise Refused(Code.PLACEMENT_LOST, "nothing is saved")
        notes = (("memory", thing.memory),)
        return PackList(
            MomentFacts("machine", Isolation.GVISOR, "x86_64", thing.saved, "sha256:aa", notes=notes), self.inbox(name), size_bytes=1 << 20
        )

    def inbox(self, name: str) -> Path:
        return Path("/nonexistent") / name

    async def kinds(self) -> list[str]:
        return ["machine/gvisor/x86_64"]

    async def suits(self, facts: MomentFacts) -> None:
        if facts.kind not in await self.kinds():
            raise Refused(Code.MOMENT_UNSUITABLE, f"it is {facts.kind}'s")

    async def receive(self, order: Order, facts: MomentFacts, directory: Path, *, snapshot_id: str | None = None) -> None:
        await self._verb("receive", order.placement_id)
        if snapshot_id is not None:
            self.machine.kept.add(snapshot_id)
        elif (thing := self.machine.things.setdefault(order.placement_id, Thing(order))).saved is None:
            thing.power, thing.saved, thing.memory = Power.SAVED, facts.mode, dict(facts.notes)["memory"]
        self.fuse.pass_("after receive")

    async def held(self) -> list[Held]:
        mine = [Held(i, t.order.sandbox_id, t.order.generation, ("process 1",)) for i, t in self.machine.things.items()]
        return [*mine, *self.machine.stray]

    async def adopt(self, placement_id: str) -> Seen:
        self.machine.history.append(("adopt", placement_id))
        thing = self.machine.things.get(placement_id)
        if thing is None:
            return Seen(Power.ABSENT)
        if thing.saved is not None and thing.power is Power.RUNNING:
            thing.power = Power.SAVED
        return Seen(thing.power, address="10.64.0.2" if thing.power in (Power.RUNNING, Power.FROZEN) else None)

    async def probe(self) -> list[Probe]:
        return self.probes

    async def images(self) -> list[Image]:
        return [Image("sha256:aa", "base")]

    async def console(self, placement_id: str, *, bytes_max: int = 65536) -> bytes:
        return b"hello from " + placement_id.encode() if placement_id in self.machine.things else b""


class MachineGuests:
    """Guests on the machine, met without a network."""

    def __init__(self, machine: Machine, fuse: Fuse) -> None:
        self.machine = machine
        self.fuse = fuse
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.deaf = False
        """Guests do not answer when they are told to sleep."""
        self.says_revision = True
        """As guests do since they know of revisions."""

    async def lull(self, placement_id, address, token, *, awake):
        self.fuse.pass_("before lull")
        thing = self.machine.things.get(placement_id)
        if self.deaf or token is None or thing is None:
            return False
        if awake and thing.asleep:
            thing.initialised, thing.asleep = True, False
        if not awake and thing.initialised:
            thing.initialised, thing.asleep = False, True
        self.fuse.pass_("after lull")
        return True

    async def meet(self, record, address, host):
        secret = await host.token()
        assert secret.reveal() == f"token of {record.placement_id}"
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        thing = self.machine.things[record.placement_id]
        assert thing.power is Power.RUNNING, "what is frozen or saved answers nobody"
        hello = self._hello(record, thing)
        if lacks_init(record, hello):
            content = await host.init(hello)
            assert thing.saved is None, "it could be begun again from before this use"
            self.fuse.pass_("before init")
            thing.initialised, thing.asleep, thing.revision = True, False, content.revision
            thing.inits.append(InitPayload(env=content.env))
            self.fuse.pass_("after init")
        return self._hello(record, thing)

    def _hello(self, record, thing):
        return Hello(
            sandbox_id=record.sandbox_id,
            placement_id=record.placement_id,
            generation=record.generation,
            nonce=record.blueprint.nonce,
            guest_version="1",
            envd_version="0.6.13",
            initialised=thing.initialised,
            init_revision=thing.revision if self.says_revision else None,
        )
