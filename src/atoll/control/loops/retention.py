"""Retention: records of ended sandboxes are kept for a time, then forgotten in small steps; so are tokens that have expired."""

from __future__ import annotations

import asyncio

from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.store import hosts, sandboxes
from atoll.store.engine import Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

_PAUSE_S = 300.0
TOKENS_KEPT_S = 24 * 3600.0
"""After they have expired: so long a host that enrolled may repeat itself, and an operator find out what a token was used for."""
_BUSY_S = 0.1
"""Between steps while there is more to forget: requests come first."""


async def run(store: Store, clock: Clock, *, keep_s: float) -> None:
    """Runs until it is cancelled. *Units*: seconds."""
    while True:
        pruned = 0
        try:
            pruned = await store.write(lambda conn: sandboxes.prune(conn, released_before=clock.now() - keep_s))
            if not pruned:
                await store.write(lambda conn: hosts.forget_enrollments(conn, expired_before=clock.now() - TOKENS_KEPT_S))
        except AtollError as error:
            LOG.warning(names.RETENTION_FAILED, code=error.code, error=error.message)
        await asyncio.sleep(_BUSY_S if pruned else _PAUSE_S)
