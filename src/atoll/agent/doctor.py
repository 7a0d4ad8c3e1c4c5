"""Doctor: a registry of checks with stable ids, used by `atoll doctor`, by the agent's start, and by what polls say of the host.

Theory of operation. A check looks, and changes nothing. Its findings name what is wrong and what to do. A failed `fatal` one makes the
host unschedulable. A driver's own probes (one of which starts a real guest) are findings like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from atoll.agent.facts import free_mib
from atoll.agent.lock import holder_of
from atoll.base.clock import Clock
from atoll.domain.spec import Isolation
from atoll.drivers.port import Driver

CHECK_S_MAX: Final = 60.0
PLAUSIBLE_NOW: Final = 1_735_689_600.0
"""2025-01-01: a wall clock before this was never set."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    id: str
    title: str
    ok: bool
    detail: str
    fix: str = ""
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at."""

    id: str
    title: str
    run: Callable[[], Awaitable[Sequence[Finding]]]


class Registry:
    """Checks in the order in which people read them."""

    def __init__(self, checks: Sequence[Check]) -> None:
        ids = [check.id for check in checks]
        assert len(ids) == len(set(ids)), ids
        self.checks = tuple(checks)

    async def run(self) -> list[Finding]:
        """Run all of them at once. A check that raises or hangs is a finding, too."""
        found = await asyncio.gather(*(_run(check) for check in self.checks))
        return [finding for findings in found for finding in findings]


async def _run(check: Check) -> Sequence[Finding]:
    try:
        async with asyncio.timeout(CHECK_S_MAX):
            return await check.run()
    except TimeoutError:
        detail = f"no answer within {CHECK_S_MAX:g} s"
    except Exception as error:  # noqa: BLE001 - a task boundary: a check that breaks is what the doctor is for
        detail = f"{type(error).__name__}: {error}"
    return [Finding(check.id, check.title, False, detail, "Look at the agent's log.", fatal=True)]


def simple(id: str, title: str, look: Callable[[], tuple[bool, str]], *, fix: str, fatal: bool = False) -> Check:  # noqa: A002
    """A check with one finding, by a function that looks and says (ok, detail)."""

    async def run() -> Sequence[Finding]:
        ok, detail = look()
        return [Finding(id, title, ok, detail, "" if ok else fix, fatal)]

    return Check(id, title, run)


def driver_checks(drivers: Mapping[Isolation, Driver]) -> list[Check]:
    """Each driver's own probes."""

    def check(isolation: Isolation, driver: Driver) -> Check:
        title = f"driver {driver.capabilities.name} ({isolation})"

        async def run() -> Sequence[Finding]:
            return [Finding(p.id, title, p.ok, p.detail, p.fix, p.fatal) for p in await driver.probe()]

        return Check(f"driver.{isolation}", title, run)

    return [check(isolation, driver) for isolation, driver in drivers.items()]


def host_checks(*, state_directory: Path, clock: Clock, disk_reserve_mib: int) -> list[Check]:
    """What any host needs."""
    return [
        simple(
            "host.state_directory",
            "state directory",
            lambda: state_directory_private(state_directory),
            fix=f"Let root own {state_directory} with mode 0700, and let nobody else write there.",
            fatal=True,
        ),
        simple(
            "host.disk",
            "free disk",
            lambda: enough(free_mib(state_directory), disk_reserve_mib, what=f"free on the disk of {state_directory}"),
            fix="Free space on that disk; until then nothing new starts here.",
            fatal=True,
        ),
        simple("host.clock", "clock", lambda: clock_plausible(clock), fix="Set the clock; guests get their time from it."),
    ]


def agent_checks(*, lock_path: Path, credential_path: Path, control_url: str) -> list[Check]:
    """What `atoll doctor` asks from outside the agent."""

    async def reachable() -> Sequence[Finding]:
        ok, detail = await can_connect(control_url)
        fix = "" if ok else "Start control (`make up`), or correct its address in the agent's configuration."
        return [Finding("control.reachable", "control", ok, detail, fix)]

    return [
        simple("agent.running", "agent", lambda: runs(lock_path), fix="Start it with `make up`."),
        simple(
            "agent.credential",
            "host credential",
            lambda: credential_private(credential_path),
            fix="Enrol the host again; the file must be root's with mode 0600.",
            fatal=True,
        ),
        Check("control.reachable", "control", reachable),
    ]


def state_directory_private(path: Path) -> tuple[bool, str]:
    """Whether nobody but us can write or read there."""
    try:
        info = path.stat()
    except OSError as error:
        return False, f"{path}: {error.strerror}"
    mode = stat.S_IMODE(info.st_mode)
    mine = info.st_uid == os.geteuid()
    return stat.S_ISDIR(info.st_mode) and mine and mode & 0o077 == 0, f"{path} has mode {mode:04o}, owner {info.st_uid}"


def credential_private(path: Path) -> tuple[bool, str]:
    """Whether the credential is there and nobody else's to read."""
    try:
        info = path.stat()
    except OSError as error:
        return False, f"{path}: {error.strerror}"
    mode = stat.S_IMODE(info.st_mode)
    return mode & 0o077 == 0, f"{path} has mode {mode:04o}"


def enough(have: int, need: int, *, what: str) -> tuple[bool, str]:
    """Whether there is as much as is needed. *Units*: MiB."""
    return have >= need, f"{have} MiB {what}, {need} MiB wanted"


def clock_plausible(clock: Clock) -> tuple[bool, str]:
    """Whether the wall clock can be right."""
    now = clock.now()
    return now >= PLAUSIBLE_NOW, f"it says {now:.0f} s since 1970"


def runs(lock_path: Path) -> tuple[bool, str]:
    """Whether an agent holds the lock."""
    holder = holder_of(lock_path) if lock_path.exists() else None
    return holder is not None, f"pid {holder} holds {lock_path}" if holder else f"nobody holds {lock_path}"


async def can_connect(url: str) -> tuple[bool, str]:
    """Whether something listens where control should be."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(3.0):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError) as error:
        return False, f"{url}: {type(error).__name__}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True, f"{url} accepts connections"
