"""Stepping: what a loop does that looks at deadlines of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from atoll.base.errors import AtollError
from atoll.telemetry.log import get_logger

LOG = get_logger()

_AGAIN_S: Final = 1.0
"""After a step that failed."""


async def keep_stepping(step: Callable[[], Awaitable[float]], due: asyncio.Event, *, event: str) -> None:
    """Take a step now, whenever `due` is set, and after the seconds that the last one has answered, until cancelled.

    One that fails is logged as `event`, and taken again soon.
    """
    while True:
        due.clear()
        pause_s = _AGAIN_S
        try:
            pause_s = await step()
        except AtollError as error:
            LOG.warning(event, code=error.code, error=error.message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await due.wait()
