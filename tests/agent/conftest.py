"""A small world for one agent: a machine that outlives its runs, guests on it, and a control that remembers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.agent.agent import Agent
from atoll.agent.alarm import LoopAlarm
from atoll.agent.config import AgentConfig, Identity
from atoll.agent.journal import Journal
from atoll.agent.moments import MomentStore
from atoll.agent.session import Exit
from atoll.base.errors import Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.secret import Secret
from atoll.domain.command import Kind, command_id, digest
from atoll.domain.moment import HEAD_START_WAIT_S
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation, OnLeaseExpiry, Spec
from atoll.wire.agent import (
    Collected,
    Command,
    End,
    HostFacts,
    InitPayload,
    Observation,
    Observe,
    ObserveAnswer,
    Payloads,
    PayloadsWanted,
    Poll,
    PollAnswer,
    SnapshotOrder,
    SnapshotSeen,
    SnapshotWish,
)
from tests.agent.machine import FakeClock, Fuse, Machine, MachineDriver, MachineGuests

SPEC = Spec(
    class_name="default",
    template_id="tpl_x",
    image="sha256:aa",
    image_name="base",
    isolation=Isolation.GVISOR,
    cpu_millis=1000,
    memory_mib=128,
    disk_mib=256,
    pids_max=64,
    timeout_s=300,
)
FACTS = HostFacts(arch="x86_64", cpu_count=2, memory_mib=1024, disk_mib=10240, boot_id="boot-1")


@dataclass
class Desired:
    """A placement as control has it."""

    kind: Kind
    revision: int
    payload: InitPayload
    sandbox_id: str
    content: str = ""
    on_lease_expiry: OnLeaseExpiry = OnLeaseExpiry.END
    observed: Observation | None = None
    moment: str | None = None
    """What it begins from."""
    gone: bool = False
    claimed: bool = False


class FakeControl:
    """Transport and control in one: remembers what it wants and what it heard, and is as strict as the real one."""

    def __init__(self) -> None:
        self.wants: dict[str, Desired] = {}
        self.ends: dict[str, End] = {}
        self.heard: list[Observation] = []
        self.polls: list[Poll] = []
        self.current_epoch: str | None = None
        self.news = asyncio.Event()
        self.lease_s = 300.0
        self.down = False
        self.lose_answers = 0
        self.refuse: list[Exception] = []
        self.unknown: list[str] = []
        self.collect: list = []
        self.collected_messages: list[Collected] = []
        self.snapshot_orders: list[SnapshotOrder] = []
        self.snapshots_seen: list[SnapshotSeen] = []
        self.observe_calls = 0
        self.deliver_payloads = True
        self.once: dict[str, str] | None = None
        """Payloads are given to one run each, if this is a dictionary: to which."""
        self.forget_at_once = False
        self.parked = False
        self.incarnation = "1"
        self.spec = SPEC
        self.timeout_s: float | None = None
        self.moments = False
        self.moment_bytes_max = 0
        """Whether it takes what is saved into a store."""

    # what tests say
    def want(self, placement_id: str, kind: Kind = Kind.ENSURE_RUNNING, *, env: dict[str, str] | None = None, content: str = "") -> None:
        known = self.wants.get(placement_id)
        if known is None:
            self.wants[placement_id] = Desired(kind, 1, InitPayload(env=env or {}), f"i{placement_id[4:]}", content)
        else:
            known.kind, known.revision, known.content = kind, known.revision + 1, content
        self.news.set()

    def claim(self, placement_id: str, *, env: dict[str, str]) -> None:
        self.want(placement_id, content="claimed")
        self.wants[placement_id].payload, self.wants[placement_id].claimed = InitPayload(env=env), True

    def end(self, placement_id: str, remaining_s: float, revision: int, **more) -> None:
        self.ends[placement_id] = End(placement_id=placement_id, revision=revision, remaining_s=remaining_s, **more)
        self.news.set()

    def seen(self, placement_id: str) -> Observation | None:
        return self.wants[placement_id].observed if placement_id in self.wants else None

    async def next_poll(self) -> Poll:
        """Answer the parked poll and give the one after it."""
        count = len(self.polls)
        self.news.set()
        await self.until(lambda: len(self.polls) > count)
        return self.polls[-1]

    async def until(self, condition: Callable[[], bool], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.002)

    async def until_ready(self, *placement_ids: str) -> None:
        await self.until(lambda: all((o := self.seen(i)) is not None and o.ready for i in placement_ids))

    async def until_absent(self, *placement_ids: str) -> None:
        await self.until(lambda: all((o := self.seen(i)) is not None and o.observed is Observed.ABSENT for i in placement_ids))

    def end_revision(self, placement_id: str) -> int | None:
        """Of the end that the agent said last that it enforces."""
        return self.polls[-1].end_revisions.get(placement_id) if self.polls else None

    # what control does
    def command(self, placement_id: str, epoch: str) -> Command:
        want = self.wants[placement_id]
        return Command(
            id=command_id(placement_id, 1, want.revision),
            kind=want.kind,
            placement_id=placement_id,
            sandbox_id=want.sandbox_id,
            team_id="tea_x",
            generation=1,
            desired_revision=want.revision,
            digest=digest({"kind": want.kind, "revision": want.revision, "content": want.content}),
            epoch=epoch,
            spec=self.spec if want.kind is not Kind.ENSURE_ABSENT else None,
            nonce=f"nonce of {placement_id}" if want.kind is not Kind.ENSURE_ABSENT else None,
            guest_public_key="a2V5" if want.kind is not Kind.ENSURE_ABSENT else None,
            guest_token=f"token of {placement_id}" if self.deliver_payloads else None,
            payload_ref=f"pay_{placement_id}",
            ready_s=2.0,
            timeout_s=self.timeout_s,
            claimed=want.claimed,
            moment=want.moment if want.kind is Kind.ENSURE_RUNNING else None,
            carried_out=want.observed is not None and want.observed.applied_revision >= want.revision,
        )

    def _weather(self) -> None:
        if self.down:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "down")
        if self.refuse:
            raise self.refuse.pop(0)

    def _listen(self, observations: list[Observation]) -> dict[str, int]:
        acknowledged: dict[str, int] = {}
        for observation in observations:
            self.heard.append(observation)
            want = self.wants.get(observation.placement_id)
            if want is not None and (want.observed is None or observation.seq > want.observed.seq):
                want.observed = observation
            known = want.observed if want else None
            acknowledged[observation.placement_id] = known.seq if known else observation.seq
        return acknowledged

    def _due(self, message: Poll) -> tuple[list[str], list[Command], list[End]]:
        forget = [i for i in message.tombstones if i in self.wants and (o := self.seen(i)) and o.observed is Observed.ABSENT]
        commands = [
            self.command(i, message.epoch)
            for i, want in self.wants.items()
            if message.holds.get(i, 0) < want.revision and not (want.observed and want.observed.observed is Observed.ABSENT)
        ]
        ends = [end for i, end in self.ends.items() if message.end_revisions.get(i, 0) < end.revision]
        return forget, commands[:16], ends

    def drop(self, snapshot_id: str) -> None:
        """Want a snapshot gone, until this host has said that it has nothing of it."""
        self.snapshot_orders.append(SnapshotOrder(id=snapshot_id, wish=SnapshotWish.DROP, placement_id=""))
        self.news.set()

    async def poll(self, message: Poll) -> PollAnswer:
        self._weather()
        if self.current_epoch not in (None, message.epoch, message.previous_epoch):
            raise Refused(Code.OVERLAPPING_AGENT_SESSION, "another run")
        self.current_epoch = message.epoch
        self.polls.append(message)
        acknowledged = self._listen(message.observations)
        forget, commands, ends = self._due(message)
        ordered = [order for order in self.snapshot_orders if order.id not in message.snapshots]
        if not (commands or ends or forget or self.unknown or self.collect or ordered):
            self.parked = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(message.park_s):
                    await self.news.wait()
            self.parked = False
            forget, commands, ends = self._due(message)
        self.news.clear()
        if self.lose_answers:
            self.lose_answers -= 1
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "lost")
        collect, self.collect = self.collect, []
        return PollAnswer(
            snapshots=[order for order in self.snapshot_orders if order.id not in message.snapshots],
            lease_s=self.lease_s,
            commands=commands,
            ends=ends,
            payloads={f"pay_{c.placement_id}": self.wants[c.placement_id].payload for c in commands} if self.deliver_payloads else {},
            acknowledged=acknowledged,
            forget=forget,
            unknown=self.unknown,
            collect=collect,
            moments=self.moments,
            moment_bytes_max=self.moment_bytes_max,
            incarnation=self.incarnation,
        )

    async def observe(self, message: Observe) -> ObserveAnswer:
        self.observe_calls += 1
        self._weather()
        if message.epoch != self.current_epoch:
            raise Refused(Code.STALE_AGENT_EPOCH, "a newer run")
        acknowledged = self._listen(message.observations)
        self.snapshots_seen += message.snapshots
        self.snapshot_orders = [order for order in self.snapshot_orders if order.id not in {seen.id for seen in message.snapshots}]
        if self.lose_answers:
            self.lose_answers -= 1
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "lost")
        forget = [o.placement_id for o in message.observations if o.observed is Observed.ABSENT] if self.forget_at_once else []
        return ObserveAnswer(acknowledged=acknowledged, forget=forget)

    async def payloads(self, message: PayloadsWanted) -> Payloads:
        self._weather()
        refused = [ref for ref in message.refs if self.once is not None and not self._gives(ref, message)]
        return Payloads(
            payloads={ref: self.wants[ref.removeprefix("pay_")].payload for ref in message.refs if ref not in refused},
            refused=refused,
            guest_tokens={i: f"token of {i}" for i in message.placements},
        )

    def _gives(self, ref: str, message: PayloadsWanted) -> bool:
        placement_id = ref.removeprefix("pay_")
        want, start = self.wants[placement_id], f"{ref}:{self.wants[placement_id].revision}"
        assert self.once is not None
        if want.claimed and placement_id in message.missing:
            self.once[start] = message.epoch
        return self.once.setdefault(start, message.epoch) == message.epoch

    async def collected(self, message: Collected) -> None:
        self.collected_messages.append(message)

    async def close(self) -> None:
        return None


class FusedJournal(Journal):
    """A journal whose process may end before or after any commit."""

    def __init__(self, path: Path, fuse: Fuse) -> None:
        self._fuse = fuse
        super().__init__(path, inline=True)

    def submit(self, job):
        self._fuse.pass_("before commit")
        future = super().submit(job)
        self._fuse.pass_("after commit")
        return future


class World:
    """Everything around the agent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.machine = Machine()
        self.control = FakeControl()
        self.clock = FakeClock()
        self.fuse = Fuse()
        self.keeps_disk = False
        self.driver = MachineDriver(self.machine, self.fuse)
        self.guests = MachineGuests(self.machine, self.fuse)
        self.alarms: list[LoopAlarm] = []
        self.facts = FACTS
        self.inline = True
        self.head_start_wait_s = HEAD_START_WAIT_S
        self.moments: Callable[[Fuse], MomentStore] | None = None
        """The way to what is saved elsewhere, of a run with this fuse."""
        self.agent: Agent | None = None
        self.task: asyncio.Task[Exit] | None = None

    def boot(self, *, crash_at: int | None = None) -> Agent:
        """Start a run of the agent on what is there."""
        self.fuse = Fuse(crash_at)
        self.driver = MachineDriver(self.machine, self.fuse, keeps_disk=self.keeps_disk)
        self.guests = MachineGuests(self.machine, self.fuse)
        config = AgentConfig(
            state_directory=self.directory / "agent",
            control_url="http://control",
            facts=self.facts,
            disk_reserve_mib=1,
            park_s=5.0,
            upload_after_s=0.0,
            head_start_wait_s=self.head_start_wait_s,
        )
        run_fuse = self.fuse
        self.agent = Agent(
            config,
            Identity("hst_x", "ins_x", Secret("credential")),
            drivers={Isolation.GVISOR: self.driver},
            clock=self.clock,
            dice=os.urandom,
            transport=self.control,
            guests=self.guests,
            alarm=self._alarm,
            journal=lambda: FusedJournal(config.journal_path, run_fuse) if self.inline else Journal(config.journal_path),
            moments=self.moments(run_fuse) if self.moments is not None else None,
        )
        self.task = asyncio.get_running_loop().create_task(self.agent.run())
        return self.agent

    def _alarm(self) -> LoopAlarm:
        alarm = LoopAlarm(self.clock)
        self.alarms.append(alarm)
        return alarm

    def skip(self, seconds: float) -> None:
        """Let time pass at once, as a suspend of the machine does."""
        self.clock.skipped += seconds
        for alarm in self.alarms:
            alarm.poke()

    async def halt(self) -> Exit:
        """Ask the run to end."""
        assert self.agent
        assert self.task
        self.agent.stop()
        async with asyncio.timeout(5):
            return await self.task

    async def kill(self) -> None:
        """End the run as kill -9 would: nothing that it does from now on has an effect."""
        assert self.task
        self.fuse.blown = True
        self.task.cancel()
        with contextlib.suppress(BaseException):
            await self.task

    def verbs(self, placement_id: str) -> list[str]:
        return [verb for verb, i in self.machine.history if i == placement_id]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    it = World(tmp_path)
    yield it
    if it.task is not None and not it.task.done():
        await it.kill()


@pytest.fixture
def world_factory() -> Callable[[Path], World]:
    return World
