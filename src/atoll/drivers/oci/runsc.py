"""gVisor's runsc. Measured behaviour: research/runtimes-and-io.md 1 and 1b; the pin is in native/runsc/go.mod."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci import capturing, sentry
from atoll.drivers.oci.programs import RUNTIME
from atoll.drivers.oci.runtime import CONSOLE, PID_FILE, Launch, read_pid, run, tell
from atoll.hostops import mounts, processes

MAP_COUNT: Final = Path("/proc/sys/vm/max_map_count")
MAP_COUNT_MIN: Final = 262_144
DISK: Final = "disk"
STUB_OOM_SCORE: Final = 900
OWN_STUB_OOM_SCORE: Final = 600
CUT_TCP: Final = "--allow-live-tcp-migration=false"
"""What is restored has another address: its old connections are cut, rather than left to wait for peers that cannot find it."""
LENIENT: Final = "--restore-spec-validation=ignore"
"""What was saved goes on as it was: a later version of Atoll may set up new containers in another way."""
HALT_S: Final = 30.0
SAVE_S: Final = 600.0


class Runsc:
    """One directory of runsc state; containers are sandboxes of their own."""

    def __init__(self, binary: Path, root: Path, state_dir: Path) -> None:
        """`state_dir`: of the placements, whose containers are called as they are."""
        self.binary = binary
        self._root = root
        self._state_dir = state_dir

    def _of(self, container_id: str) -> str:
        """The version that a container is of, which may be an earlier one (`programs.py`)."""
        own = self._state_dir / container_id / RUNTIME
        return str(own if own.exists() else self.binary)

    def open(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A guest process with 65,530 separate mappings would otherwise end its whole sandbox (research/runtimes-and-io.md 1b).
        if int(MAP_COUNT.read_text()) < MAP_COUNT_MIN:
            with contextlib.suppress(OSError):
                MAP_COUNT.write_text(str(MAP_COUNT_MIN))

    def close(self) -> None:
        """Let go of the empty network namespace that runsc keeps mounted for its gofers, when no container needs it."""
        if not self.containers():
            mounts.unmount_below(self._root)
            with contextlib.suppress(FileNotFoundError):
                (self._root / "null-netns").unlink()

    def make_disk(self, directory: Path, disk_mib: int) -> None:  # noqa: ARG002 - the port's
        """A directory: the sentry keeps what the guest writes in one unlinked or hidden file there, of a size that it limits itself."""
        (directory / DISK).mkdir(exist_ok=True, mode=0o700)

    def rootfs(self, directory: Path, image: Path) -> Path:  # noqa: ARG002 - the port's
        return image

    def command(self, launch: Launch, verb: str, *options: str) -> list[str]:
        """A runsc command line for this container."""
        disk = f"--overlay2=root:dir={launch.directory / DISK},size={launch.order.spec.disk_mib}m"
        return [
            self._of(launch.container_id),
            f"--root={self._root}",
            "--platform=systrap",
            "--network=sandbox",
            "--allow-suid",
            "--net-raw",
            CUT_TCP,
            LENIENT,
            disk,
            verb,
            *options,
            launch.container_id,
        ]

    saves = SaveMode.FULL
    disk_file: str | None = None

    def save(self, launch: Launch, target: Path, mode: SaveMode) -> None:
        """Halt its tasks, then write: whatever is done after the moment that is written would be done twice.

        With `--leave-running`, which here means halted: a sentry that cannot write all of it is left as it was (research 1b).
        """
        name = launch.container_id
        self._say(name, ["pause", name], HALT_S)
        self._write(name, target, mode)

    halts_to_keep = False

    def keep(self, launch: Launch, guest: int, target: Path, mode: SaveMode) -> None:  # noqa: ARG002 - the port's
        """The sentry halts its tasks for the moment itself, and lets them go on whatever becomes of this command."""
        self._write(launch.container_id, target, mode)

    def _write(self, container_id: str, target: Path, mode: SaveMode) -> None:
        """What a sentry is, without a program that only tells it to: a checkpoint leaves nothing in runsc's own files (adr/0046)."""
        if mode is SaveMode.FULL:
            sentry.checkpoint(self._root / f"runsc-{container_id}.sock", target, timeout_s=SAVE_S)
        else:
            self._say(container_id, ["fscheckpoint", f"--image-path={target}", "--leave-running", container_id], SAVE_S)

    def seed_disk(self, directory: Path, disk_mib: int, source: Callable[[], Path]) -> None:  # noqa: ARG002 - the port's
        """What was on the disk is in what is restored."""
        self.make_disk(directory, disk_mib)

    def distrust(self, directory: Path) -> None:
        """It has no disk that outlasts its guest."""

    def go_on(self, container_id: str) -> None:
        if json.loads(self._say(container_id, ["state", container_id], HALT_S))["status"] == "paused":
            self._say(container_id, ["resume", container_id], HALT_S)

    def _say(self, container_id: str, words: list[str], timeout_s: float) -> str:
        return tell([self._of(container_id), f"--root={self._root}", CUT_TCP, *words], timeout_s=timeout_s, code=Code.SAVE_FAILED)

    def restore(self, launch: Launch, source: Path, mode: SaveMode) -> int:
        image = f"--image-path={source}" if mode is SaveMode.FULL else f"--fs-restore-image-path={source}"
        return self._begin(launch, "restore" if mode is SaveMode.FULL else "run", image)

    def start(self, launch: Launch) -> int:
        return self._begin(launch, "run")

    def _begin(self, launch: Launch, verb: str, *options: str) -> int:
        # What an earlier start of this placement left would make runsc refuse; its guest is known to be gone.
        shutil.rmtree(launch.directory / DISK, ignore_errors=True)
        self.make_disk(launch.directory, launch.order.spec.disk_mib)
        pid_file = launch.directory / PID_FILE
        run(
            self.command(launch, verb, "--detach", *options, f"--bundle={launch.directory}", f"--pid-file={pid_file}"),
            console=launch.directory / CONSOLE,
        )
        pid = read_pid(launch.directory)
        if pid is None:
            raise Refused(Code.START_FAILED, f"runsc wrote no pid to {pid_file}")
        return pid

    def settle(self, pid: int) -> None:
        """Choose who goes when the group's memory runs out: never the sentry, the guest last of its children.

        A guest's address space is a stub process here, and what the kernel can see of its size says little: without this it kills
        atoll-guest as readily as the hog. The sentry's first child is the one that all later stubs are copied from, scores included;
        the second holds atoll-guest.
        """
        stubs = sorted(processes.children(pid), key=lambda stub: (processes.started_ticks(stub) or 0, stub))
        own = stubs[1:2]
        spared = {*own, *(child for stub in own for child in processes.descendants(stub))}
        for stub in processes.descendants(pid):
            processes.set_oom_score(stub, OWN_STUB_OOM_SCORE if stub in spared else STUB_OOM_SCORE)

    def let_go(self, container_id: str) -> None:
        """Nothing is left to be done when `start` returns."""

    def ask_to_end(self, container_id: str, pid: int) -> None:  # noqa: ARG002 - the port's
        subprocess.run(
            [self._of(container_id), f"--root={self._root}", "kill", container_id, "TERM"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=5, check=False,
        )  # fmt: skip

    captures_running = True

    def capture(self, directory: Path, container_id: str, packer: Sequence[str]) -> bytes:  # noqa: ARG002 - the port's
        """The sentry keeps what was written, and hands it out as long as it lives."""
        # By a pipe of its own: what runsc says for people goes to its output.
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as content, tempfile.TemporaryFile() as words:
            try:
                source = subprocess.Popen(
                    [self._of(container_id), f"--root={self._root}", "tar", "rootfs-upper", f"--file=/proc/self/fd/{writer}", container_id],
                    stdin=subprocess.DEVNULL, stdout=words, stderr=words, pass_fds=(writer,),
                )  # fmt: skip
            finally:
                os.close(writer)
            try:
                said = capturing.pack([*packer, "--tar", "-"], stdin=content)
            finally:
                # Nobody reads any more: without this it would wait for a reader forever.
                content.close()
                status = source.wait()
            words.seek(0)
            if status != 0:
                said_by_it = words.read().decode(errors="replace").strip()[-600:]
                raise Refused(Code.PLACEMENT_LOST, f"runsc does not hand out the files of {container_id}: {said_by_it}")
        return said

    def state_paths(self, container_id: str) -> list[Path]:
        names = (
            f"{container_id}_sandbox:{container_id}.state",
            f"{container_id}_sandbox:{container_id}.lock",
            f"runsc-{container_id}.sock",
        )
        return [path for name in names if (path := self._root / name).exists()]

    def containers(self) -> set[str]:
        if not self._root.is_dir():
            return set()
        names = [path.name for path in self._root.iterdir()]
        sockets = {
            name.removeprefix("runsc-").removesuffix(".sock") for name in names if name.startswith("runsc-") and name.endswith(".sock")
        }
        return sockets | {name.partition("_sandbox:")[0] for name in names if "_sandbox:" in name}

    def is_guest(self, pid: int, container_id: str) -> bool:
        """The sentry's command line: `runsc-sandbox ... boot ... ID`."""
        line = processes.arguments(pid)
        return bool(line) and "boot" in line and line[-1] == container_id
