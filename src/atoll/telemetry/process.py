"""What a process says of itself in its metrics: memory, CPU, and since when it runs."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.telemetry import metrics as m
from atoll.telemetry.metrics import Metrics


def look(metrics: Metrics, *, version: str) -> None:
    """Put the present values. What a machine does not tell is left out."""
    metrics.put(m.INFO, 1, version)
    times = os.times()
    metrics.total(m.CPU, times.user + times.system)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        booted_at = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, ValueError, IndexError, StopIteration):
        return
    metrics.put(m.MEMORY, pages * os.sysconf("SC_PAGE_SIZE"))
    metrics.put(m.START, booted_at + ticks / os.sysconf("SC_CLK_TCK"))
