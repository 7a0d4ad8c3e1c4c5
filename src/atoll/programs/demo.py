"""The first sandbox: create it, run a command and Python in it, read what they said, remove it; all through the product's own API."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from atoll.base.errors import Code, Unavailable
from atoll.client.api import Api
from atoll.client.guest import Guest, Result
from atoll.client.target import Target

T = TypeVar("T")

COMMAND = "uname -sr; id -un; grep PRETTY_NAME /etc/os-release"
PYTHON = 'import platform; print("Python", platform.python_version(), "says", sum(range(101)))'  # fmt: skip
_GONE_S = 30.0


@dataclass(frozen=True, slots=True)
class Demo:
    """What was done and how long it took. *Units*: milliseconds."""

    sandbox_id: str
    isolation: str
    command: str
    command_said: str
    python_said: str
    create_ms: float
    command_ms: float
    python_ms: float
    remove_ms: float


def run(target: Target) -> Demo:
    """Do it. *Errors*: those of the client; Unavailable START_FAILED when a command did not end with 0."""
    with Api(target) as api:
        api.whoami()  # opens the connection, so that the times below are of the work alone
        sandbox, create_ms = _timed(lambda: api.create_sandbox(request_id=f"up-{secrets.token_hex(8)}", metadata={"made-by": "atoll up"}))
        sandbox_id = str(sandbox["id"])
        try:
            with api.guest(sandbox) as guest:
                said, command_ms = _timed(lambda: _checked(guest, ["/bin/sh", "-c", COMMAND]))
                python_said, python_ms = _timed(lambda: _checked(guest, ["python3", "-c", PYTHON]))
        finally:
            _, remove_ms = _timed(lambda: _remove(api, sandbox_id))
    return Demo(sandbox_id, str(sandbox.get("isolation") or ""), COMMAND, said, python_said, create_ms, command_ms, python_ms, remove_ms)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.monotonic()
    result = work()
    return result, (time.monotonic() - started) * 1000.0


def _checked(guest: Guest, command: list[str]) -> str:
    result: Result = guest.run(command)
    if result.exit_code != 0:
        raise Unavailable(
            Code.START_FAILED,
            f"`{' '.join(command)[:60]}` in the sandbox ended with {result.exit_code}: {result.stderr.decode(errors='replace').strip()[:300]}",
            hint="The template may be broken: `scripts/setup.py --verify-base` reads it whole.",
        )
    return result.stdout.decode(errors="replace").strip()


def _remove(api: Api, sandbox_id: str) -> None:
    """Release it, and wait until it is seen gone."""
    api.release(sandbox_id)
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        state = str(api.sandbox(sandbox_id).get("state"))
        if state in {"released", "failed"}:
            return
        time.sleep(0.01)
    raise Unavailable(
        Code.CLEANUP_FAILED,
        f"sandbox {sandbox_id} was not gone after {_GONE_S:.0f} s",
        hint=f"`atoll sandbox events {sandbox_id}` says why.",
    )
