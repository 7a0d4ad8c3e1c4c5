"""Ledger: every record in memory, each change durable before anybody sees it.

Theory of operation. `change` makes the next value from the newest one (which may still be on its way to disk) and gives it to the
journal; readers see it, and the outbox says it, only when it is durable. The journal keeps the order, so what readers see never goes
back. A change that the disk refuses raises and is seen by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from atoll.agent.intake import Judged, Verdict, judge
from atoll.agent.journal import Journal, drop_records, load_facts, load_records, put_fact, put_record
from atoll.agent.outbox import Outbox
from atoll.agent.record import EndRule, Record, with_end
from atoll.base.errors import Unavailable
from atoll.domain.placement import Observed
from atoll.wire.agent import Command

LEASE_FACT = "lease"
INCARNATION_FACT = "incarnation"
ISOLATIONS_FACT = "isolations"
_LEASE_STEP_S = 5.0


class Ledger:
    """The agent's knowledge. One writer: this process, under its lock."""

    def __init__(self, journal: Journal, outbox: Outbox, *, boot_id: str) -> None:
        self._journal = journal
        self._outbox = outbox
        self.boot_id = boot_id
        self._records: dict[str, Record] = {r.placement_id: r for r in journal.read(load_records)}
        self._newest: dict[str, Record] = {}
        self._facts = journal.read(load_facts)
        self._lease_kept: float | None = None

    # look
    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    def get(self, placement_id: str) -> Record | None:
        """The durable record."""
        return self._records.get(placement_id)

    def held(self) -> dict[str, tuple[int, int]]:
        """Placements that are not absent, with the highest desired revision accepted and the revision of the end that is enforced, or 0."""
        return {
            r.placement_id: (r.desired_revision, r.end.revision if r.end is not None else 0) for r in self._records.values() if not r.absent
        }

    def tombstones(self) -> list[str]:
        """Absent placements that control has not confirmed."""
        return [r.placement_id for r in self._records.values() if r.absent]

    def say_all(self) -> None:
        """Let everything be told again, as a new run does."""
        for record in self._records.values():
            self._outbox.put(record, urgent=False)

    # change
    async def accept(self, command: Command, *, epoch: str, quarantine: bool, held: bool = False, end: EndRule | None = None) -> Judged:
        """Judge a command and make its intent durable, together with the `end` that came with it. *Idempotency*: see intake.judge."""
        newest = self._newest.get(command.placement_id) or self._records.get(command.placement_id)
        judged = judge(newest, command, epoch=epoch, boot_id=self.boot_id, quarantine=quarantine, held=held)
        if judged.record is not None:
            record = (with_end(judged.record, end) if end is not None else None) or judged.record
            judged = Judged(judged.verdict, record)
            await self._keep(record, urgent=record.reason is not None)
        elif newest is not None and judged.verdict is not Verdict.FOREIGN:
            self.say_again(newest.placement_id)
        return judged

    async def change(
        self, placement_id: str, make: Callable[[Record], Record | None], *, urgent: bool = True, told: bool = True
    ) -> Record | None:
        """Make the next value of a record durable; `make` gives None when nothing changes. None too when it is unknown.

        Not `told`: it is of no use to control unless it lasts; then `tell` says it.
        """
        newest = self._newest.get(placement_id) or self._records.get(placement_id)
        if newest is None:
            return None
        after = make(newest)
        if after is None or after == newest:
            return newest
        await self._keep(after, urgent=urgent and after.seq > newest.seq, told=told)
        return after

    async def set_end(self, placement_id: str, end: EndRule) -> bool:
        """Enforce this end from now on. False when its revision is not newer than the known one, or there is nothing to end."""
        after = await self.change(placement_id, lambda record: with_end(record, end), urgent=False)
        return after is not None and after.end is end

    async def forget(self, placement_ids: Sequence[str]) -> list[str]:
        """Drop confirmed tombstones; what is not absent stays."""
        gone = [i for i in placement_ids if (r := self._records.get(i)) is not None and r.absent and i not in self._newest]
        if gone:
            await self._journal.write(drop_records(gone))
            for placement_id in gone:
                self._records.pop(placement_id, None)
                self._outbox.drop(placement_id)
        return gone

    def say_again(self, placement_id: str) -> None:
        """Tell control what is seen, though nothing changed."""
        record = self._records.get(placement_id)
        if record is not None:
            self._outbox.say_again(record)

    def tell(self, placement_id: str) -> None:
        """Let control hear at once what is seen."""
        record = self._records.get(placement_id)
        if record is not None:
            self._outbox.put(record, urgent=True)

    async def _keep(self, record: Record, *, urgent: bool, told: bool = True) -> None:
        self._newest[record.placement_id] = record
        kept = self._journal.submit(put_record(record))
        # Settled by the journal's word and not by the caller's patience: a cancelled step must not leave memory behind the disk.
        if kept.done():
            self._settle(record, kept, urgent=urgent, told=told)
        else:
            kept.add_done_callback(lambda done: self._settle(record, done, urgent=urgent, told=told))
        await asyncio.shield(kept)

    def _settle(self, record: Record, kept: asyncio.Future[None], *, urgent: bool, told: bool) -> None:
        if self._newest.get(record.placement_id) is record:
            del self._newest[record.placement_id]
        if kept.cancelled() or kept.exception() is not None:
            return
        known = self._records.get(record.placement_id)
        self._records[record.placement_id] = record
        # That a command was accepted is told by the next poll's `holds`; an observation of it would only cost control a commit.
        if told and (record.seq > known.seq if known is not None else record.observed is not Observed.ACCEPTED):
            self._outbox.put(record, urgent=urgent)

    # lease
    def lease_until(self) -> float | None:
        """The lease of the last run, when it was in this boot of the kernel. *Units*: CLOCK_BOOTTIME seconds."""
        boot_id, _, until = self._facts.get(LEASE_FACT, "").partition(" ")
        return float(until) if until and boot_id == self.boot_id else None

    def isolations(self) -> list[str]:
        """Isolations whose probes passed when they were last run in this boot of the kernel."""
        boot_id, _, names = self._facts.get(ISOLATIONS_FACT, "").partition(" ")
        return names.split() if boot_id == self.boot_id else []

    async def keep_isolations(self, names: Sequence[str]) -> None:
        """Remember which isolations work here, so that the next run need not wait for its own probes to be useful."""
        with contextlib.suppress(Unavailable):
            await self._journal.write(put_fact(ISOLATIONS_FACT, f"{self.boot_id} {' '.join(names)}"))

    def incarnation(self) -> str | None:
        """Of the store that this host has settled with; None: it has not heard of any."""
        return self._facts.get(INCARNATION_FACT)

    async def keep_incarnation(self, incarnation: str) -> None:
        """This host has settled with this life of the store."""
        await self._journal.write(put_fact(INCARNATION_FACT, incarnation))
        self._facts[INCARNATION_FACT] = incarnation

    async def keep_lease(self, until: float) -> None:
        """Remember the lease for the next run. Kept in steps of 5 s: a run that restarts counts a little less, never more."""
        if self._lease_kept is None or until >= self._lease_kept + _LEASE_STEP_S or until < self._lease_kept:
            await self._journal.write(put_fact(LEASE_FACT, f"{self.boot_id} {until!r}"))
            self._lease_kept = until
