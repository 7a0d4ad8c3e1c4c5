"""Children: small programs that the agent keeps running beside itself, such as the slots' DNS forwarder.

A child that ends is started again with backoff. It dies with the agent, however that ends (`setpriv --pdeathsig`), so that the next
run finds its address free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from atoll.agent.backoff import Backoff
from atoll.base.clock import Clock
from atoll.base.ids import Dice
from atoll.telemetry import events
from atoll.telemetry.log import get_logger

log = get_logger()

STABLE_S = 10.0
"""A child that ran this long has recovered."""
IF_ITS_PARENT_LIVES: Final = '[ "$PPID" = "$0" ] && exec "$@"'


@runtime_checkable
class HasGateway(Protocol):
    """A driver whose slots have a gateway address that should answer DNS."""

    @property
    def gateway_address(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Child:
    """A program to keep running."""

    name: str
    command: tuple[str, ...]


async def supervise(child: Child, *, clock: Clock, dice: Dice) -> None:
    """Keep the child running until cancelled; then end it."""
    backoff = Backoff(dice, first_s=0.1, most_s=10.0)
    while True:
        began = clock.boot()
        try:
            code = await _run_once(child)
            log.warning(events.CHILD_ENDED, name=child.name, exit_code=code)
        except OSError as error:
            log.warning(events.CHILD_ENDED, name=child.name, message=f"cannot start: {error.strerror}")
        if clock.boot() - began >= STABLE_S:
            backoff.reset()
        await asyncio.sleep(backoff.next_s())


async def _run_once(child: Child) -> int:
    process = await asyncio.create_subprocess_exec(*_bound(child.command), stdin=asyncio.subprocess.DEVNULL)
    log.info(events.CHILD_STARTED, name=child.name, pid=process.pid)
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(2.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def _bound(command: Sequence[str]) -> list[str]:
    """The command, bound to die with this process.

    The kernel is asked for that by the child, and a parent that died just before is not noticed: so it looks once, afterwards.
    """
    setpriv = shutil.which("setpriv")
    return (
        [setpriv, "--pdeathsig", "KILL", "--", "/bin/sh", "-c", IF_ITS_PARENT_LIVES, str(os.getpid()), *command]
        if setpriv
        else list(command)
    )
