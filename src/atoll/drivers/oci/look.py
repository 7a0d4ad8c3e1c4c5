"""Looking: what the machine says about placements, whatever this process remembers.

A placement is seen in five places: its directory, its control groups and the processes in them, the runtime's files, its interface.
Each is looked up by the placement's id. Blocking; the driver calls it in threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.drivers.oci import record as records
from atoll.drivers.oci import saves
from atoll.drivers.oci.record import Record
from atoll.drivers.oci.runtime import PID_FILE, Runtime, read_pid
from atoll.drivers.port import Power, Seen
from atoll.hostops import cgroups, mounts, processes
from atoll.hostops.cgroups import Layout


@dataclass(frozen=True, slots=True)
class View:
    """Where to look for one driver's placements."""

    state_dir: Path
    layout: Layout
    parent: str
    runtime: Runtime

    def group(self, placement_id: str) -> str:
        """The placement's control group."""
        return f"{self.parent}/{placement_id}"

    def directory(self, placement_id: str) -> Path:
        return self.state_dir / placement_id


@dataclass(frozen=True, slots=True)
class Traces:
    """Everything of one placement that is there."""

    directory: Path | None
    record: Record | None
    ran: bool
    groups: tuple[Path, ...]
    pids: tuple[int, ...]
    runtime_files: tuple[Path, ...]
    slots: tuple[int, ...]
    mounts: tuple[str, ...]
    guest: int | None
    """The process to watch, when it runs or is frozen."""
    frozen: bool = False
    saved: bool = False
    """Something of it is saved."""

    def names(self) -> tuple[str, ...]:
        """For people: what is there, one name each."""
        found = [f"process {pid}" for pid in self.pids]
        found += [f"cgroup {path}" for path in self.groups]
        found += [f"runtime state {path}" for path in self.runtime_files]
        found += [f"slot {number}" for number in self.slots]
        found += [f"mount {point}" for point in self.mounts]
        if self.directory is not None:
            found.append(f"directory {self.directory}")
        return tuple(found)


def traces(view: View, placement_id: str, slots: Mapping[int, str], *, strays: bool = False) -> Traces:
    """Look for one placement. `slots` is what the pool sees: number → placement.

    With `strays`, every process of the machine is read for one that mentions the placement: a runtime that an earlier agent run
    started and that has not joined its control group yet.
    """
    directory = view.directory(placement_id)
    there = directory.is_dir()
    group = view.group(placement_id)
    pids = set(cgroups.pids(view.layout, group))
    if strays:
        pids |= find_strays(view, placement_id)
    guest = _guest(view, placement_id, pids) if there else None
    return Traces(
        directory=directory if there else None,
        record=records.read(directory) if there else None,
        ran=there and (directory / PID_FILE).exists(),
        groups=tuple(cgroups.exists(view.layout, group)),
        pids=tuple(sorted(pids)),
        runtime_files=tuple(view.runtime.state_paths(placement_id)),
        slots=tuple(sorted(number for number, owner in slots.items() if owner == placement_id)),
        mounts=tuple(mounts.below(directory)) if there else (),
        guest=guest,
        saved=there and saves.exists(directory),
        frozen=_is_frozen(view, group, guest),
    )


@dataclass(frozen=True, slots=True)
class Vital:
    """Of a placement what decides whether it can be saved; as `Traces` has it."""

    guest: int | None
    frozen: bool
    saved: bool


def vital(view: View, placement_id: str) -> Vital:
    """Look for a guest and for what is saved of it alone: neither the mounts nor the interfaces of the whole host are read."""
    directory, group = view.directory(placement_id), view.group(placement_id)
    guest = _guest(view, placement_id, set(cgroups.pids(view.layout, group)))
    return Vital(guest, _is_frozen(view, group, guest), saves.exists(directory))


def _guest(view: View, placement_id: str, pids: set[int]) -> int | None:
    pid = read_pid(view.directory(placement_id))
    # A number in a file is nobody's identity: it must be in the placement's own group, and be what the runtime would have started.
    return pid if pid in pids and processes.alive(pid) and view.runtime.is_guest(pid, placement_id) else None


def _is_frozen(view: View, group: str, guest: int | None) -> bool:
    return guest is not None and cgroups.freezes(view.layout) and cgroups.frozen(view.layout, group)


def find_strays(view: View, placement_id: str) -> set[int]:
    """Runtimes that mention a placement, whatever group they are in; reads every process."""
    return {pid for pid in processes.mentioning(placement_id) if _is_runtime(view, pid)}


def _is_runtime(view: View, pid: int) -> bool:
    """Only a runtime's own processes are ours to end: somebody's editor may mention the placement, too."""
    line = processes.arguments(pid)
    return bool(line) and (line[0].startswith(("runsc-", str(view.runtime.binary))) or view.runtime.binary.name in line[0])


def seen(found: Traces) -> Seen:
    """The port's answer for what was found."""
    names = found.names()
    if not names:
        return Seen(Power.ABSENT)
    if found.guest is not None:
        power = Power.FROZEN if found.frozen else Power.RUNNING
        return Seen(power, address=found.record.address if found.record else None, pid=found.guest)
    if found.saved:
        return Seen(Power.SAVED, leftovers=names)
    if found.ran:
        return Seen(Power.STOPPED, reason="exited", leftovers=names)
    return Seen(Power.PREPARED, leftovers=names)


def known(view: View, slots: Mapping[int, str]) -> set[str]:
    """Every placement id that any of the five places mentions."""
    found = {path.name for path in view.state_dir.iterdir() if path.is_dir()} if view.state_dir.is_dir() else set()
    found |= cgroups.members(view.layout, view.parent)
    found |= view.runtime.containers()
    found |= {owner for owner in slots.values() if owner}
    return {name for name in found if not name.startswith(".")}
