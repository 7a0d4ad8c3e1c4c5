"""Talking to the supervisor from outside: is it there, start it, stop it, ask it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from atoll.base.errors import Code, Unavailable
from atoll.programs import identity
from atoll.programs.children import mark
from atoll.programs.layout import PROCESSES, Layout
from atoll.programs.supervisor import NAME, end_process, short_path

STOP_S = 60.0


def running(layout: Layout) -> identity.Identity | None:
    """The living supervisor of this instance."""
    return identity.living(layout.pid_file(NAME))


def ask(layout: Layout, request: str, **more: str) -> dict[str, Any]:
    """One question over its socket. *Errors*: Unavailable NOT_RUNNING."""
    try:
        with short_path(layout.socket) as path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5.0)
            connection.connect(path)
            connection.sendall(json.dumps({"ask": request, **more}).encode() + b"\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        value = json.loads(answer)
    except (OSError, ValueError) as error:
        raise Unavailable(Code.NOT_RUNNING, f"the supervisor of {layout.home} does not answer: {error}") from error
    return value if isinstance(value, dict) else {}


def start(layout: Layout) -> int:
    """Start the supervisor detached from this terminal and session; its process id."""
    environment = {name: value for name, value in os.environ.items() if name != "ATOLL_API_KEY"}
    environment["ATOLL_HOME"] = str(layout.home)
    with layout.log_file(NAME).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "atoll.programs.supervisor"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        found = running(layout)
        if found is not None and found.pid == process.pid and layout.socket.exists():
            return process.pid
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise Unavailable(
        Code.SETUP_FAILED,
        f"the supervisor did not start (status {process.poll()})",
        hint=f"Its last words are in {layout.log_file(NAME)}.",
    )


def outdated(layout: Layout, code: str) -> list[str]:
    """The living programs that were started from other code than `code`, or from settings that have changed since."""
    found: list[str] = []
    for name in PROCESSES:
        file = layout.pid_file(name)
        if identity.living(file) is not None and identity.mark_of(file) != mark(layout, name, code):
            found.append(name)
    return found


def stop_outdated(layout: Layout, code: str) -> list[str]:
    """Without a supervisor: end the programs that an earlier one left and that are outdated; which ones."""
    stopped: list[str] = []
    for name in reversed(outdated(layout, code)):
        left = identity.living(layout.pid_file(name))
        if left is not None:
            asyncio.run(end_process(left, 20.0, name))
            stopped.append(name)
    return stopped


def restart(layout: Layout, name: str) -> None:
    """Have the supervisor start one program anew, and wait until it has; it may not be well yet. *Errors*: Unavailable NOT_RUNNING."""
    before = identity.read(layout.pid_file(name))
    answer = ask(layout, "restart", name=name)
    deadline = time.monotonic() + STOP_S
    while answer.get("ok") and time.monotonic() < deadline:
        if (now := identity.living(layout.pid_file(name))) is not None and now != before:
            return
        time.sleep(0.02)
    raise Unavailable(
        Code.NOT_RUNNING,
        f"{name} was not started anew: {answer.get('error', 'it takes too long')}",
        hint=f"Its last words are in {layout.log_file(name)}.",
    )


def stop(layout: Layout) -> list[str]:
    """Stop the supervisor and with it everything, or, where there is none, what an earlier one left; what was stopped.

    *Idempotency*: nothing running is fine. Sandboxes are not touched.
    """
    stopped: list[str] = []
    supervisor = running(layout)
    if supervisor is not None:
        os.kill(supervisor.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while supervisor.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        if supervisor.alive():
            os.kill(supervisor.pid, signal.SIGKILL)
        stopped.append(NAME)
    for name in reversed(PROCESSES):
        left = identity.living(layout.pid_file(name))
        if left is not None:
            asyncio.run(end_process(left, 10.0, name))
            stopped.append(name)
    layout.socket.unlink(missing_ok=True)
    return stopped
