"""Control is taken back to a backup while a real agent goes on: who was lost on record is on record again, and nobody is lost or begun anew.

The right result, for each sandbox: known to the backup and there: goes on, with the end that its agent enforces. Made since: on record
again, ready, without its metadata. Ended since: ended as PLACEMENT_LOST, not started again. Under way at the moment of the backup: as its
host says. What cannot be placed (its team was made since): kept, quarantined, reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import BaseModel

from atoll.agent.agent import Agent
from atoll.agent.alarm import LoopAlarm
from atoll.agent.config import AgentConfig, Identity
from atoll.agent.transport import HttpTransport, refusal
from atoll.base.errors import Code, OutcomeUnknown, Unavailable
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.control.compose import Control
from atoll.domain.spec import Isolation
from atoll.drivers.fake.driver import FakeDriver, FakeMachine
from atoll.drivers.port import Mark, Power
from atoll.store import backup, facts, hosts, warmth
from atoll.testing.sim.network import post
from atoll.wire import agent as wire
from tests.sim.world import World

CAPACITY = Vector(cpu_millis=16_000, memory_mib=8192, disk_mib=65_536, slots=8)


class Line(HttpTransport):
    """A host's way into whatever control serves now, over the agents' own routes. `cut`: nothing gets there."""

    def __init__(self, control: Callable[[], Control | None], credential: Secret) -> None:
        super().__init__("http://localhost", credential)
        self._control = control
        self._key = credential
        self.cut = False

    async def _send(self, name: str, message: BaseModel, *, within_s: float) -> bytes:
        control = self._control()
        if control is None or self.cut:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "no way to control")
        data, hung_up = message.model_dump_json(exclude_none=True).encode(), asyncio.Event()
        asking = asyncio.ensure_future(post(control, f"/agent/v1/{name}", self._key, data, hung_up))
        try:
            # The request dies with the control that serves it.
            while not asking.done():
                await asyncio.wait({asking}, timeout=0.2)
                if self._control() is not control or self.cut:
                    raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "control went away")
            status, headers, body = asking.result()
        finally:
            hung_up.set()
            asking.cancel()
        if status >= 300:
            raise refusal(status, body, headers.get("retry-after"))
        return body


@dataclass
class Host:
    """A host with a real agent over a line to whatever control runs, and a machine that outlives both."""

    world: World
    name: str
    directory: Path
    things: FakeMachine = field(default_factory=FakeMachine)
    identity: Identity | None = None
    line: Line | None = None
    agent: Agent | None = None
    task: asyncio.Task[object] | None = None

    async def join(self) -> None:
        token = await self.world.token(self.name)
        facts_of = wire.HostFacts(arch="x86_64", cpu_count=2, memory_mib=8192, disk_mib=65_536, boot_id="boot-1", claims=True)
        enrolled = await self.world.running.enrollment.enroll(wire.Enroll(token=token, name=self.name, capacity=CAPACITY, facts=facts_of))
        self.identity = Identity(enrolled.host_id, enrolled.install_id, Secret(enrolled.credential), 1)
        self.line = Line(self.control, Secret(enrolled.credential))

    def control(self) -> Control | None:
        """Whatever control serves now."""
        found = self.world.control
        return found if found is not None and found._started else None

    @property
    def id(self) -> str:
        assert self.identity is not None
        return self.identity.host_id

    def begin(self) -> None:
        assert self.identity is not None
        assert self.line is not None
        config = AgentConfig(
            state_directory=self.directory,
            control_url="http://localhost",
            facts=wire.HostFacts(arch="x86_64", cpu_count=2, memory_mib=8192, disk_mib=65_536, boot_id="boot-1", claims=True),
            agent_version="0.1.0",
            disk_reserve_mib=0,
        )
        driver = FakeDriver(Mark(self.world.install_id, self.id), machine=self.things)
        self.agent = Agent(
            config,
            self.identity,
            drivers={Isolation.GVISOR: driver},
            clock=self.world.clock,
            dice=os.urandom,
            transport=self.line,
            alarm=lambda: LoopAlarm(self.world.clock),
        )
        self.task = asyncio.create_task(self.agent.run())

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    def running(self) -> set[str]:
        return {placement.order.sandbox_id for placement in self.things.placements.values() if placement.power is Power.RUNNING}


@contextlib.asynccontextmanager
async def deployment(path: Path, *names: str) -> AsyncIterator[tuple[World, list[Host]]]:
    world = World(path)
    await world.start()
    machines = [Host(world, name, path / name) for name in names]
    try:
        for machine in machines:
            machine.directory.mkdir(mode=0o700)
            await machine.join()
            machine.begin()
        await settled(world, *machines)
        yield world, machines
    finally:
        for machine in machines:
            await machine.kill()
        await world.stop()


async def settled(world: World, *machines: Host) -> None:
    """Each host is heard and takes sandboxes."""
    async with asyncio.timeout(20):
        for machine in machines:
            while True:
                known = await world.store.read(lambda conn, machine=machine: hosts.by_id(conn, machine.id))
                if known is not None and known.seen_at is not None and not known.problems and known.isolations:
                    break
                await asyncio.sleep(0.02)


def back_up(world: World) -> Path:
    file = world.path / "backup"
    backup.create(world.database, file, version="0.1.0", now=world.clock.now(), keys={})
    return file


async def take_back(world: World, file: Path) -> None:
    await world.stop()
    backup.prepare(file, world.database, install_id=world.install_id, keys={}, now=world.clock.now(), chance=os.urandom)
    await world.start()


async def ready(world: World, **body: object) -> str:
    made = await world.create(template="base", timeoutSeconds=600, **body)
    assert made["state"] == "ready"
    return str(made["id"])


async def ended(world: World, sandbox_id: str) -> None:
    await world.release(sandbox_id)
    await world.until(sandbox_id, "released")


async def until_known(world: World, sandbox_id: str, state: str) -> None:
    async with asyncio.timeout(20):
        while True:
            known = await world.store.read(lambda conn: facts.load(conn, sandbox_id))
            if known is not None and known.sandbox.state == state:
                return
            await asyncio.sleep(0.02)


async def test_five_are_backed_up_three_are_made_and_one_is_killed(tmp_path: Path) -> None:
    async with deployment(tmp_path, "one") as (world, (machine,)):
        five = [await ready(world, metadata={"n": str(n)}) for n in range(5)]
        file = back_up(world)
        three = [await ready(world, metadata={"n": "late"}) for _ in range(3)]
        await ended(world, five[0])
        guests = machine.running()
        assert guests == {*five[1:], *three}
        before = world.running._routes.get(three[0])
        await take_back(world, file)
        await settled(world, machine)
        await until_known(world, five[0], "released")
        # Known and there: as they were.
        for sandbox_id in five[1:]:
            shown = await world.show(sandbox_id)
            assert (shown["state"], list(shown["metadata"])) == ("ready", ["n"])
        # Made since: on record again, reachable under the same placement, and said so.
        for sandbox_id in three:
            await until_known(world, sandbox_id, "ready")
            assert (await world.show(sandbox_id))["metadata"] == {}
            assert await world.history(sandbox_id) == ["sandbox.restored"]
        after = world.running._routes.get(three[0])
        assert before is not None
        assert after is not None
        assert (after.placement_id, after.connect_token) == (before.placement_id, before.connect_token)
        # Killed since: lost, and not begun anew.
        assert (await world.show(five[0]))["reason"] == "PLACEMENT_LOST"
        assert machine.running() == guests
        assert (await world.used(machine.id)).slots == 7
        # And every one of them can be ended.
        for sandbox_id in guests:
            await ended(world, sandbox_id)
        assert machine.things.placements == {}
        assert await world.held(machine.id) == 0


async def test_nothing_is_placed_before_its_host_has_said_what_it_has(tmp_path: Path) -> None:
    """Full on the host, and on record only half so: the record is not believed."""
    async with deployment(tmp_path, "one") as (world, (machine,)):
        for _ in range(4):
            await ready(world)
        file = back_up(world)
        for _ in range(4):
            await ready(world)
        assert machine.line is not None
        machine.line.cut = True
        await take_back(world, file)
        assert (await world.used(machine.id)).slots == 4
        waiting = asyncio.create_task(world.create(template="base", **{"class": "brisk"}))
        await asyncio.sleep(0.3)
        machine.line.cut = False
        answers = await asyncio.gather(waiting, return_exceptions=True)
        assert getattr(answers[0], "code", None) == "NO_CAPACITY"
        await settled(world, machine)
        assert (await world.used(machine.id)).slots == 8
        assert len(machine.running()) == 8


async def test_a_create_that_was_under_way_is_what_its_host_says(tmp_path: Path) -> None:
    """Without a host in the backup, and ready since; without a host, and nowhere since; placed in the backup, and ready since."""
    async with deployment(tmp_path, "one") as (world, (machine,)):
        await world.call("POST", f"/v1/hosts/{machine.id}/drain")
        found, nowhere = await world.accept(template="base"), await world.accept(template="base")
        file = back_up(world)
        await world.call("POST", f"/v1/hosts/{machine.id}/activate")
        await world.until(found, "ready")
        await world.until(nowhere, "ready")
        await ended(world, nowhere)
        await take_back(world, file)
        await settled(world, machine)
        await until_known(world, found, "ready")
        assert machine.running() == {found}
        lost = await world.show(nowhere)
        assert (lost["state"], lost["reason"]) == ("failed", "STORE_RESTORED")
        assert (await world.history(found))[-2:] == ["sandbox.failed", "sandbox.restored"]
        await ended(world, found)


async def test_a_start_that_failed_since_is_not_tried_again(tmp_path: Path) -> None:
    async with deployment(tmp_path, "one") as (world, (machine,)):
        assert machine.line is not None
        machine.line.cut = True
        await asyncio.sleep(0.6)
        begun = await world.accept(template="base")
        assert (await world.facts(begun)).sandbox.state == "provisioning"
        file = back_up(world)
        machine.line.cut = False
        await world.until(begun, "ready")
        await ended(world, begun)
        await take_back(world, file)
        await until_known(world, begun, "failed")
        assert (await world.show(begun))["reason"] == "PLACEMENT_LOST"
        assert machine.things.placements == {}
        assert await world.held(machine.id) == 0


async def test_the_end_that_its_agent_enforces_is_the_end_on_record(tmp_path: Path) -> None:
    async with deployment(tmp_path, "one") as (world, (machine,)):
        longer, shorter, same = [await ready(world) for _ in range(3)]
        file = back_up(world)
        for sandbox_id, seconds in ((longer, 5000), (shorter, 120)):
            answer = await world.call("POST", f"/v1/sandboxes/{sandbox_id}/end", json={"timeoutSeconds": seconds})
            assert answer.status_code == 200
        await asyncio.sleep(0.5)
        now = world.clock.now()
        await take_back(world, file)
        await settled(world, machine)
        for sandbox_id, seconds in ((longer, 5000), (shorter, 120), (same, 600)):
            end_at = (await world.facts(sandbox_id)).sandbox.end_at
            assert end_at is not None
            assert abs(end_at - now - seconds) < 15
        # And control's next word about it is the newest again.
        answer = await world.call("POST", f"/v1/sandboxes/{longer}/end", json={"timeoutSeconds": 1})
        assert answer.status_code == 200
        await world.until(longer, "released", timeout_s=10)


async def test_what_ended_on_record_long_ago_does_not_end_because_of_a_restore(tmp_path: Path) -> None:
    """On record its end is half an hour ago: it has been kept alive since."""
    async with deployment(tmp_path, "one") as (world, (machine,)):
        kept = await ready(world)
        file = back_up(world)
        for _ in range(10):
            world.clock.pass_s(240)
            answer = await world.call("POST", f"/v1/sandboxes/{kept}/end", json={"timeoutSeconds": 1000})
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.2)
        await take_back(world, file)
        await settled(world, machine)
        await asyncio.sleep(1.0)
        assert (await world.show(kept))["state"] == "ready"
        assert machine.running() == {kept}


async def test_a_team_that_was_made_since_is_not_guessed(tmp_path: Path) -> None:
    """Its sandbox is kept where it is, reported, and the host takes nothing new until somebody has looked."""
    async with deployment(tmp_path, "one") as (world, (machine,)):
        file = back_up(world)
        key = await world.team("since")
        theirs = (await world.create(key=key, template="base"))["id"]
        await take_back(world, file)
        async with asyncio.timeout(20):
            while True:
                known = await world.store.read(lambda conn: hosts.by_id(conn, machine.id))
                assert known is not None
                if "inventory.quarantine" in known.problems and "store.restored" not in known.problems:
                    break
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        assert machine.running() == {theirs}


async def test_what_was_made_ahead_since_a_backup_of_before_is_given_up(tmp_path: Path) -> None:
    """Nothing had ever been kept warm when the backup was made: its host has something of a team that no record knows, and that there always is."""
    async with deployment(tmp_path, "one") as (world, (machine,)):
        file = back_up(world)
        answer = await world.call("PUT", "/v1/templates/base/warm", json={"count": 2})
        assert answer.status_code == 200, answer.text
        async with asyncio.timeout(20):
            while len(await world.store.read(warmth.guests)) < 2 or len(machine.running()) < 2:
                await asyncio.sleep(0.02)
        await take_back(world, file)
        await settled(world, machine)
        async with asyncio.timeout(20):
            while machine.things.placements or await world.store.read(warmth.guests):
                await asyncio.sleep(0.02)
        assert (await world.used(machine.id)).slots == 0
        await ready(world)


@pytest.mark.parametrize("parts", [1, 2])
async def test_an_agent_that_dies_while_it_accounts_begins_again(tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.agent.settling.ACCOUNTS_PER_MESSAGE_MAX", 2)
    async with deployment(tmp_path, "one") as (world, (machine,)):
        known = await ready(world)
        file = back_up(world)
        since = [await ready(world) for _ in range(4)]
        assert machine.line is not None
        given = 0
        accounts = machine.line.accounts

        async def dying(message: wire.Accounts) -> wire.AccountsAnswer:
            nonlocal given
            given += 1
            answer = await accounts(message)
            if given == parts:
                assert machine.task is not None
                machine.task.cancel()
                await asyncio.sleep(0)
            return answer

        monkeypatch.setattr(machine.line, "accounts", dying)
        await take_back(world, file)
        async with asyncio.timeout(20):
            assert machine.task is not None
            await asyncio.gather(machine.task, return_exceptions=True)
        machine.begin()
        await settled(world, machine)
        assert given > parts
        for sandbox_id in (known, *since):
            await until_known(world, sandbox_id, "ready")
            assert (await world.history(sandbox_id)).count("sandbox.restored") == (sandbox_id != known)
        assert machine.running() == {known, *since}
        for sandbox_id in (known, *since):
            await ended(world, sandbox_id)


async def test_a_host_that_was_enrolled_since_ends_nothing_because_of_it(tmp_path: Path) -> None:
    """Its credential is unknown now, which is no fence: it asks on, and keeps what it has as long as its lease allows."""
    async with deployment(tmp_path, "one") as (world, (first,)):
        file = back_up(world)
        late = Host(world, "late", tmp_path / "late")
        late.directory.mkdir(mode=0o700)
        await late.join()
        late.begin()
        await settled(world, late)
        await world.call("POST", f"/v1/hosts/{first.id}/drain")
        theirs = await ready(world)
        assert late.running() == {theirs}
        try:
            await take_back(world, file)
            await settled(world, first)
            await asyncio.sleep(1.0)
            assert late.running() == {theirs}
            assert late.task is not None
            assert not late.task.done()
        finally:
            await late.kill()


async def test_a_revoked_credential_is_still_a_fence_after_a_restore(tmp_path: Path) -> None:
    async with deployment(tmp_path, "one", "two") as (world, (one, two)):
        assert two.line is not None
        two.line.cut = True
        answer = await world.call("POST", f"/v1/hosts/{two.id}/disable", json={})
        assert answer.status_code == 200
        file = back_up(world)
        await take_back(world, file)
        await settled(world, one)
        assert two.identity is not None
        with pytest.raises(Exception, match=Code.CREDENTIAL_REVOKED):
            await world.running.sessions.host_of(two.identity.credential.reveal())
        with pytest.raises(Exception, match=Code.HOST_UNKNOWN):
            await world.running.sessions.host_of("hk_" + hashlib.sha256(b"never").hexdigest())


async def test_two_restores_in_a_row(tmp_path: Path) -> None:
    async with deployment(tmp_path, "one") as (world, (machine,)):
        first = await ready(world)
        file = back_up(world)
        second = await ready(world)
        for _ in range(2):
            await take_back(world, file)
            await settled(world, machine)
            await until_known(world, second, "ready")
        third = await ready(world)
        assert machine.running() == {first, second, third}
        for sandbox_id in (first, second, third):
            await ended(world, sandbox_id)
