"""Settling, the agent's side: control's store has another incarnation than this host has settled with, so all is accounted for anew.

Theory of operation. The journal keeps the incarnation of the last store that this host has settled with. Another one means that control was
taken back to a backup: it may not know what this host has, and may hold for new what was decided long ago. Everything that is not gone
is accounted for, in parts; what control then has a record of is work as usual, what it cannot place is quarantined, which keeps it and
reports it. Only after the last part is the incarnation kept, so that a run that ends in between begins again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from atoll.agent.inventory import UNRECORDED, Quarantine
from atoll.agent.ledger import Ledger
from atoll.agent.record import Record, is_claimed
from atoll.base.clock import Clock
from atoll.base.records import replace
from atoll.domain.placement import Observed
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire.agent import ACCOUNTS_PER_MESSAGE_MAX, Account, AccountsAnswer

log = get_logger()

PART_BYTES_MAX: Final = 128 * 1024

Give = Callable[[str, list[Account]], Awaitable[AccountsAnswer]]
"""`await give(incarnation, accounts)`: hand a part in. *Errors*: those of Transport."""


@dataclass(frozen=True, slots=True)
class Settling:
    """Of one run."""

    ledger: Ledger
    quarantine: Quarantine
    clock: Clock
    give: Give

    async def follow(self, incarnation: str) -> None:
        """Settle with this life of the store, if that is not done. *Errors*: those of Transport and of the journal; then nothing is kept."""
        known = self.ledger.incarnation()
        if known == incarnation:
            return
        if known is not None:
            log.warning(events.STORE_RESTORED, was=known, count=len(self.ledger))
            for part in self._parts():
                await self._take(await self.give(incarnation, part))
        await self.ledger.keep_incarnation(incarnation)

    def _parts(self) -> Iterator[list[Account]]:
        part: list[Account] = []
        size = 0
        for record in self.ledger:
            if record.absent:
                continue
            account = account_of(record, boot=self.clock.boot())
            length = len(account.model_dump_json())
            if part and (len(part) == ACCOUNTS_PER_MESSAGE_MAX or size + length > PART_BYTES_MAX):
                yield part
                part, size = [], 0
            part.append(account)
            size += length
        if part:
            yield part

    async def _take(self, answer: AccountsAnswer) -> None:
        for placement_id in answer.known:
            # It had no row for it, and has one again.
            if self.quarantine.things.get(placement_id) == UNRECORDED:
                await self.ledger.change(placement_id, lambda record: replace(record, quarantined=False))
                self.quarantine.clear(placement_id)
            # What was heard before there was a row for it is on no record.
            self.ledger.say_again(placement_id)
        for placement_id in answer.unknown:
            record = self.ledger.get(placement_id)
            if record is not None and not record.absent and not record.quarantined:
                await self.ledger.change(placement_id, lambda now: replace(now, quarantined=True))
                self.quarantine.add(placement_id, UNRECORDED)


def account_of(record: Record, *, boot: float) -> Account:
    """What control is told of a placement. Pure. *Units*: CLOCK_BOOTTIME seconds."""
    blueprint = record.blueprint
    moment = record.moment if record.observed is Observed.SAVED else None
    return Account(
        placement_id=record.placement_id,
        sandbox_id=record.sandbox_id,
        team_id=record.team_id,
        generation=record.generation,
        kind=record.desired,
        desired_revision=record.desired_revision,
        spec=blueprint.spec if blueprint else None,
        nonce=blueprint.nonce if blueprint else None,
        ready=record.ready and not is_claimed(record),
        observed=record.observed,
        save_mode=record.save_mode if record.observed is Observed.SAVED else None,
        moment=moment.digest if moment is not None else None,
        moment_size=moment.size if moment is not None else 0,
        moment_kind=moment.kind if moment is not None else "",
        address=record.address,
        end_revision=record.end.revision if record.end else 0,
        remaining_s=max(0.0, record.end.at_boot - boot) if record.end else None,
    )
