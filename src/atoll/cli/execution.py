"""`exec`: a command's output here, its status as ours."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.cli import output
from atoll.client.guest import Ended, Event, Guest, Output, Started

INPUT_BYTES: Final = 1 << 16
CANNOT_START: Final = 127
_SIGNALS: Final = {
    "killed": 9,
    "terminated": 15,
    "interrupt": 2,
    "hangup": 1,
    "aborted": 6,
    "segmentation fault": 11,
    "broken pipe": 13,
    "quit": 3,
}


@dataclass(frozen=True, slots=True)
class Options:
    """How a command is run."""

    user: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bool = False
    timeout_s: float | None = None
    as_json: bool = False


def exit_status(end: Ended) -> int:
    """The status that a shell would give: 128 and the number for a signal, 0 to 255 otherwise."""
    if end.status.startswith("signal: "):
        name = end.status.removeprefix("signal: ").partition(" (")[0]
        return 128 + _SIGNALS.get(name, 0)
    return end.exit_code & 0xFF


def run(guest: Guest, command: list[str], options: Options) -> int:
    """Run it; its exit status, or `CANNOT_START` as a shell would say. The first Ctrl-C asks it to end, the second kills it."""
    try:
        return _run(guest, command, options)
    except _CannotStartError as error:
        output.show_error(error.reason, as_json=options.as_json)
        return CANNOT_START


class _CannotStartError(Exception):
    """The guest refused the command before it ran."""

    def __init__(self, reason: AtollError) -> None:
        super().__init__(reason.message)
        self.reason = reason


def _until_started(events: Iterator[Event]) -> Iterator[Event]:
    """The events; a refusal before the first is told apart from one that comes later."""
    try:
        first = next(events, None)
    except Refused as error:
        if error.code is Code.INVALID_REQUEST:
            raise _CannotStartError(error) from error
        raise
    if first is not None:
        yield first
    yield from events


def _run(guest: Guest, command: list[str], options: Options) -> int:
    kept: dict[str, list[bytes]] = {"stdout": [], "stderr": [], "pty": []}
    started_s, pid = time.monotonic(), 0
    interrupts = _Interrupts(guest)
    with (
        guest.start(
            command, user=options.user, cwd=options.cwd, env=options.env, stdin=options.stdin, timeout_s=options.timeout_s
        ) as events,
        interrupts,
    ):
        for event in _until_started(events):
            match event:
                case Started():
                    pid = interrupts.pid = event.pid
                    if options.stdin:
                        threading.Thread(target=_feed, args=(guest, pid), daemon=True).start()
                case Output():
                    if options.as_json:
                        kept[event.stream].append(event.data)
                    else:
                        _write(event)
                case Ended():
                    code = exit_status(event)
                    if options.as_json:
                        elapsed_ms = round((time.monotonic() - started_s) * 1000)
                        output.document(_result(kept, exitCode=code, status=event.status, error=event.error, pid=pid, elapsedMs=elapsed_ms))
                    return code
    raise Unavailable(Code.OUTCOME_UNKNOWN, "the stream ended before the command did")


def _result(kept: dict[str, list[bytes]], **more: Any) -> dict[str, Any]:
    result = dict(more)
    for stream in ("stdout", "stderr"):
        data = b"".join(kept[stream])
        try:
            result[stream] = data.decode()
        except UnicodeDecodeError:
            result[stream] = data.decode(errors="replace")
            result[f"{stream}Base64"] = base64.b64encode(data).decode()
    return result


def _write(event: Output) -> None:
    stream = sys.stderr.buffer if event.stream == "stderr" else sys.stdout.buffer
    stream.write(event.data)
    stream.flush()


def _feed(guest: Guest, pid: int) -> None:
    """Give our standard input to the command until it ends, or the command does."""
    # What is left to send when the command has ended has no reader.
    with contextlib.suppress(AtollError):
        while data := os.read(sys.stdin.fileno(), INPUT_BYTES):
            guest.send_input(pid, data)
        guest.close_stdin(pid)


class _Interrupts:
    """While it is entered, Ctrl-C goes to the command."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._count = 0
        self._previous: Any = None
        self.pid: int | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._interrupt)

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, _number: int, _frame: Any) -> None:
        if self.pid is None:
            raise KeyboardInterrupt
        self._count += 1
        name = "SIGNAL_SIGTERM" if self._count == 1 else "SIGNAL_SIGKILL"
        threading.Thread(target=self._send, args=(self.pid, name), daemon=True).start()

    def _send(self, pid: int, name: str) -> None:
        with contextlib.suppress(AtollError):
            self._guest.signal(pid, name)
