"""A build's log on a terminal: what several stages say at once, one step after the other.

Theory of operation. One step is shown as it speaks; what others say meanwhile is held back, each step's lines together, until the shown one
has ended or is silent. So no two steps' lines are mixed, and nobody waits for a step that says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

SILENT_S: Final = 1.0


@dataclass(slots=True)
class Pages:
    """Shows lines by `show`; `now` counts seconds."""

    show: Callable[[str], None]
    now: Callable[[], float]
    shown: str | None = None
    """The step that may speak."""
    spoke_at: float = 0.0
    held: dict[str, list[str]] = field(default_factory=dict)
    last: str | None = None
    """The step that has spoken last."""
    heads: dict[str, str] = field(default_factory=dict)
    """The first line of each step that was shown: said again where it goes on after another."""

    def take(self, entries: Sequence[tuple[str, str]]) -> None:
        """(step, line) of each new line, in order."""
        for step, line in entries:
            if self.shown is not None and step != self.shown and _stage(step) == _stage(self.shown):
                # The next step of its stage: it has ended, and whoever waited longest is shown first.
                self._next()
            if self.shown is None or step == self.shown:
                self._show(step, [line])
            else:
                self.held.setdefault(step, []).append(line)
        if self.held and self.now() - self.spoke_at >= SILENT_S:
            self._next()

    def end(self) -> None:
        """Show all that is held back."""
        while self.held:
            self._next()

    def _next(self) -> None:
        self.shown = next(iter(self.held), None)
        if self.shown is not None:
            self._show(self.shown, self.held.pop(self.shown))

    def _show(self, step: str, lines: Sequence[str]) -> None:
        if step not in self.heads:
            self.heads[step] = lines[0]
        elif self.last != step:
            self.show(f"{self.heads[step]} (goes on)")
        self.shown = self.last = step
        self.spoke_at = self.now()
        for line in lines:
            self.show(line)


def _stage(step: str) -> str:
    return step.rpartition(":")[0]
