"""What is said to Firecracker of one machine: pure, so that what a machine is can be read and tested here.

Source: Firecracker's OpenAPI description, 1.17, and its documents on snapshots and vsock. The image comes first, so that it is /dev/vda.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from atoll.drivers.firecracker.config import Rate, Rates
from atoll.drivers.machines import tap
from atoll.drivers.machines.cell import INNER_IMAGE, INNER_INITRD, INNER_KERNEL, INNER_VM
from atoll.drivers.machines.runtime import CONFIG, DEVICES, DISK, MEMORY, RUN
from atoll.drivers.machines.telling import KERNEL_WORDS

Request = tuple[Literal["PUT", "PATCH"], str, dict[str, Any]]
NETWORK: Final = "net"
VSOCK: Final = f"{INNER_VM}/{RUN}/vsock.sock"
GUEST_CID: Final = 3
DIFF: Final = "changed"
"""What the machine has written since its memory's file was whole."""
CPUS_MAX: Final = 32
REFILL_MS: Final = 100
NO_RATES: Final = Rates()


@dataclass(frozen=True, slots=True)
class Shape:
    """*Units*: MiB."""

    memory_mib: int
    cpus: int
    rates: Rates = NO_RATES


def cpus(cpu_millis: int) -> int:
    """How many cores a machine has."""
    return min(CPUS_MAX, max(1, -(-cpu_millis // 1000)))


def kernel_line() -> str:
    """What the kernel is told; Firecracker adds the root's device. Its end is a reset by the keyboard, which Firecracker makes its own end."""
    return " ".join((*KERNEL_WORDS, "reboot=k", "pci=off", "i8042.noaux", "i8042.nomux", "i8042.dumbkbd"))


def fresh(shape: Shape) -> list[Request]:
    """From a process that knows nothing to a machine that boots."""
    return [
        ("PUT", "/logger", {"level": "Warning", "show_level": True}),
        (
            "PUT",
            "/machine-config",
            {"vcpu_count": shape.cpus, "mem_size_mib": shape.memory_mib, "smt": False, "track_dirty_pages": True},
        ),
        ("PUT", "/boot-source", {"kernel_image_path": INNER_KERNEL, "initrd_path": INNER_INITRD, "boot_args": kernel_line()}),
        _drive("image", INNER_IMAGE, NO_RATES, root=True),
        _drive("disk", f"{INNER_VM}/{DISK}", shape.rates, writable=True),
        _drive("config", f"{INNER_VM}/{CONFIG}", NO_RATES),
        _network(shape.rates),
        ("PUT", "/vsock", {"guest_cid": GUEST_CID, "uds_path": VSOCK}),
        ("PUT", "/entropy", {}),
        ("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]


def loaded() -> list[Request]:
    """From a process that knows nothing to a machine that goes on where it was saved. Its memory is the file, mapped privately."""
    return [
        ("PUT", "/logger", {"level": "Warning", "show_level": True}),
        (
            "PUT",
            "/snapshot/load",
            {
                "snapshot_path": f"{INNER_VM}/{DEVICES}",
                "mem_backend": {"backend_type": "File", "backend_path": f"{INNER_VM}/{MEMORY}"},
                "track_dirty_pages": True,
                "resume_vm": False,
                "network_overrides": [{"iface_id": NETWORK, "host_dev_name": tap.TAP}],
                "vsock_override": {"uds_path": VSOCK},
            },
        ),
        ("PATCH", "/vm", {"state": "Resumed"}),
    ]


def halted() -> Request:
    """The machine stands still."""
    return ("PATCH", "/vm", {"state": "Paused"})


def going() -> Request:
    """It goes on."""
    return ("PATCH", "/vm", {"state": "Resumed"})


def snapshot(*, whole: bool) -> Request:
    """Of a machine that stands still: its devices, and all of its memory or what has changed since the last time."""
    body = {
        "snapshot_type": "Full" if whole else "Diff",
        "snapshot_path": f"{INNER_VM}/{DEVICES}",
        "mem_file_path": f"{INNER_VM}/{DIFF}",
    }
    return ("PUT", "/snapshot/create", body)


def _drive(name: str, path: str, rates: Rates, *, root: bool = False, writable: bool = False) -> Request:
    body: dict[str, Any] = {
        "drive_id": name,
        "path_on_host": path,
        "is_root_device": root,
        "is_read_only": not writable,
        # What a guest has synced is on the host's disk.
        "cache_type": "Writeback" if writable else "Unsafe",
        "io_engine": "Sync",
    }
    if limiter := _limiter(rates.disk_bytes, rates.disk_operations):
        body["rate_limiter"] = limiter
    return ("PUT", f"/drives/{name}", body)


def _network(rates: Rates) -> Request:
    body: dict[str, Any] = {"iface_id": NETWORK, "host_dev_name": tap.TAP, "guest_mac": tap.GUEST_MAC}
    if limiter := _limiter(rates.network_bytes, rates.network_packets):
        body["rx_rate_limiter"] = body["tx_rate_limiter"] = limiter
    return ("PUT", f"/network-interfaces/{NETWORK}", body)


def _limiter(size: Rate | None, operations: Rate | None) -> dict[str, Any]:
    return {name: _bucket(rate) for name, rate in (("bandwidth", size), ("ops", operations)) if rate is not None}


def _bucket(rate: Rate) -> dict[str, int]:
    """A bucket that holds a tenth of a second's worth, and is full again after that time."""
    bucket = {"size": max(1, rate.per_s * REFILL_MS // 1000), "refill_time": REFILL_MS}
    return {**bucket, "one_time_burst": rate.burst} if rate.burst else bucket


def paths(requests: Sequence[Request]) -> list[str]:
    """Every path that the requests name; all of them are inside of the jail."""
    found: list[str] = []

    def walk(value: object, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, key)
        elif isinstance(value, list):
            for inner in value:
                walk(inner, name)
        elif isinstance(value, str) and name.endswith(("_path", "path_on_host")):
            found.append(value)

    for _, _, body in requests:
        walk(body, "")
    return found
