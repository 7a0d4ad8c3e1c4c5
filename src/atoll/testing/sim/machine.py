"""A host's machine, its driver and its guests: what outlives an agent, and what can fail of it.

Theory of operation. `SimMachine` is the fake driver's table with weather and with what guests know: whether they answer, and whether they
were initialised, with what. Each verb has one effect; it may fail before it, after it, or never come to it. After every effect `looked`
is called, so that an invariant is checked at the moment in which it could break.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atoll.agent.handshake import Meeting, lacks_init
from atoll.agent.journal import Job, Journal
from atoll.agent.record import Record
from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.secret import Secret
from atoll.domain.spec import Isolation, SaveMode
from atoll.drivers.fake.driver import FakeDriver, FakeMachine
from atoll.drivers.fake.driver import Weather as DriverWeather
from atoll.drivers.port import Capabilities, Mark, Power
from atoll.testing.sim.process import Process
from atoll.wire.guest import Hello, Init

_DELAY_S: Final = {
    "prepare": 0.05,
    "start": 0.1,
    "stop": 0.02,
    "remove": 0.05,
    "inspect": 0.005,
    "pause": 0.01,
    "resume": 0.01,
    "save": 0.2,
    "restore": 0.2,
    "snapshot": 0.2,
    "drop": 0.05,
}
_CODES: Final = {
    **dict.fromkeys(("stop", "remove", "inspect"), Code.CLEANUP_FAILED),
    "pause": Code.PAUSE_FAILED,
    "resume": Code.RESUME_FAILED,
    "save": Code.SAVE_FAILED,
    "restore": Code.RESUME_FAILED,
    "discard": Code.RESUME_FAILED,
    "snapshot": Code.SAVE_FAILED,
    "drop": Code.CLEANUP_FAILED,
}
_MEET_S: Final = 0.05


@dataclass(slots=True)
class SimMachine(FakeMachine):
    """Adds guests' memory and faults to the fake machine."""

    failing: dict[str, str] = field(default_factory=dict)
    """verb → `once`, `after` (once, its effect done) or `always`."""
    hanging: set[str] = field(default_factory=set)
    mute: bool = False
    """Guests that start now never answer."""
    journal_refuses: bool = False
    silent: set[str] = field(default_factory=set)
    initialised: dict[str, Init] = field(default_factory=dict)
    looked: Callable[[str], None] = lambda _verb: None
    remembers: Callable[[str], str] = lambda _sandbox_id: ""
    """What a guest of this sandbox remembers that begins to serve now: more each time."""

    def end(self, placement_id: str, reason: str) -> None:
        """The guest of a running placement ends."""
        placement = self.placements[placement_id]
        placement.power, placement.reason = Power.STOPPED, reason
        self.initialised.pop(placement_id, None)

    def living(self) -> list[str]:
        """Placements whose guest is there, running or frozen."""
        return [name for name, placement in self.placements.items() if placement.power in (Power.RUNNING, Power.FROZEN)]

    def running(self) -> list[str]:
        """Placements whose guest runs."""
        return [name for name, placement in self.placements.items() if placement.power is Power.RUNNING]


class SimDriver(FakeDriver):
    """The driver of one agent run."""

    def __init__(self, machine: SimMachine, mark: Mark, process: Process, dice: random.Random) -> None:
        super().__init__(mark, machine=machine, weather=DriverWeather())
        self._sim = machine
        self._process = process
        self._dice = dice

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="sim",
            isolation=Isolation.GVISOR,
            arch="x86_64",
            real_kernel_limits=False,
            network_slots=False,
            stop_keeps_disk=True,
            pauses=True,
            saves=SaveMode.FULL,
            snapshots=True,
            portable=True,
        )

    async def _before(self, verb: str) -> None:
        await asyncio.sleep(_DELAY_S.get(verb, 0.01) * (0.5 + self._dice.random()))
        while verb in self._sim.hanging:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.5)
        self._process.check()
        how = self._sim.failing.get(verb)
        if how in ("once", "always"):
            if how == "once":
                del self._sim.failing[verb]
            raise self._fault(verb)

    def _after(self, verb: str) -> None:
        for placement_id in [name for name in self._sim.initialised if name not in self._sim.living()]:
            del self._sim.initialised[placement_id]
        self._sim.looked(verb)
        if self._sim.failing.get(verb) == "after":
            del self._sim.failing[verb]
            raise self._fault(verb)

    def _fault(self, verb: str) -> Exception:
        code = _CODES.get(verb, Code.START_FAILED)
        faults: list[AtollError | OSError] = [
            Refused(code, f"a simulated fault of {verb}"),
            Unavailable(code, f"a simulated fault of {verb}"),
            OutcomeUnknown(Code.OUTCOME_UNKNOWN, f"a simulated fault of {verb}"),
            OSError(5, f"a simulated fault of {verb}"),
        ]
        return self._dice.choice(faults)

    async def start(self, order: Any) -> Any:
        seen = await super().start(order)
        if self._sim.mute:
            self._sim.silent.add(order.placement_id)
        return seen

    async def tell_exit(self, placement_id: str, reason: str) -> None:
        """A watched guest has ended: say so, as a driver's watcher does."""
        if placement_id in self._watched and self._on_exit is not None:
            self._watched.discard(placement_id)
            await self._on_exit(placement_id, reason)


class SimGuests:
    """Implements agent.handshake.Guests without a network."""

    def __init__(self, machine: SimMachine, process: Process, *, accepts: Callable[[Record, Secret, Init], None]) -> None:
        self._machine = machine
        self._process = process
        self._accepts = accepts
        """Told what a guest gets, before it takes it; raises when that is wrong."""

    async def meet(self, record: Record, address: str, host: Meeting) -> Hello:
        """See Guests."""
        blueprint = record.blueprint
        assert blueprint is not None
        try:
            async with asyncio.timeout(blueprint.ready_s):
                secret = await host.token()
                while not self._answers(record.placement_id):  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(_MEET_S)
                order = self._machine.placements[record.placement_id].order
                if (order.nonce, order.generation, order.sandbox_id) != (blueprint.nonce, record.generation, record.sandbox_id):
                    raise Refused(Code.GUEST_IDENTITY_MISMATCH, "another guest answered")
                hello = self._hello(record)
                if lacks_init(record, hello):
                    content = await host.init(hello)
                    await asyncio.sleep(_MEET_S / 5)
                    self._process.check()
                    if self._answers(record.placement_id):
                        self._accepts(record, secret, content)
                        self._machine.initialised[record.placement_id] = content
                        # From now on it remembers something that no earlier save has.
                        self._machine.placements[record.placement_id].memory = self._machine.remembers(record.sandbox_id)
        except TimeoutError:
            raise Refused(Code.GUEST_BOOT_TIMEOUT, f"the guest was not ready within {blueprint.ready_s:g} s") from None
        return hello

    def _hello(self, record: Record) -> Hello:
        assert record.blueprint is not None
        known = self._machine.initialised.get(record.placement_id)
        return Hello(
            sandbox_id=record.sandbox_id,
            placement_id=record.placement_id,
            generation=record.generation,
            nonce=record.blueprint.nonce,
            guest_version="sim",
            envd_version="sim",
            initialised=known is not None,
            init_revision=known.revision if known is not None else 0,
        )

    async def lull(self, placement_id: str, address: str, token: Secret | None, *, awake: bool) -> bool:
        """See Guests. One that is lulled is initialised anew, as after a save."""
        await asyncio.sleep(_MEET_S / 5)
        self._process.check()
        if token is None or not self._answers(placement_id) or awake:
            return False
        self._machine.initialised.pop(placement_id, None)
        return True

    def _answers(self, placement_id: str) -> bool:
        placement = self._machine.placements.get(placement_id)
        return placement is not None and placement.power is Power.RUNNING and placement_id not in self._machine.silent


class SimJournal(Journal):
    """The agent's real journal, committed a moment after it was given, as its thread does; of a process that has ended, maybe never."""

    def __init__(
        self, path: Path, process: Process, machine: SimMachine, dice: random.Random, *, on_statement: Callable[[str], None]
    ) -> None:
        self._process = process
        self._machine = machine
        self._dice = dice
        self._given: list[tuple[Job[Any], asyncio.Future[Any]]] = []
        super().__init__(path, inline=True)
        self._connection.set_trace_callback(on_statement)

    def submit(self, job: Job[Any]) -> asyncio.Future[Any]:
        """As Journal.submit."""
        self._process.check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._given.append((job, future))
        if len(self._given) == 1:
            loop.call_later(self._dice.random() * 0.002, self._work)
        return future

    def close(self) -> None:
        """As Journal.close; whoever was killed finishes some of what was given, as the disk happened to be."""
        if not self._process.alive:
            del self._given[self._dice.randint(0, len(self._given)) :]
        self._work()
        super().close()

    def count(self) -> int:
        """How many placements it knows, tombstones included."""
        found: int = self._connection.execute("SELECT count(*) FROM placements").fetchone()[0]
        return found

    def _work(self) -> None:
        given, self._given = self._given, []
        for job, future in given:
            if self._machine.journal_refuses:
                job = _refuse  # noqa: PLW2901 - the disk says no to whatever it is
            self._commit_alone(job, future)


def _refuse(_connection: sqlite3.Connection) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def claims(token: Secret) -> dict[str, Any]:
    """What a guest token says; its signature is the guest's own business."""
    body = token.reveal().split(".")[1]
    said: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return said
