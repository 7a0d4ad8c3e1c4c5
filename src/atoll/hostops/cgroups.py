"""One control group per placement, on cgroup v1 (also hybrid) and v2.

Theory of operation. `detect` says which hierarchy carries which controller. What a limit means there is a pure value, a list of
(file, text) from `limit_writes`, so that both layouts are tested by what they would write. A group's name is `parent/placement`; the
processes of a placement are those in its groups and nobody else's, whatever a runtime's own records say.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.hostops import mounts

CPU_PERIOD_US: Final = 100_000
CPU_QUOTA_US_MIN: Final = 1_000
_NEEDED: Final = ("memory", "pids", "cpu")
_ALSO: Final = ("cpuacct", "freezer", "devices", "blkio", "cpuset", "systemd")

# What a container may open: the devices that Docker allows, as major:minor of character devices, and pseudo-terminals.
DEVICES_V1: Final = (
    "c 1:3 rwm",
    "c 1:5 rwm",
    "c 1:7 rwm",
    "c 1:8 rwm",
    "c 1:9 rwm",
    "c 5:0 rwm",
    "c 5:1 rwm",
    "c 5:2 rwm",
    "c 136:* rwm",
    "b *:* m",
    "c *:* m",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where controllers are. v1: one directory per controller; v2: one for all, under the key `""`."""

    version: int
    roots: tuple[tuple[str, Path], ...]

    def root(self, controller: str) -> Path | None:
        """The hierarchy that carries a controller, or None."""
        if self.version == 2:
            return self.roots[0][1]
        return dict(self.roots).get(controller)

    def missing(self) -> list[str]:
        """Controllers that limits need and this machine does not have."""
        if self.version == 1:
            return [name for name in _NEEDED if self.root(name) is None]
        have = (self.roots[0][1] / "cgroup.controllers").read_text().split()
        return [name for name in _NEEDED if name not in have]


@dataclass(frozen=True, slots=True)
class Limits:
    """*Units*: MiB, millicores, processes. None: no limit."""

    memory_mib: int | None = None
    cpu_millis: int | None = None
    pids_max: int | None = None
    devices: bool = False
    """Allow only the usual character devices (v1; on v2 a container must not be able to make device nodes)."""
    more_devices: tuple[str, ...] = ()
    """And these, as the kernel has them: `c 10:232 rwm`."""


def detect(base: Path = Path("/sys/fs/cgroup"), table: list[mounts.Mount] | None = None) -> Layout:
    """How this machine is set up. *Errors*: FileNotFoundError when there are no control groups at all."""
    if (base / "cgroup.controllers").exists():
        return Layout(2, (("", base),))
    found: dict[str, Path] = {}
    for mount in mounts.table() if table is None else table:
        point = Path(mount.point)
        if mount.kind == "cgroup" and point.parent == base:
            for name in point.name.split(","):
                found.setdefault(name, point)
    if not found:
        raise FileNotFoundError(f"no control groups below {base}")
    return Layout(1, tuple((name, found[name]) for name in (*_NEEDED, *_ALSO) if name in found))


def directories(layout: Layout, group: str) -> list[Path]:
    """Every directory that makes up a group; each hierarchy once."""
    return list(dict.fromkeys(root / group for _, root in layout.roots))


def own_views(layout: Layout, group: str) -> tuple[tuple[str, str], ...]:
    """(directory, name) of what a container may see of its own group below /sys/fs/cgroup; on v2 the name is empty."""
    if layout.version == 2:
        return ((str(layout.roots[0][1] / group), ""),)
    return tuple((str(root / group), name) for name, root in layout.roots if name in ("memory", "cpu", "cpuacct", "pids"))


def cpu_quota_us(cpu_millis: int) -> int:
    """Microseconds of CPU in each period. *Units*: millicores in."""
    return max(CPU_QUOTA_US_MIN, cpu_millis * CPU_PERIOD_US // 1000)


def limit_writes(layout: Layout, group: str, limits: Limits) -> list[tuple[Path, str]]:
    """What to write, in order, to give a group these limits."""
    writes: list[tuple[Path, str]] = []
    two = layout.version == 2

    def put(controller: str, name: str, value: str) -> None:
        root = layout.root(controller)
        if root is not None:
            writes.append((root / group / name, value))

    if limits.memory_mib is not None:
        put("memory", "memory.max" if two else "memory.limit_in_bytes", str(limits.memory_mib << 20))
        if two:
            put("memory", "memory.swap.max", "0")
    if limits.pids_max is not None:
        put("pids", "pids.max", str(limits.pids_max))
    if limits.cpu_millis is not None:
        quota = cpu_quota_us(limits.cpu_millis)
        if two:
            put("cpu", "cpu.max", f"{quota} {CPU_PERIOD_US}")
        else:
            put("cpu", "cpu.cfs_period_us", str(CPU_PERIOD_US))
            put("cpu", "cpu.cfs_quota_us", str(quota))
    if limits.devices and not two and layout.root("devices") is not None:
        put("devices", "devices.deny", "a")
        for rule in (*DEVICES_V1, *limits.more_devices):
            put("devices", "devices.allow", rule)
    return writes


def make_parent(layout: Layout, parent: str) -> None:
    """Have the group that all placements of an instance are below; on v2 with the controllers given on to them."""
    for directory in directories(layout, parent):
        directory.mkdir(exist_ok=True)
    if layout.version == 2:
        root = layout.roots[0][1]
        for directory in (root, root / parent):
            for name in _NEEDED:
                (directory / "cgroup.subtree_control").write_text(f"+{name}")
    elif (cpuset := layout.root("cpuset")) is not None:
        # A cpuset without cpus and memory nodes takes no process.
        for name in ("cpuset.cpus", "cpuset.mems"):
            with contextlib.suppress(FileNotFoundError):
                (cpuset / parent / name).write_text((cpuset / name).read_text())
        with contextlib.suppress(FileNotFoundError):
            (cpuset / parent / "cgroup.clone_children").write_text("1")


def make(layout: Layout, group: str, limits: Limits) -> None:
    """Have a group with these limits. *Idempotency*: limits are written again."""
    for directory in directories(layout, group):
        directory.mkdir(exist_ok=True)
    for file, text in limit_writes(layout, group, limits):
        try:
            file.write_text(text)
        except FileNotFoundError:
            # memory.swap.max is missing where the kernel accounts no swap; every other file must be there.
            if file.name != "memory.swap.max":
                raise


def exists(layout: Layout, group: str) -> list[Path]:
    """The group's directories that are there."""
    return [directory for directory in directories(layout, group) if directory.is_dir()]


def members(layout: Layout, parent: str) -> set[str]:
    """Names of all groups directly below `parent`, in any hierarchy."""
    found: set[str] = set()
    for directory in directories(layout, parent):
        with contextlib.suppress(FileNotFoundError):
            found |= {entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)}
    return found


def pids(layout: Layout, group: str) -> list[int]:
    """Processes in a group and in groups below it, in any hierarchy."""
    found: set[int] = set()
    for directory in directories(layout, group):
        for place in _with_below(directory):
            # A group may vanish while it is read; ENODEV is what its open files then say.
            with contextlib.suppress(FileNotFoundError):
                try:
                    found |= {int(word) for word in (place / "cgroup.procs").read_text().split()}
                except OSError as error:
                    if error.errno != errno.ENODEV:
                        raise
    return sorted(found)


def _with_below(directory: Path) -> list[Path]:
    """A group and all below it, deepest first."""
    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                found += _with_below(Path(entry.path))
        found.append(directory)
    return found


def remove(layout: Layout, group: str, *, patience_s: float = 2.0) -> list[Path]:
    """Remove a group with all below it and say which directories are left. The kernel needs a moment after the last process's end."""
    deadline = time.monotonic() + patience_s
    left = [place for directory in directories(layout, group) for place in _with_below(directory)]
    while left:
        still = []
        for place in left:
            try:
                place.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                still.append(place)
        left = still
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(0.005)
    return left


def own_places(layout: Layout, text: str) -> list[Path]:
    """The groups of a process whose /proc/PID/cgroup is `text`, in the layout's order."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _number, names, path = line.split(":", 2)
        for name in names.removeprefix("name=").split(",") if names else ("",):
            found.setdefault(name, path)
    return [root / found[name].lstrip("/") for name, root in layout.roots if name in found]


def expect_moves(layout: Layout) -> None:
    """Let the next moves of processes between groups be quick, for some ten milliseconds. Blocks for about as long; never raises.

    The kernel lets no process into another group before an RCU grace period has passed (7 to 10 ms where measured), unless one has passed
    just now. A thread that moves to where it is already asks for one ahead of those who are waited for.
    *Source*: cgroup_attach_lock, rcu_sync_enter (Linux); `crun run` took 12 ms instead of 24, `runsc run` 107 instead of 123.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        place = own_places(layout, Path("/proc/thread-self/cgroup").read_text())[0]
        if layout.version == 2:
            (place / "cgroup.procs").write_text(str(os.getpid()))
        else:
            (place / "tasks").write_text(str(threading.get_native_id()))


def freezes(layout: Layout) -> bool:
    """Whether groups can be frozen here."""
    return layout.version == 2 or layout.root("freezer") is not None


def frozen(layout: Layout, group: str) -> bool:
    """Whether a group is frozen, or on its way there. False when it is gone."""
    file, _, on, _ = _freezer(layout, group)
    try:
        return file.read_text().strip() in (on, "FREEZING")
    except OSError:
        return False


def freeze(layout: Layout, group: str, *, patience_s: float = 5.0) -> bool:
    """Freeze a group with all below it; whether that was done in time, else it is as it was. *Errors*: OSError where there is none."""
    file, told, on, _ = _freezer(layout, group)
    file.write_text(on)
    deadline = time.monotonic() + patience_s
    while not told(on):
        if time.monotonic() >= deadline:
            thaw(layout, group)
            return False
        time.sleep(0.0005)
    return True


def thaw(layout: Layout, group: str) -> None:
    """Let a frozen group go on. *Idempotency*: one that runs, or is gone, is fine."""
    file, _, _, off = _freezer(layout, group)
    with contextlib.suppress(FileNotFoundError):
        file.write_text(off)


def _freezer(layout: Layout, group: str) -> tuple[Path, Callable[[str], bool], str, str]:
    """The file that freezes a group, how it says that it is done, and what is written there for frozen and for not."""
    if layout.version == 2:
        place = layout.roots[0][1] / group
        return place / "cgroup.freeze", lambda on: _keyed((place / "cgroup.events").read_text(), "frozen") == on, "1", "0"
    root = layout.root("freezer")
    if root is None:
        raise FileNotFoundError(errno.ENOENT, "this machine has no freezer", "freezer")
    state = root / group / "freezer.state"
    return state, lambda on: state.read_text().strip() == on, "FROZEN", "THAWED"


def kill_file(layout: Layout, group: str) -> Path | None:
    """v2: the file that kills a whole group at once."""
    return layout.roots[0][1] / group / "cgroup.kill" if layout.version == 2 else None


@dataclass(frozen=True, slots=True)
class Spent:
    """What a group uses. *Units*: seconds since it was made, bytes."""

    cpu_s: float
    memory_bytes: int
    cache_bytes: int
    """Of files: the kernel drops it when it needs the room. What is shared memory cannot be dropped, and is not in here."""


def spent(layout: Layout, group: str) -> Spent | None:
    """What the group uses now; None when it is gone."""
    cpu, memory = layout.root("cpuacct"), layout.root("memory")
    if memory is None:
        return None
    try:
        if layout.version == 2:
            cpu_s = int(_keyed((memory / group / "cpu.stat").read_text(), "usage_usec")) / 1e6
            total = int((memory / group / "memory.current").read_text())
            stat = (memory / group / "memory.stat").read_text()
            cache = int(_keyed(stat, "file")) - int(_keyed(stat, "shmem"))
        else:
            cpu_s = int((cpu / group / "cpuacct.usage").read_text()) / 1e9 if cpu is not None else 0.0
            total = int((memory / group / "memory.usage_in_bytes").read_text())
            stat = (memory / group / "memory.stat").read_text()
            cache = int(_keyed(stat, "total_cache")) - int(_keyed(stat, "total_shmem"))
    except (OSError, ValueError):
        return None
    cache = min(max(0, cache), total)
    return Spent(cpu_s, total - cache, cache)


def _keyed(text: str, key: str) -> str:
    """The value of a `key value` line; `0` where there is none."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return value
    return "0"


def oom_kills(layout: Layout, group: str) -> int:
    """How often the kernel killed something in the group for lack of memory; 0 when it cannot be told."""
    root = layout.root("memory")
    if root is None:
        return 0
    file = root / group / ("memory.events" if layout.version == 2 else "memory.oom_control")
    try:
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except OSError:
        return 0
    return 0
