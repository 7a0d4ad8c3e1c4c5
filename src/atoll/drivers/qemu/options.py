"""QEMU's command line for one machine: pure, so that what a machine is can be read and tested here.

A `microvm`: no firmware to speak of, no PCI, devices on virtio-mmio; the kernel is booted directly. What is here of it must be the same for a
machine that is restored as for the one that was saved. *Source*: research/isolation.md C2 to C4, each line of which was needed there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from atoll.drivers.oci.bundle import guest_config
from atoll.drivers.port import Order
from atoll.drivers.qemu import line, qmp, tap
from atoll.drivers.qemu.config import Accelerator
from atoll.drivers.qemu.jail import INNER_FIRMWARE, INNER_IMAGE, INNER_INITRD, INNER_KERNEL, INNER_VM

DISK: Final = "disk.img"
CONFIG: Final = "config.img"
MEMORY: Final = "memory"
DEVICES: Final = "devices"
RUN: Final = "run"
"""The only directory in which QEMU may make or replace anything: sockets, and the devices' state."""
SECTOR: Final = 512
KERNEL_MIB: Final = 64
"""What a guest's kernel, and the agent, have of its memory; file systems in memory may not count on it."""
SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a machine is made of. *Units*: MiB, kHz."""

    name: str
    accelerator: Accelerator
    memory_mib: int
    cpus: int
    tap: int
    """The descriptor of its network device."""
    tsc_khz: int = 0
    """How fast the host's clock counts, for a guest that cannot find out: without it boots hang when the host is busy."""
    state: int | None = None
    """The descriptor of the devices' state, for a machine that was saved."""


def cpus(accelerator: Accelerator, cpu_millis: int) -> int:
    """How many a machine has. TCG has one: more are slower, and none was ever saved with more."""
    return 1 if accelerator is Accelerator.TCG else max(1, -(-cpu_millis // 1000))


def kernel_line(shape: Shape) -> str:
    """What the kernel is told."""
    words = [
        "console=ttyS0",
        "quiet",
        # The machine's end is a reset, which its host makes the end of the process.
        "reboot=t",
        "panic=-1",
        "random.trust_cpu=on",
        "cgroup_no_v1=all",
        # A machine that was frozen for a while finds its processor stuck; that is no news.
        "nowatchdog",
        "rcupdate.rcu_cpu_stall_suppress=1",
    ]
    if shape.accelerator is Accelerator.TCG:
        words += [f"tsc_early_khz={shape.tsc_khz}", "tsc=reliable", "no_timer_check", "mitigations=off"]
    return " ".join(words)


def arguments(shape: Shape) -> list[str]:
    """Everything after the program's name."""
    tcg = shape.accelerator is Accelerator.TCG
    words = [
        "-name", shape.name,
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-sandbox", SANDBOX,
        "-L", INNER_FIRMWARE,
        "-machine", "microvm,rtc=on,suppress-vmdesc=on,memory-backend=ram",
        "-global", "migration.send-configuration=off",
        "-accel", "tcg,tb-size=32" if tcg else "kvm",
        "-cpu", "max" if tcg else "host",
        "-smp", str(shape.cpus),
        "-m", str(shape.memory_mib),
        "-object", f"memory-backend-file,id=ram,size={shape.memory_mib}M,mem-path={INNER_VM}/{MEMORY},share=off",
        "-kernel", INNER_KERNEL, "-initrd", INNER_INITRD, "-append", kernel_line(shape),
        "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
        "-device", "virtio-serial-device,max_ports=2",
        "-chardev", f"socket,id=line,path={INNER_VM}/{RUN}/{line.SOCKET},server=on,wait=off",
        "-device", f"virtserialport,chardev=line,name={line.PORT}",
        *_disk("image", INNER_IMAGE, writable=False),
        *_disk("disk", f"{INNER_VM}/{DISK}", writable=True),
        *_disk("config", f"{INNER_VM}/{CONFIG}", writable=False),
        "-netdev", f"tap,id=net,fd={shape.tap}",
        "-device", f"virtio-net-device,netdev=net,mac={tap.GUEST_MAC}",
        "-qmp", f"unix:{INNER_VM}/{RUN}/{qmp.SOCKET},server=on,wait=off",
    ]  # fmt: skip
    return words if shape.state is None else [*words, "-incoming", f"fd:{shape.state}"]


def _disk(name: str, path: str, *, writable: bool) -> list[str]:
    rights = "" if writable else ",readonly=on"
    return ["-drive", f"if=none,id={name},file={path},format=raw{rights}", "-device", f"virtio-blk-device,drive={name}"]


def guest_disk(order: Order, *, resolver: str, tmpfs_percent: tuple[int, int, int]) -> bytes:
    """The small disk by which a guest is told what it is; `native/internal/guest/boot` reads it. Holds no secret."""
    usable = max(KERNEL_MIB, order.spec.memory_mib - KERNEL_MIB)
    tmp, shm, run = (max(1, usable * percent // 100) for percent in tmpfs_percent)
    content: dict[str, Any] = {
        "guest": guest_config(order).model_dump(),
        "network": {"address": f"{tap.GUEST}/{tap.PREFIX}", "gateway": tap.ROUTER, "resolver": resolver},
        "hostname": order.hostname,
        "tmp_mib": 0 if order.spec.tmp_on_disk else tmp,
        "shm_mib": shm,
        "run_mib": run,
    }
    text = json.dumps(content).encode()
    return text + b"\0" * (-len(text) % SECTOR)
