"""Terminals through the unmodified SDK."""

from __future__ import annotations

import concurrent.futures
import time

import pytest
from e2b import CommandExitException, NotFoundException, PtySize, SandboxException


def _until(sandbox, handle, lines: str) -> str:
    """Send lines, end with `exit`, and give all that the terminal said."""
    said: list[bytes] = []
    sandbox.pty.send_stdin(handle.pid, lines.encode())
    handle.wait(on_pty=said.append)
    return b"".join(said).decode(errors="replace")


def test_a_terminal(sandbox) -> None:
    handle = sandbox.pty.create(PtySize(rows=30, cols=100), envs={"MARK": "here"})
    said = _until(sandbox, handle, "tty; stty size; echo $TERM $MARK; whoami; exit\n")
    assert "/dev/pts/" in said
    assert "30 100" in said
    assert "xterm-256color here" in said
    assert "user" in said


def test_resize_reaches_the_program(sandbox) -> None:
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.send_stdin(handle.pid, b"trap 'echo changed $(stty size)' WINCH; echo rea$((40 + 2))dy\n")
    said: list[bytes] = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.wait, said.append)
        deadline = time.monotonic() + 15
        while b"rea42dy" not in b"".join(said):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        sandbox.pty.resize(handle.pid, PtySize(rows=50, cols=132))
        # A shell runs its trap when its present command ends.
        sandbox.pty.send_stdin(handle.pid, b"stty size; exit\n")
        waiting.result(20)
    assert "50 132" in b"".join(said).decode(errors="replace")


def test_status_and_user(sandbox) -> None:
    handle = sandbox.pty.create(PtySize(rows=24, cols=80), user="root", cwd="/tmp")
    sandbox.pty.send_stdin(handle.pid, b"whoami; pwd; exit 7\n")
    said: list[bytes] = []
    with pytest.raises(CommandExitException) as ended:
        handle.wait(on_pty=said.append)
    assert ended.value.exit_code == 7
    text = b"".join(said).decode(errors="replace")
    assert "root" in text
    assert "/tmp" in text


def test_control_characters(sandbox) -> None:
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.send_stdin(handle.pid, b"sleep 100\n")
    time.sleep(1)
    sandbox.pty.send_stdin(handle.pid, b"\x03")
    said = _until(sandbox, handle, "echo after-$?; exit\n")
    assert "after-130" in said


def test_connect_and_kill(sandbox) -> None:
    handle = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=0)
    handle.disconnect()
    again = sandbox.pty.connect(handle.pid)
    said = _until(sandbox, again, "echo still-here; exit\n")
    assert "still-here" in said
    doomed = sandbox.pty.create(PtySize(rows=24, cols=80))
    assert sandbox.pty.kill(doomed.pid) is True
    with pytest.raises(CommandExitException):
        doomed.wait()
    assert sandbox.pty.kill(doomed.pid) is False
    with pytest.raises(NotFoundException):
        sandbox.pty.resize(999999, PtySize(rows=1, cols=1))


def test_a_terminal_takes_no_ordinary_input(sandbox) -> None:
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    with pytest.raises(SandboxException):
        sandbox.commands.send_stdin(handle.pid, "echo\n")
    sandbox.pty.kill(handle.pid)


def test_input_streamed(sandbox) -> None:
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.stream_input(handle.pid, [b"echo part", b"-one\n", "exit\n"])
    said: list[bytes] = []
    handle.wait(on_pty=said.append)
    assert b"part-one" in b"".join(said)
