"""The self-check that boots: a real guest in an empty root, within a slot of its own, until it answers.

Its order is like any other; the record tells it apart, so that what a killed check leaves is removed and nobody takes it for a sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final

from atoll.base.errors import AtollError
from atoll.base.ids import Dice, Prefix, new_id
from atoll.domain.spec import Isolation, NetworkSpec, Spec
from atoll.drivers.oci import record as records
from atoll.drivers.oci.config import OciConfig, RuntimeKind
from atoll.drivers.port import Order, Probe, Seen
from atoll.wire.guest import GUEST_PORT

SANDBOX_ID: Final = "self-check"
BOOT_S: Final = 3.0
FIX: Final = "read the detail; `make up` builds the runtime anew, and the kernel must allow namespaces and seccomp"
_ISOLATION: Final = {
    RuntimeKind.RUNSC: Isolation.GVISOR,
    RuntimeKind.CRUN: Isolation.SHARED_KERNEL,
    RuntimeKind.QEMU: Isolation.VM,
    RuntimeKind.QEMU_EMULATED: Isolation.VM_EMULATED,
    RuntimeKind.FIRECRACKER: Isolation.VM,
}
_MACHINES: Final = frozenset({Isolation.VM, Isolation.VM_EMULATED})
_LOOK_EVERY_S: Final = 0.005
_REQUEST: Final = b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n"


def order(kind: RuntimeKind, dice: Dice) -> Order:
    """A small guest without network egress; nobody has the key that its public one belongs to."""
    spec = Spec(
        class_name=SANDBOX_ID,
        template_id="",
        image="",
        image_name="",
        isolation=_ISOLATION[kind],
        cpu_millis=2000,
        memory_mib=256 if _ISOLATION[kind] in _MACHINES else 128,
        disk_mib=64,
        pids_max=64,
        timeout_s=60,
        network=NetworkSpec(internet=False),
    )
    key = base64.b64encode(dice(32)).decode()
    return Order(new_id(Prefix.PLACEMENT, dice), SANDBOX_ID, 1, spec, dice(16).hex(), key, SANDBOX_ID)


def left(config: OciConfig) -> list[str]:
    """Placements that a self-check of an earlier run of this host and kind has left."""
    found = [(path.name, records.read(path)) for path in config.state_dir.iterdir() if path.is_dir()]
    mine = (config.mark.host_id, str(config.runtime), SANDBOX_ID)
    return [name for name, record in found if record is not None and (record.host_id, record.runtime, record.sandbox_id) == mine]


async def boot(config: OciConfig, begin: Callable[[], Awaitable[Seen]], *, limit_s: float = BOOT_S) -> Probe:
    """Start with `begin` and wait for the guest's answer; the caller removes it. *Units*: seconds."""
    name = f"runtime.{config.runtime}.boot"
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            seen = await begin()
            answered = await answers(seen.address or "", config.guest_command)
    except (AtollError, OSError) as error:
        # TimeoutError is an OSError without words.
        return Probe(name, ok=False, detail=str(error) or f"no answer within {limit_s:.0f} s", fix=FIX)
    detail = f"a guest answered after {(time.monotonic() - started) * 1000:.0f} ms" if answered else "something else answered"
    return Probe(name, ok=answered, detail=detail, fix=FIX)


async def answers(address: str, other_command: tuple[str, ...]) -> bool:
    """Wait until the guest answers at its address; the caller sets the limit. With another command in its place nobody would answer."""
    if other_command:
        return True
    while True:
        try:
            async with asyncio.timeout(0.25):
                reader, writer = await asyncio.open_connection(address, GUEST_PORT)
                # A guest that is only just beginning takes the connection and answers later than one waits here.
                with contextlib.closing(writer):
                    writer.write(_REQUEST)
                    line = await reader.readline()
                return line.startswith(b"HTTP/1.1 ")
        except (OSError, TimeoutError):
            await asyncio.sleep(_LOOK_EVERY_S)
