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
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.domain.spec import SaveMode
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Mark, Order
from atoll.testing.conformance.firecracker_stand import FirecrackerStand
from atoll.testing.conformance.oci_stand import OciStand
from atoll.testing.conformance.qemu_stand import QemuStand
from atoll.testing.conformance.stand import shell

_STANDS: Final[dict[RuntimeKind, type[OciStand]]] = {
    RuntimeKind.QEMU: QemuStand,
    RuntimeKind.QEMU_EMULATED: QemuStand,
    RuntimeKind.FIRECRACKER: FirecrackerStand,
}
BEGUN = "BEGUN"
KEPT = "KEPT"
BEGUN_FROM = "BEGUN_FROM"
USED = "USED"
"""What is said between the steps of a life with a save in it."""


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
    saving: bytes | None = None
    """Save and restore between start and removal; the raw private key that speaks to the guest."""
    clone: Order | None = None
    """In place of a save: keep a moment, begin this from it, drop that. Its origin names the moment."""


async def run(script: Script) -> None:
    """Prepare, start, remove; or start, save, restore, use and remove."""
    passed = 0 if script.saving is None else -1000

    def on_step(name: str) -> None:
        nonlocal passed
        print(name, flush=True)  # noqa: T201 - the parent reads it
        if passed == script.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    made = _STANDS.get(script.kind, OciStand)
    stand = made(script.kind, script.home, binaries=script.binaries, cache=script.cache, identity=script.identity, on_step=on_step)
    await stand.open()
    await stand.driver.prepare(script.order)
    seen = await stand.driver.start(script.order)
    if script.saving is not None:
        stand.key = Ed25519PrivateKey.from_private_bytes(script.saving)
        guest = await stand.guest(script.order, seen)
        await shell(guest, "echo written >/kept")
        print(BEGUN, flush=True)  # noqa: T201 - the parent reads it
        passed = 0
        if script.clone is not None:
            await _keep(script, stand, script.clone)
            return
        await stand.driver.save(script.order, SaveMode.FULL)
        seen = await stand.driver.restore(script.order)
        await stand.driver.discard(script.order.placement_id)
        guest = await stand.guest(script.order, seen)
        await shell(guest, "echo used >/kept")
        print(USED, flush=True)  # noqa: T201 - the parent reads it
        await stand.driver.save(script.order, SaveMode.FULL)
    await stand.driver.remove(script.order.placement_id)
    await stand.driver.close()


async def _keep(script: Script, stand: OciStand, clone: Order) -> None:
    assert clone.spec.origin is not None
    kept = clone.spec.origin.snapshot_id
    await stand.driver.snapshot(script.order, kept, clone.spec.origin.mode)
    print(KEPT, flush=True)  # noqa: T201 - the parent reads it
    await stand.guest(clone, await stand.driver.start(clone))
    print(BEGUN_FROM, flush=True)  # noqa: T201 - the parent reads it
    await stand.driver.drop(kept)
    await stand.driver.remove(clone.placement_id)
    await stand.driver.remove(script.order.placement_id)
    await stand.driver.close()


if __name__ == "__main__":
    asyncio.run(run(pickle.loads(Path(sys.argv[1]).read_bytes())))  # noqa: S301 - written by the test beside it
