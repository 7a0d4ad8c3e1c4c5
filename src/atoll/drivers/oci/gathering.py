"""Steps side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def both(*work: Awaitable[None]) -> None:
    """Do them side by side; the first failure is raised when all have ended."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if outcome is not None:
            raise outcome
