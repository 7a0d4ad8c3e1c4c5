"""Which process: a pid alone may be somebody else's by now, a pid with its start time is not.

Standard library only: the launcher of every child imports it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.programs import notes


@dataclass(frozen=True, slots=True)
class Identity:
    """A process of this boot. *Units*: clock ticks since boot."""

    pid: int
    started_ticks: int
    boot_id: str

    def alive(self) -> bool:
        """Whether exactly this process still runs (a zombie does not)."""
        return self.boot_id == boot_id() and _stat(self.pid) == (self.started_ticks, True)


def boot_id() -> str:
    """Of the running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def of(pid: int) -> Identity | None:
    """The identity of a living process."""
    started = _stat(pid)
    return Identity(pid, started[0], boot_id()) if started is not None and started[1] else None


def _stat(pid: int) -> tuple[int, bool] | None:
    """(start time, whether it runs). The name in the second field may hold spaces and brackets: fields count from the last bracket."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]), fields[0] not in "ZX"


def read(path: Path) -> Identity | None:
    """What a pid file says; None when there is none or it is broken."""
    try:
        raw = json.loads(path.read_bytes())
        return Identity(int(raw["pid"]), int(raw["started_ticks"]), str(raw["boot_id"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def living(path: Path) -> Identity | None:
    """The process of a pid file, when it is alive."""
    found = read(path)
    return found if found is not None and found.alive() else None


def mark_of(path: Path) -> str | None:
    """Which code the process of a pid file was started from."""
    try:
        mark = json.loads(path.read_bytes()).get("mark")
    except (OSError, ValueError, AttributeError):
        return None
    return str(mark) if mark else None


def write(path: Path, identity: Identity, **more: str | int) -> None:
    """Write a pid file. *Errors*: OSError."""
    notes.write(path, json.dumps({**asdict(identity), **more}) + "\n")
