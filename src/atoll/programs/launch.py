"""Become a child of the supervisor: claim the pid file, take the user, see the code, then exec. Standard library only.

    python -m atoll.programs.launch --pid-file F --lock F --mark M [--user NAME] [--show FROM TO] -- PROGRAM ARGUMENT...

Theory of operation. The claim is made by the process itself, before exec and under a lock, so no supervisor, however it dies, can start
a second one beside a living first: the second ends with status `ALREADY_RUNS` and the supervisor adopts the first. The mark says of which
code it is. A checkout below a directory that the user may not pass (a clone in root's home) is shown to the child at another place, in a mount namespace of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import resource
import sys
from pathlib import Path
from typing import Final

from atoll.programs import identity

ALREADY_RUNS: Final = 75
CANNOT_START: Final = 71
_CLONE_NEWNS: Final = 0x00020000
_MS_RDONLY: Final = 0x1
_MS_REMOUNT: Final = 0x20
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 0x40000


def main(arguments: list[str]) -> int:
    """Never returns when it succeeds."""
    options, command = _parse(arguments)
    pid_file = Path(options["--pid-file"][0])
    if not _claim(pid_file, Path(options["--lock"][0]), name=pid_file.stem, mark=options["--mark"][0]):
        return ALREADY_RUNS
    try:
        if "--show" in options:
            _show(*options["--show"])
        _raise_descriptors()
        os.umask(0o077)
        if "--user" in options:
            _become(options["--user"][0])
        os.execv(command[0], command)  # noqa: S606 - a program by its path, with no shell between
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return CANNOT_START


def _parse(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    counts = {"--pid-file": 1, "--lock": 1, "--mark": 1, "--user": 1, "--show": 2}
    options: dict[str, list[str]] = {}
    at = 0
    while arguments[at] != "--":
        count = counts[arguments[at]]
        options[arguments[at]] = arguments[at + 1 : at + 1 + count]
        at += 1 + count
    return options, arguments[at + 1 :]


def _claim(pid_file: Path, lock: Path, *, name: str, mark: str) -> bool:
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        other = identity.living(pid_file)
        if other is not None and other.pid != os.getpid():
            return False
        mine = identity.of(os.getpid())
        assert mine is not None
        identity.write(pid_file, mine, name=name, mark=mark)
    return True


def _raise_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _become(name: str) -> None:
    entry = pwd.getpwnam(name)
    os.initgroups(name, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    # 38 = PR_SET_NO_NEW_PRIVS: nothing that it starts can get more.
    _call("prctl", 38, 1, 0, 0, 0)


def _show(source: str, target: str) -> None:
    Path(target).mkdir(exist_ok=True)
    _call("unshare", _CLONE_NEWNS)
    _mount(b"none", b"/", _MS_REC | _MS_PRIVATE)
    _mount(os.fsencode(source), os.fsencode(target), _MS_BIND)
    _mount(b"none", os.fsencode(target), _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def _mount(source: bytes, target: bytes, flags: int) -> None:
    _call("mount", ctypes.c_char_p(source), ctypes.c_char_p(target), None, ctypes.c_ulong(flags), None)


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
