"""What a part of the benchmark gives: a table, notes, verdicts. Plain values, so that a report can be written from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.stats import Sample


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, and whether this run reached it. Both figures in `unit`."""

    target: str
    measured: str
    allowed: str
    reached: bool


@dataclass(slots=True)
class Finding:
    """One table of the report."""

    name: str
    title: str
    columns: Sequence[str]
    about: str = ""
    """A sentence or two before the table: what was measured, and how."""
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Raw values by row, for whoever reads the JSON. *Units*: as the title says; times in seconds."""

    def keep(self, label: str, sample: Sample) -> None:
        """Raw values of a row."""
        self.samples[label] = list(sample.values)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Finding:
        """The finding that `as_json` gave."""
        values = dict(content)
        values["verdicts"] = [Verdict(**verdict) for verdict in values.get("verdicts", [])]
        return cls(**values)
