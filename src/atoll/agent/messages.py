"""Messages: what goes into one poll, within the limits of the protocol. Pure.

Theory of operation. Observations come first, because control waits for them; then tombstones, which are repeated with every poll, and what
is held (`telling.py`): when they don't all fit, each poll carries the next part of them. Leaving one out says nothing: control takes
nothing for absent because it was not mentioned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

OVERHEAD_BYTES: Final = 24
"""Quotes, colon, comma and digits around an id."""


@dataclass(slots=True)
class Window:
    """Where the next part begins."""

    offset: int = 0


def part_of(items: Sequence[str], window: Window, *, bytes_max: int) -> tuple[list[str], int]:
    """The next items that fit, and how many bytes they take; all of them, in order, when they fit together."""
    if not items:
        return [], 0
    total = sum(len(item) + OVERHEAD_BYTES for item in items)
    if total <= bytes_max:
        window.offset = 0
        return list(items), total
    begin = window.offset % len(items)
    turned = [*items[begin:], *items[:begin]]
    taken: list[str] = []
    size = 0
    for item in turned:
        if size + len(item) + OVERHEAD_BYTES > bytes_max:
            break
        size += len(item) + OVERHEAD_BYTES
        taken.append(item)
    window.offset = (begin + len(taken)) % len(items)
    return taken, size
