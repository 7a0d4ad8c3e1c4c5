"""config.json of a container, made of an order: pure, so that what a guest may do can be read and tested here.

gVisor guests get every capability: their kernel is the sandbox's own. Containers that share the host's kernel get Docker's set without
CAP_MKNOD, Docker's seccomp filter, masked paths, and may not gain a user namespace. Source: OCI runtime-spec 1.0.2; moby
oci/caps/defaults.go and profiles/seccomp (see `seccomp`); research/runtimes-and-io.md 1b.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atoll.drivers.oci import seccomp
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Order
from atoll.hostops.cgroups import CPU_PERIOD_US, cpu_quota_us
from atoll.wire.guest import CONFIG_VARIABLE, GUEST_PATH, PLACEMENT_PATH, GuestConfig

OCI_VERSION: Final = "1.0.2"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

ALL_CAPABILITIES: Final = tuple(
    "CAP_" + name
    for name in (
        "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE",
        "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT",
        "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE",
        "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ",
    )
)  # fmt: skip
SHARED_KERNEL_CAPABILITIES: Final = tuple(
    "CAP_" + name
    for name in (
        "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP", "NET_BIND_SERVICE",
        "SYS_CHROOT", "KILL", "AUDIT_WRITE",
    )
)  # fmt: skip
MASKED: Final = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
    "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap",
)  # fmt: skip
READ_ONLY: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

NOFILE_SOFT: Final = 1024
"""As any machine gives its programs. One that needs more takes it, up to the hard limit; one that looks at all it may have open, as x11vnc does for
each connection, takes seconds for a million."""
TMP_KEEPER: Final = ".atoll-keeps"
"""The name of a mount that no layer takes in."""
HOST_PIDS_FACTOR: Final = 3
HOST_PIDS_SPARE: Final = 200
"""gVisor needs more than one host thread for a guest process, and a hit of the host's limit ends the whole sandbox."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of one placement are on the host. *Units*: descriptors, MiB."""

    rootfs: str
    guest_binary: str
    resolv_conf: str
    namespace: str
    cgroup: str
    nofile_max: int
    shown: str = ""
    """Directory with the guest's PlacementFile, in place of the image's own `/.atoll`; empty: it is not shown whose it is."""
    cgroup_binds: tuple[tuple[str, str], ...] = ()
    """(host directory, name below /sys/fs/cgroup): the guest's own groups, for programs that read their limits there."""
    tmpfs_percent: tuple[int, int, int] = (40, 20, 10)
    command: tuple[str, ...] = ()
    """Overrides the guest binary; for self-checks and tests."""


def host_pids_max(kind: RuntimeKind, pids_max: int) -> int:
    """The host's limit for a guest that may have `pids_max` processes."""
    return pids_max * HOST_PIDS_FACTOR + HOST_PIDS_SPARE if kind is RuntimeKind.RUNSC else pids_max


def guest_config(order: Order, *, named: bool = False) -> GuestConfig:
    """What a guest of this placement is told of itself. Holds no secret. `named`: it is shown whose it is."""
    return GuestConfig(
        sandbox_id=order.sandbox_id,
        placement_id=order.placement_id,
        generation=order.generation,
        nonce=order.nonce,
        public_key=order.guest_public_key,
        command=list(order.spec.command),
        command_user=order.spec.command_user,
        ready=list(order.spec.ready_command),
        pids_max=order.spec.pids_max,
        placement_file=PLACEMENT_PATH if named else "",
    )


def guest_environment(order: Order, *, named: bool = False) -> str:
    """ATOLL_GUEST_CONFIG of this placement; as `guest_config`."""
    return guest_config(order, named=named).model_dump_json()


def make(kind: RuntimeKind, order: Order, places: Places) -> dict[str, Any]:
    """The whole config.json."""
    gvisor = kind is RuntimeKind.RUNSC
    capabilities = list(ALL_CAPABILITIES if gvisor else SHARED_KERNEL_CAPABILITIES)
    return {
        "ociVersion": OCI_VERSION,
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(places.command) or [GUEST_PATH],
            "env": [f"PATH={PATH}", "HOME=/root", f"{CONFIG_VARIABLE}={guest_environment(order, named=bool(places.shown))}"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "soft": min(NOFILE_SOFT, places.nofile_max), "hard": places.nofile_max},
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
            ],
            # sudo and ping are what a user expects of a machine: set-user-id programs work.
            "noNewPrivileges": False,
        },
        "root": {"path": places.rootfs, "readonly": False},
        "hostname": order.hostname,
        "mounts": _mounts(gvisor, order, places),
        "linux": _linux(kind, order, places),
    }


def _mounts(gvisor: bool, order: Order, places: Places) -> list[dict[str, Any]]:  # noqa: FBT001 - private
    tmp, shm, run = (f"size={max(1, order.spec.memory_mib * percent // 100)}m" for percent in places.tmpfs_percent)
    quiet = ["nosuid", "noexec", "nodev"]
    mounts: list[dict[str, Any]] = [
        _mount("/proc", "proc", "proc", quiet),
        _mount("/dev", "tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
        _mount("/dev/pts", "devpts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
        _mount("/dev/shm", "tmpfs", "shm", [*quiet, "mode=1777", shm]),  # noqa: S108 - the guest's
        _mount("/sys", "sysfs", "sysfs", [*quiet, "ro"]),
        *_tmp(gvisor, order, tmp),
        _mount("/run", "tmpfs", "tmpfs", ["nosuid", "nodev", "mode=755", run]),
    ]
    if gvisor:
        # The guest's own hierarchy: its pids.max is what bounds a fork bomb without ending the sandbox.
        mounts.append(_mount("/sys/fs/cgroup", "cgroup", "cgroup", [*quiet, "mode=755", "size=64k"]))
        # The sentry keeps what the guest writes, so nothing can be written for it beforehand; crun's disk has the file already.
        mounts.append(_mount("/etc/resolv.conf", "bind", places.resolv_conf, ["bind", "ro", *quiet]))
    else:
        mounts.append(_mount("/dev/mqueue", "mqueue", "mqueue", quiet))
        mounts.append(_mount("/sys/fs/cgroup", "tmpfs", "tmpfs", [*quiet, "mode=755", "size=64k"]))
        mounts += [
            _mount(f"/sys/fs/cgroup/{name}".rstrip("/"), "bind", source, ["bind", "ro", *quiet]) for source, name in places.cgroup_binds
        ]
    if places.shown:
        # Every image has the directory: a mount point of its own would be made in the image's tree, which all sandboxes share.
        mounts.append(_mount(str(Path(PLACEMENT_PATH).parent), "bind", places.shown, ["bind", "ro", *quiet]))
    if not places.command:
        mounts.append(_mount(GUEST_PATH, "bind", places.guest_binary, ["bind", "ro", "nosuid", "nodev"]))
    return mounts


def _tmp(gvisor: bool, order: Order, size: str) -> list[dict[str, Any]]:  # noqa: FBT001 - private
    if not order.spec.tmp_on_disk:
        return [_mount("/tmp", "tmpfs", "tmpfs", ["nosuid", "nodev", "mode=1777", size])]  # noqa: S108 - the guest's
    if not gvisor:
        return []
    # runsc mounts a tmpfs on an empty /tmp by itself, which would lose what is written there; a mount below it makes it not empty.
    return [_mount(f"/tmp/{TMP_KEEPER}", "tmpfs", "tmpfs", ["nosuid", "nodev", "noexec", "mode=700", "size=4k"])]  # noqa: S108


def _mount(destination: str, kind: str, source: str, options: list[str]) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": options}


def _linux(kind: RuntimeKind, order: Order, places: Places) -> dict[str, Any]:
    spec = order.spec
    namespaces: list[dict[str, str]] = [{"type": name} for name in ("pid", "ipc", "uts", "mount")]
    namespaces.append({"type": "network", "path": places.namespace})
    limited: dict[str, Any] = {
        "cgroupsPath": f"/{places.cgroup}",
        "resources": {
            "memory": {"limit": spec.memory_mib << 20},
            "cpu": {"quota": cpu_quota_us(spec.cpu_millis), "period": CPU_PERIOD_US},
            "pids": {"limit": host_pids_max(kind, spec.pids_max)},
        },
    }
    if kind is RuntimeKind.RUNSC:
        # runsc makes its own control group below our parent, so that the guest's MemTotal is the limit.
        return {"namespaces": namespaces, **limited}
    # Ours are made before crun starts, which is told to manage none; runc, which cannot be told, finds them as it would make them.
    limited["resources"]["devices"] = [{"allow": False, "access": "rwm"}]
    return {
        **limited,
        "namespaces": [*namespaces, {"type": "cgroup"}],
        "maskedPaths": list(MASKED),
        "readonlyPaths": list(READ_ONLY),
        "seccomp": seccomp.profile(spec.arch),
        "sysctl": {"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": "0 2147483647"},
        "rootfsPropagation": "private",
    }
