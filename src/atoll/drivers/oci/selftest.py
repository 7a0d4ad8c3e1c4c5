"""The guest that a self-check starts: an order like any other, which its record tells apart."""

from __future__ import annotations

import asyncio
import base64
from typing import Final

from atoll.base.ids import Dice, Prefix, new_id
from atoll.domain.spec import Isolation, NetworkSpec, Spec
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Order
from atoll.wire.guest import GUEST_PORT

SANDBOX_ID: Final = "self-check"
_LOOK_EVERY_S: Final = 0.005
_REQUEST: Final = b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n"


def order(kind: RuntimeKind, dice: Dice) -> Order:
    """A small guest without network egress; nobody has the key that its public one belongs to."""
    spec = Spec(
        class_name=SANDBOX_ID,
        template_id="",
        image="",
        image_name="",
        isolation=Isolation.GVISOR if kind is RuntimeKind.RUNSC else Isolation.SHARED_KERNEL,
        cpu_millis=2000,
        memory_mib=128,
        disk_mib=64,
        pids_max=64,
        timeout_s=60,
        network=NetworkSpec(internet=False),
    )
    key = base64.b64encode(dice(32)).decode()
    return Order(new_id(Prefix.PLACEMENT, dice), SANDBOX_ID, 1, spec, dice(16).hex(), key, SANDBOX_ID)


async def answers(address: str, other_command: tuple[str, ...]) -> bool:
    """Wait until the guest answers at its address; the caller sets the limit. With another command in its place nobody would answer."""
    if other_command:
        return True
    while True:
        try:
            async with asyncio.timeout(0.25):
                reader, writer = await asyncio.open_connection(address, GUEST_PORT)
                writer.write(_REQUEST)
                line = await reader.readline()
                writer.close()
                return line.startswith(b"HTTP/1.1 ")
        except (OSError, TimeoutError):
            await asyncio.sleep(_LOOK_EVERY_S)
