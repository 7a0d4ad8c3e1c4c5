"""A program that makes one placement and removes it, and is killed between two given steps: what it leaves is the test's subject.

`python -m atoll.testing.conformance.killed FILE`: FILE is a pickled Script. It prints each step's name before it goes on.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Mark, Order
from atoll.testing.conformance.oci_stand import OciStand


@dataclass(frozen=True, slots=True)
class Script:
    """What to do, and before which step (counted from 0) to be gone; None: never."""

    kind: RuntimeKind
    home: Path
    binaries: Path
    cache: Path
    identity: tuple[Mark, int]
    order: Order
    die_at: int | None


async def run(script: Script) -> None:
    """Prepare, start, remove."""
    passed = 0

    def on_step(name: str) -> None:
        nonlocal passed
        print(name, flush=True)  # noqa: T201 - the parent reads it
        if passed == script.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    stand = OciStand(script.kind, script.home, binaries=script.binaries, cache=script.cache, identity=script.identity, on_step=on_step)
    await stand.open()
    await stand.driver.prepare(script.order)
    await stand.driver.start(script.order)
    await stand.driver.remove(script.order.placement_id)
    await stand.driver.close()


if __name__ == "__main__":
    asyncio.run(run(pickle.loads(Path(sys.argv[1]).read_bytes())))  # noqa: S301 - written by the test beside it
