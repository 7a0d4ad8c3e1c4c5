"""What is on record, for operators: implements control.operations.Operations."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.base.units import ZERO, Vector
from atoll.control.hosts.directory import Directory
from atoll.control.loops.alerts import Alerts
from atoll.control.metering import Meter
from atoll.control.operations import AlertQuery, AlertRecord, AuditQuery, AuditRecord, CollectedArtifacts, EventQuery
from atoll.control.replicas.hub import Hub
from atoll.control.routes import Routes
from atoll.control.service import Caller, EventRecord, Page
from atoll.domain.host import Admin, health
from atoll.domain.operations import Act, Action, Alert
from atoll.planning.admission import Bucket
from atoll.store import operations as stored
from atoll.store import tenancy
from atoll.store.engine import Store
from atoll.telemetry import metrics as m
from atoll.telemetry import process
from atoll.wire.agent import ImageCacheState

STREAMS_MAX: Final = 64
PING_S: Final = 10.0
"""A stream says at least this often that it lives, and looks whether another replica has written something."""
GATHER_S: Final = 0.05
"""Under load many events come at once: one look for all of them."""
PAGE: Final = 500
OVERLAP: Final = 256
"""On a shared database numbers are given before commits: one that is lower may become visible later. So many are looked at again."""
CENSUS_SHARE: Final = 100
"""A census takes at most this part of the time: after one of 2 ms the next comes 0.2 s later at the soonest."""
_REFUSALS_PER_S: Final = 5.0
_REFUSALS_AT_ONCE: Final = 50.0


@dataclass(slots=True, kw_only=True)
class Records:
    """One per control process. `shared`: other replicas write to the same database."""

    store: Store
    clock: Clock
    hub: Hub
    directory: Directory
    routes: Routes
    meter: Meter
    watching: Alerts
    version: str
    shared: bool
    images_kept: Callable[[], Awaitable[ImageCacheState]]
    """What all hosts keep of images, summed."""
    collecting: Callable[[bool], Awaitable[CollectedArtifacts]] | None = None
    """`await collecting(dry_run)`."""
    streams: int = 0
    _refusals: Bucket | None = None
    _counted: Sequence[tuple[str, str, int]] = ()
    _census_after: float = field(default=0.0)

    async def alerts(self, caller: Caller, query: AlertQuery) -> Page[AlertRecord]:
        """As Operations.alerts."""
        _operator(caller)
        before = _parse_cursor(query.cursor) if query.cursor else None

        def work(conn: sa.Connection) -> Sequence[stored.AlertRow]:
            return stored.alerts(conn, state=query.state, severity=query.severity, kind=query.kind, limit=query.limit, before=before)

        found = [_alert(row) for row in await self.store.read(work)]
        page, more = found[: query.limit], len(found) > query.limit
        if before is None and query.state != "cleared":
            page = [*self._unkept(query), *page]
        last = found[query.limit - 1] if more else None
        return Page(page, _cursor(last) if last is not None else None)

    def _unkept(self, query: AlertQuery) -> list[AlertRecord]:
        now = self.clock.now()
        return [
            AlertRecord(None, one.kind, one.subject, one.severity, one.detail, now, now, None)
            for one in self.watching.unkept
            if query.severity in (None, one.severity) and query.kind in (None, one.kind)
        ]

    async def audit(self, caller: Caller, query: AuditQuery) -> Sequence[AuditRecord]:
        """As Operations.audit."""
        _operator(caller)

        def work(conn: sa.Connection) -> Sequence[sa.RowMapping]:
            wanted = stored.AuditFilter(query.action, query.subject, _team(conn, query.team), query.client_id, query.result)
            return stored.audited(conn, wanted, after=query.after, limit=query.limit, newest=query.newest)

        return [AuditRecord(**row) for row in await self.store.read(work)]

    async def events(self, caller: Caller, query: EventQuery) -> Sequence[EventRecord]:
        """As Operations.events."""
        _operator(caller)
        return [EventRecord(**row) for row in await self.store.read(lambda conn: _events(conn, query))]

    def follow(self, caller: Caller, query: EventQuery) -> AsyncIterator[Sequence[EventRecord]]:
        """As Operations.follow."""
        _operator(caller)
        if self.streams >= STREAMS_MAX:
            raise Unavailable(Code.RATE_LIMITED, f"{STREAMS_MAX} streams of events are open", retry_after_s=10.0)
        return self._follow(caller, replace(query, limit=PAGE, newest=False))

    async def _follow(self, caller: Caller, query: EventQuery) -> AsyncIterator[Sequence[EventRecord]]:
        def look(conn: sa.Connection) -> tuple[bool, int, Sequence[sa.RowMapping]]:
            # The newest number first: whatever has a lower one and was wanted is among what is read then.
            return tenancy.lives(conn, caller.client.id), stored.last_seq(conn), _events(conn, asked)

        self.streams += 1
        after = query.after
        given: deque[int] = deque(maxlen=2 * OVERLAP)
        try:
            with self.hub.all_commits() as news:
                while True:
                    news.clear()
                    back = min(after - query.after, OVERLAP) if self.shared else 0
                    asked = replace(query, after=after - back, limit=PAGE + back)
                    lives, newest, found = await self.store.read(look)
                    if not lives:
                        return  # its key was revoked
                    fresh = [EventRecord(**row) for row in found if row["seq"] not in given]
                    given.extend(event.seq for event in fresh)
                    yield fresh
                    if len(found) >= asked.limit:
                        after = max(after, found[-1]["seq"])
                        continue
                    # Past what was not wanted, too: or the rarer what is wanted, the more each look would read.
                    after = max(after, newest)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(PING_S):
                            await news.wait()
                    await asyncio.sleep(GATHER_S)
        finally:
            self.streams -= 1

    async def did(self, act: Act) -> None:
        """As Operations.did."""
        await self.store.write(lambda conn: stored.audit(conn, act, at=self.clock.now()))

    async def refused(self, act: Act) -> None:
        """As Operations.refused."""
        boot = self.clock.boot()
        if self._refusals is None:
            self._refusals = Bucket(_REFUSALS_PER_S, _REFUSALS_AT_ONCE, _REFUSALS_AT_ONCE, boot)
        try:
            self._refusals.take(boot=boot)
            await self.store.write(lambda conn: stored.audit(conn, act, at=self.clock.now()))
        except AtollError:
            return  # the caller is told why it was refused, whatever becomes of our note

    async def metrics(self, caller: Caller) -> bytes:
        """As Operations.metrics."""
        _operator(caller)
        await self._look()
        return self.meter.metrics.page()

    async def collect(self, caller: Caller, *, dry_run: bool) -> CollectedArtifacts:
        """As Operations.collect."""
        _operator(caller)
        if self.collecting is None:
            raise Refused(Code.NOT_SUPPORTED, "this control process keeps no images")
        found = await self.collecting(dry_run)
        if not dry_run:
            done = Act(caller.actor(), Action.ARTIFACTS_COLLECT, "artifacts", data={"count": len(found.keys), "bytes": found.size})
            await self.did(done)
        return found

    async def _look(self) -> None:
        metrics, meter, now = self.meter.metrics, self.meter, self.clock.now()
        census, alerts, kept = await self._census(), await self.store.read(stored.open_alerts), await self.images_kept()
        # No await from here on: another look would find half of this one.
        metrics.clear(m.SANDBOXES, m.HOSTS, m.ALERTS)
        for state, class_name, count in census:
            metrics.put(m.SANDBOXES, count, state, class_name)
        capacity, used = ZERO, ZERO
        hosts: dict[tuple[str, str], int] = {}
        for advert in self.directory.adverts():
            key = (advert.host.admin.value, health(advert.host, now=now).value)
            hosts[key] = hosts.get(key, 0) + 1
            if advert.host.admin is not Admin.DISABLED:
                capacity, used = capacity + advert.host.capacity, used + advert.used
        for key, count in hosts.items():
            metrics.put(m.HOSTS, count, *key)
        for spec, vector in ((m.CAPACITY, capacity), (m.USED, used)):
            for name in Vector.__slots__:
                metrics.put(spec, getattr(vector, name), name)
        for alert in alerts:
            metrics.put(m.ALERTS, metrics.value(m.ALERTS, alert.severity) + 1, alert.severity)
        self._put_images(kept)
        metrics.put(m.EVENT_STREAMS, self.streams)
        lengths = {"store": meter.storing, "polls": meter.parked, "creates": meter.creating, "requests": meter.in_flight}
        for queue, length in {**lengths, "edges": self.routes.followers}.items():
            metrics.put(m.WAITING, length, queue)
        process.look(metrics, version=self.version)

    def _put_images(self, kept: ImageCacheState) -> None:
        put = self.meter.metrics.put
        for what in ("tree", "blob"):
            put(m.IMAGE_BYTES, getattr(kept, f"{what}_bytes"), f"{what}s")
        for what in ("trees", "blobs", "quarantined", "pinned"):
            put(m.IMAGE_ENTRIES, getattr(kept, what), what)
        for name, how in (("hits", "hit"), ("fetches", "fetched")):
            put(m.IMAGE_USES, getattr(kept, name), how)

    async def _census(self) -> Sequence[tuple[str, str, int]]:
        began = time.perf_counter()
        if began >= self._census_after:
            self._counted = await self.store.read(stored.census)
            ended = time.perf_counter()
            self._census_after = ended + CENSUS_SHARE * (ended - began)
        return self._counted


def _operator(caller: Caller) -> None:
    if not caller.operator:
        raise Refused(Code.FORBIDDEN, "only operators see the deployment's records")


def _events(conn: sa.Connection, query: EventQuery) -> Sequence[sa.RowMapping]:
    wanted = stored.EventFilter(query.type, query.sandbox_id, query.host_id, _team(conn, query.team), query.request_id)
    return stored.events(conn, wanted, after=query.after, limit=query.limit, newest=query.newest)


def _team(conn: sa.Connection, reference: str | None) -> str | None:
    """The id of the team of this name; what is no name of one is taken for an id."""
    if reference is None:
        return None
    known = tenancy.team_by_name(conn, reference)
    return known.id if known is not None else reference


def _alert(row: stored.AlertRow) -> AlertRecord:
    return AlertRecord(row.id, Alert(row.kind), row.subject, row.severity, row.detail, row.raised_at, row.seen_at, row.cleared_at)


def _cursor(last: AlertRecord) -> str:
    return base64.urlsafe_b64encode(f"{last.raised_at!r}|{last.id}".encode()).decode()


def _parse_cursor(cursor: str) -> tuple[float, str]:
    try:
        at, _, alert_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition("|")
        return float(at), alert_id
    except (ValueError, binascii.Error):
        raise Refused(Code.INVALID_REQUEST, "the cursor is not one of ours") from None
