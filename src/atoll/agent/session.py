"""Session: the agent's talk with control.

Theory of operation. One poll is out at any time, parked at control until there is news; its answer renews the lease, counted from when
the request was sent. What cannot wait for the poll goes beside it, through /observe, as soon as it is durable. Nothing is sent beside
the poll before control has answered this run once, because until then another run may still be the host's session. A new run shows the
runs before it; the first that control knows proves the takeover. Errors are told apart by code, never by text:

| code | what the agent does |
|---|---|
| STALE_AGENT_EPOCH | a newer run has taken over: end, touch no guest (exit code 75) |
| CREDENTIAL_REVOKED | the host is fenced: end every placement, then ask once a minute |
| OVERLAPPING_AGENT_SESSION | show the next earlier run; when none is left, wait for the other session to grow stale |
| STALE_POLL, anything temporary | again, with backoff |
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from atoll.agent.backoff import Backoff
from atoll.agent.config import AgentConfig, Identity
from atoll.agent.executor import Executor
from atoll.agent.health import Health
from atoll.agent.intake import Verdict
from atoll.agent.inventory import UNRECORDED, Quarantine
from atoll.agent.journal import Journal, answer_epoch
from atoll.agent.keeping import Keeping
from atoll.agent.leases import Deadlines, rule_of
from atoll.agent.ledger import Ledger
from atoll.agent.messages import Window, part_of
from atoll.agent.outbox import Outbox
from atoll.agent.record import EndedBy, EndRule, Goal, ending, goal, is_claimed
from atoll.agent.settling import Settling
from atoll.agent.telling import Telling
from atoll.agent.transport import Transport
from atoll.agent.uploads import Uploads
from atoll.agent.vault import Vault
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.base.ids import Dice
from atoll.base.records import replace
from atoll.domain.command import Kind
from atoll.drivers.port import Change
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire.agent import (
    LAYER,
    MESSAGE_BYTES_MAX,
    USAGE,
    Account,
    Accounts,
    AccountsAnswer,
    Collect,
    Collected,
    Command,
    End,
    HostHealth,
    InitPayload,
    Observation,
    Observe,
    Payloads,
    PayloadsWanted,
    Poll,
    PollAnswer,
    Sample,
    SnapshotSeen,
)

log = get_logger()

OBSERVATION_BYTES_MAX: Final = 128 * 1024
"""Of one message; the rest of a poll is for what is repeated."""
ENVELOPE_BYTES: Final = 32 * 1024
"""Of a poll: facts, health, images, ids."""
FLYING_MAX: Final = 4
PARK_UNFIT_S: Final = 5.0
"""How long a poll is parked that says that nothing can be placed here: what changes that is told with the next one."""
REVOKED_PAUSE_S: Final = 60.0
HASTY_S: Final = 0.05
"""An answer that comes sooner than this and brings nothing new slows the next poll down."""
START_REST_S: Final = 0.008
"""Between an answer that brought something to start and the next poll: the start comes first, and what else is to start comes together."""


class Exit(IntEnum):
    """How a run ends, as the program's exit code."""

    STOPPED = 0
    SUPERSEDED = 75
    """EX_TEMPFAIL: a newer run holds the host; a supervisor must not start this one again at once."""


@dataclass(frozen=True, slots=True)
class Run:
    """This run of the agent."""

    epoch: str
    earlier: tuple[str, ...]
    """Runs that control may hold for the current one, newest first."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the session talks about; made by `agent.Agent`."""

    ledger: Ledger
    outbox: Outbox
    journal: Journal
    executor: Executor
    deadlines: Deadlines
    vault: Vault
    quarantine: Quarantine
    health: Health
    console: Callable[[str, int], Awaitable[bytes | None]]
    usage: Callable[[Sequence[str], int], Awaitable[dict[str, list[Sample]]]]
    capture: Callable[[str], AbstractAsyncContextManager[tuple[Path, Change]]]
    """A layer of what has changed in a placement's files, as a file that goes with the context."""
    keeping: Keeping
    uploads: Uploads | None = None


class Session:
    """The loops that talk."""

    def __init__(  # noqa: PLR0913 - a composition
        self,
        config: AgentConfig,
        identity: Identity,
        run: Run,
        host: Host,
        transport: Transport,
        *,
        clock: Clock,
        dice: Dice,
        over: Callable[[Exit], None],
        on_answer: Callable[[HostHealth], None] | None = None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._run = run
        self._host = host
        self._transport = transport
        self._clock = clock
        self._dice = dice
        self._over = over
        self._on_answer = on_answer
        self.established = asyncio.Event()
        self._poll_seq = 0
        self._confirmed: dict[str, None] = {}
        """Tombstones that control has confirmed beside a poll; dropped once a poll that was sent later is answered."""
        self._proof = 0
        self._lost = False
        self._bytes_max = MESSAGE_BYTES_MAX
        self._tombstones = Window()
        self._telling = Telling(clock)
        self._settling = Settling(host.ledger, host.quarantine, clock, self._give_account)
        self._failures = Backoff(dice, first_s=0.05, most_s=2.0)
        self._haste = Backoff(dice, first_s=0.02, most_s=1.0)

    # polls
    async def poll_forever(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                pause_s = await self._poll_once()
                self._failures.reset()
            except AtollError as error:
                pause_s = self._after(error)
            except Exception:
                log.exception(events.COMMAND_FAILED, operation="poll")
                pause_s = self._failures.next_s()
            await asyncio.sleep(pause_s)

    async def _poll_once(self) -> float:
        """One poll and what its answer asks; gives the pause before the next. *Errors*: those of Transport."""
        health = await self._host.health.compose()
        confirmed = list(self._confirmed)
        message = self._compose(health)
        sent_boot = self._clock.boot()
        try:
            answer = await self._transport.poll(message)
        except BaseException:
            self._host.outbox.lost(message.observations)
            self._telling.lost()
            raise
        self._telling.answered(answer.told)
        if answer.told is not None:
            self._host.keeping.told(message.kept)
        self._host.outbox.landed(message.observations, answer.acknowledged)
        news = await self._take(answer, sent_boot) or bool(message.observations)
        await self._bury(confirmed)
        if self._on_answer is not None:
            self._on_answer(health)
        if news or message.park_s == 0 or self._clock.boot() - sent_boot > HASTY_S:
            self._haste.reset()
            return START_REST_S if any(command.kind is Kind.ENSURE_RUNNING for command in answer.commands) else 0.0
        return self._haste.next_s()

    def _compose(self, health: HostHealth) -> Poll:
        self._poll_seq += 1
        host = self._host
        observations = host.outbox.take(bytes_max=min(OBSERVATION_BYTES_MAX, self._bytes_max // 2))
        room = self._bytes_max - ENVELOPE_BYTES - sum(len(o.model_dump_json()) + 1 for o in observations)
        unconfirmed = [one for one in host.ledger.tombstones() if one not in self._confirmed]
        tombstones, size = part_of(unconfirmed, self._tombstones, bytes_max=max(0, room // 2))
        word = self._telling.compose(host.ledger.held(), bytes_max=max(0, room - size))
        earlier = self._run.earlier
        first = not self.established.is_set()
        return Poll(
            host_id=self._identity.host_id,
            epoch=self._run.epoch,
            previous_epoch=earlier[self._proof % len(earlier)] if earlier else None,
            poll_seq=self._poll_seq,
            incarnation=host.ledger.incarnation(),
            agent_version=self._config.agent_version,
            facts=self._config.facts,
            health=health,
            observations=observations,
            since=word.since,
            holds=word.holds,
            end_revisions=word.end_revisions,
            dropped=word.dropped,
            tombstones=tombstones,
            snapshots=host.keeping.under_way(),
            kept=host.keeping.untold(),
            sent_at=self._clock.now(),
            park_s=0.0 if first or self._lost or word.more or host.outbox.more() or host.deadlines.unsure else self._park_s(health),
        )

    def _park_s(self, health: HostHealth) -> float:
        unfit = not health.isolations or any(check.fatal and not check.ok for check in health.checks)
        return min(PARK_UNFIT_S, self._config.park_s) if unfit else self._config.park_s

    async def _take(self, answer: PollAnswer, sent_boot: float) -> bool:
        """Do what an answer asks; whether it brought anything new."""
        host = self._host
        until = host.deadlines.renew(sent_boot=sent_boot, lease_s=answer.lease_s)
        if self._lost:
            self._lost = False
            log.info(events.CONTROL_FOUND, host_id=self._identity.host_id)
        if not self.established.is_set():
            await self._establish()
        await self._settling.follow(answer.incarnation)
        try:
            ends = {end.placement_id: rule_of(end, sent_boot=sent_boot) for end in answer.ends}
            accepted = await asyncio.gather(*(self._accept(c, answer.payloads, ends.get(c.placement_id)) for c in answer.commands))
            ended = await self._take_ends(answer.ends, sent_boot)
            forgotten = await self._forget(answer.forget)
            await self._quarantine(answer.unknown)
        except Unavailable as error:
            # The journal refuses: what was not accepted is sent again by control; the pause keeps that from becoming a race.
            log.warning(events.JOURNAL_REFUSED, code=error.code, message=error.message)
            await asyncio.sleep(1.0)
            return False
        # After what was ordered, which somebody waits for: a run that is killed before has the lease of a little earlier.
        await self._remember(until)
        host.deadlines.heard(sent_boot=sent_boot)
        if host.uploads is not None:
            host.uploads.allow(allowed=answer.moments, bytes_max=answer.moment_bytes_max)
        kept = host.keeping.take(answer.snapshots)
        for wish in answer.collect:
            host.executor.spawn(self._collect(wish))
        return any(accepted) or ended or forgotten or kept or bool(answer.collect)

    async def _establish(self) -> None:
        """Control has answered this run. A journal that refuses makes the next run prove itself once more."""
        self.established.set()
        try:
            await self._host.journal.write(answer_epoch(self._run.epoch))
        except Unavailable as error:
            log.warning(events.JOURNAL_REFUSED, code=error.code, message=error.message)
        self._host.outbox.urgent.set()

    async def _remember(self, lease_until: float) -> None:
        """Keep the lease for the next run. A journal that refuses makes that run count less, never more."""
        try:
            await self._host.ledger.keep_lease(lease_until)
        except Unavailable as error:
            log.warning(events.JOURNAL_REFUSED, code=error.code, message=error.message)

    async def _accept(self, command: Command, payloads: dict[str, InitPayload], end: EndRule | None = None) -> bool:
        host = self._host
        held = host.quarantine.holds(command.placement_id, command.sandbox_id, command.generation)
        judged = await host.ledger.accept(command, epoch=self._run.epoch, quarantine=bool(host.quarantine), held=held, end=end)
        if held and judged.verdict is Verdict.NEW and command.kind is not Kind.ENSURE_ABSENT:
            host.executor.inherit(command.placement_id)
            host.quarantine.clear(command.placement_id)
        if end is not None and judged.record is not None and judged.record.end is end:
            host.deadlines.watch(command.placement_id, end)
        record = host.ledger.get(command.placement_id)
        if judged.verdict in (Verdict.STALE, Verdict.CONFLICT, Verdict.FOREIGN):
            log.warning(events.COMMAND_REFUSED, command_id=command.id, what=judged.verdict.name.lower(), placement_id=command.placement_id)
        elif record is not None and (
            ((not record.ready or is_claimed(record)) and goal(record) is Goal.RUNNING) or goal(record) is Goal.SUSPENDED
        ):
            if judged.verdict is Verdict.NEWER and is_claimed(record):
                # What the guest was begun with must not be taken for what its create has brought.
                host.vault.drop(command.placement_id)
            payload = payloads.get(command.payload_ref) if command.payload_ref else None
            host.vault.put(command.placement_id, token=command.guest_token, payload=payload)
        if judged.verdict in (Verdict.NEW, Verdict.NEWER):
            log.info(events.COMMAND_STARTED, command_id=command.id, kind=command.kind, sandbox_id=command.sandbox_id)
            host.executor.nudge(command.placement_id)
        return judged.record is not None

    async def _take_ends(self, ends: Sequence[End], sent_boot: float) -> bool:
        async def take(end: End) -> bool:
            rule = rule_of(end, sent_boot=sent_boot)
            if not await self._host.ledger.set_end(end.placement_id, rule):
                return False
            self._host.deadlines.watch(end.placement_id, rule)
            return True

        return any(await asyncio.gather(*(take(end) for end in ends)))

    async def _bury(self, confirmed: Sequence[str]) -> None:
        for placement_id in confirmed:
            self._confirmed.pop(placement_id, None)
        try:
            await self._forget(confirmed)
        except Unavailable as error:
            # They are told again, and confirmed again.
            log.warning(events.JOURNAL_REFUSED, code=error.code, message=error.message)

    async def _forget(self, placement_ids: Sequence[str]) -> bool:
        forgotten = await self._host.ledger.forget(placement_ids)
        for placement_id in forgotten:
            self._host.deadlines.unwatch(placement_id)
        return bool(forgotten)

    async def _give_account(self, incarnation: str, accounts: list[Account]) -> AccountsAnswer:
        message = Accounts(host_id=self._identity.host_id, epoch=self._run.epoch, incarnation=incarnation, accounts=accounts)
        return await self._transport.accounts(message)

    async def _quarantine(self, placement_ids: Sequence[str]) -> None:
        for placement_id in placement_ids:
            record = self._host.ledger.get(placement_id)
            if record is not None and not record.absent and not record.quarantined:
                await self._host.ledger.change(placement_id, lambda r: replace(r, quarantined=True))
                self._host.quarantine.add(placement_id, UNRECORDED)

    # beside the poll
    async def speak_up(self) -> None:
        """Send what cannot wait, until cancelled."""
        outbox = self._host.outbox
        flying = asyncio.Semaphore(FLYING_MAX)
        backoff = Backoff(self._dice, first_s=0.05, most_s=2.0)
        await self.established.wait()
        async with asyncio.TaskGroup() as group:
            while True:
                await outbox.urgent.wait()
                outbox.urgent.clear()
                while outbox.more():
                    await flying.acquire()
                    batch = outbox.take(bytes_max=OBSERVATION_BYTES_MAX)
                    group.create_task(self._observe(batch, flying, backoff))

    async def _observe(self, batch: list[Observation], flying: asyncio.Semaphore, backoff: Backoff) -> None:
        outbox = self._host.outbox
        try:
            if not batch:
                return
            sent_boot = self._clock.boot()
            try:
                answer = await self._transport.observe(Observe(host_id=self._identity.host_id, epoch=self._run.epoch, observations=batch))
                outbox.landed(batch, answer.acknowledged)
                backoff.reset()
                await self._take_ends(answer.ends, sent_boot)
                # A poll that is out may bring a command from before control heard of this: its tombstone stays to refuse that.
                self._confirmed.update(dict.fromkeys(answer.forget))
            except AtollError as error:
                outbox.lost(batch)
                if error.code in (Code.STALE_AGENT_EPOCH, Code.CREDENTIAL_REVOKED):
                    self._after(error)
                await asyncio.sleep(_pause_s(error, backoff.next_s()))
            except Exception:
                outbox.lost(batch)
                log.exception(events.COMMAND_FAILED, operation="observe")
                await asyncio.sleep(backoff.next_s())
            if outbox.more():
                outbox.urgent.set()
        finally:
            flying.release()

    async def tell_snapshot(self, seen: SnapshotSeen) -> None:
        """Have control hear what became of a snapshot (keeping.Tell)."""
        await self.established.wait()
        await self._transport.observe(Observe(host_id=self._identity.host_id, epoch=self._run.epoch, observations=[], snapshots=[seen]))

    async def fetch_payloads(self, refs: list[str], placement_ids: list[str], missing: list[str]) -> Payloads:
        """Ask control for payloads and guest tokens that this run never had (vault.Fetch)."""
        await self.established.wait()
        run = self._run.epoch
        wanted = PayloadsWanted(host_id=self._identity.host_id, epoch=run, refs=refs, placements=placement_ids, missing=missing)
        return await self._transport.payloads(wanted)

    async def _collect(self, wish: Collect) -> None:
        if wish.what == LAYER:
            await self._capture(wish)
            return
        answer = Collected(host_id=self._identity.host_id, epoch=self._run.epoch, id=wish.id, placement_id=wish.placement_id)
        if wish.what == USAGE:
            answer = answer.model_copy(update={"samples": await self._host.usage(wish.placements, wish.points_max)})
        elif (console := await self._host.console(wish.placement_id, wish.bytes_max)) is not None:
            answer = answer.model_copy(update={"console_base64": base64.b64encode(console).decode()})
        else:
            answer = answer.model_copy(update={"code": Code.PLACEMENT_LOST.value})
        try:
            await self._transport.collected(answer)
        except AtollError as error:
            log.info(events.COMMAND_FAILED, operation="collect", code=error.code, placement_id=wish.placement_id)

    async def _capture(self, wish: Collect) -> None:
        """Send a layer, or say why not."""
        try:
            async with self._host.capture(wish.placement_id) as (path, change):
                await self._transport.layer(wish.id, path, entries=change.entries)
            return
        except AtollError as error:
            failure = error
        except OSError as error:
            failure = Refused(Code.HOST_DISK_FULL, f"the layer could not be written: {error.strerror}")
        log.warning(events.COMMAND_FAILED, operation="capture", code=failure.code, placement_id=wish.placement_id, message=failure.message)
        answer = Collected(host_id=self._identity.host_id, epoch=self._run.epoch, id=wish.id, placement_id=wish.placement_id)
        answer = answer.model_copy(update={"code": failure.code.value, "message": failure.message[:2000]})
        with contextlib.suppress(AtollError):
            await self._transport.collected(answer)

    # errors
    def _after(self, error: AtollError) -> float:
        """React to a refusal or to weather; gives the pause before the next poll."""
        match error.code:
            case Code.STALE_AGENT_EPOCH:
                log.error(events.AGENT_SUPERSEDED, code=error.code, epoch=self._run.epoch, hint=error.hint)
                self._over(Exit.SUPERSEDED)
                return REVOKED_PAUSE_S
            case Code.CREDENTIAL_REVOKED:
                self._fence()
                return REVOKED_PAUSE_S
            case Code.OVERLAPPING_AGENT_SESSION:
                self._proof += 1
                if self._run.earlier and self._proof % len(self._run.earlier):
                    return 0.0
            case Code.BODY_TOO_LARGE:
                self._bytes_max = max(ENVELOPE_BYTES * 2, self._bytes_max // 2)
            case _:
                pass
        pause_s = self._failures.next_s()
        if self._failures.failures >= 2 and not self._lost:
            self._lost = True
            log.warning(events.CONTROL_LOST, code=error.code, message=error.message, url=self._config.control_url)
        return _pause_s(error, pause_s)

    def _fence(self) -> None:
        log.error(events.HOST_FENCED, code=Code.CREDENTIAL_REVOKED, host_id=self._identity.host_id)
        for record in self._host.ledger:
            if not record.absent:
                self._host.executor.decide(record.placement_id, lambda r: ending(r, EndedBy.FENCE, reason=Code.CREDENTIAL_REVOKED))
        self._host.executor.spawn(self._host.keeping.drop_all())


def _pause_s(error: AtollError, pause_s: float) -> float:
    """How long to wait after this: what control says, when it says so. *Units*: seconds."""
    return max(pause_s, error.retry_after_s) if isinstance(error, Unavailable) and error.code is Code.RATE_LIMITED else pause_s
