"""Handles: what a control process has of the simulated store, alone or as one of several.

Theory of operation. A handle behaves as a client of its database does: a transaction takes a moment, may be run again because it lost a
race (its first run is rolled back), may find no database, and may be committed without its caller hearing of it. Of several processes
each tells the others what it has changed, right after the commit, over a connection that can break; whoever hears nothing for a while
takes everything for changed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from atoll.base.errors import Code, OutcomeUnknown, Unavailable
from atoll.store import hints
from atoll.store.engine import Doubt, Stale, Tell, Work, telling
from atoll.store.hints import EVERYTHING, NOTHING, Collected, Hints, Told
from atoll.testing.sim.interleaving import Blocked, Late
from atoll.testing.sim.process import Process
from atoll.testing.sim.store import Database

T = TypeVar("T")

_TRIES: Final = 12
_PAUSED_READS: Final = 0.1
_PAUSED_WRITES: Final = 0.5
"""Shares of a late transaction's statements before which it stands still."""
_SHORT: Final = 0.9
_PAUSE_S: Final = 0.02
_LONG_PAUSE_S: Final = 2.0


class _Lost(Exception):
    """Somebody else was quicker: nothing of the transaction is kept."""


class Handle:
    """Implements store.engine.Store for one process that has the database for itself."""

    def __init__(self, database: Database, process: Process, dice: random.Random) -> None:
        self._database = database
        self._process = process
        self._dice = dice

    async def write(self, work: Work[T], *, tell: Tell[T] | None = None, doubt: Doubt | None = None) -> T:
        """As Store.write. Whoever is cancelled does not undo what has been given to the store."""
        writing = asyncio.ensure_future(telling(lambda: self._write(work), tell, doubt))
        writing.add_done_callback(_heard)
        return await asyncio.shield(writing)

    async def _write(self, work: Work[T]) -> T:
        weather = self._database.weather
        await asyncio.sleep(self._dice.random() * (0.002 + weather.slow_s))
        result = await self._kept(work)
        if self._dice.random() < weather.forgets:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the connection broke during the commit")
        await asyncio.sleep(self._dice.random() * 0.001)
        return result

    async def _kept(self, work: Work[T]) -> T:
        """Run it until it is committed."""
        attempt = 0
        while True:
            self._process.check()
            if self._database.weather.down:
                raise Unavailable(Code.STORE_UNAVAILABLE, "the simulated database is down")
            try:
                return await self._attempt(work)
            except Blocked as blocked:
                # A database waits here, within the statement.
                await blocked.by.over.wait()
            except (Stale, _Lost):
                attempt += 1
                if attempt == _TRIES:
                    raise Unavailable(Code.STORE_UNAVAILABLE, "the same rows were changed by others each time") from None
                await asyncio.sleep(0.002 * attempt * (1 + self._dice.random()))

    async def _attempt(self, work: Work[T]) -> T:
        """*Errors*: _Lost, Blocked, Stale when nothing was kept because others were quicker."""
        if self._dice.random() < self._database.weather.races:
            self._database.lose(work)
            raise _Lost
        return self._database.commit(work)

    async def read(self, work: Work[T]) -> T:
        """As Store.read."""
        self._process.check()
        if self._database.weather.down:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the simulated database is down")
        return work(self._database.conn)

    async def wall(self) -> float | None:
        """As Store.wall."""
        return None

    def require_room(self) -> None:
        """Memory has room."""

    async def close(self) -> None:
        """Nothing: the next control finds everything as it was."""


@dataclass(slots=True)
class Ear:
    """One replica's connection on which it hears the others; it outlives the process that uses it."""

    cut: bool = False
    broken: asyncio.Event = field(default_factory=asyncio.Event)

    def cut_off(self) -> None:
        """What is told from now on is not heard."""
        self.cut = True
        self.broken.set()


class SharedHandle(Handle):
    """Implements also store.hints.Shared: one of several processes on one database, as store.postgres.PostgresStore is."""

    def __init__(self, database: Database, process: Process, dice: random.Random, ear: Ear | None = None) -> None:
        super().__init__(database, process, dice)
        self._ear = ear if ear is not None else Ear()
        self._sender = dice.randbytes(8).hex()
        self._waiting = NOTHING
        self._something = asyncio.Event()
        self.begun = False
        """Its process has begun: what it does before that it does alone, under an advisory lock that SQLite has not."""

    async def _attempt(self, work: Work[T]) -> T:
        weather = self._database.weather
        noted = Collected()
        if self._dice.random() < weather.races:
            self._database.lose(work)
            raise _Lost
        if self.begun and self._dice.random() < weather.late:
            result = await self._database.commit_late(work, Late(self._process, self._pause_s, noted=noted))
        else:
            result = self._database.commit(work, noted)
        self.tell(noted.hints())
        return result

    def _pause_s(self, writes: bool) -> float:  # noqa: FBT001 - interleaving.Late wants it so
        """Often a moment before a write, now and then one before a read, rarely long enough for many others."""
        if self._dice.random() > (_PAUSED_WRITES if writes else _PAUSED_READS):
            return 0.0
        return self._dice.random() * (_PAUSE_S if self._dice.random() < _SHORT else _LONG_PAUSE_S)

    async def read(self, work: Work[T]) -> T:
        """As Store.read; each statement sees what is true when it runs."""
        await asyncio.sleep(self._dice.random() * (0.001 + self._database.weather.slow_s))
        self._process.check()
        if self._database.weather.down:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the simulated database is down")
        if not self.begun or self._dice.random() >= self._database.weather.late:
            return work(self._database.conn)
        return await self._database.read_late(work, Late(self._process, self._pause_s))

    async def wall(self) -> float | None:
        """As Store.wall."""
        await asyncio.sleep(self._dice.random() * self._database.weather.slow_s)
        self._process.check()
        if self._database.weather.down:
            raise Unavailable(Code.STORE_UNAVAILABLE, "the simulated database is down")
        return self._database.wall()

    async def follow(self, told: Told) -> None:
        """As Shared.follow; what store.postgres_hints.Line does."""
        while True:
            if not (self._ear.cut or self._database.weather.down):
                self._ear.broken.clear()
                ends = self._database.listen(self._ear, self._hearing(told))
                told(EVERYTHING)
                speaking = asyncio.ensure_future(self._speak())
                try:
                    await self._ear.broken.wait()
                finally:
                    ends()
                    speaking.cancel()
                # What others have told meanwhile was not heard, and what was being told here may not have been.
                self._waiting = EVERYTHING
                self._something.set()
            await asyncio.sleep(0.1 + self._dice.random())

    def _hearing(self, told: Told) -> Callable[[str], None]:
        def heard(message: str) -> None:
            sender, what = hints.read(message)
            if sender != self._sender and self._process.alive:
                told(what)

        return heard

    async def _speak(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            await asyncio.sleep(self._dice.random() * (0.002 + self._database.weather.slow_s))
            self._process.check()
            what, self._waiting = self._waiting, NOTHING
            if what:
                self._database.notify(hints.write(self._sender, what))

    def tell(self, hints: Hints) -> None:
        """As Shared.tell."""
        if hints:
            self._waiting = self._waiting | hints
            self._something.set()


def _heard(writing: asyncio.Future[Any]) -> None:
    """Whoever waited may have gone, and an error that nobody takes would be reported."""
    if not writing.cancelled():
        writing.exception()
