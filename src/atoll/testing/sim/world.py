"""A world of one scenario: the seats of control replicas over one store, hosts, clients that want sandboxes, and what has happened so far."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from atoll.agent.config import Identity
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.control.bootstrap import register_templates
from atoll.drivers.port import Image
from atoll.store import moments, sending
from atoll.testing.sim.checks import Ledger, Violated
from atoll.testing.sim.clients import CANARY, Clients
from atoll.testing.sim.clock import MachineClock
from atoll.testing.sim.history import History
from atoll.testing.sim.loop import VirtualLoop
from atoll.testing.sim.moments import Shelf
from atoll.testing.sim.network import Replica
from atoll.testing.sim.places import Host, Seat
from atoll.testing.sim.scenario import Scenario
from atoll.testing.sim.store import Database
from atoll.wire import agent as wire

IMAGE: Final = "sha256:" + "0" * 64
INSTALL: Final = "ins_" + "s" * 20
CLASS: Final = "simulated"
ROOM: Final = Vector(4000, 2048, 20000, 8)
"""Of each host: four sandboxes."""


class World:
    """All of one: what is there, what has happened, and the one clock. Build it inside its own VirtualLoop; `story.py` sets it going."""

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
        self.history = History()
        self.database = Database(on_statement=self.overhear, shared=scenario.replicas > 1)
        self.hosts: list[Host] = []
        self.shelf = Shelf()
        skews = [*scenario.skews_s, *([0.0] * (scenario.replicas + scenario.hosts))]
        self.seats = [Seat(n, MachineClock(loop.time, skew_s=skews[n], up_since_s=5000.0 + 1000.0 * n)) for n in range(scenario.replicas)]
        self.host_skews = skews[scenario.replicas :]
        self.clients = Clients(self.dice("clients"), self.replicas, loop.time, self.note, CLASS, self._rebuild)
        self.failed: asyncio.Future[None] = loop.create_future()
        self._strays: dict[asyncio.Task[None], None] = {}

    def dice(self, part: str) -> random.Random:
        """Chance for one part of the world."""
        return random.Random(f"{self.scenario.seed}/{part}")

    @property
    def shared(self) -> bool:
        """Whether several control processes use the database."""
        return self.scenario.replicas > 1

    def replicas(self) -> list[Replica]:
        """Control processes that answer."""
        return [seat.replica for seat in self.seats if seat.replica is not None and seat.replica.process.alive]

    def note(self, what: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.loop.time():11.6f} {what}")

    # Control.

    def build(self, image: str) -> None:
        current = self.directory / "images" / "base" / "current"
        current.mkdir(parents=True, exist_ok=True)
        (current / "manifest.json").write_text(json.dumps({"name": "base", "digest": image}))

    async def _rebuild(self) -> None:
        """The template's next build; whichever replica begins next, or is there, takes it up."""
        self.builds += 1
        image = f"sha256:{self.builds:064x}"
        for host in self.hosts:
            host.things.images.append(Image(image, "base", labels={"arch": "x86_64"}))
        self.build(image)
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

    # Hosts.

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

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something of the world's own that runs beside everything, in no process."""
        task = asyncio.get_running_loop().create_task(work)
        self._strays[task] = None
        task.add_done_callback(lambda done: self._strays.pop(done, None))
        return task

    # Watching.

    @contextlib.contextmanager
    def watched(self) -> Any:
        """What is found broken inside ends the story; the product does not hear of it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the simulation's and must not end in the product's hands
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self.broken.append(error)
        self.note(f"BROKEN: {error}")
        if not self.failed.done():
            self.failed.set_result(None)

    def overhear(self, statement: str) -> None:
        lowered = CANARY.encode().hex()
        if CANARY in statement or lowered in statement.lower() or any(secret in statement for secret in self.history.secrets):
            with self.watched():
                raise Violated(f"a secret is at rest: {statement[:120]}...")

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
