"""Samples and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

MILLI: Final = 1000.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, between neighbours by proportion. *Errors*: ValueError for none, or a share outside 0..1."""
    if not values or not 0.0 <= share <= 1.0:
        raise ValueError(f"no quantile {share} of {len(values)} values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(slots=True)
class Sample:
    """Values of one quantity. Times are kept in seconds and shown in milliseconds."""

    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values.append(value)

    def extend(self, values: Iterable[float]) -> None:
        self.values.extend(values)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        return quantile(self.values, 0.5)

    @property
    def p95(self) -> float:
        return quantile(self.values, 0.95)

    @property
    def p99(self) -> float:
        return quantile(self.values, 0.99)

    def cells(self, *, scale: float = MILLI) -> list[str]:
        """Median, p95, p99 and count, as a table shows them; dashes when there are no values."""
        if not self.values:
            return ["–", "–", "–", "0"]
        return [*(figure(value * scale) for value in (self.median, self.p95, self.p99)), str(len(self))]


def figure(value: float) -> str:
    """Three significant digits, no exponent: 0.123, 1.23, 12.3, 123, 1234."""
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def difference(ours: Sample, bare: Sample) -> float:
    """How much larger our median is."""
    return ours.median - bare.median


def paired(ours: Sequence[float], bare: Sequence[float]) -> float:
    """The median of differences taken pair by pair: what was measured at the same time is compared with each other."""
    return quantile([a - b for a, b in zip(ours, bare, strict=True)], 0.5)


def ratio(ours: Sequence[float], bare: Sequence[float]) -> float:
    """The median of quotients taken pair by pair."""
    return quantile([a / b for a, b in zip(ours, bare, strict=True)], 0.5)
