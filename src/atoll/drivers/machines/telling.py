"""What a machine is told of itself: the small disk that `native/internal/guest/boot` reads. Holds no secret. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

from atoll.drivers.machines import tap
from atoll.drivers.oci.bundle import guest_config
from atoll.drivers.port import Order
from atoll.wire.guest import MACHINE_PLACEMENT_PATH

SECTOR: Final = 512
KERNEL_MIB: Final = 64
"""What a guest's kernel, and the agent, have of its memory; file systems in memory may not count on it."""
KERNEL_WORDS: Final = (
    "console=ttyS0",
    "quiet",
    "panic=-1",
    "random.trust_cpu=on",
    "cgroup_no_v1=all",
    # A machine that was frozen for a while finds its processor stuck; that is no news.
    "nowatchdog",
    "rcupdate.rcu_cpu_stall_suppress=1",
)
"""What every guest's kernel is told."""


def guest_disk(order: Order, *, resolver: str, tmpfs_percent: tuple[int, int, int]) -> bytes:
    """The disk's content, whole sectors."""
    usable = max(KERNEL_MIB, order.spec.memory_mib - KERNEL_MIB)
    tmp, shm, run = (max(1, usable * percent // 100) for percent in tmpfs_percent)
    content: dict[str, Any] = {
        "guest": {**guest_config(order).model_dump(), "placement_file": MACHINE_PLACEMENT_PATH},
        "network": {"address": f"{tap.GUEST}/{tap.PREFIX}", "gateway": tap.ROUTER, "resolver": resolver},
        "hostname": order.hostname,
        "tmp_mib": 0 if order.spec.tmp_on_disk else tmp,
        "shm_mib": shm,
        "run_mib": run,
    }
    text = json.dumps(content).encode()
    return text + b"\0" * (-len(text) % SECTOR)
