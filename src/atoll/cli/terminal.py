"""`shell`: a real terminal. This one goes raw, every key goes to the other, its size follows ours, its status becomes ours."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Any, Final

from atoll.base.errors import AtollError, Code, Unavailable
from atoll.cli.execution import exit_status
from atoll.client.guest import Ended, Guest, Output, Started

READ_BYTES: Final = 1 << 14
END_OF_INPUT: Final = b"\x04"
END_AGAIN_S: Final = 1.0


def run(guest: Guest, command: list[str], *, user: str | None = None, cwd: str | None = None) -> int:
    """Run `command` on a terminal of its own inside; its exit status. Without a terminal here, input is passed on and then ended."""
    size = _size()
    env = {"TERM": os.environ.get("TERM") or "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    with guest.start(command, user=user, cwd=cwd, env=env, pty=(size.columns, size.lines)) as events:
        first = next(iter(events), None)
        if not isinstance(first, Started):
            raise Unavailable(Code.OUTCOME_UNKNOWN, "the shell did not start")
        with _raw(), _Side(guest, first.pid):
            for event in events:
                match event:
                    case Output():
                        _write(event.data)
                    case Ended():
                        return exit_status(event)
                    case _:
                        pass
    raise Unavailable(Code.OUTCOME_UNKNOWN, "the terminal's stream ended before its shell did")


def _size() -> os.terminal_size:
    """Of the terminal itself: COLUMNS and LINES, where somebody exports them, are what it was once."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return shutil.get_terminal_size()
    return size if size.columns and size.lines else shutil.get_terminal_size()


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Every key is passed on, also Ctrl-C, until the end; then the terminal is as it was."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)  # not FLUSH: what was typed ahead counts
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Side:
    """What goes in: keys and sizes, by a thread of its own, in the order in which they came."""

    def __init__(self, guest: Guest, pid: int) -> None:
        self._guest = guest
        self._pid = pid
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._resized = False
        self._ended = False
        self._previous: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGWINCH, self._on_resize)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._wake()
        self._thread.join(timeout=2.0)
        if self._previous is not None:
            signal.signal(signal.SIGWINCH, self._previous)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _on_resize(self, _number: int, _frame: Any) -> None:
        self._resized = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
        # The shell has ended, or the sandbox: the stream of events says so, with more detail.
        with contextlib.suppress(AtollError):
            self._pass_on()

    def _pass_on(self) -> None:
        source = sys.stdin.fileno()
        waiting = [self._wake_read, source]
        ending = END_OF_INPUT
        while not self._ended:
            ready, _, _ = select.select(waiting, [], [], None if source in waiting else END_AGAIN_S)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                if self._resized:
                    self._resized = False
                    size = _size()
                    self._guest.resize(self._pid, columns=size.columns, rows=size.lines)
            if source in ready and not self._ended:
                data = os.read(source, READ_BYTES)
                self._guest.send_input(self._pid, data or ending, pty=True)
                if not data:
                    waiting.remove(source)
                # In the middle of a line the key is no end: a shell's editor would delete with it, and wait for ever.
                ending = END_OF_INPUT if data.endswith((b"\n", b"\r")) else b"\n" + END_OF_INPUT
            elif not ready:
                # A key is heard once, also by a shell that was not listening yet; an input that has ended has ended for each reader.
                self._guest.send_input(self._pid, END_OF_INPUT, pty=True)
