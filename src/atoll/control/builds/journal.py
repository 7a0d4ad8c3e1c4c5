"""A build's log on its way to the store: lines are gathered for a moment and written together, up to a limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from atoll.base.clock import Clock
from atoll.domain.building import Line
from atoll.store import builds as stored
from atoll.store.engine import Store

GATHER_S: Final = 0.1
LINE_CHARACTERS_MAX: Final = 4096
LINES_MAX: Final = 20_000
CHARACTERS_MAX: Final = 4 << 20


class Journal:
    """Of one run of one build; use it as a context, whose end writes what is left. `hidden`: texts that are never written."""

    def __init__(self, store: Store, clock: Clock, build_id: str, *, hidden: Sequence[str] = ()) -> None:
        self._store = store
        self._clock = clock
        self._build_id = build_id
        self._hidden = hidden
        self._waiting: list[Line] = []
        self._lines = self._characters = 0
        self._full = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.step = "base"
        """What was begun last: it stands beside every line that says nothing else."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"log of build {self._build_id}")
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.shield(self.flush())

    def say(self, message: str, *, level: str = "info", step: str | None = None) -> None:
        """Add lines; beyond the limit only what is no mere output."""
        for text in message.splitlines() or [""]:
            self._add(level, text.replace("\0", "\ufffd"), step or self.step)
        self._wake.set()

    def told(self, level: str, line: str, *, step: str | None = None) -> None:
        """A line of a command's output."""
        if self._full:
            return
        self._lines += 1
        self._characters += len(line)
        if self._lines > LINES_MAX or self._characters > CHARACTERS_MAX:
            self._full = True
            self.say("the log is full: what commands write is left out from here on", level="warn", step=step)
            return
        self.say(line, level=level, step=step)

    def _add(self, level: str, text: str, step: str) -> None:
        for secret in self._hidden:
            text = text.replace(secret, "***")
        self._waiting.append(Line(self._clock.now(), level, text[:LINE_CHARACTERS_MAX], step))

    async def flush(self) -> None:
        """Write what waits."""
        lines, self._waiting = self._waiting, []
        if lines:
            await self._store.write(lambda conn: stored.say(conn, self._build_id, lines))

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(GATHER_S)
            await asyncio.shield(self.flush())


@dataclass(slots=True)
class Page:
    """The log of one stage, beside others that are under way."""

    journal: Journal
    stage: str = ""
    """Its name; empty: the one that becomes the template."""
    step: str = ""

    def begin(self, step: str) -> None:
        """What is under way from here on."""
        self.step = self.journal.step = f"{self.stage}:{step}" if self.stage else step

    def say(self, message: str, *, level: str = "info") -> None:
        """See Journal."""
        self.journal.say(message, level=level, step=self.step)

    def told(self, level: str, line: str) -> None:
        """See Journal."""
        self.journal.told(level, line, step=self.step)
