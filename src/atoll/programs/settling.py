"""What a process that runs for long does once, when it has started."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from typing import Final

SWITCH_S: Final = 0.0005
"""How long a thread that wants to run may wait for one that computes. Python's 5 ms is much where a commit takes 0.2 ms in its own thread
and a request waits for it."""


def settle_down() -> None:
    """Keep the collector away from what will stay for ever, give back what only the start needed, and let threads take turns sooner."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    sys.setswitchinterval(SWITCH_S)
