"""Hints over PostgreSQL: LISTEN on a connection of its own, NOTIFY on another, both mended when they break.

Theory of operation. A commit's hints are told right after it and not inside it: a transaction that notifies holds a lock of the whole
database through the flush of its commit, so that notifying commits follow each other one by one (PreCommit_Notify in PostgreSQL's
async.c; measured in docs/adr/0015). Here one small transaction, whose own commit waits for no disk, tells for all commits of the moment.
A process that dies between a commit and its hint leaves a wait as long as it would have been without hints, never a wrong answer.
Whatever could not be told, and whatever may not have been heard, becomes EVERYTHING.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import asyncpg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg

from atoll.base.ids import Dice
from atoll.store import hints
from atoll.store.hints import EVERYTHING, NOTHING, Hints, Told
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger

LOG = get_logger()

CHANNEL: Final = "atoll_hints"
_LOOK_S: Final = 10.0
"""Between two looks whether a connection that says nothing is alive; a machine that has gone says nothing either."""
_ANSWER_S: Final = 5.0
_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_WAITING_MAX: Final = 500
"""Ids that wait to be told; more are EVERYTHING."""


class Line:
    """One replica's ear and mouth. `run` must run for anything to be heard or told."""

    def __init__(self, url: str, *, dice: Dice) -> None:
        self._address = sa.make_url(url)
        self._sender = dice(8).hex()
        self._waiting = NOTHING
        self._something = asyncio.Event()
        self._failures = 0

    def tell(self, what: Hints) -> None:
        """Tell the others, soon."""
        waiting = self._waiting | what
        self._waiting = EVERYTHING if len(waiting) > _WAITING_MAX else waiting
        self._something.set()

    async def run(self, told: Told) -> None:
        """Listen and tell until cancelled. After each break, everybody is told EVERYTHING, here and elsewhere."""
        while True:
            try:
                await self._connected(told)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                if self._failures == 0:
                    LOG.warning(names.HINTS_LOST, error=type(error).__name__)
                # What others have told meanwhile was not heard, and what was being told here may not have been.
                self._waiting = EVERYTHING
            pause_s = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
            self._failures += 1
            await asyncio.sleep(pause_s)

    async def _connected(self, told: Told) -> None:
        async with contextlib.AsyncExitStack() as stack:
            ear, mouth = await self._connect(stack), await self._connect(stack)
            broken = asyncio.Event()
            ear.add_termination_listener(lambda _connection: broken.set())

            def heard(_connection: object, _pid: int, _channel: str, payload: object) -> None:
                sender, what = hints.read(str(payload))
                if sender != self._sender:
                    told(what)

            await ear.add_listener(CHANNEL, heard)
            await mouth.execute("SET synchronous_commit = off")
            if self._failures:
                LOG.info(names.HINTS_FOLLOWED)
            self._failures = 0
            told(EVERYTHING)
            tasks = [asyncio.ensure_future(self._speak(mouth)), asyncio.ensure_future(self._look_after(ear, broken))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        await task
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Any:
        _, options = PGDialect_asyncpg().create_connect_args(self._address)  # type: ignore[no-untyped-call]
        options.pop("prepared_statement_cache_size", None)
        async with asyncio.timeout(_ANSWER_S):
            connection = await asyncpg.connect(**options)
        stack.callback(connection.terminate)
        return connection

    async def _speak(self, mouth: Any) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            what, self._waiting = self._waiting, NOTHING
            if what:
                await mouth.execute("SELECT pg_notify($1, $2)", CHANNEL, hints.write(self._sender, what), timeout=_ANSWER_S)

    @staticmethod
    async def _look_after(ear: Any, broken: asyncio.Event) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await broken.wait()
                raise ConnectionError("the listening connection has ended")
            await ear.execute("SELECT 1", timeout=_ANSWER_S)
