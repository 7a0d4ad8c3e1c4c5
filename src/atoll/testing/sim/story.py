"""A story: the life of one world, with control replicas over one store, hosts with agents, clients that want sandboxes, and a fate that breaks things.

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
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from atoll.agent.agent import Agent
from atoll.agent.alarm import LoopAlarm
from atoll.agent.config import AgentConfig
from atoll.base.errors import AtollError
from atoll.control.bootstrap import DEFAULT_TEAM
from atoll.control.compose import Control
from atoll.control.settings import ControlSettings
from atoll.domain.deployment import DEFAULT_CLASSES, Deployment, WorkloadClass
from atoll.domain.spec import Isolation, OnExit, OnLeaseExpiry, OnLoss
from atoll.domain.tenancy import key_digest
from atoll.drivers.port import Image, Mark
from atoll.testing.sim import verdict, warmth
from atoll.testing.sim.checks import Violated
from atoll.testing.sim.clients import KEY
from atoll.testing.sim.clock import MachineClock, ProcessClock
from atoll.testing.sim.fate import Fate
from atoll.testing.sim.handle import Handle, SharedHandle
from atoll.testing.sim.loop import VirtualLoop
from atoll.testing.sim.machine import SimDriver, SimGuests, SimJournal
from atoll.testing.sim.moments import SimMoments
from atoll.testing.sim.network import Line, Replica, SimTransport
from atoll.testing.sim.places import Host, Seat
from atoll.testing.sim.process import Process
from atoll.testing.sim.scenario import Scenario
from atoll.testing.sim.store import Change
from atoll.testing.sim.world import CLASS, IMAGE, INSTALL, World

_WINDS: Final = 20


class Story:
    """Begin it inside the world's loop, then `await run()`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._fate = Fate(world)
        world.loop.set_exception_handler(self._unhandled)

    async def run(self) -> str:
        """The whole story; the digest of its trace. *Errors*: checks.Violated, and what no part of the product handles."""
        story = asyncio.create_task(self._story())
        await asyncio.wait({story, self.world.failed}, return_when=asyncio.FIRST_COMPLETED)
        self._raise()
        await story
        return hashlib.sha256("\n".join(self.world.trace).encode()).hexdigest()

    async def _story(self) -> None:
        self._make_secrets()
        self.world.database.after_commit = self._committed
        supervisors = [asyncio.create_task(self._keep_control(seat)) for seat in self.world.seats]
        await self.world.until(lambda: all(seat.replica for seat in self.world.seats), 60.0, "control never came up")
        for number in range(self.world.scenario.hosts):
            await self._add_host(number)
            supervisors.append(asyncio.create_task(self._keep_agent(self.world.hosts[-1])))
        clients = [
            asyncio.create_task(self.world.clients.client(n, [s for s in self.world.scenario.steps if s.client == n]))
            for n in range(self.world.scenario.clients)
        ]
        watch = asyncio.create_task(self._watch())
        fate = asyncio.create_task(self._fate.run())
        await asyncio.sleep(max(0.0, self.world.scenario.fate_s - self.world.loop.time()))
        fate.cancel()
        await asyncio.wait({fate})
        if not fate.cancelled():
            fate.result()
        await self._fate.heal()
        self.world.healed_at = self.world.loop.time()
        self.world.note("everything has healed")
        await asyncio.wait(clients, timeout=3600.0)
        if any(not client.done() for client in clients):
            raise Violated("a client never came to an end")
        for client in clients:
            client.result()
        await verdict.at_rest(self.world)
        await self.world.clients.cool()
        for promise in list(self.world.clients.book.by_request.values()):
            await self.world.clients.release(promise)
        if self.world.history.taken_back:
            await self.world.clients.release_all()
        await self.world.clients.drop_all()
        await verdict.until_nothing_is_left(self.world)
        await verdict.still_works(self.world)
        for task in (watch, *supervisors):
            task.cancel()
        for process in [seat.process for seat in self.world.seats] + [host.process for host in self.world.hosts]:
            if process is not None:
                process.end()
                await process.gone()
        verdict.in_the_end(self.world)

    # Control.

    def _make_secrets(self) -> None:
        secrets = self.world.directory / "secrets"
        secrets.mkdir()
        dice = self.world.dice("secrets")
        for name in ("sealing.key", "token.key"):
            (secrets / name).write_text(base64.b64encode(dice.randbytes(32)).decode())
        key = Ed25519PrivateKey.from_private_bytes(dice.randbytes(32))
        (secrets / "guest-ed25519").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (secrets / "edge.token").write_text("e")
        self.world.build(IMAGE)

    def _settings(self) -> ControlSettings:
        policy = WorkloadClass(
            name=CLASS,
            on_lease_expiry=OnLeaseExpiry(self.world.scenario.on_lease_expiry),
            on_exit=OnExit(self.world.scenario.on_exit),
            on_loss=OnLoss(self.world.scenario.on_loss),
            local_s=self.world.scenario.local_s,
        )
        return ControlSettings(
            database=self.world.directory / "none",
            secrets=self.world.directory / "secrets",
            artifacts=self.world.directory / "images",
            install_id=INSTALL,
            domain="sim",
            version="sim",
            boot_id="seat",
            api=False,
            moments=self.world.scenario.stored,
            deployment=Deployment(classes={**DEFAULT_CLASSES, CLASS: policy}),
        )

    async def _keep_control(self, seat: Seat) -> None:
        """Start this replica, and start it again whenever it has ended."""
        while True:
            seat.runs += 1
            ended = asyncio.Event()
            process = seat.process = Process(f"control {seat.number}", lambda _process, ended=ended: ended.set())  # type: ignore[misc]
            dice = self.world.dice(f"control {seat.number} run {seat.runs}")
            store = (
                SharedHandle(self.world.database, process, dice, seat.ear)
                if self.world.shared
                else Handle(self.world.database, process, dice)
            )
            control = Control(self._settings(), clock=ProcessClock(seat.clock), dice=dice.randbytes, store=store)
            starting = process.run(self._begin(control, store))
            await asyncio.wait({starting})
            if not starting.cancelled() and starting.exception() is None and process.alive:
                seat.replica = Replica(process, control)
                self.world.note(f"control {seat.number} is up, run {seat.runs}")
                process.run(self._end_when_outlived(control, process))
                await ended.wait()
                seat.replica = None
            elif not starting.cancelled() and not isinstance(starting.exception(), AtollError | None):
                self.world.broken.append(starting.exception() or RuntimeError("start"))
            process.end()
            await process.gone()
            self.world.note(f"control {seat.number} has ended")
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
        directory = self.world.directory / name
        directory.mkdir(mode=0o700)
        clock = MachineClock(self.world.loop.time, skew_s=self.world.host_skews[number], up_since_s=1000.0 * (number + 1))
        host = Host(name, number, Line(answered_at=clock.boot()), await self.world.enrol(name), directory, clock)
        host.things.looked = lambda _verb: verdict.looked(self.world, host)
        host.things.remembers = self.world.history.remember
        host.things.images += [
            Image(f"sha256:{number:064x}", "base", labels={"arch": "x86_64"}) for number in range(1, self.world.builds + 1)
        ]
        self.world.hosts.append(host)

    async def _keep_agent(self, host: Host) -> None:
        """Run this host's agent, again and again, while its machine is on."""
        while True:
            while host.off:
                host.woken.clear()
                await host.woken.wait()
            host.runs += 1
            process = host.process = Process(host.name)
            run = process.run(self._agent(host, process).run(), name=f"agent {host.name}")
            self.world.note(f"{host.name} begins run {host.runs}")
            await asyncio.wait({run})
            if not run.cancelled() and (error := run.exception()) is not None and not isinstance(error, AtollError | OSError):
                self.world.broken.append(error)
            process.end()
            await process.gone()
            host.driver = None
            self.world.note(f"{host.name} has ended run {host.runs}")
            host.woken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(host.pause_s):
                    await host.woken.wait()
            host.pause_s = 0.5

    def _agent(self, host: Host, process: Process) -> Agent:
        part = f"{host.name} run {host.runs}"
        config = AgentConfig(state_directory=host.directory, control_url="sim", facts=host.facts(), agent_version="sim", disk_reserve_mib=0)
        dice = self.world.dice(part)
        host.driver = SimDriver(host.things, Mark(INSTALL, host.identity.host_id), process, self.world.dice(f"{part}/driver"))
        guests = SimGuests(host.things, process, accepts=lambda *what: verdict.guest_takes(self.world, *what))
        transport = SimTransport(
            host.line,
            host.identity.credential,
            self.world.dice(f"{part}/network"),
            replicas=self.world.replicas,
            boot=host.clock.boot,
            stray=self.world.spawn,
            faulty=lambda what: self.world.fail(Violated(what)),
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
            moments=SimMoments(self.world.shelf, process, self.world.dice(f"{part}/moments")) if self.world.scenario.stored else None,
        )

    def _journal(self, host: Host, process: Process, path: Path) -> SimJournal:
        dice = self.world.dice(f"{host.name} run {host.runs}/journal")
        host.journal = SimJournal(path, process, host.things, dice, on_statement=self.world.overhear)
        return host.journal

    # Watching.

    def _committed(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        with self.world.watched():
            self.world.ledger.take(changes)
            for change in changes:
                self._tell(change)
            verdict.committed(self.world, changes)

    def _tell(self, change: Change) -> None:
        before, after = change.before, change.after
        if change.table == "sandboxes" and after is not None and (before is None or before["state"] != after["state"]):
            why = f" ({after['reason']})" if after["reason"] and after["state"] in ("releasing", "released", "failed") else ""
            self.world.note(
                f"{after['id']} {before['state'] if before else '-'} -> {after['state']}{why}, generation {after['generation']}"
            )
            if after["state"] in ("released", "failed"):
                self.world.ends[f"{after['state']} {after['reason']}"] += 1
        elif change.table == "placements" and after is not None:
            was = (before["holding"], before["desired"], before["observed"]) if before else None
            now = (after["holding"], after["desired"], after["observed"])
            if was != now:
                host = next((h.name for h in self.world.hosts if h.identity.host_id == after["host_id"]), after["host_id"])
                self.world.note(f"  {after['id']} of {after['sandbox_id']} on {host}: {', '.join(now)}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(5.0)
            with self.world.watched():
                verdict.nothing_is_kept_too_long(self.world)
                warmth.tallies_agree(self.world)
            self.world.collect()

    def _unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.world.fail(error if error is not None else RuntimeError(str(context.get("message"))))

    def _raise(self) -> None:
        if self.world.broken:
            raise self.world.broken[0]


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
        digest = loop.run_until_complete(Story(world).run())
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
