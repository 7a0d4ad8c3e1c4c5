"""What is behind the API: a machine of the same make, emulated by QEMU in a helper that is outside of the jail.

Theory of operation. The helper is told by messages with open files and opens nothing by itself. Memory is a file that QEMU maps privately: an empty one, or
the one that is loaded. A whole snapshot is that file and all pages that are the process's own; a difference is only those of them that have
changed since the last snapshot, as the real one has it, with what became zero written out. The vsock's port is the guest's serial line.
The helper ends when its Firecracker does, and Firecracker when the machine does. Its files are beside the jail's root, on ground that is gone with
their namespace: it may be killed at any point.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final, Protocol

from atoll.base.errors import Code, Refused
from atoll.drivers.machines import tap
from atoll.drivers.qemu import memory, qmp
from atoll.drivers.qemu.config import QEMU
from atoll.drivers.qemu.machine import tsc_khz
from atoll.drivers.qemu.options import LINE_PORT, LINE_SOCKET
from atoll.drivers.sockets import connect

MAGIC: Final = b"atoll.testing.firecracker\n"
GUEST_PORT: Final = 1024
_MESSAGE_BYTES_MAX: Final = 1 << 16
_FILES_MAX: Final = 16
_IFF_TAP_PLAIN_HDR: Final = 0x0002 | 0x1000 | 0x4000
_TUNSETIFF: Final = 0x400454CA
_STARTED_S: Final = 60.0


class Failed(Exception):
    """The helper could not do it."""


class Helper(Protocol):
    """Whoever carries out what is allowed."""

    def ask(self, verb: str, files: dict[str, int] | None = None, **more: Any) -> None:
        """Have it done; the files are closed. *Errors*: Failed."""
        ...


class Idle:
    """Nothing is behind the API; snapshots are written as what they should look like."""

    def ask(self, verb: str, files: dict[str, int] | None = None, **more: Any) -> None:
        for name, fd in (files or {}).items():
            if verb == "snapshot" and name == "state":
                os.write(fd, state_of(more["machine"], b"nothing"))
            os.close(fd)


class _Outside:
    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer

    def ask(self, verb: str, files: dict[str, int] | None = None, **more: Any) -> None:
        given = files or {}
        try:
            text = json.dumps({"do": verb, "files": list(given), **more}).encode()
            socket.send_fds(self._peer, [text], list(given.values()))
            said = json.loads(self._peer.recv(_MESSAGE_BYTES_MAX) or b'{"error": "the helper has ended"}')
        finally:
            for fd in given.values():
                os.close(fd)
        if "error" in said:
            raise Failed(said["error"])


def split_off(place: Path | None = None) -> Helper:
    """Start the helper, which stays what this process is now. `place`: for its files; None: somewhere, and it takes that away."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        with contextlib.suppress(BaseException):
            _Machine(parent, place).serve(theirs)
        os._exit(0)
    theirs.close()
    return _Outside(ours)


def open_tap(name: str) -> int:
    """The device of this name, as Firecracker opens it. *Errors*: OSError, where it is another user's."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_PLAIN_HDR))
    except BaseException:
        os.close(fd)
        raise
    return fd


def state_of(machine: dict[str, Any], devices: bytes) -> bytes:
    """A snapshot's state: what the machine is made of, and its devices."""
    text = json.dumps(machine).encode()
    return MAGIC + len(text).to_bytes(4, "big") + text + devices


def machine_of(state: bytes) -> dict[str, Any]:
    """*Errors*: Failed when it is no state."""
    if not state.startswith(MAGIC):
        raise Failed("the snapshot's state is none of this Firecracker's")
    size = int.from_bytes(state[len(MAGIC) :][:4], "big")
    found: dict[str, Any] = json.loads(state[len(MAGIC) + 4 :][:size])
    return found


def _devices_of(state: bytes) -> bytes:
    size = int.from_bytes(state[len(MAGIC) :][:4], "big")
    return state[len(MAGIC) + 4 + size :]


class _Machine:
    """The helper."""

    def __init__(self, parent: int, place: Path | None) -> None:
        self._parent = parent
        self._place = Path(tempfile.mkdtemp(prefix="atoll-fc-")) if place is None else place
        self._place.mkdir(exist_ok=True, mode=0o700)
        self._process: subprocess.Popen[bytes] | None = None
        self._base = -1
        """What memory began as, as a file."""
        self._last: int | None = None
        """The pages of the last snapshot."""

    def serve(self, peer: socket.socket) -> None:
        """Do what is asked until nobody asks any more."""
        try:
            while True:
                text, fds, _, _ = socket.recv_fds(peer, _MESSAGE_BYTES_MAX, _FILES_MAX)
                if not text:
                    return
                asked = json.loads(text)
                try:
                    self._do(asked, dict(zip(asked["files"], fds, strict=True)))
                    peer.send(b"{}")
                except (Failed, Refused, OSError, subprocess.SubprocessError) as error:
                    peer.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
        finally:
            if self._process is not None:
                self._process.kill()
            shutil.rmtree(self._place, ignore_errors=True)

    def _do(self, asked: dict[str, Any], files: dict[str, int]) -> None:
        match asked["do"]:
            case "start":
                self._base = os.memfd_create("memory")
                os.ftruncate(self._base, asked["machine"]["memory_mib"] << 20)
                words = f"{asked['words']} tsc_early_khz={tsc_khz()} tsc=reliable no_timer_check mitigations=off reboot=t"
                boot = ["-kernel", _path(files["kernel"]), "-append", words]
                boot += ["-initrd", _path(files["initrd"])] if "initrd" in files else []
                self._run(asked["machine"], files, boot)
            case "load":
                self._load(asked["machine"], files)
            case "halt":
                self._say("stop")
            case "go on":
                self._say("cont")
            case "snapshot":
                self._snapshot(asked["machine"], files, whole=asked["whole"])
            case other:
                raise Failed(f"nobody does {other}")

    def _say(self, command: str, **arguments: Any) -> None:
        with qmp.Qmp(self._place, code=Code.SAVE_FAILED) as monitor:
            monitor.ask(command, **arguments)

    def _run(self, machine: dict[str, Any], files: dict[str, int], boot: list[str]) -> None:
        words = [str(QEMU), *_arguments(machine, files, _path(self._base)), *boot]
        passed = [*files.values(), self._base]
        # Names of sockets are short, and places need not be.
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=passed, cwd=self._place)
        if not qmp.wait_until_there(self._place, self._process.pid, timeout_s=_STARTED_S):
            raise Failed("QEMU ended, or has no monitor")
        threading.Thread(target=self._follow, args=(self._process,), daemon=True).start()
        if "vsock" in files:
            listener = socket.socket(fileno=files["vsock"])
            threading.Thread(target=self._connect_guests, args=(listener,), daemon=True).start()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._parent, signal.SIGTERM)

    def _load(self, machine: dict[str, Any], files: dict[str, int]) -> None:
        self._base = files.pop("memory")
        devices = self._place / "devices"
        with os.fdopen(files.pop("state"), "rb") as state:
            devices.write_bytes(_devices_of(state.read()))
        incoming = os.open(devices, os.O_RDONLY)
        os.set_inheritable(incoming, True)
        # As a real one it stands still until it is told to go on.
        self._run(machine, {**files, "incoming": incoming}, ["-S", "-incoming", f"fd:{incoming}"])
        deadline = time.monotonic() + _STARTED_S
        with qmp.Qmp(self._place, code=Code.RESUME_FAILED) as monitor:
            while (status := monitor.status()) in ("inmigrate", "finish-migrate"):
                if time.monotonic() > deadline:
                    raise Failed(f"the machine is {status}")
                time.sleep(0.005)

    def _snapshot(self, machine: dict[str, Any], files: dict[str, int], *, whole: bool) -> None:
        assert self._process is not None
        devices = self._place / "devices"
        self._say("xen-save-devices-state", filename=devices.name, live=True)
        with os.fdopen(files["state"], "wb") as state:
            state.write(state_of(machine, devices.read_bytes()))
        # It counts as the machine's own memory, and there is room for one of these, and the one before.
        now = os.memfd_create("pages")
        spent: int | None = now
        try:
            os.ftruncate(now, os.fstat(self._base).st_size)
            _copy_own(self._process.pid, self._base, now)
            if whole:
                _copy_data(self._base, files["memory"])
                _copy_data(now, files["memory"])
            else:
                _copy_data(now, files["memory"], unlike=self._last)
            spent, self._last = self._last, now
        finally:
            os.close(files["memory"])
            if spent is not None:
                os.close(spent)

    def _connect_guests(self, listener: socket.socket) -> None:
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=self._connect_guest, args=(peer,), daemon=True).start()

    def _connect_guest(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, ValueError):
            word, number = peer.makefile("rb", buffering=0).readline(64).split()
            if word != b"CONNECT" or int(number) != GUEST_PORT:
                return
            with connect(self._place, LINE_SOCKET, timeout_s=5.0) as guest:
                guest.settimeout(None)
                peer.sendall(b"OK 1073741824\n")
                back = threading.Thread(target=_pump, args=(guest, peer), daemon=True)
                back.start()
                _pump(peer, guest)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _arguments(machine: dict[str, Any], files: dict[str, int], memory_path: str) -> list[str]:
    size = machine["memory_mib"]
    words = [
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-machine", "microvm,rtc=on,suppress-vmdesc=on,memory-backend=ram",
        "-global", "migration.send-configuration=off",
        "-accel", "tcg,tb-size=32", "-cpu", "max", "-smp", "1", "-m", str(size),
        "-object", f"memory-backend-file,id=ram,size={size}M,mem-path={memory_path},share=off",
        "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
        "-device", "virtio-serial-device,max_ports=2",
        "-chardev", f"socket,id=line,path={LINE_SOCKET},server=on,wait=off",
        "-device", f"virtserialport,chardev=line,name={LINE_PORT}",
        "-qmp", f"unix:{qmp.SOCKET},server=on,wait=off",
    ]  # fmt: skip
    for drive in machine["drives"]:
        name = drive["drive_id"]
        rights = ",readonly=on" if drive["is_read_only"] else ""
        words += ["-drive", f"if=none,id={name},file={_path(files[f'drive {name}'])},format=raw{rights}"]
        words += ["-device", f"virtio-blk-device,drive={name}"]
    for network in machine["networks"]:
        name = network["iface_id"]
        words += ["-netdev", f"tap,id={name},fd={files[f'tap {name}']}"]
        words += ["-device", f"virtio-net-device,netdev={name},mac={network.get('guest_mac', tap.GUEST_MAC)}"]
    return [*words, *(["-device", "virtio-rng-device"] if machine["entropy"] else [])]


def _copy_own(pid: int, base: int, target: int) -> None:
    """All pages that are the process's own, zeros too."""
    about = os.fstat(base)
    found = memory.regions(Path(f"/proc/{pid}/maps").read_text(), about.st_ino, about.st_dev)
    if not found:
        raise Failed("the machine's process does not map its memory")
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap, Path(f"/proc/{pid}/mem").open("rb", buffering=0) as content:
        for region in found:
            for start, length in memory.own_runs(pagemap.fileno(), region):
                os.pwrite(target, os.pread(content.fileno(), length, start), region.offset + start - region.start)


def _copy_data(source: int, target: int, *, unlike: int | None = None) -> None:
    """Write what is no hole; with `unlike`, only pages that differ from that file's."""
    page, end, size = memory.PAGE, 0, os.fstat(source).st_size
    while end < size:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(source, start, os.SEEK_HOLE)
        for offset in range(start, end, page):
            data = os.pread(source, page, offset)
            if unlike is None or os.pread(unlike, page, offset) != data:
                os.pwrite(target, data, offset)
