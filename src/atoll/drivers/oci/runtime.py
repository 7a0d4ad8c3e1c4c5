"""A runtime: how one kind of container is started, and where its own state is.

Everything else (directories, slots, control groups, killing, looking) is the same for all and is done by the driver itself, so that a
sandbox can always be removed, whatever state its runtime is in or whether the runtime is still installed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci.slotworks import Slot
from atoll.drivers.port import Order
from atoll.hostops import processes

START_TIMEOUT_S: Final = 30.0
CONSOLE: Final = "console.log"
PID_FILE: Final = "init.pid"


@dataclass(frozen=True, slots=True)
class Launch:
    """One start: where the bundle is and what it is called."""

    container_id: str
    directory: Path
    group: str
    order: Order
    rootfs: Path
    resolv_conf: Path
    slot: Slot | None = None
    """Where it is to be; None for what is only looked at, or saved."""


class Runtime(Protocol):
    """What differs between runtimes. All blocking; the driver calls them in threads."""

    @property
    def binary(self) -> Path:
        """The program that is started."""
        ...

    def open(self) -> None:
        """Begin; called once before anything else."""
        ...

    def close(self) -> None:
        """End."""
        ...

    def make_disk(self, directory: Path, disk_mib: int) -> None:
        """Have a disk of this size in the placement's directory. *Errors*: Refused(HOST_DISK_FULL)."""
        ...

    def rootfs(self, directory: Path, image: Path) -> Path:
        """What config.json names as the root: the image's tree, or where it will be mounted."""
        ...

    def start(self, launch: Launch) -> int:
        """Start the container of a prepared bundle and return its watched process. *Errors*: Refused(START_FAILED, RUNTIME_MISSING)."""
        ...

    saves: SaveMode
    """What can be saved of a container."""

    disk_file: str | None
    """The file of a placement's directory that is saved by being there, where `save` writes no more than a note; None: `save` writes all."""

    def save(self, launch: Launch, target: Path, mode: SaveMode) -> None:
        """Write what is to be saved into a directory, and leave the container halted or as it was. *Errors*: Refused SAVE_FAILED."""
        ...

    halts_to_keep: bool
    """Whether whoever calls `keep` halts the container meanwhile."""

    def keep(self, launch: Launch, guest: int, target: Path, mode: SaveMode) -> None:
        """Write what is to be kept of one moment into a directory; the container goes on. *Errors*: Refused SAVE_FAILED; OSError."""
        ...

    def seed_disk(self, directory: Path, disk_mib: int, source: Callable[[], Path]) -> None:
        """As `make_disk`, for a container that is begun from what `keep` has written: asked for where it has no disk yet. *Errors*: OSError."""
        ...

    def distrust(self, directory: Path) -> None:
        """The disk in a placement's directory came from elsewhere. *Errors*: OSError."""
        ...

    def go_on(self, container_id: str) -> None:
        """Let a container go on that `save`, of this run or an earlier one, has halted. *Idempotency*: one that runs is left alone."""
        ...

    def restore(self, launch: Launch, source: Path, mode: SaveMode) -> int:
        """Start the container of a prepared bundle from what was saved; its watched process. *Errors*: as `start`."""
        ...

    def settle(self, pid: int) -> None:
        """What can wait until after the start, e.g. scores for the OOM killer. Never raises for a guest that is gone.

        *Idempotency*: done again when a guest is adopted.
        """
        ...

    def let_go(self, container_id: str) -> None:
        """Wait until nothing is under way here for this container: what `start` has left to be done behind it."""
        ...

    def ask_to_end(self, container_id: str, pid: int) -> None:
        """Tell the guest to end by itself; it may not listen."""
        ...

    captures_running: bool
    """Whether what a container has written is captured while it runs, or only once it has ended."""

    def capture(self, directory: Path, container_id: str, packer: Sequence[str]) -> bytes:
        """What the packing program says of what the container has written. *Errors*: Refused PLACEMENT_LOST; OSError."""
        ...

    def state_paths(self, container_id: str) -> list[Path]:
        """Files of the runtime's own about this container, that exist."""
        ...

    def containers(self) -> set[str]:
        """Ids of all containers that the runtime has files about."""
        ...

    def is_guest(self, pid: int, container_id: str) -> bool:
        """True when this process is the one to watch for this container."""
        ...


def tell(command: Sequence[str], *, timeout_s: float, code: Code) -> str:
    """Run a runtime's command about a container that there is, and give what it says. *Errors*: Refused with this code, RUNTIME_MISSING."""
    name = Path(command[0]).name
    with os.fdopen(os.memfd_create("out"), "w+b") as said, os.fdopen(os.memfd_create("errors"), "w+b") as complained:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=complained)
        except (FileNotFoundError, PermissionError) as error:
            raise Refused(Code.RUNTIME_MISSING, f"{command[0]} cannot be run: {error}") from error
        # As in `run`: whoever waits with a limit in any other way looks again only every few milliseconds.
        if not processes.wait_end(process.pid, timeout_s):
            process.kill()
            process.wait()
            raise Refused(code, f"{name} did not answer within {timeout_s:.0f} s")
        result = process.wait()
        said.seek(0)
        complained.seek(0)
        words, complaints = said.read().decode(errors="replace"), complained.read().decode(errors="replace")
    if result != 0:
        raise Refused(code, f"{name} ended with {result}: {(complaints or words).strip()[-600:]}")
    return words


def run(command: Sequence[str], *, console: Path, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()) -> None:
    """Run a runtime's command to its end, with the console as the container's output.

    *Errors*: Refused(START_FAILED) with its last words, Refused(RUNTIME_MISSING).
    """
    # The container inherits its output, so what the runtime itself says goes to the same file; only that of a failed start is read.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    output = os.open(console, flags, 0o600)
    try:
        before = os.fstat(output).st_size
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment) if environment is not None else None,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        # Popen.wait with a timeout looks again only every 50 ms; the descriptor says it at once.
        if not processes.wait_end(process.pid, START_TIMEOUT_S):
            process.kill()
            process.wait()
            raise Refused(Code.START_FAILED, f"{command[0]} did not answer within {START_TIMEOUT_S:.0f} s")
        result = process.wait()
    except (FileNotFoundError, PermissionError) as error:
        raise Refused(Code.RUNTIME_MISSING, f"{command[0]} cannot be run: {error}") from error
    finally:
        os.close(output)
    if result != 0:
        raise Refused(Code.START_FAILED, f"{Path(command[0]).name} ended with {result}: {last_words(console, before)}")


def last_words(console: Path, offset: int) -> str:
    """What was said on a console from an offset on, the end of it."""
    with console.open("rb") as file:
        file.seek(max(offset, 0))
        text = file.read(65536).decode(errors="replace").strip()
    return text[-600:] or "it said nothing"


def read_pid(directory: Path) -> int | None:
    """The pid that the runtime wrote, or None."""
    try:
        return int((directory / PID_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
