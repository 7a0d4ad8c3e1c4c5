"""QMP, as far as one machine needs it: a connection, one command after the other, events passed over. Blocking.

QEMU talks to one peer at a time: whoever has it is the placement's one verb, under its lock.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from atoll.base.errors import Code, Refused
from atoll.drivers.sockets import connect, is_ending

SOCKET: Final = "qmp.sock"
ANSWER_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.003


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
        if not Path(f"/proc/{pid}/cgroup").exists() or is_ending(pid):
            return False
        time.sleep(_LOOK_EVERY_S)
    return False
