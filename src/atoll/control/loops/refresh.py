"""Refresh: what other replicas have decided and this one only remembers: the deployment document, and on a shared database the hosts.

A pass costs one small query where nothing is new. What is remembered is a hint or a policy: no capacity is granted by it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from atoll.base.errors import AtollError
from atoll.control.configuration import Configuration
from atoll.control.hosts.directory import Directory
from atoll.store.engine import Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

PAUSE_S: Final = 5.0


async def run(store: Store, *, configuration: Configuration, directory: Directory | None) -> None:
    """Runs until it is cancelled. `directory`: None where nobody else writes the hosts' rows."""
    while True:
        await asyncio.sleep(PAUSE_S)
        try:
            await configuration.follow()
            if directory is not None:
                await store.read(directory.load)
        except AtollError as error:
            LOG.warning(names.CONFIG_FOLLOWED, code=error.code, error=error.message)
