"""The instance that is measured: started for the benchmark, or one that runs already; its processes, and what they use.

A process's CPU time comes from its own clock (nanoseconds), its memory from smaps_rollup (PSS: shared pages are counted by share).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
ATOLL: Final = ROOT / ".venv" / "bin" / "atoll"
OURS: Final = ("control", "agent", "edge")
UP_S: Final = 900
_CPUCLOCK_SCHED: Final = 2


class CannotMeasure(Exception):
    """What is missing on this machine, in words."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One running instance."""

    home: Path
    install_id: str
    url: str
    control_url: str
    key: str
    environment: Mapping[str, str]
    pids: Mapping[str, int]
    """control, agent, edge, supervisor."""

    @property
    def edge_token(self) -> str:
        return (self.home / "secrets" / "edge.token").read_text().strip()

    @property
    def cgroup_parent(self) -> str:
        return f"atoll-{self.install_id.removeprefix('ins_')[:8]}"

    def cpu_s(self, *names: str) -> float:
        """CPU time of these processes so far; of all of ours without names."""
        return sum(cpu_s(pid) for pid in self.family(*(names or OURS)))

    def family(self, *names: str) -> list[int]:
        """These processes, with what they keep running beside them (the agent's resolver)."""
        found: list[int] = []
        for name in names:
            pid = self.pids[name]
            found += [pid, *(child for child in children(pid) if _is_program_of_ours(child))]
        return found


def children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def _is_program_of_ours(pid: int) -> bool:
    # A runtime that the agent has just started is a sandbox's, not ours.
    try:
        return b"atoll-io" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far, all threads, ended ones too."""
    # MAKE_PROCESS_CPUCLOCK of the kernel's posix-timers.h.
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def pss_kib(pid: int) -> int:
    """Proportional set size; 0 for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


@contextlib.contextmanager
def instance(home: str | None) -> Iterator[Instance]:
    """The instance in `home`, left as it is; or one of our own, gone afterwards. *Errors*: CannotMeasure."""
    if home is not None:
        yield _look(Path(home))
        return
    place = Path(tempfile.mkdtemp(prefix="atoll-bench.", dir="/var/tmp"))
    place.chmod(0o755)
    environment = {**os.environ, "ATOLL_HOME": str(place), "ATOLL_PORT": str(free_ports(3))}
    try:
        _run("up", "--no-demo", environment=environment, timeout_s=UP_S)
        yield _look(place)
    finally:
        _run("down", environment=environment, timeout_s=300)
        shutil.rmtree(place, ignore_errors=True)


def _look(home: Path) -> Instance:
    environment = {**os.environ, "ATOLL_HOME": str(home)}
    status = json.loads(_run("status", "--json", environment=environment, timeout_s=60))
    exports: dict[str, str] = {}
    for line in _run("env", environment=environment, timeout_s=60).splitlines():
        words = shlex.split(line)
        if len(words) == 2 and words[0] == "export":
            name, _, value = words[1].partition("=")
            exports[name] = value
    processes = {process["name"]: process for process in status["processes"]}
    return Instance(
        home=home,
        install_id=status["install_id"],
        url=status["url"],
        control_url=processes["control"]["address"],
        key=exports["E2B_API_KEY"],
        environment=exports,
        pids={name: process["pid"] for name, process in processes.items() if process["pid"]},
    )


def _run(*arguments: str, environment: Mapping[str, str], timeout_s: float) -> str:
    if not ATOLL.exists():
        raise CannotMeasure(f"{ATOLL} is missing: run `make up` once")
    ran = subprocess.run([str(ATOLL), *arguments], env=dict(environment), capture_output=True, text=True, timeout=timeout_s, check=False)
    if ran.returncode != 0:
        raise CannotMeasure(f"atoll {' '.join(arguments)} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}")
    return ran.stdout


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that nobody uses."""
    command = [str(ROOT / ".venv" / "bin" / "python"), str(ROOT / "scripts" / "free_ports.py"), str(count)]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)
