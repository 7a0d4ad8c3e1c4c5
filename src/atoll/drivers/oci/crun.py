"""crun, with runc as its stand-in: containers that share the host's kernel ("shared-kernel", only when the operator says so).

Theory of operation. The guest's root is an overlay: the image below, a sparse ext4 of the spec's size on a loop device above. Both are
mounted in the mount namespace of a thread of ours, the runtime is started from there and copies that namespace for the container, and
then they are unmounted in the thread: so they exist only in the container's own namespace, end with it, and the host's mount table
never grows. The same thread has no cgroup v2 tree mounted on a hybrid machine, where crun refuses to work (isolation.md A4).
Control groups are ours, not the runtime's: the runtime is started by a shell that first joins them, and told to manage none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci import capturing
from atoll.drivers.oci.runtime import CONSOLE, PID_FILE, Launch, read_pid, run
from atoll.hostops import cgroups, loopdisk, mounts, namespaces, processes, syscalls
from atoll.hostops.cgroups import Layout, Limits

DISK: Final = "disk.img"
UPPER: Final = "disk"
ROOT: Final = "rootfs"
BOOT_FILE: Final = "disk.boot"
DISK_NOTE: Final = "disk.txt"
UNIFIED: Final = "/sys/fs/cgroup/unified"
MOUNT_THREADS: Final = 8
DISK_FLAGS: Final = syscalls.MS_NODEV | syscalls.MS_NOATIME
WORKS_S: Final = 5.0
REFILL_DELAY_S: Final = 0.25
END_GRACE_SIGNAL: Final = 15


class SpareDisks:
    """Disks made ahead, in the sizes that have been asked for: copies of one that mkfs has made, on the host's disk already.

    A mount writes the superblock and waits until the host's disk has it. For a file that is only just being written that takes as long
    as all that the host has to write; so the copies are made durable beforehand, and not while whoever took one is starting.
    """

    def __init__(self, directory: Path, ahead: int, *, journal: bool = False) -> None:
        self._directory = directory
        self._ahead = ahead
        self._journal = journal
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._making = threading.Lock()

    def open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in self._directory.glob(".*.unfinished"):
            leftover.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._work, name="spare disks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Make what is still wanted, then end."""
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()
            self._thread = None

    def take(self, target: Path, size_mib: int) -> None:
        """Have a fresh disk at `target`: a spare one moved there, or one made now."""
        self._wanted.put(size_mib)
        for spare in self._spares(size_mib):
            try:
                spare.rename(target)
            except FileNotFoundError:
                continue  # another thread was faster
            return
        loopdisk.copy(self._blank(size_mib), target)

    def _blank(self, size_mib: int) -> Path:
        """What all disks of this size are copies of; its UUID is theirs, too, which ext4 does not mind."""
        path = self._directory / f"{size_mib}.img"
        with self._making:
            if not path.exists():
                loopdisk.make(path, size_mib, journal=self._journal)
        return path

    def _spares(self, size_mib: int) -> list[Path]:
        return sorted(self._directory.glob(f"{size_mib}-*.img"))

    def _work(self) -> None:
        number = 0
        while (size_mib := self._wanted.get()) is not None:
            time.sleep(REFILL_DELAY_S)
            while len(self._spares(size_mib)) < self._ahead:
                number += 1
                try:
                    loopdisk.copy(self._blank(size_mib), self._directory / f"{size_mib}-{os.getpid()}-{number}.img", durable=True)
                except OSError:
                    break  # whoever needs one makes it and hears why not


class Crun:
    """Containers by crun, or by runc when crun cannot run one on this machine."""

    def __init__(self, crun: Path, runc: Path, root: Path, layout: Layout, *, probe: Path, spare_disks: int = 4) -> None:
        """`probe`: a static program that ends well when it is given `--version`."""
        self._probe = probe
        self._crun = crun
        self._runc = runc
        self._root = root
        self._layout = layout
        self._disks = SpareDisks(root / "disks", spare_disks)
        self._mounters: ThreadPoolExecutor | None = None
        self._under_way: dict[str, Future[None]] = {}
        """Starts whose thread has not taken its mounts away yet."""
        self._use_runc = not crun.exists() and runc.exists()

    @property
    def binary(self) -> Path:
        return self._runc if self._use_runc else self._crun

    @property
    def is_runc(self) -> bool:
        """True when runc stands in."""
        return self._use_runc

    @property
    def _state(self) -> Path:
        return self._root / "containers"

    def open(self) -> None:
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._disks.open()
        self._mounters = ThreadPoolExecutor(max_workers=MOUNT_THREADS, thread_name_prefix="mounts", initializer=self._enter)
        if not self._use_runc and self._runc.exists():
            # A disk that has no room for a trial says nothing of a runtime, and there may be guests to look after.
            with contextlib.suppress(OSError):
                self._use_runc = not self._tried(self._crun) and self._tried(self._runc)

    def _tried(self, binary: Path) -> bool:
        assert self._mounters is not None
        return self._mounters.submit(self._works, binary).result()

    def _works(self, binary: Path) -> bool:
        """Whether a runtime can start a container on this machine: by starting one, since its reasons not to are its own."""
        with tempfile.TemporaryDirectory(dir=self._root, prefix=".works-") as name:
            bundle = Path(name)
            # crun wants to find a directory for devices, runc makes it.
            (bundle / "rootfs" / "dev").mkdir(parents=True)
            program = {"destination": "/program", "type": "bind", "source": str(self._probe), "options": ["bind", "ro"]}
            config = {
                "ociVersion": "1.0.2",
                "process": {"user": {"uid": 0, "gid": 0}, "args": ["/program", "--version"], "cwd": "/", "env": ["PATH=/"]},
                "root": {"path": "rootfs"},
                "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, program],
                "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]},
            }
            (bundle / "config.json").write_text(json.dumps(config))
            command = [*self._runtime(binary), "run", f"--bundle={bundle}", f"works-{os.getpid()}-{binary.name}"]
            quiet = subprocess.DEVNULL
            try:
                done = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=WORKS_S, check=False)
            except (OSError, subprocess.TimeoutExpired):
                return False
            return done.returncode == 0

    def _runtime(self, binary: Path) -> list[str]:
        """A runtime and what it is told first. runc cannot be told to leave control groups alone; it finds them as it would make them."""
        return [str(binary), f"--root={self._state}", *([] if binary == self._runc else ["--cgroup-manager=disabled"])]

    def _enter(self) -> None:
        namespaces.new_mount_namespace()
        if any(mount.point == UNIFIED for mount in mounts.table()) and self._layout.version == 1:
            syscalls.umount(UNIFIED, syscalls.MNT_DETACH)

    def close(self) -> None:
        if self._mounters is not None:
            self._mounters.shutdown(wait=True)
            self._mounters = None
        self._disks.close()

    # -- disk

    def make_disk(self, directory: Path, disk_mib: int) -> None:
        if not (directory / DISK).exists():
            self._disks.take(directory / DISK, disk_mib)
        for name in (UPPER, ROOT):
            (directory / name).mkdir(exist_ok=True, mode=0o700)

    def rootfs(self, directory: Path, image: Path) -> Path:  # noqa: ARG002 - the port's
        return directory / ROOT

    # -- start

    def start(self, launch: Launch) -> int:
        if self._mounters is None:
            raise RuntimeError("the runtime is not open")
        spec = launch.order.spec
        limits = Limits(spec.memory_mib, spec.cpu_millis, spec.pids_max, devices=True)
        # The groups are made here while the root is mounted there.
        grouped: Future[None] = Future()
        started: Future[None] = Future()
        under_way = self._mounters.submit(self._start_in_thread, launch, grouped, started)
        self._under_way[launch.container_id] = under_way
        under_way.add_done_callback(lambda done: self._forget(launch.container_id, done))
        try:
            cgroups.make(self._layout, launch.group, limits)
            grouped.set_result(None)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits for it, and from there below
            grouped.set_exception(error)
        started.result()
        pid = read_pid(launch.directory)
        if pid is None:
            raise Refused(Code.START_FAILED, f"{self.binary.name} wrote no pid")
        return pid

    def _forget(self, container_id: str, done: Future[None]) -> None:
        if self._under_way.get(container_id) is done:
            del self._under_way[container_id]

    def let_go(self, container_id: str) -> None:
        if (under_way := self._under_way.get(container_id)) is not None:
            wait((under_way,))

    def _start_in_thread(self, launch: Launch, grouped: Future[None], started: Future[None]) -> None:
        failure: BaseException | None = None
        try:
            self._mount_and_run(launch, grouped)
            # The guest has its own copies of the mounts by now: nobody waits while ours are taken away.
            started.set_result(None)
            # Of the file system itself, so of the guest's mount, too: from now on what a guest syncs is on the host's disk. Only an agent
            # that is killed within these few milliseconds leaves it otherwise.
            syscalls.mount(None, str(launch.directory / UPPER), None, syscalls.MS_REMOUNT | DISK_FLAGS, "barrier")
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it, when nothing is mounted any more
            failure = error
        for name in (ROOT, UPPER):
            with contextlib.suppress(OSError):
                syscalls.umount(str(launch.directory / name), syscalls.MNT_DETACH)
        if failure is not None and not started.done():
            started.set_exception(failure)

    def _mount_and_run(self, launch: Launch, grouped: Future[None]) -> None:
        try:
            self._mount(launch, launch.directory / UPPER, launch.directory / ROOT)
            grouped.result()
            run(self._command(launch), console=launch.directory / CONSOLE)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Refused(Code.HOST_DISK_FULL, str(error)) from error
            raise Refused(Code.START_FAILED, str(error)) from error

    def _mount(self, launch: Launch, upper: Path, root: Path) -> None:
        self._check_after_crash(launch.directory)
        device, fd = loopdisk.attach(launch.directory / DISK)
        try:
            # A mount writes the superblock and, with barriers, waits for the host's disk: `_start_in_thread` turns them on meanwhile.
            syscalls.mount(device, str(upper), "ext4", DISK_FLAGS, "nobarrier")
        finally:
            os.close(fd)
        files, work = upper / "upper", upper / "work"
        if not files.exists():
            work.mkdir(mode=0o700, exist_ok=True)
            self._first_files(launch, files)
        syscalls.mount("overlay", str(root), "overlay", syscalls.MS_NODEV, f"lowerdir={launch.rootfs},upperdir={files},workdir={work}")

    def _first_files(self, launch: Launch, files: Path) -> None:
        """What a new guest finds on its disk: a root with the image's mode, and a hosts file with its own name."""
        unfinished = files.with_name("upper.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        image = launch.rootfs
        shutil.copystat(image, unfinished)
        etc = image / "etc"
        if etc.is_dir() and not etc.is_symlink():
            (unfinished / "etc").mkdir()
            shutil.copystat(etc, unfinished / "etc")
            hosts = unfinished / "etc" / "hosts"
            hosts.write_text(f"127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 {launch.order.hostname}\n")
            hosts.chmod(0o644)
            resolv_conf = Path(shutil.copyfile(launch.resolv_conf, unfinished / "etc" / "resolv.conf"))
            # The agent's umask leaves nothing to others, and every user inside asks for names.
            resolv_conf.chmod(0o644)
        unfinished.rename(files)

    def _check_after_crash(self, directory: Path) -> None:
        """A disk without a journal that was in use when the host went down is checked before it is used again."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        note = directory / BOOT_FILE
        if note.exists() and note.read_text() != boot:
            loopdisk.check(directory / DISK)
        note.write_text(boot)

    def _command(self, launch: Launch) -> list[str]:
        """A shell that joins the groups and becomes the runtime: the container is born inside its limits."""
        join = "".join(f"echo 0 >{shlex.quote(str(path / 'cgroup.procs'))} && " for path in cgroups.directories(self._layout, launch.group))
        options = ["--detach", f"--bundle={launch.directory}", f"--pid-file={launch.directory / PID_FILE}"]
        runtime = [*self._runtime(self.binary), "run", *options, launch.container_id]
        return ["/bin/sh", "-c", f"{join}exec {shlex.join(runtime)}"]

    def settle(self, pid: int) -> None:
        """Nothing waits: the limits were there before the guest was."""

    # -- save

    saves = SaveMode.FILES
    disk_file: str | None = DISK

    def save(self, launch: Launch, target: Path, mode: SaveMode) -> None:
        """Its disk is what is kept, and it is there: a note stands for it. Whatever is not on it ends with the guest."""
        (target / DISK_NOTE).write_text(f"{launch.directory / DISK} is what was saved ({mode})\n")

    halts_to_keep = True

    def keep(self, launch: Launch, guest: int, target: Path, mode: SaveMode) -> None:  # noqa: ARG002 - the port's
        """A copy of its disk, as far as there is something on it. It is halted, so nobody writes; what was written is brought there first."""
        fd = os.open(f"/proc/{guest}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            syscalls.syncfs(fd)
        finally:
            os.close(fd)
        loopdisk.copy(launch.directory / DISK, target / DISK)

    def seed_disk(self, directory: Path, disk_mib: int, source: Callable[[], Path]) -> None:  # noqa: ARG002 - the port's
        if not (directory / DISK).exists():
            kept = source()
            # Its file system was in use when it was copied.
            self.distrust(directory)
            loopdisk.copy(kept / DISK, directory / DISK)
        for name in (UPPER, ROOT):
            (directory / name).mkdir(exist_ok=True, mode=0o700)

    def distrust(self, directory: Path) -> None:
        """By the note of another boot: its file system is looked through before it is mounted."""
        (directory / BOOT_FILE).write_text("copied")

    def go_on(self, container_id: str) -> None:
        """Nothing is halted to be saved."""

    def restore(self, launch: Launch, source: Path, mode: SaveMode) -> int:  # noqa: ARG002 - the port's
        return self.start(launch)

    # -- capture

    captures_running = False

    def capture(self, directory: Path, container_id: str, packer: Sequence[str]) -> bytes:
        """The disk is mounted again, read-only, where nobody else sees it: its guest has ended, and with it every other mount."""
        if self._mounters is None:
            raise RuntimeError("the runtime is not open")
        if not (directory / DISK).exists():
            raise Refused(Code.PLACEMENT_LOST, f"{container_id} has no disk any more")
        return self._mounters.submit(self._pack, directory, packer).result()

    def _pack(self, directory: Path, packer: Sequence[str]) -> bytes:
        upper = directory / UPPER
        device, fd = loopdisk.attach(directory / DISK)
        try:
            syscalls.mount(device, str(upper), "ext4", DISK_FLAGS | syscalls.MS_RDONLY, "")
        finally:
            os.close(fd)
        try:
            return capturing.pack([*packer, "--upper", str(upper / "upper")])
        finally:
            syscalls.umount(str(upper), syscalls.MNT_DETACH)

    # -- end and look

    def ask_to_end(self, container_id: str, pid: int) -> None:  # noqa: ARG002 - the port's
        processes.send_signal(pid, END_GRACE_SIGNAL)

    def state_paths(self, container_id: str) -> list[Path]:
        path = self._state / container_id
        return [path] if path.exists() else []

    def containers(self) -> set[str]:
        if not self._state.is_dir():
            return set()
        return {path.name for path in self._state.iterdir() if path.is_dir() and not path.name.startswith(".")}

    def is_guest(self, pid: int, container_id: str) -> bool:  # noqa: ARG002 - the port's
        """The container's first process is recognised by its control group alone (look.traces)."""
        return True
