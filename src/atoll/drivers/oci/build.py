"""Put a driver together: the only functions that the composition root needs.

```python
pool = slot_pool(mark, subnet=n, size=8)
gvisor = oci_driver(OciConfig(runtime=RuntimeKind.RUNSC, ...), pool)
shared = oci_driver(replace(config, runtime=RuntimeKind.CRUN), pool)
```
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.drivers.oci.config import Names, OciConfig, RuntimeKind
from atoll.drivers.oci.crun import Crun
from atoll.drivers.oci.driver import OciDriver, no_step
from atoll.drivers.oci.runsc import Runsc
from atoll.drivers.oci.runtime import Runtime
from atoll.drivers.oci.slots import SlotPool
from atoll.drivers.port import Mark
from atoll.hostops import cgroups

SLOTS_READY = 8


def slot_pool(mark: Mark, *, subnet: int, size: int = SLOTS_READY, closed: tuple[str, ...] = ()) -> SlotPool:
    """The pool of an instance: slots in 10.(64+subnet).0.0/16, `size` of them kept ready; give it to every driver of the instance."""
    return SlotPool(Names.of(mark), subnet=subnet, size=size, closed=closed)


def oci_driver(config: OciConfig, pool: SlotPool, *, on_step: Callable[[str], None] = no_step) -> OciDriver:
    """A driver for `config.runtime`. Nothing happens before its `open`. `on_step` is for tests: it is called between any two steps."""
    runtime: Runtime
    if config.runtime is RuntimeKind.RUNSC:
        runtime = Runsc(config.runsc, config.run_dir / "runsc", config.state_dir)
    else:
        runtime = Crun(config.crun, config.runc, config.run_dir / "crun", cgroups.detect(), probe=config.guest_binary)
    return OciDriver(config, pool, runtime, on_step=on_step)
