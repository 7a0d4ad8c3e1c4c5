"""A socket of a running program for root's commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from atoll.telemetry import events
from atoll.telemetry.log import get_logger

log = get_logger()

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(path: Path, answer: Answer, *, check: str) -> AsyncIterator[None]:
    """Answer each connection while inside. A program that cannot listen works all the same, and says so under `check`."""
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        server = await asyncio.start_unix_server(answer, str(path))
    except OSError as error:
        log.warning(events.CHECK_FAILED, check=check, detail=f"{path}: {error}")
        server = None
    finally:
        os.umask(before)
    try:
        yield
    finally:
        if server is not None:
            server.close()
            path.unlink(missing_ok=True)
