"""How `up` and `down` show what they do: one line a step with its time, and on failure which step, why, and what to do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO, TypeVar

from atoll.base.errors import AtollError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Done:
    """A step that ended well."""

    name: str
    detail: str
    elapsed_ms: float


@dataclass(slots=True)
class Step:
    """The running step; `detail` is what its line says when it is done."""

    name: str
    detail: str = ""


@dataclass(slots=True)
class Steps:
    """Runs steps one after the other and prints a line for each. `quiet` prints nothing (for --json) but keeps the record."""

    stream: TextIO = field(default_factory=lambda: sys.stdout)
    quiet: bool = False
    done: list[Done] = field(default_factory=list)
    failed: str | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """One step. An error passes through with the step's name remembered in `failed`."""
        live = not self.quiet and self.stream.isatty()
        if live:
            self._print(f"  … {name}", end="")
        current, started = Step(name), time.monotonic()
        try:
            yield current
        except BaseException:
            self.failed = name
            if live:
                self._print("\r\033[K", end="")
            if not self.quiet:
                self._print(f"  ✗ {name}")
            raise
        elapsed_ms = (time.monotonic() - started) * 1000.0
        self.done.append(Done(name, current.detail, elapsed_ms))
        if live:
            self._print("\r\033[K", end="")
        if not self.quiet:
            self._print(f"  ✓ {name:<28} {duration(elapsed_ms):>8}  {current.detail}".rstrip())

    def say(self, text: str = "") -> None:
        """A line of its own."""
        if not self.quiet:
            self._print(text)

    def _print(self, text: str, end: str = "\n") -> None:
        try:
            print(text, end=end, file=self.stream, flush=True)
        except OSError:
            # Whoever read has gone (`up | head`), or the disk of the output is full. What was begun is finished all the same: half an `up`
            # is programs stopped and not started.
            self.quiet = True
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def duration(elapsed_ms: float) -> str:
    """A time for people."""
    return f"{elapsed_ms:.0f} ms" if elapsed_ms < 1000 else f"{elapsed_ms / 1000:.2f} s"


def wait_for(look: Callable[[], T | None], *, within_s: float, problem: Callable[[], AtollError], every_s: float = 0.05) -> T:
    """Call `look` until it gives something. *Errors*: what `problem()` makes, when time is up."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            raise problem()
        time.sleep(every_s)
