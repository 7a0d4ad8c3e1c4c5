"""Agent: one host's run, from its lock to its last word.

Theory of operation. Start-up is in this order: exclusive lock; drivers open; a new epoch is committed with the ones before it; the
inventory is settled against the journal; ends and lease are enforced from then on, whether control answers or not; the drivers are
probed; the first poll, which does not park. Eight things run beside each other after that: the executor, the deadlines, what keeps
snapshots, what sends moments to the store, the poll, what speaks up beside it, what measures, and children. They share the ledger and nothing else. A run ends when it is asked to, or when a newer one has taken
over; either way no guest is touched, and the next run goes on where this one stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

from atoll.agent.alarm import Alarm, BootAlarm, LoopAlarm
from atoll.agent.arrivals import Arrivals
from atoll.agent.children import Child, HasGateway, supervise
from atoll.agent.config import AgentConfig, Identity
from atoll.agent.executor import Executor
from atoll.agent.handshake import Guests, TcpGuests
from atoll.agent.health import Health
from atoll.agent.inventory import Quarantine, settle
from atoll.agent.journal import Journal, begin_epoch
from atoll.agent.keeping import Keeping
from atoll.agent.lastwords import LastWords
from atoll.agent.leases import Deadlines
from atoll.agent.ledger import Ledger
from atoll.agent.lock import Lock
from atoll.agent.moments import MomentStore
from atoll.agent.outbox import Outbox
from atoll.agent.session import Exit, Host, Run, Session
from atoll.agent.steps import Steps
from atoll.agent.transport import Transport
from atoll.agent.uploads import Uploads
from atoll.agent.usage import Usage
from atoll.agent.vault import Vault
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused
from atoll.base.ids import Dice, Prefix, new_id
from atoll.domain.spec import Isolation
from atoll.drivers.port import Change, Driver
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire.agent import HostHealth, Payloads, SnapshotSeen

log = get_logger()

PROBE_S_MAX: Final = 10.0
"""How long the first poll waits for the drivers' probes."""


class Agent:
    """One run for one host. Everything real is given: drivers, time, chance, the way to control and to guests."""

    def __init__(  # noqa: PLR0913 - a composition root's arguments
        self,
        config: AgentConfig,
        identity: Identity,
        *,
        drivers: Mapping[Isolation, Driver],
        clock: Clock,
        dice: Dice,
        transport: Transport,
        guests: Guests | None = None,
        alarm: Callable[[], Alarm] | None = None,
        journal: Callable[[], Journal] | None = None,
        on_answer: Callable[[HostHealth], None] | None = None,
        moments: MomentStore | None = None,
    ) -> None:
        """`moments`: the way to what is saved elsewhere, and of what is saved here; None: there is none."""
        self._config = config
        self._identity = identity
        self._drivers = drivers
        self._clock = clock
        self._dice = dice
        self._transport = transport
        self._guests = guests or TcpGuests(clock)
        self._make_alarm = alarm or _real_alarm(clock)
        self._open_journal = journal or (lambda: Journal(config.journal_path, inline=config.journal_inline))
        self._on_answer = on_answer
        self._moments = moments
        self._last_words = LastWords(config.last_words_path)
        self._over: asyncio.Future[Exit] | None = None
        self.epoch: str | None = None
        """Of this run, once it is committed."""
        self.ledger: Ledger | None = None
        """What it knows, to be looked at; None before it is open and after it is closed."""
        self.deadlines: Deadlines | None = None

    def stop(self) -> None:
        """End the run; guests go on."""
        self._end(Exit.STOPPED)

    def _end(self, how: Exit) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(how)

    async def run(self) -> Exit:
        """Act for the host until `stop`, or until a newer run has taken over.

        *Errors*: Refused AGENT_LOCKED; Unavailable STORE_* (the journal cannot be opened); what a driver's `open` and `held` raise.
        """
        self._over = asyncio.get_running_loop().create_future()
        self._config.state_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with Lock(self._config.lock_path), contextlib.closing(self._open_journal()) as journal:
            try:
                return await self._run(journal)
            finally:
                await self._transport.close()

    async def _run(self, journal: Journal) -> Exit:
        outbox = Outbox()
        self.ledger = ledger = Ledger(journal, outbox, boot_id=self._config.facts.boot_id)
        quarantine = Quarantine()
        health = Health(self._config, self._drivers, quarantine, self._clock, recalled=ledger.isolations(), remember=ledger.keep_isolations)
        vault = Vault(self._fetch, self._dice)
        steps = self._steps(ledger, vault)
        executor = Executor(ledger, steps, self._dice)
        steps.on_failure = health.suspect
        steps.on_last_words = self._last_words.keep
        async with self._opened(executor):
            self.epoch = new_id(Prefix.EPOCH, self._dice)
            earlier = await journal.write(begin_epoch(self.epoch, boot_id=ledger.boot_id))
            log.info(events.EPOCH_BEGUN, epoch=self.epoch, host_id=self._identity.host_id, count=len(ledger))
            await settle(ledger, self._drivers, quarantine, inherited=steps.inherited, parallel=self._config.parallel_max)
            ledger.say_all()
            with contextlib.closing(self._make_alarm()) as alarm:
                self.deadlines = deadlines = Deadlines(
                    clock=self._clock, alarm=alarm, records=ledger, decide=executor.decide, lease_until=ledger.lease_until()
                )
                steps.may_start = deadlines.may_start
                steps.on_end = deadlines.watch
                steps.on_gone = lambda placement_id: _gone(placement_id, deadlines, quarantine)
                usage = Usage(lambda: ledger, self._drivers, self._clock)
                keeping = Keeping(ledger, self._drivers, self._dice, self._tell_snapshot, parallel=self._config.parallel_max)
                uploads = self._joined(ledger, steps, keeping, health)
                host = Host(
                    ledger,
                    outbox,
                    journal,
                    executor,
                    deadlines,
                    vault,
                    quarantine,
                    health,
                    self._console,
                    usage.samples,
                    self._capture,
                    keeping,
                    uploads,
                )
                self._session = Session(
                    self._config,
                    self._identity,
                    Run(self.epoch, tuple(earlier)),
                    host,
                    self._transport,
                    clock=self._clock,
                    dice=self._dice,
                    over=self._end,
                    on_answer=self._on_answer,
                )
                try:
                    return await self._beside_each_other(executor, deadlines, health, usage, keeping, uploads)
                finally:
                    await steps.origins.close()

    def _steps(self, ledger: Ledger, vault: Vault) -> Steps:
        parallel, wait_s = self._config.parallel_max, self._config.head_start_wait_s
        made = Steps(ledger, self._drivers, self._guests, vault, clock=self._clock, dice=self._dice, parallel=parallel)
        made.origins.wait_s = wait_s
        return made

    def _joined(self, ledger: Ledger, steps: Steps, keeping: Keeping, health: Health) -> Uploads | None:
        """What sends moments to the store, told by those who save and keep; None: this host has no way to it."""
        if self._moments is None:
            return None
        uploads = Uploads(ledger, self._drivers, self._moments, self._dice, self._tell_snapshot, after_s=self._config.upload_after_s)
        arrivals = steps.origins.arrivals = Arrivals(self._moments)

        async def given_up(snapshot_id: str) -> None:
            await arrivals.give_up(snapshot_id)
            await uploads.forget(snapshot_id)

        steps.on_touch, steps.on_saved, steps.on_forget = uploads.halt, uploads.saved, uploads.forget
        keeping.on_kept, keeping.on_drop = uploads.kept, given_up
        health.fetches = True
        return uploads

    async def _beside_each_other(
        self, executor: Executor, deadlines: Deadlines, health: Health, usage: Usage, keeping: Keeping, uploads: Uploads | None
    ) -> Exit:
        assert self._over is not None
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(executor.run(), name="executor"),
                group.create_task(keeping.run(), name="keeping"),
                group.create_task(deadlines.run(), name="deadlines"),
                group.create_task(self._talk(health), name="poll"),
                group.create_task(self._session.speak_up(), name="speak-up"),
                group.create_task(usage.run(), name="usage"),
                *([group.create_task(uploads.run(), name="uploads")] if uploads is not None else []),
                *(group.create_task(supervise(child, clock=self._clock, dice=self._dice)) for child in self._children()),
            ]
            how = await self._over
            log.info(events.PROCESS_STOPPING, epoch=self.epoch, exit_code=int(how))
            for task in tasks:
                task.cancel()
        return how

    async def _talk(self, health: Health) -> None:
        async with asyncio.TaskGroup() as group:
            # Control should learn with the first poll what works here; but what worked in this boot need not be waited for, and a
            # probe that hangs must not cost the lease.
            probe = group.create_task(health.probe())
            await asyncio.wait({probe}, timeout=0.0 if health.recalled else PROBE_S_MAX)
            group.create_task(self._session.poll_forever())
            await probe
            group.create_task(health.keep_probing())

    async def _fetch(self, refs: list[str], placement_ids: list[str], missing: list[str]) -> Payloads:
        return await self._session.fetch_payloads(refs, placement_ids, missing)

    async def _tell_snapshot(self, seen: SnapshotSeen) -> None:
        await self._session.tell_snapshot(seen)

    async def _console(self, placement_id: str, bytes_max: int) -> bytes | None:
        """The end of a guest's console, or its last words; None when nobody has any."""
        for driver in {id(d): d for d in self._drivers.values()}.values():
            try:
                if console := await driver.console(placement_id, bytes_max=bytes_max):
                    return console[-bytes_max:]
            except (AtollError, OSError) as error:
                log.info(events.COMMAND_FAILED, operation="console", placement_id=placement_id, message=str(error))
        words = self._last_words.read(placement_id)
        return words[-bytes_max:] if words is not None else None

    @contextlib.asynccontextmanager
    async def _capture(self, placement_id: str) -> AsyncIterator[tuple[Path, Change]]:
        """What has changed in a placement's files. *Errors*: as Driver.capture; Refused PLACEMENT_LOST when it does not run here."""
        record = None if self.ledger is None else self.ledger.get(placement_id)
        driver = None if record is None or record.blueprint is None else self._drivers.get(record.blueprint.spec.isolation)
        if driver is None or "/" in placement_id:
            raise Refused(Code.PLACEMENT_LOST, f"{placement_id} is not on this host")
        layers = self._config.layers_path
        layers.mkdir(mode=0o700, exist_ok=True)
        target = layers / f"{placement_id}.tar"
        try:
            yield target, await driver.capture(placement_id, target)
        finally:
            target.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def _opened(self, executor: Executor) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for driver in {id(d): d for d in self._drivers.values()}.values():
                await driver.open(executor.exited)
                stack.push_async_callback(driver.close)
            yield

    def _children(self) -> list[Child]:
        if not self._config.resolver:
            return []
        gateways = {driver.gateway_address for driver in self._drivers.values() if isinstance(driver, HasGateway)}
        return [Child(f"dns {gateway}", (*self._config.resolver, "--listen", f"{gateway}:53")) for gateway in sorted(gateways)]


def _gone(placement_id: str, deadlines: Deadlines, quarantine: Quarantine) -> None:
    deadlines.unwatch(placement_id)
    quarantine.clear(placement_id)


def _real_alarm(clock: Clock) -> Callable[[], Alarm]:
    def make() -> Alarm:
        try:
            return BootAlarm()
        except (OSError, AttributeError):
            return LoopAlarm(clock)

    return make
