"""The system user of control and edge, and what it can reach."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from atoll.base.errors import Code, Refused
from atoll.programs.layout import USER


@dataclass(frozen=True, slots=True)
class Account:
    """A user that a program runs as."""

    name: str
    uid: int
    gid: int

    @property
    def owner(self) -> tuple[int, int]:
        return (self.uid, self.gid)


def account(name: str = USER) -> Account | None:
    """The user, when the machine has it."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(name, entry.pw_uid, entry.pw_gid)


def ensure_account(name: str = USER) -> Account:
    """Have the system user: no home, no shell, no password. *Errors*: Refused SETUP_FAILED with useradd's words."""
    found = account(name)
    if found is not None:
        return found
    command = [
        "useradd",
        "--system",
        "--user-group",
        "--no-create-home",
        "--home-dir",
        "/nonexistent",
        "--shell",
        "/usr/sbin/nologin",
        name,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Refused(
            Code.SETUP_FAILED, f"cannot create the system user {name}: useradd is missing", hint="Install the package passwd."
        ) from None
    found = account(name)
    if found is None:
        raise Refused(
            Code.SETUP_FAILED,
            f"cannot create the system user {name}: {done.stderr.strip() or done.returncode}",
            hint=f"Create it by hand: {' '.join(command)}",
        )
    return found


def closed_on_the_way(path: Path, user: Account) -> Path | None:
    """The first directory on the way to `path` that `user` may not pass, or None. Mode bits only; the parents of `path`, then itself."""
    for step in [*reversed(path.absolute().parents), path.absolute()]:
        try:
            info = step.stat()
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(info.st_mode):
            return None
        bits = info.st_mode & 0o7
        if info.st_uid == user.uid:
            bits = (info.st_mode >> 6) & 0o7
        elif info.st_gid == user.gid:
            bits = (info.st_mode >> 3) & 0o7
        if not bits & 0o1:
            return step
    return None


def require_root(command: str) -> None:
    """*Errors*: Refused NOT_ROOT."""
    if os.geteuid() != 0:
        raise Refused(
            Code.NOT_ROOT,
            f"`{command}` makes namespaces, cgroups and users, so it must run as root",
            hint=f"Run `sudo {command}`.",
        )
