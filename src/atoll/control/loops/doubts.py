"""Doubts: commits whose outcome this process has not heard, looked up so that routes, waiting requests and parked polls follow all the same.

A connection that breaks during a commit, and a caller that goes away meanwhile, leave a change that may be on disk while nobody was told. Its
row is read after whatever still writes it, and published like a commit of one's own; read for nothing, it changes nothing.
"""

from __future__ import annotations

import asyncio
from typing import Final

from atoll.base.errors import AtollError
from atoll.control.loops.reconcile import Reconciler
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

_PAUSE_S: Final = 0.2
"""Before a look: one for all doubts of a moment."""
_AGAIN_S: Final = 1.0


async def run(reconciler: Reconciler) -> None:
    """Runs until it is cancelled."""
    while True:
        await reconciler.doubts.wait()
        await asyncio.sleep(_PAUSE_S)
        reconciler.doubts.clear()
        for sandbox_id in sorted(reconciler.doubtful):
            try:
                await reconciler.look_again(sandbox_id)
            except AtollError as error:
                LOG.warning(names.HINTS_LOST, code=error.code, error=error.message, sandbox_id=sandbox_id)
                await asyncio.sleep(_AGAIN_S)
