"""Retention: what has been kept for long enough is forgotten in small steps, and nothing is looked at before the oldest of it is due."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.store import operations, sandboxes, snapshots
from atoll.store.engine import Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

PAUSE_S_MAX: Final = 3600.0
"""A clock that was set is noticed by then."""
PAUSE_S_MIN: Final = 5.0
"""What ends one after another is forgotten together."""
_BUSY_S: Final = 0.1
"""Between steps while there is more to forget: requests come first."""
_AFTER_ERROR_S: Final = 30.0


TOKENS_KEPT_S: Final = 24 * 3600.0
"""So long a host that enrolled may repeat itself, and an operator find out what a token was used for."""


@dataclass(frozen=True, slots=True)
class Kept:
    """How long. *Units*: seconds."""

    records_s: float
    """Sandboxes that have ended, with their events, and snapshots, from their end."""
    audit_s: float
    alerts_s: float
    """From when they were cleared."""
    events_s: float
    """Of hosts and alerts; also what is known of agents' earlier runs."""
    tokens_s: float = TOKENS_KEPT_S
    """From when they expired."""


async def run(store: Store, clock: Clock, kept: Kept) -> None:
    """Runs until it is cancelled."""
    while True:
        pause_s = _AFTER_ERROR_S
        try:
            pause_s = await step(store, clock, kept)
        except AtollError as error:
            LOG.warning(names.RETENTION_FAILED, code=error.code, error=error.message)
        await asyncio.sleep(pause_s)


async def step(store: Store, clock: Clock, kept: Kept) -> float:
    """Forget some of what is due. *Units*: seconds until the next step."""
    now = clock.now()

    def forget(conn: sa.Connection) -> int:
        gone = sandboxes.prune(conn, released_before=now - kept.records_s) + snapshots.prune(conn, ended_before=now - kept.records_s)
        return gone + operations.prune(
            conn,
            audit_before=now - kept.audit_s,
            alerts_before=now - kept.alerts_s,
            events_before=now - kept.events_s,
            tokens_before=now - kept.tokens_s,
        )

    due_at = await store.read(lambda conn: next_due(conn, kept))
    if due_at is not None and due_at <= now and (await store.write(forget)) > 0:
        return _BUSY_S
    # What is not there yet is due a whole retention time from now, at the soonest.
    longest = min(PAUSE_S_MAX, kept.records_s, kept.audit_s, kept.alerts_s, kept.events_s, kept.tokens_s)
    return max(PAUSE_S_MIN, longest if due_at is None else min(longest, due_at - now))


def next_due(conn: sa.Connection, kept: Kept) -> float | None:
    """When the oldest of it all may be forgotten; None when there is nothing. *Units*: wall seconds."""
    old = operations.oldest(conn)
    ages = (
        (sandboxes.oldest_ended(conn), kept.records_s),
        (snapshots.oldest_ended(conn), kept.records_s),
        (old.entry, kept.audit_s),
        (old.cleared, kept.alerts_s),
        (old.event, kept.events_s),
        (old.epoch, kept.events_s),
        (old.token, kept.tokens_s),
    )
    return min((at + kept_s for at, kept_s in ages if at is not None), default=None)
