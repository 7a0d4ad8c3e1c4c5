"""Deadlines: sleeps until the next one, then activates the sandboxes that are due. Idle sandboxes cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math

from atoll.base.clock import Clock
from atoll.base.errors import AtollError
from atoll.control.loops.reconcile import Reconciler
from atoll.store import sandboxes
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

_IDLE_S = 30.0
"""Longest sleep: other replicas may have set deadlines that this one has not heard of."""
_AFTER_ERROR_S = 1.0


async def run(reconciler: Reconciler, clock: Clock, *, stagger_s: float = 0.0) -> None:
    """Runs until it is cancelled. `stagger_s`: how much later than a deadline it looks, another value in each replica: all of them may act
    on one deadline, and the first to commit has done it, but there is no need for all to try in the same moment.
    """
    while True:
        pause_s = _AFTER_ERROR_S
        try:
            pause_s = await _pass(reconciler, clock, stagger_s)
        except AtollError as error:
            LOG.warning(names.SANDBOX_DEADLINE_MISSED, code=error.code, error=error.message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await reconciler.deadlines.wait()
        # Many deadlines move at once under load: one look for all of them.
        await asyncio.sleep(0.01)


async def _pass(reconciler: Reconciler, clock: Clock, stagger_s: float) -> float:
    reconciler.deadlines.clear()
    reconciler.next_look_at = math.inf
    now = clock.now()
    due = await reconciler.store.read(lambda conn: sandboxes.due(conn, now=now))
    for sandbox_id in due:
        await reconciler.settle(sandbox_id)
    coming = await reconciler.store.read(sandboxes.next_deadline)
    pause_s = _IDLE_S if coming is None else min(_IDLE_S, max(0.02, coming + stagger_s - clock.now()))
    reconciler.next_look_at = clock.now() + pause_s
    return pause_s
