"""QMP, as far as one machine needs it: a connection, one command after the other, events passed over. Blocking.

The socket is in a directory where QEMU may write, and so is not believed to be one: it is opened without following anything, looked at, and reached by
its descriptor. That also helps with the paths of sockets, which are short (108 bytes) while those of instances need not be. QEMU talks to one peer at a time: whoever has it is the placement's one verb, under its lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from atoll.base.errors import Code, Refused

SOCKET: Final = "qmp.sock"
ANSWER_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.003


def connect(directory: Path, name: str, *, timeout_s: float) -> socket.socket:
    """A connection to a socket in a directory. *Errors*: OSError."""
    found = os.open(directory / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise OSError(errno.ENOTSOCK, f"{directory / name} is no socket")
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            made.settimeout(timeout_s)
            made.connect(f"/proc/self/fd/{found}")
        except BaseException:
            made.close()
            raise
        return made
    finally:
        os.close(found)


class Qmp:
    """One conversation with one machine's monitor."""

    def __init__(self, directory: Path, *, code: Code, timeout_s: float = ANSWER_S) -> None:
        """`code`: what a failure is refused with. *Errors*: Refused with it."""
        self._code = code
        try:
            self._socket = connect(directory, SOCKET, timeout_s=timeout_s)
        except OSError as error:
            raise Refused(code, f"the machine's monitor does not answer: {error}") from error
        self._file = self._socket.makefile("rb")
        try:
            self._read()  # the greeting
            self.ask("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Carry a command out and give what it returns. *Errors*: Refused with the code of this conversation, and QEMU's own words."""
        message = {"execute": command, "arguments": arguments} if arguments else {"execute": command}
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Refused(self._code, f"{command}: the machine's monitor went away: {error}") from error
        while True:
            answer = self._read()
            if "error" in answer:
                raise Refused(self._code, f"{command}: {answer['error'].get('desc', 'it was refused')}")
            if "return" in answer:
                return answer["return"]

    def status(self) -> str:
        """`running`, `paused`, `inmigrate`... *Source*: QEMU's RunState."""
        return str(self.ask("query-status")["status"])

    def _read(self) -> dict[str, Any]:
        try:
            line = self._file.readline()
            answer = json.loads(line) if line else None
        except (OSError, ValueError) as error:
            raise Refused(self._code, f"the machine's monitor does not answer: {error}") from error
        if not isinstance(answer, dict):
            raise Refused(self._code, "the machine's monitor went away")
        return answer


def wait_until_there(directory: Path, pid: int, *, timeout_s: float) -> bool:
    """Wait until a machine that was just started has its monitor; False when its process ended, or time did."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), connect(directory, SOCKET, timeout_s=timeout_s) as peer:
            # It greets when it has begun to work, which is later than it listens.
            if peer.recv(1):
                return True
        if not Path(f"/proc/{pid}/cgroup").exists() or _is_zombie(pid):
            return False
        time.sleep(_LOOK_EVERY_S)
    return False


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
