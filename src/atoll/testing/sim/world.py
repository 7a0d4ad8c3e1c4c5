"""A world of one seed: control over a store, hosts with agents, clients that want sandboxes, and a fate that breaks things.

Theory of operation. Everything runs on one virtual clock and one seeded source of chance. Fate kills and restarts control and agents,
cuts lines, loses and repeats messages, lets guests die and drivers fail. After `fate_s` it heals everything; the clients release what
they have; and the world must come to rest with nothing left. What a client was told is remembered: a sandbox that was ready, not
released, not at its end, and on a host that lived, must still be there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from atoll.agent.agent import Agent
from atoll.agent.alarm import LoopAlarm
from atoll.agent.config import AgentConfig, Identity
from atoll.base.errors import AtollError, Code, Refused
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.control.bootstrap import DEFAULT_TEAM
from atoll.control.compose import Control, ControlSettings
from atoll.control.service import Caller
from atoll.domain.spec import Isolation
from atoll.domain.tenancy import key_digest
from atoll.drivers.fake.driver import FakeDriver, FakeMachine
from atoll.drivers.fake.driver import Weather as DriverWeather
from atoll.drivers.port import Mark
from atoll.planning.resolve import CreateRequest
from atoll.testing.sim import checks
from atoll.testing.sim.loop import VirtualLoop
from atoll.testing.sim.network import Line, Weather
from atoll.testing.sim.store import InlineStore
from atoll.wire import agent as wire

EPOCH_S: Final = 1_800_000_000.0
IMAGE: Final = "sha256:" + "0" * 64
KEY: Final = "e2b_" + "5" * 40
INSTALL: Final = "ins_" + "s" * 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How big a world, and how bad its weather. *Units*: virtual seconds."""

    hosts: int = 3
    clients: int = 4
    fate_s: float = 240.0
    lost: float = 0.05
    repeated: float = 0.05
    faults_every_s: float = 6.0


@dataclass(slots=True)
class Machine:
    """One host: what outlives its agent, and the agent that runs now."""

    name: str
    line: Line
    identity: Identity
    directory: Path
    things: FakeMachine = field(default_factory=FakeMachine)
    agent: asyncio.Task[Any] | None = None
    handle: Agent | None = None


class _Clock:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return EPOCH_S + self._loop.time()

    def boot(self) -> float:
        return 1000.0 + self._loop.time()


class World:
    """Build it inside its own VirtualLoop, then `await run()`."""

    def __init__(self, seed: int, plan: Plan, directory: Path, loop: VirtualLoop) -> None:
        self.plan = plan
        self.dice = random.Random(seed)
        self.clock = _Clock(loop)
        self.directory = directory
        self.machines: dict[str, Machine] = {}
        self.store = InlineStore(lambda conn: checks.after_commit(conn, {m.name: m.things for m in self.machines.values()}))
        self.control: Control | None = None
        self.trace: list[str] = []
        self.broken: list[BaseException] = []
        self._serving: dict[asyncio.Task[Any], None] = {}
        """In the order of their beginning: a set of tasks has another order in every process."""
        self._loop = loop
        loop.set_exception_handler(self._unhandled)

    async def run(self) -> str:
        """The whole story. The digest of the trace. *Errors*: checks.Violated."""
        self._make_secrets()
        await self._start_control()
        for number in range(self.plan.hosts):
            await self._add_host(f"host-{number}")
        clients = [asyncio.create_task(self._client(n)) for n in range(self.plan.clients)]
        fate = asyncio.create_task(self._fate())
        await asyncio.sleep(self.plan.fate_s)
        fate.cancel()
        await self._heal()
        await asyncio.wait(clients, timeout=3600.0)
        self._raise(*(c.exception() for c in clients if c.done() and not c.cancelled()))
        if any(not c.done() for c in clients):
            raise checks.Violated("a client never came to an end")
        await asyncio.sleep(900.0)
        self._raise(*self.broken)
        await self.store.read(lambda conn: checks.in_the_end(conn, {m.name: m.things for m in self.machines.values()}))
        await self._stop()
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def note(self, what: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self._loop.time():.6f} {what}")

    def bytes(self, count: int) -> bytes:
        """The world's dice, for ids and keys."""
        return self.dice.randbytes(count)

    # Control.

    def _make_secrets(self) -> None:
        secrets = self.directory / "secrets"
        secrets.mkdir()
        for name in ("sealing.key", "token.key"):
            (secrets / name).write_text(base64.b64encode(self.bytes(32)).decode())
        key = Ed25519PrivateKey.from_private_bytes(self.bytes(32))
        (secrets / "guest-ed25519").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (secrets / "edge.token").write_text("e")
        image = self.directory / "images" / "base" / "current"
        image.mkdir(parents=True)
        (image / "manifest.json").write_text(json.dumps({"name": "base", "digest": IMAGE}))

    async def _start_control(self) -> None:
        settings = ControlSettings(
            database=self.directory / "none",
            secrets=self.directory / "secrets",
            artifacts=self.directory / "images",
            install_id=INSTALL,
            domain="sim",
            version="sim",
        )
        control = Control(settings, clock=self.clock, dice=self.bytes, store=self.store)
        await control.start()
        await control.keys.ensure_operator(digest=key_digest(KEY), hint="5555", team=DEFAULT_TEAM)
        self.control = control
        self.note("control starts")

    async def _kill_control(self) -> None:
        control, self.control = self.control, None
        if control is not None:
            control.kill()
            for task in tuple(self._serving):
                task.cancel()
            self.note("control dies")

    # Hosts.

    async def _add_host(self, name: str) -> None:
        assert self.control is not None
        token = self.bytes(8).hex()
        await self.control.enrollment.admit_token(hashlib.sha256(token.encode()).hexdigest(), host_name=name)
        facts = wire.HostFacts(arch="x86_64", cpu_count=2, memory_mib=4096, disk_mib=20000, boot_id=name)
        enrolled = await self.control.enrollment.enroll(
            wire.Enroll(token=token, name=name, capacity=Vector(4000, 2048, 20000, 8), facts=facts)
        )
        weather = Weather(lost_there=self.plan.lost, lost_back=self.plan.lost, repeated=self.plan.repeated)
        identity = Identity(enrolled.host_id, enrolled.install_id, Secret(enrolled.credential), 1)
        line = Line(lambda: self.control, enrolled.credential, self.dice, weather)
        directory = self.directory / name
        directory.mkdir(mode=0o700)
        self.machines[name] = Machine(name, line, identity, directory)
        self._start_agent(self.machines[name])

    def _start_agent(self, machine: Machine) -> None:
        config = AgentConfig(
            state_directory=machine.directory,
            control_url="sim",
            facts=wire.HostFacts(arch="x86_64", cpu_count=2, memory_mib=4096, disk_mib=20000, boot_id=machine.name),
            agent_version="sim",
            disk_reserve_mib=0,
            journal_inline=True,
        )
        weather = DriverWeather(delay_s={"prepare": 0.05, "start": 0.1, "stop": 0.02, "remove": 0.05, "inspect": 0.005})
        driver = FakeDriver(Mark(INSTALL, machine.identity.host_id), machine=machine.things, weather=weather)
        agent = Agent(
            config,
            machine.identity,
            drivers={Isolation.GVISOR: driver},
            clock=self.clock,
            dice=self.bytes,
            transport=machine.line,
            alarm=lambda: LoopAlarm(self.clock),
        )
        machine.handle = agent
        machine.agent = asyncio.create_task(agent.run(), name=f"agent {machine.name}")
        self.note(f"{machine.name} starts")

    async def _kill_agent(self, machine: Machine) -> None:
        if machine.agent is None:
            return
        machine.agent.cancel()
        await asyncio.wait({machine.agent})
        if not machine.agent.cancelled() and (error := machine.agent.exception()) is not None:
            self.broken.append(error)
        machine.agent = None
        self.note(f"{machine.name} dies")

    # Fate.

    async def _fate(self) -> None:
        while True:
            await asyncio.sleep(self.dice.random() * 2 * self.plan.faults_every_s)
            machine = self.dice.choice(list(self.machines.values()))
            match self.dice.randrange(6):
                case 0:
                    await self._kill_control()
                    await asyncio.sleep(self.dice.random() * 10)
                    await self._start_control()
                case 1:
                    await self._kill_agent(machine)
                    await asyncio.sleep(self.dice.random() * 20)
                    self._start_agent(machine)
                case 2:
                    machine.line.cut = True
                    self.note(f"{machine.name} is cut off")
                    await asyncio.sleep(self.dice.random() * 60)
                    machine.line.cut = False
                case 3:
                    running = [p for p in machine.things.placements if machine.things.placements[p].power == "running"]
                    if running and machine.handle is not None:
                        self.note(f"{machine.name} loses a guest")
                        machine.things.placements[self.dice.choice(running)].power = type(
                            machine.things.placements[running[0]].power
                        ).STOPPED
                case 4:
                    machine.things.disk_full = True
                    await asyncio.sleep(self.dice.random() * 10)
                    machine.things.disk_full = False
                case _:
                    stuck = list(machine.things.placements.values())
                    if stuck:
                        chosen = self.dice.choice(stuck)
                        chosen.stuck = True
                        await asyncio.sleep(self.dice.random() * 30)
                        chosen.stuck = False

    async def _heal(self) -> None:
        self.note("everything heals")
        if self.control is None:
            await self._start_control()
        for machine in self.machines.values():
            machine.line.cut = False
            machine.line.weather = Weather()
            machine.things.disk_full = False
            for placement in machine.things.placements.values():
                placement.stuck = False
            if machine.agent is None or machine.agent.done():
                if machine.agent is not None and not machine.agent.cancelled() and (error := machine.agent.exception()) is not None:
                    self.broken.append(error)
                self._start_agent(machine)

    # Clients.

    async def _client(self, number: int) -> None:
        mine: dict[str, float] = {}
        count = 0
        while self._loop.time() < self.plan.fate_s:
            await asyncio.sleep(self.dice.random() * 6)
            count += 1
            if mine and self.dice.random() < 0.4:
                sandbox_id = self.dice.choice(sorted(mine))
                del mine[sandbox_id]
                await self._release(sandbox_id)
            else:
                made = await self._create(f"c{number}-{count}")
                if made is not None:
                    mine[made[0]] = made[1]
        for sandbox_id in sorted(mine):
            await self._release(sandbox_id)

    async def _create(self, request_id: str) -> tuple[str, float] | None:
        request = CreateRequest(template="base", timeout_s=self.dice.choice([20, 120, 1000]), memory_mib=512, request_id=request_id)
        while True:
            try:
                sandbox = await self._ask(lambda caller, control: control.service.create(caller, request))
            except AtollError as error:
                if error.code in (Code.NO_CAPACITY, Code.CREATE_TIMEOUT) or not isinstance(error, Refused):
                    self.note(f"create {request_id}: {error.code}")
                    if error.code in (Code.CONTROL_UNAVAILABLE, Code.OUTCOME_UNKNOWN):
                        await asyncio.sleep(1.0)
                        continue
                    return None
                if error.code is Code.REQUEST_IN_PROGRESS:
                    await asyncio.sleep(1.0)
                    continue
                raise
            self.note(f"create {request_id}: {sandbox.id} {sandbox.state}")
            return sandbox.id, self._loop.time()

    async def _release(self, sandbox_id: str) -> None:
        while True:
            try:
                await self._ask(lambda caller, control: control.service.release(caller, sandbox_id))
            except AtollError as error:
                if error.code is Code.SANDBOX_NOT_FOUND:
                    break
                await asyncio.sleep(1.0)
                continue
            break
        self.note(f"release {sandbox_id}")

    async def _ask(self, work: Any) -> Any:
        """One request to whatever control runs now; it dies with it."""
        control = self.control
        if control is None:
            raise AtollError(Code.CONTROL_UNAVAILABLE, "control is down")
        caller: Caller = await control.service.authenticate(Secret(KEY))
        coroutine: Coroutine[Any, Any, Any] = work(caller, control)
        task = asyncio.create_task(coroutine)
        self._serving[task] = None
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled():
                raise AtollError(Code.OUTCOME_UNKNOWN, "control died") from None
            raise
        finally:
            self._serving.pop(task, None)

    # The end.

    def _unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.broken.append(error if error is not None else RuntimeError(str(context.get("message"))))

    @staticmethod
    def _raise(*errors: BaseException | None) -> None:
        for error in errors:
            if error is not None:
                raise error

    async def _stop(self) -> None:
        for machine in self.machines.values():
            await self._kill_agent(machine)
        if self.control is not None:
            await self.control.stop()
        self._raise(*self.broken)


def simulate(seed: int, plan: Plan | None = None) -> World:
    """Run one seed to its end. *Errors*: checks.Violated, and whatever a task did not handle."""
    loop = VirtualLoop()
    directory = Path(tempfile.mkdtemp(prefix="atoll-sim-"))
    world = World(seed, plan or Plan(), directory, loop)
    try:
        world.trace.append(loop.run_until_complete(world.run()))
    finally:
        with contextlib.suppress(RuntimeError):
            for task in asyncio.all_tasks(loop):
                task.cancel()
        world.store.dispose()
        loop.close()
        shutil.rmtree(directory, ignore_errors=True)
    return world
