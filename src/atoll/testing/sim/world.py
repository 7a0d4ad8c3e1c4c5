"""A world of one scenario: control replicas over one store, hosts with agents, clients that want sandboxes, and a fate that breaks things.

Theory of operation. Everything runs on one virtual clock; chance comes from one seed, with dice of their own for each part, so that
leaving something out changes as little as possible elsewhere. Processes are started again when they end, as a supervisor does. After
`fate_s` everything heals; then every promise that is still open is kept or broken: sandboxes go on until the end that they were promised,
a new one can be had, and when all were released nothing is left of anything.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from atoll.agent.agent import Agent
from atoll.agent.alarm import LoopAlarm
from atoll.agent.config import AgentConfig, Identity
from atoll.base.errors import AtollError
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.control.bootstrap import DEFAULT_TEAM, register_templates
from atoll.control.compose import Control
from atoll.control.settings import ControlSettings
from atoll.domain.deployment import DEFAULT_CLASSES, Deployment, WorkloadClass
from atoll.domain.host import LEASE_S
from atoll.domain.spec import Isolation, OnExit, OnLeaseExpiry, OnLoss
from atoll.domain.tenancy import key_digest
from atoll.drivers.port import Image, Mark
from atoll.store import moments, sending
from atoll.testing.sim import verdict, warmth
from atoll.testing.sim.checks import Ledger, Violated
from atoll.testing.sim.clients import CANARY, KEY, Clients
from atoll.testing.sim.clock import MachineClock, ProcessClock
from atoll.testing.sim.fate import Fate
from atoll.testing.sim.handle import Ear, Handle, SharedHandle
from atoll.testing.sim.loop import VirtualLoop
from atoll.testing.sim.machine import SimDriver, SimGuests, SimJournal, SimMachine
from atoll.testing.sim.moments import Shelf, SimMoments
from atoll.testing.sim.network import Line, Replica, SimTransport
from atoll.testing.sim.process import Process
from atoll.testing.sim.scenario import Scenario
from atoll.testing.sim.store import Change, Database
from atoll.wire import agent as wire

IMAGE: Final = "sha256:" + "0" * 64
INSTALL: Final = "ins_" + "s" * 20
CLASS: Final = "simulated"
ROOM: Final = Vector(4000, 2048, 20000, 8)
"""Of each host: four sandboxes."""
_WINDS: Final = 20


@dataclass(slots=True)
class Host:
    """One host: what outlives its agent, and the agent run of now."""

    name: str
    number: int
    line: Line
    identity: Identity
    directory: Path
    clock: MachineClock
    things: SimMachine = field(default_factory=SimMachine)
    process: Process | None = None
    driver: SimDriver | None = None
    boots: int = 1
    runs: int = 0
    off: bool = False
    """The machine is switched off: no agent is started."""
    fenced: bool = False
    """An operator has given it up; it joins again when everything heals."""
    journal: SimJournal | None = None
    pause_s: float = 0.5
    """How long until its agent is started again."""
    forgot_at: float = -math.inf
    """When its agent lost its database last, by the boot clock."""
    unable_at: float = -math.inf
    """When something kept its agent from acting last."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Its agent is to be started now."""

    def able_since(self, now: float, for_s: float) -> bool:
        """Whether its agent could act all this time, as far as fate is concerned. *Units*: true seconds."""
        things, process = self.things, self.process
        if process is None or not process.alive or process.frozen is not None or self.off or things.failing or things.hanging:
            self.unable_at = now
        if things.journal_refuses or any(placement.stuck for placement in things.placements.values()):
            self.unable_at = now
        if self.line.answered_at <= self.forgot_at:
            # It knows of nothing what is wanted before control has told it again.
            self.unable_at = now
        return now - self.unable_at >= for_s

    def was_unheard(self) -> bool:
        """Whether its line was silent for about a lease, at any time so far."""
        return max(self.line.longest_silence_s, self.clock.boot() - self.line.answered_at) >= LEASE_S - 10.0

    def known(self) -> int:
        """How many placements its agent remembers."""
        return self.journal.count() if self.journal is not None and self.process is not None and self.process.alive else 0

    def facts(self) -> wire.HostFacts:
        """What its agent finds out about it."""
        return wire.HostFacts(arch="x86_64", cpu_count=2, memory_mib=4096, disk_mib=20000, boot_id=f"{self.name}-{self.boots}", claims=True)


@dataclass(slots=True)
class Seat:
    """The place of one control replica."""

    number: int
    clock: MachineClock
    replica: Replica | None = None
    process: Process | None = None
    runs: int = 0
    pause_s: float = 0.5
    ear: Ear = field(default_factory=Ear)
    """Where it hears the other replicas."""


class World:
    """Build it inside its own VirtualLoop, then `await run()`."""

    def __init__(self, scenario: Scenario, directory: Path, loop: VirtualLoop) -> None:
        self.scenario = scenario
        self.loop = loop
        self.directory = directory
        self.trace: list[str] = []
        self.injected: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        """How sandboxes ended, by state and reason."""
        self.claims = 0
        """Creates that took over what was made ahead."""
        self.builds = 0
        self.broken: list[BaseException] = []
        self.healed_at: float | None = None
        self.ledger = Ledger()
        self.history = verdict.History()
        self.database = Database(on_statement=self._overhear, shared=scenario.replicas > 1)
        self.hosts: list[Host] = []
        self.shelf = Shelf()
        skews = [*scenario.skews_s, *([0.0] * (scenario.replicas + scenario.hosts))]
        self.seats = [Seat(n, MachineClock(loop.time, skew_s=skews[n], up_since_s=5000.0 + 1000.0 * n)) for n in range(scenario.replicas)]
        self.host_skews = skews[scenario.replicas :]
        self.clients = Clients(self.dice("clients"), self.replicas, loop.time, self.note, CLASS, self._rebuild)
        self.fate = Fate(self)
        self.failed: asyncio.Future[None] = loop.create_future()
        self._strays: dict[asyncio.Task[None], None] = {}
        loop.set_exception_handler(self._unhandled)

    def dice(self, part: str) -> random.Random:
        """Chance for one part of the world."""
        return random.Random(f"{self.scenario.seed}/{part}")

    async def run(self) -> str:
        """The whole story; the digest of its trace. *Errors*: checks.Violated, and what no part of the product handles."""
        story = asyncio.create_task(self._story())
        await asyncio.wait({story, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        self._raise()
        await story
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    async def _story(self) -> None:
        self._make_secrets()
        self.database.after_commit = self._committed
        supervisors = [asyncio.create_task(self._keep_control(seat)) for seat in self.seats]
        await self.until(lambda: all(seat.replica for seat in self.seats), 60.0, "control never came up")
        for number in range(self.scenario.hosts):
            await self._add_host(number)
            supervisors.append(asyncio.create_task(self._keep_agent(self.hosts[-1])))
        clients = [
            asyncio.create_task(self.clients.client(n, [s for s in self.scenario.steps if s.client == n]))
            for n in range(self.scenario.clients)
        ]
        watch = asyncio.create_task(self._watch())
        fate = asyncio.create_task(self.fate.run())
        await asyncio.sleep(max(0.0, self.scenario.fate_s - self.loop.time()))
        fate.cancel()
        await asyncio.wait({fate})
        if not fate.cancelled():
            fate.result()
        await self.fate.heal()
        self.healed_at = self.loop.time()
        self.note("everything has healed")
        await asyncio.wait(clients, timeout=3600.0)
        if any(not client.done() for client in clients):
            raise Violated("a client never came to an end")
        for client in clients:
            client.result()
        await verdict.at_rest(self)
        await self.clients.cool()
        for promise in list(self.clients.book.by_request.values()):
            await self.clients.release(promise)
        if self.history.taken_back:
            await self.clients.release_all()
        await self.clients.drop_all()
        await verdict.until_nothing_is_left(self)
        await verdict.still_works(self)
        for task in (watch, *supervisors):
            task.cancel()
        for process in [seat.process for seat in self.seats] + [host.process for host in self.hosts]:
            if process is not None:
                process.end()
                await process.gone()
        verdict.in_the_end(self)

    @property
    def shared(self) -> bool:
        """Whether several control processes use the database."""
        return self.scenario.replicas > 1

    def take_back(self, backup: bytes, *, made_at: float) -> None:
        """The store is what it was at `made_at`: an operator has ended every control process, and restored it. *Units*: true seconds.

        One that stands still was overlooked, and goes on later as if nothing had happened; but its connections are broken.
        """
        for seat in self.seats:
            if seat.process is not None and (seat.process.frozen is None or not self.shared):
                seat.process.end()
            seat.ear.broken.set()
        now = self.database.wall() if self.shared else self.seats[0].clock.now()
        self.database.take_back(backup, now=now, chance=self.dice(f"life after {self.loop.time()}").randbytes)
        self.ledger.taken_back(self.database.rows())
        with self.watched():
            verdict.taken_back(self, made_at=made_at)

    def replicas(self) -> list[Replica]:
        """Control processes that answer."""
        return [seat.replica for seat in self.seats if seat.replica is not None and seat.replica.process.alive]

    def note(self, what: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.loop.time():11.6f} {what}")

    # Control.

    def _make_secrets(self) -> None:
        secrets = self.directory / "secrets"
        secrets.mkdir()
        dice = self.dice("secrets")
        for name in ("sealing.key", "token.key"):
            (secrets / name).write_text(base64.b64encode(dice.randbytes(32)).decode())
        key = Ed25519PrivateKey.from_private_bytes(dice.randbytes(32))
        (secrets / "guest-ed25519").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (secrets / "edge.token").write_text("e")
        self._build(IMAGE)

    def _build(self, image: str) -> None:
        current = self.directory / "images" / "base" / "current"
        current.mkdir(parents=True, exist_ok=True)
        (current / "manifest.json").write_text(json.dumps({"name": "base", "digest": image}))

    async def _rebuild(self) -> None:
        """The template's next build; whichever replica begins next, or is there, takes it up."""
        self.builds += 1
        image = f"sha256:{self.builds:064x}"
        for host in self.hosts:
            host.things.images.append(Image(image, "base", labels={"arch": "x86_64"}))
        self._build(image)
        self.note(f"build {self.builds} of the template is there")
        dice = self.dice(f"build {self.builds}")
        while True:
            for replica in self.replicas():
                store, clock = replica.control.reconciler.store, replica.control.reconciler.clock
                taking = replica.process.run(register_templates(self.directory / "images", store=store, clock=clock, dice=dice.randbytes))
                await asyncio.wait({taking}, timeout=30.0)
                if taking.done() and not taking.cancelled() and taking.exception() is None:
                    return
                taking.cancel()
            await asyncio.sleep(1.0)

    def _settings(self) -> ControlSettings:
        policy = WorkloadClass(
            name=CLASS,
            on_lease_expiry=OnLeaseExpiry(self.scenario.on_lease_expiry),
            on_exit=OnExit(self.scenario.on_exit),
            on_loss=OnLoss(self.scenario.on_loss),
            local_s=self.scenario.local_s,
        )
        return ControlSettings(
            database=self.directory / "none",
            secrets=self.directory / "secrets",
            artifacts=self.directory / "images",
            install_id=INSTALL,
            domain="sim",
            version="sim",
            boot_id="seat",
            api=False,
            moments=self.scenario.stored,
            deployment=Deployment(classes={**DEFAULT_CLASSES, CLASS: policy}),
        )

    async def _keep_control(self, seat: Seat) -> None:
        """Start this replica, and start it again whenever it has ended."""
        while True:
            seat.runs += 1
            ended = asyncio.Event()
            process = seat.process = Process(f"control {seat.number}", lambda _process, ended=ended: ended.set())  # type: ignore[misc]
            dice = self.dice(f"control {seat.number} run {seat.runs}")
            store = SharedHandle(self.database, process, dice, seat.ear) if self.shared else Handle(self.database, process, dice)
            control = Control(self._settings(), clock=ProcessClock(seat.clock), dice=dice.randbytes, store=store)
            starting = process.run(self._begin(control, store))
            await asyncio.wait({starting})
            if not starting.cancelled() and starting.exception() is None and process.alive:
                seat.replica = Replica(process, control)
                self.note(f"control {seat.number} is up, run {seat.runs}")
                process.run(self._end_when_outlived(control, process))
                await ended.wait()
                seat.replica = None
            elif not starting.cancelled() and not isinstance(starting.exception(), AtollError | None):
                self.broken.append(starting.exception() or RuntimeError("start"))
            process.end()
            await process.gone()
            self.note(f"control {seat.number} has ended")
            await asyncio.sleep(seat.pause_s)
            seat.pause_s = 0.5

    @staticmethod
    async def _end_when_outlived(control: Control, process: Process) -> None:
        """As its program does."""
        await control.outlived.wait()
        process.end()

    @staticmethod
    async def _begin(control: Control, store: Handle) -> None:
        await control.start()
        await control.keys.ensure_operator(digest=key_digest(KEY), hint="5555", team=DEFAULT_TEAM)
        if isinstance(store, SharedHandle):
            store.begun = True

    # Hosts.

    async def _add_host(self, number: int) -> None:
        name = f"host-{number}"
        directory = self.directory / name
        directory.mkdir(mode=0o700)
        clock = MachineClock(self.loop.time, skew_s=self.host_skews[number], up_since_s=1000.0 * (number + 1))
        host = Host(name, number, Line(answered_at=clock.boot()), await self.enrol(name), directory, clock)
        host.things.looked = lambda _verb: verdict.looked(self, host)
        host.things.remembers = self.history.remember
        host.things.images += [Image(f"sha256:{number:064x}", "base", labels={"arch": "x86_64"}) for number in range(1, self.builds + 1)]
        self.hosts.append(host)

    async def enrol(self, name: str) -> Identity:
        """A credential for this host, as an operator's token and its agent's `join` bring it about."""
        await self.until(self.replicas, 120.0, "control never came back")
        control = self.replicas()[0].control
        token = self.dice(f"token of {name} at {self.loop.time()}").randbytes(8).hex()
        await control.enrollment.admit_token(hashlib.sha256(token.encode()).hexdigest(), host_name=name)
        facts = wire.HostFacts(arch="x86_64", cpu_count=2, memory_mib=4096, disk_mib=20000, boot_id=name)
        enrolled = await control.enrollment.enroll(wire.Enroll(token=token, name=name, capacity=ROOM, facts=facts))
        self.history.secrets.add(enrolled.credential)
        return Identity(enrolled.host_id, enrolled.install_id, Secret(enrolled.credential), enrolled.credential_version)

    def host_of(self, host_id: str) -> Host | None:
        """By the id that control gave it; None for one that is just being added."""
        return next((host for host in self.hosts if host.identity.host_id == host_id), None)

    async def _keep_agent(self, host: Host) -> None:
        """Run this host's agent, again and again, while its machine is on."""
        while True:
            while host.off:
                host.woken.clear()
                await host.woken.wait()
            host.runs += 1
            process = host.process = Process(host.name)
            run = process.run(self._agent(host, process).run(), name=f"agent {host.name}")
            self.note(f"{host.name} begins run {host.runs}")
            await asyncio.wait({run})
            if not run.cancelled() and (error := run.exception()) is not None and not isinstance(error, AtollError | OSError):
                self.broken.append(error)
            process.end()
            await process.gone()
            host.driver = None
            self.note(f"{host.name} has ended run {host.runs}")
            host.woken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(host.pause_s):
                    await host.woken.wait()
            host.pause_s = 0.5

    def _agent(self, host: Host, process: Process) -> Agent:
        part = f"{host.name} run {host.runs}"
        config = AgentConfig(state_directory=host.directory, control_url="sim", facts=host.facts(), agent_version="sim", disk_reserve_mib=0)
        dice = self.dice(part)
        host.driver = SimDriver(host.things, Mark(INSTALL, host.identity.host_id), process, self.dice(f"{part}/driver"))
        guests = SimGuests(host.things, process, accepts=lambda *what: verdict.guest_takes(self, *what))
        transport = SimTransport(
            host.line,
            host.identity.credential,
            self.dice(f"{part}/network"),
            replicas=self.replicas,
            boot=host.clock.boot,
            stray=self.spawn,
            faulty=lambda what: self._fail(Violated(what)),
        )
        return Agent(
            config,
            host.identity,
            drivers={Isolation.GVISOR: host.driver},
            clock=host.clock,
            dice=dice.randbytes,
            transport=transport,
            guests=guests,
            alarm=lambda: LoopAlarm(host.clock),
            journal=lambda: self._journal(host, process, config.journal_path),
            moments=SimMoments(self.shelf, process, self.dice(f"{part}/moments")) if self.scenario.stored else None,
        )

    def _journal(self, host: Host, process: Process, path: Path) -> SimJournal:
        dice = self.dice(f"{host.name} run {host.runs}/journal")
        host.journal = SimJournal(path, process, host.things, dice, on_statement=self._overhear)
        return host.journal

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something of the world's own that runs beside everything, in no process."""
        task = asyncio.get_running_loop().create_task(work)
        self._strays[task] = None
        task.add_done_callback(lambda done: self._strays.pop(done, None))
        return task

    # Watching.

    def _committed(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        with self.watched():
            self.ledger.take(changes)
            for change in changes:
                self._tell(change)
            verdict.committed(self, changes)

    def _tell(self, change: Change) -> None:
        before, after = change.before, change.after
        if change.table == "sandboxes" and after is not None and (before is None or before["state"] != after["state"]):
            why = f" ({after['reason']})" if after["reason"] and after["state"] in ("releasing", "released", "failed") else ""
            self.note(f"{after['id']} {before['state'] if before else '-'} -> {after['state']}{why}, generation {after['generation']}")
            if after["state"] in ("released", "failed"):
                self.ends[f"{after['state']} {after['reason']}"] += 1
        elif change.table == "placements" and after is not None:
            was = (before["holding"], before["desired"], before["observed"]) if before else None
            now = (after["holding"], after["desired"], after["observed"])
            if was != now:
                host = next((h.name for h in self.hosts if h.identity.host_id == after["host_id"]), after["host_id"])
                self.note(f"  {after['id']} of {after['sandbox_id']} on {host}: {', '.join(now)}")

    @contextlib.contextmanager
    def watched(self) -> Any:
        """What is found broken inside ends the story; the product does not hear of it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the simulation's and must not end in the product's hands
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.broken.append(error)
        self.note(f"BROKEN: {error}")
        if not self.failed.done():
            self.failed.set_result(None)

    def _overhear(self, statement: str) -> None:
        lowered = CANARY.encode().hex()
        if CANARY in statement or lowered in statement.lower() or any(secret in statement for secret in self.history.secrets):
            with self.watched():
                raise Violated(f"a secret is at rest: {statement[:120]}...")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(5.0)
            with self.watched():
                verdict.nothing_is_kept_too_long(self)
                warmth.tallies_agree(self)
            self.collect()

    def collect(self) -> None:
        """As control does now and then: what nobody needs of the artifact store goes."""
        conn = self.database.conn
        self.shelf.collect(moments.needed(conn), sending.held(conn, self.shelf.names()), now=self.loop.time())

    async def until(self, condition: Callable[[], Any], within_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not condition():  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.25)
        except TimeoutError:
            raise Violated(what) from None

    def _unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._fail(error if error is not None else RuntimeError(str(context.get("message"))))

    def _raise(self) -> None:
        if self.broken:
            raise self.broken[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    scenario: Scenario
    trace: list[str]
    digest: str
    injected: Counter[str]
    ends: Counter[str]
    commits: int
    messages: int
    error: BaseException | None = None
    claims: int = 0


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario to its end. What it broke is in the outcome, not raised."""
    loop = VirtualLoop()
    shared_memory = Path("/dev/shm")  # noqa: S108 - journals are flushed to no disk; the directory is private
    directory = Path(tempfile.mkdtemp(prefix="atoll-sim-", dir=shared_memory if shared_memory.is_dir() else None))
    world = World(scenario, directory, loop)
    error: BaseException | None = None
    digest = ""
    try:
        digest = loop.run_until_complete(world.run())
    except Exception as broken:  # noqa: BLE001 - whatever broke is the outcome
        error = broken
    finally:
        _wind_up(loop)
        world.database.dispose()
        loop.close()
        shutil.rmtree(directory, ignore_errors=True)
    messages = sum(host.line.messages for host in world.hosts) + world.clients.asked
    return Outcome(scenario, world.trace, digest, world.injected, world.ends, world.database.commits, messages, error, world.claims)


def _wind_up(loop: VirtualLoop) -> None:
    """Let every task end, so that none is left to complain when it is collected."""
    loop.set_exception_handler(lambda _loop, _context: None)
    for _ in range(_WINDS):
        loop.calm()
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        with contextlib.suppress(RuntimeError):
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()
