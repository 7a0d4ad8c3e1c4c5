"""Put a driver together: the only function that the composition root needs. The pool is `drivers/oci/build.py`'s."""

from __future__ import annotations

from collections.abc import Callable

from atoll.drivers.firecracker.config import FirecrackerConfig
from atoll.drivers.firecracker.driver import FirecrackerDriver
from atoll.drivers.oci.config import OciConfig
from atoll.drivers.oci.driver import no_step
from atoll.drivers.oci.slots import SlotPool


def firecracker_driver(
    config: OciConfig, machines: FirecrackerConfig, pool: SlotPool, *, on_step: Callable[[str], None] = no_step
) -> FirecrackerDriver:
    """A driver of virtual machines. Nothing happens before its `open`. `on_step` is for tests: it is called between any two steps."""
    return FirecrackerDriver(config, machines, pool, on_step=on_step)
