"""Counts of tests, in the words that every runner's last line uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """How many tests ended how. A check without tests of its own (a linter) counts as nothing when it passes and one when it fails."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    names: tuple[str, ...] = ()
    """What failed, to be shown again at the end of a long run."""
    unsteady: tuple[str, ...] = ()
    """What failed beside others and passed when it was run again alone: counted as passed, and named at the end."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.names + other.names,
            self.unsteady + other.unsteady,
        )

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
