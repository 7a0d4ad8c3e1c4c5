"""Alerts: every few seconds what is wrong is worked out anew from what is on record, and the rows are made to say the same.

Theory of operation. `planning/alerting.py` decides; this reads and writes. Raising and clearing follow from one comparison, so that no
alert can be forgotten: one whose cause is gone is cleared by the next look, whoever raised it, also after a restart. What one process
knows of itself alone (how its store does) is its own to clear; when it has not said so for a while, any other may.
Nothing is written while nothing changes. A look costs one query over the few sandboxes that are not at rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.base.ids import Dice, Prefix, new_id
from atoll.control.hosts.directory import Directory
from atoll.control.metering import Meter
from atoll.control.replicas.hub import Hub
from atoll.domain import history
from atoll.domain.host import Admin, Health, health
from atoll.domain.operations import Alert, Raised
from atoll.planning.alerting import REFUSED_S, HostFacts, RefusedImage, StoreFacts, Troubled, WarmShort, wrong
from atoll.store import operations, warmth
from atoll.store.engine import Store
from atoll.store.operations import AlertRow, Told
from atoll.telemetry import events as names
from atoll.telemetry import metrics as m
from atoll.telemetry.log import get_logger

LOG = get_logger()

PAUSE_S: Final = 5.0
CONFIRM_S: Final = 60.0
"""How often open alerts are written again although nothing has changed, so that others see that somebody still looks."""
OWN: Final = frozenset({Alert.STORE_SLOW, Alert.STORE_FULL})
"""What only the process knows that has met it."""


@dataclass(slots=True, kw_only=True)
class Alerts:
    """The loop, and what it has written last."""

    store: Store
    clock: Clock
    dice: Dice
    hub: Hub
    directory: Directory
    meter: Meter
    process: str
    """This process's name in alerts about itself."""
    unkept: list[Raised] = field(default_factory=list)
    """What is wrong and could not be written, because the store does not take it."""
    _kept: list[Raised] | None = None
    _confirmed_at: float = 0.0

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(PAUSE_S)
            try:
                await self.step()
            except AtollError as error:
                LOG.warning(names.ALERTS_NOT_KEPT, code=error.code, error=error.message)

    async def step(self) -> None:
        """One look. *Errors*: Unavailable of the store; what is wrong is in `unkept` then."""
        now = self.clock.now()
        hosts = [HostFacts(advert.host, advert.used.slots) for advert in self.directory.adverts()]
        unheard = [one.host.id for one in hosts if one.held and _unheard(one, now=now)]
        store = self._store_facts()
        self.unkept = wrong(hosts, (), store, now=now)

        def look(conn: sa.Connection) -> tuple[Sequence[Troubled], Sequence[RefusedImage], Sequence[WarmShort]]:
            refused = operations.refused_images(conn, since=now - REFUSED_S)
            return [*operations.troubled(conn), *operations.blocked(conn, unheard)], refused, warmth.short(conn)

        sandboxes, refused, short = await self.store.read(look)
        self.unkept = found = wrong(hosts, sandboxes, store, now=now, refused=refused, short=short)
        if found == self._kept and self.clock.boot() - self._confirmed_at < CONFIRM_S:
            self.unkept = []
            return
        raised, cleared = await self.store.write(lambda conn: self._keep(conn, found, now=now))
        self.unkept, self._kept, self._confirmed_at = [], found, self.clock.boot()
        self._tell(raised, cleared)

    def _store_facts(self) -> StoreFacts:
        facts = self.meter.store_facts(self.process)
        try:
            self.store.require_room()
        except AtollError as error:
            return replace(facts, refused=error.code)
        return facts

    def _keep(self, conn: sa.Connection, found: Sequence[Raised], *, now: float) -> tuple[list[AlertRow], list[AlertRow]]:
        def others(row: AlertRow) -> bool:
            return row.kind in OWN and row.subject != self.process and now - row.seen_at < 2 * CONFIRM_S

        raised, cleared = operations.keep_alerts(conn, found, now=now, ids=lambda: new_id(Prefix.ALERT, self.dice), spare=others)
        for kind, rows in ((history.ALERT_RAISED, raised), (history.ALERT_CLEARED, cleared)):
            for row in rows:
                host_id = row.subject if row.subject.startswith(Prefix.HOST) else None
                data = {"alert_id": row.id, "kind": row.kind, "subject": row.subject, "detail": row.detail}
                told = Told(kind, row.severity, host_id=host_id, data=data)
                operations.record(conn, told, event_id=new_id(Prefix.EVENT, self.dice), at=now)
        return raised, cleared

    def _tell(self, raised: Sequence[AlertRow], cleared: Sequence[AlertRow]) -> None:
        for row in raised:
            self.meter.metrics.count(m.ALERTS_RAISED, row.kind)
            LOG.warning(names.ALERT_RAISED, kind=row.kind, what=row.subject, detail=row.detail)
        for row in cleared:
            LOG.info(names.ALERT_CLEARED, kind=row.kind, what=row.subject)
        if raised or cleared:
            self.hub.news()


def _unheard(one: HostFacts, *, now: float) -> bool:
    return one.host.admin is Admin.DISABLED or health(one.host, now=now) is Health.LOST
