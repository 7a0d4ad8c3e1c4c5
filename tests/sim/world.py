"""A whole control in this process, driven through its sockets' side, and agents that speak the protocol by a script.

Nothing of control is replaced but its clock: `Clock` is the real one with an offset that tests move. Agents keep what a real one keeps
in its database (what it holds, sequence numbers, what was acknowledged), so that a test can lose, repeat and reorder messages.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from atoll.base.ids import Prefix, new_id
from atoll.base.units import Vector
from atoll.control.compose import Control
from atoll.control.settings import ControlSettings
from atoll.domain.command import Kind
from atoll.domain.deployment import DEFAULT_CLASSES, Deployment, WorkloadClass
from atoll.domain.placement import Observed
from atoll.domain.tenancy import key_digest
from atoll.images import signing
from atoll.store import facts, hosts
from atoll.wire import agent as wire
from tests.builders import IMAGE
from tests.store import whole

OPERATOR_KEY = "e2b_" + "0" * 40
EDGE_TOKEN = "edge-token"
TOKEN = "enroll-me"
DOMAIN = "localhost:3000"
ROOM = Vector(cpu_millis=16_000, memory_mib=8192, disk_mib=65_536, slots=8)
"""Of a scripted host: eight sandboxes of the base template."""

IMPATIENT = WorkloadClass(name="impatient", create_patience_s=0.3)
"""For creates that find no room; one that should succeed on a busy machine needs BRISK."""
BRISK = WorkloadClass(name="brisk", create_patience_s=4.0)
HOPELESS = WorkloadClass(name="hopeless", no_capacity_s=0.2, create_patience_s=20.0)
SLOW_GUEST = WorkloadClass(name="slow-guest", guest_ready_s=1.0, attempts_max=1)


class Clock:
    """The machine's clocks with an offset each: `pass_s` is time going by, `step_s` a wrong hand at the wall clock."""

    def __init__(self) -> None:
        self._passed = self._stepped = 0.0

    def pass_s(self, seconds: float) -> None:
        self._passed += seconds

    def step_s(self, seconds: float) -> None:
        self._stepped += seconds

    def now(self) -> float:
        return time.time() + self._passed + self._stepped

    def boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) + self._passed


class Refusal(AssertionError):
    """A call was refused; `code` is the stable one."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.code = body.get("code")
        self.body = body


@dataclass
class World:
    """One instance: its files, its clock, and the control that runs on them."""

    path: Path
    clock: Clock = field(default_factory=Clock)
    changes: dict[str, Any] = field(default_factory=dict)
    deployment: Deployment = field(default_factory=Deployment)
    """Limits; its classes are those of the tests."""
    install_id: str = field(default_factory=lambda: new_id(Prefix.INSTALL, os.urandom))
    control: Control | None = None
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def write_files(self) -> None:
        secrets = self.path / "secrets"
        secrets.mkdir(parents=True)
        for name in ("sealing.key", "token.key"):
            (secrets / name).write_text(base64.b64encode(os.urandom(32)).decode())
        pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (secrets / "guest-ed25519").write_bytes(pem)
        (secrets / "edge.token").write_text(EDGE_TOKEN)
        key = signing.new_key()
        (secrets / signing.KEY_FILE).write_bytes(key)
        (secrets / signing.CHAIN_FILE).write_bytes(signing.first_chain(key))
        manifest = self.path / "artifacts" / "base" / "current"
        manifest.mkdir(parents=True)
        (manifest / "manifest.json").write_text(json.dumps({"name": "base", "digest": IMAGE}))
        brought = {
            "operator_key_digest": key_digest(OPERATOR_KEY),
            "operator_key_hint": OPERATOR_KEY[-4:],
            "enrollment_token_digest": hashlib.sha256(TOKEN.encode()).hexdigest(),
            "host_name": "local",
        }
        (self.path / "bootstrap.json").write_text(json.dumps(brought))

    @property
    def database(self) -> Path:
        return self.path / "atoll.db"

    def settings(self) -> ControlSettings:
        classes = {**DEFAULT_CLASSES, **{policy.name: policy for policy in (IMPATIENT, BRISK, HOPELESS, SLOW_GUEST)}}
        settings = ControlSettings(
            database=self.database,
            secrets=self.path / "secrets",
            artifacts=self.path / "artifacts",
            install_id=self.install_id,
            domain=DOMAIN,
            version="0.1.0",
            bootstrap=self.path / "bootstrap.json",
            deployment=replace(self.deployment, classes=classes),
        )
        return replace(settings, **self.changes)

    async def start(self) -> None:
        if not (self.path / "secrets").exists():
            self.write_files()
            await whole.sqlite(self.database)
        self.control = Control(self.settings(), clock=self.clock, dice=os.urandom)
        await self.control.start()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        if self.control is not None:
            await self.control.stop()
            self.control = None

    async def restart(self) -> None:
        """Every request that was under way is cut off, and a new control starts on the same database."""
        await self.stop()
        await self.start()

    @property
    def running(self) -> Control:
        assert self.control is not None, "control is away"
        return self.control

    @property
    def store(self) -> Any:
        return self.running._store

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self.tasks.append(task)
        return task

    # What clients say.

    async def call(
        self, method: str, path: str, *, key: str = OPERATOR_KEY, headers: Mapping[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        async with self._client() as client:
            return await client.request(method, path, headers={"X-API-KEY": key, **(headers or {})}, **body)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.running.app), base_url="http://control.test", timeout=60)

    async def create(self, *, key: str = OPERATOR_KEY, **body: Any) -> dict[str, Any]:
        """`POST /v1/sandboxes`; 201 or 202, else Refusal."""
        answer = await self.call("POST", "/v1/sandboxes", key=key, json=body)
        if answer.status_code not in (201, 202):
            raise Refusal(answer.status_code, answer.json()["error"])
        return answer.json()

    async def accept(self, **body: Any) -> str:
        """A sandbox that nobody waits for; its id."""
        return str((await self.create(wait=False, **body))["id"])

    async def show(self, sandbox_id: str, *, key: str = OPERATOR_KEY) -> dict[str, Any]:
        """`GET /v1/sandboxes/{id}`: living and ended ones."""
        answer = await self.call("GET", f"/v1/sandboxes/{sandbox_id}", key=key)
        if answer.status_code != 200:
            raise Refusal(answer.status_code, answer.json()["error"])
        return answer.json()

    async def release(self, sandbox_id: str, *, key: str = OPERATOR_KEY) -> dict[str, Any]:
        answer = await self.call("DELETE", f"/v1/sandboxes/{sandbox_id}", key=key)
        if answer.status_code not in (200, 202):
            raise Refusal(answer.status_code, answer.json()["error"])
        return answer.json()

    async def until(self, sandbox_id: str, *states: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """The sandbox once it is in one of these states."""
        async with asyncio.timeout(timeout_s):
            while (await self.facts(sandbox_id)).sandbox.state not in states:
                await asyncio.sleep(0.01)
        return await self.show(sandbox_id)

    async def history(self, sandbox_id: str) -> list[str]:
        answer = await self.call("GET", f"/v1/sandboxes/{sandbox_id}/events")
        assert answer.status_code == 200, answer.text
        return [event["type"] for event in answer.json()["items"]]

    async def team(self, name: str) -> str:
        """A key of a team of that name, made when it is new."""
        answer = await self.call("POST", "/v1/keys", json={"name": "a key", "team": name})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["secret"])

    # What is on record.

    async def used(self, host_id: str) -> Vector:
        return await self.store.read(lambda conn: facts.used(conn, host_id))

    async def facts(self, sandbox_id: str) -> facts.Facts:
        loaded = await self.store.read(lambda conn: facts.load(conn, sandbox_id))
        assert loaded is not None
        return loaded

    async def held(self, host_id: str) -> int:
        return await self.store.read(lambda conn: hosts.placements_held(conn, host_id))

    def look_at_deadlines(self) -> None:
        """Time was moved: the loop looks now instead of at the end of its sleep."""
        self.running.reconciler.deadlines.set()

    async def agent(self, name: str = "local", *, token: str = TOKEN, **changes: Any) -> Agent:
        """An enrolled agent that has polled once."""
        made = Agent(self, name=name, **changes)
        await made.enroll(token)
        await made.poll()
        return made

    async def token(self, name: str, *, life_s: float = 3600.0) -> str:
        """A one-use token for a host of this name, as an operator's program would put it on record."""
        token = f"token-of-{name}-{os.urandom(4).hex()}"
        digest = hashlib.sha256(token.encode()).hexdigest()
        now = self.clock.now()
        record = hosts.Enrollment(new_id(Prefix.ENROLLMENT, os.urandom), digest, name, now, now + life_s)
        await self.store.write(lambda conn: hosts.add_enrollment(conn, record))
        return token


Script = Callable[[wire.Command], Mapping[str, Any] | None]
"""What an agent sees after it has obeyed: fields of an Observation; None: it says nothing."""


def obedient(command: wire.Command) -> Mapping[str, Any] | None:
    """Everything works: running and ready, or absent."""
    if command.kind is Kind.ENSURE_ABSENT:
        return {"observed": Observed.ABSENT, "ended_by": "command"}
    return {"observed": Observed.RUNNING, "ready": True, "address": "10.64.0.2"}


def failing(code: str, detail: str = "no") -> Script:
    """Starts fail; removals work."""

    def script(command: wire.Command) -> Mapping[str, Any] | None:
        if command.kind is Kind.ENSURE_ABSENT:
            return obedient(command)
        return {"observed": Observed.ERROR, "reason": code, "detail": detail}

    return script


def waiting(command: wire.Command) -> Mapping[str, Any] | None:
    """Guests answer, and their start commands are never ready; removals work."""
    if command.kind is Kind.ENSURE_ABSENT:
        return obedient(command)
    return {"observed": Observed.RUNNING, "reason": "START_COMMAND_FAILED", "detail": "no port yet"}


def silent(command: wire.Command) -> None:
    """Takes every command and says nothing."""


Keeps = Callable[[wire.SnapshotOrder], wire.SnapshotSeen | None]
"""What becomes of a snapshot's order; None: nothing is said."""


def keeper(order: wire.SnapshotOrder) -> wire.SnapshotSeen:
    """Everything works."""
    if order.wish is wire.SnapshotWish.DROP:
        return wire.SnapshotSeen(id=order.id, state=wire.SnapshotState.ABSENT)
    return wire.SnapshotSeen(id=order.id, state=wire.SnapshotState.KEPT, save_mode=order.save_mode, size_bytes=3 << 20)


@dataclass
class Agent:
    """One agent run for one host, by a script."""

    world: World
    name: str = "local"
    capacity: Vector = ROOM
    isolations: tuple[str, ...] = ("gvisor", "shared-kernel")
    drivers: tuple[wire.DriverState, ...] = ()
    moments: tuple[str, ...] = ()
    """Kinds that it can go on from; none, as older agents."""
    script: Script = obedient
    host_id: str = ""
    credential: str = ""
    epoch: str = field(default_factory=lambda: new_id(Prefix.EPOCH, os.urandom))
    previous_epoch: str | None = None
    poll_seq: int = 0
    holds: dict[str, int] = field(default_factory=dict)
    generations: dict[str, tuple[str, int]] = field(default_factory=dict)
    """placement id → (sandbox id, generation)."""
    seqs: dict[str, itertools.count[int]] = field(default_factory=dict)
    ends: dict[str, wire.End] = field(default_factory=dict)
    tombstones: list[str] = field(default_factory=list)
    unheard: dict[str, wire.Observation] = field(default_factory=dict)
    """placement id → observation that control has not acknowledged."""
    commands: list[wire.Command] = field(default_factory=list)
    payloads: dict[str, wire.InitPayload] = field(default_factory=dict)
    checks: list[wire.Check] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    snapshots: dict[str, wire.SnapshotOrder] = field(default_factory=dict)
    """Orders that it is at."""
    kept: dict[str, wire.SnapshotSeen] = field(default_factory=dict)
    """What its host keeps."""
    keeping: Keeps = keeper
    claims: bool = True
    """It knows how to hand a guest over."""

    def facts(self) -> wire.HostFacts:
        return wire.HostFacts(
            arch="x86_64", kernel="6.1", cpu_count=2, memory_mib=8192, disk_mib=65_536, boot_id="boot-1", claims=self.claims
        )

    async def enroll(self, token: str = TOKEN, **changes: Any) -> wire.Enrolled:
        body = wire.Enroll(token=token, name=self.name, capacity=self.capacity, facts=self.facts(), agent_version="0.1.0")
        answer = await self._post("enroll", body.model_copy(update=changes), credential=None)
        enrolled = wire.Enrolled.model_validate(answer)
        self.host_id, self.credential = enrolled.host_id, enrolled.credential or self.credential
        return enrolled

    async def identify(self) -> wire.Known:
        """Who this credential is."""
        return wire.Known.model_validate(await self._post("identity", wire.Message()))

    def message(self, *, park_s: float = 0.0, **changes: Any) -> wire.Poll:
        """The next poll as this agent would send it now."""
        self.poll_seq += 1
        health = wire.HostHealth(
            checks=self.checks,
            isolations=list(self.isolations),
            drivers=list(self.drivers),
            images=[IMAGE],
            quarantined=self.quarantined,
            moments=list(self.moments),
        )
        values: dict[str, Any] = {
            "host_id": self.host_id,
            "epoch": self.epoch,
            "previous_epoch": self.previous_epoch,
            "poll_seq": self.poll_seq,
            "agent_version": "0.1.0",
            "facts": self.facts(),
            "health": health,
            "observations": list(self.unheard.values()),
            "holds": dict(self.holds),
            "end_revisions": {placement: end.revision for placement, end in self.ends.items()},
            "tombstones": list(self.tombstones),
            "snapshots": {one.id: one.wish for one in self.snapshots.values()},
            "park_s": park_s,
        }
        return wire.Poll(**{**values, **changes})

    async def poll(self, *, park_s: float = 0.0, **changes: Any) -> wire.PollAnswer:
        """One poll, its answer taken in: acknowledgements, ends, tombstones; commands are recorded, not obeyed."""
        answer = wire.PollAnswer.model_validate(await self._post("poll", self.message(park_s=park_s, **changes)))
        self._heard(answer.acknowledged, answer.forget, answer.ends)
        for command in answer.commands:
            self.commands.append(command)
            self.holds[command.placement_id] = command.desired_revision
            self.generations[command.placement_id] = (command.sandbox_id, command.generation)
        self.payloads.update(answer.payloads)
        self.snapshots.update((order.id, order) for order in answer.snapshots)
        return answer

    async def keep(self) -> None:
        """Carry out the orders for snapshots that it has, and tell control."""
        for order in list(self.snapshots.values()):
            seen = self.keeping(order)
            if seen is None:
                continue
            if seen.state is wire.SnapshotState.KEPT:
                self.kept[order.id] = seen
            elif seen.state is wire.SnapshotState.ABSENT:
                self.kept.pop(order.id, None)
            await self.tell(seen)
            self.snapshots.pop(order.id, None)

    async def tell(self, seen: wire.SnapshotSeen) -> None:
        """What became of a snapshot."""
        await self._post("observe", wire.Observe(host_id=self.host_id, epoch=self.epoch, observations=[], snapshots=[seen]))

    def _heard(self, acknowledged: Mapping[str, int], forget: list[str], ends: list[wire.End]) -> None:
        for placement, seq in acknowledged.items():
            waiting = self.unheard.get(placement)
            if waiting is not None and waiting.seq <= seq:
                del self.unheard[placement]
        for end in ends:
            self.ends[end.placement_id] = end
        for placement in forget:
            if placement in self.tombstones:
                self.tombstones.remove(placement)

    def see(self, placement_id: str, **fields: Any) -> wire.Observation:
        """Note what is seen of a placement, as the next observation of it."""
        sandbox_id, generation = self.generations[placement_id]
        seq = next(self.seqs.setdefault(placement_id, itertools.count(1)))
        values = {"applied_revision": self.holds.get(placement_id, 0), **fields}
        seen = wire.Observation(placement_id=placement_id, sandbox_id=sandbox_id, generation=generation, seq=seq, **values)
        self.unheard[placement_id] = seen
        if seen.observed is Observed.ABSENT:
            self.holds.pop(placement_id, None)
            self.ends.pop(placement_id, None)
            self.tombstones.append(placement_id)
        return seen

    async def observe(self, *seen: wire.Observation) -> wire.ObserveAnswer:
        """Say at once what was seen: these, or all that control has not acknowledged."""
        observations = list(seen) or list(self.unheard.values())
        body = wire.Observe(host_id=self.host_id, epoch=self.epoch, observations=observations)
        answer = wire.ObserveAnswer.model_validate(await self._post("observe", body))
        self._heard(answer.acknowledged, answer.forget, answer.ends)
        return answer

    async def wanted(self, **options: Any) -> wire.Command:
        """The one command of the next poll."""
        answer = await self.poll(park_s=5.0, **options)
        assert len(answer.commands) == 1, f"{len(answer.commands)} commands"
        return answer.commands[0]

    async def obey(self, command: wire.Command) -> None:
        """Do as the script says and tell control."""
        seen = self.script(command)
        if seen is not None:
            self.see(command.placement_id, **seen)
            await self.observe()

    async def catch_up(self) -> None:
        """Finish what was taken and not reported, as a real agent does from its own database."""
        for placement_id, revision in list(self.holds.items()):
            command = next(c for c in reversed(self.commands) if c.placement_id == placement_id and c.desired_revision == revision)
            seen = self.script(command)
            if seen is not None:
                self.see(placement_id, **seen)
        for command in (await self.poll()).commands:
            await self.obey(command)
        await self.keep()

    async def run(self) -> None:
        """Poll and obey until cancelled."""
        await self.catch_up()
        while True:
            for command in (await self.poll(park_s=5.0)).commands:
                await self.obey(command)
            await self.keep()

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """`run` beside the test."""
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def next_run(self, *, proves: bool = True) -> Agent:
        """The same host's next agent run, with what the database of the last one kept."""
        return replace(
            self,
            epoch=new_id(Prefix.EPOCH, os.urandom),
            previous_epoch=self.epoch if proves else None,
            poll_seq=0,
            commands=[],
            payloads={},
            snapshots={},
        )

    async def fetch(self, command: wire.Command, *, missing: bool = False) -> wire.Payloads:
        """What this command refers to, asked for as by a guest that is there to take it. `missing`: which has said that it lacks it."""
        wanted = wire.PayloadsWanted(
            host_id=self.host_id,
            epoch=self.epoch,
            refs=[command.payload_ref or ""],
            placements=[command.placement_id],
            missing=[command.placement_id] if missing else [],
        )
        answer = wire.Payloads.model_validate(await self._post("payloads", wanted))
        self.payloads.update(answer.payloads)
        return answer

    async def _post(self, call: str, body: wire.Message, *, credential: str | None = "") -> dict[str, Any]:
        headers = {} if credential is None else {"Authorization": f"Bearer {credential or self.credential}"}
        async with self.world._client() as client:
            answer = await client.post(f"/agent/v1/{call}", headers=headers, content=body.model_dump_json())
        if answer.status_code not in (200, 201, 204):
            raise Refusal(answer.status_code, answer.json())
        return answer.json() if answer.content else {}
