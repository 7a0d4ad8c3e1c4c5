"""The jailer: `python -m atoll.testing.firecracker.jailer --id ID --exec-file FILE --uid N --gid N [...] -- FIRECRACKER'S OWN`.

It does what Firecracker's docs/jailer.md says, and refuses what that refuses. It ends by becoming the program (`program.py`), which enters the
root and becomes the user itself: there is no Python in the root.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import stat
import sys
from pathlib import Path
from typing import Final, NoReturn

from atoll.hostops import syscalls

ID: Final = re.compile("[A-Za-z0-9-]{1,64}")
DEVICES: Final = (("dev/net/tun", 10, 200), ("dev/kvm", 10, 232), ("dev/urandom", 1, 9))
LIMITS: Final = {"fsize": resource.RLIMIT_FSIZE, "no-file": resource.RLIMIT_NOFILE}


def main(arguments: list[str]) -> NoReturn:
    """Make the jail, and become its prisoner."""
    own, _, theirs = _split(arguments)
    told = _parse(own)
    program = Path(told.exec_file).resolve(strict=True)
    if ID.fullmatch(told.id) is None:
        raise SystemExit(f"invalid instance ID: {told.id}")
    if "firecracker" not in program.name:
        raise SystemExit("the exec file's name must contain `firecracker`")
    if os.geteuid() != 0:
        raise SystemExit("the jailer runs as root")
    root = Path(told.chroot_base_dir).resolve(strict=True) / program.name / told.id / "root"
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, root / program.name)
    _limit(told.resource_limit)
    if told.netns:
        namespace = os.open(told.netns, os.O_RDONLY | os.O_CLOEXEC)
        syscalls.setns(namespace, syscalls.CLONE_NEWNET)
        os.close(namespace)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_SLAVE | syscalls.MS_REC)
    syscalls.mount(str(root), str(root), None, syscalls.MS_BIND | syscalls.MS_REC)
    _furnish(root, told.uid, told.gid)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    words = [
        f"/{program.name}",
        "-m",
        "atoll.testing.firecracker.program",
        "--id",
        told.id,
        "--start-time-us",
        "1",
        "--start-time-cpu-us",
        "1",
    ]
    words += ["--jail", str(root), "--uid", str(told.uid), "--gid", str(told.gid), *theirs]
    kept = {name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "PYTHONHOME", "ATOLL_FIRECRACKER_CONTRACT")}
    os.execve(os.path.realpath(sys.executable), words, kept)  # noqa: S606 - that is what a jailer does


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], "--", arguments[at + 1 :]


def _parse(own: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--id", "--exec-file"):
        parser.add_argument(name, required=True)
    for name in ("--uid", "--gid"):
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--chroot-base-dir", default="/srv/jailer")
    parser.add_argument("--netns")
    parser.add_argument("--resource-limit", action="append", default=[])
    return parser.parse_args(own)


def _limit(wanted: list[str]) -> None:
    values = {"no-file": 2048, **{name: int(value) for name, _, value in (one.partition("=") for one in wanted)}}
    for name, value in values.items():
        resource.setrlimit(LIMITS[name], (value, value))


def _furnish(root: Path, uid: int, gid: int) -> None:
    """Its folders and devices. A device that is there is an error, as it is to the real one."""
    for folder in ("", "dev", "dev/net", "run"):
        (root / folder).mkdir(exist_ok=True)
        (root / folder).chmod(0o700)
        os.chown(root / folder, uid, gid)
    for name, major, minor in DEVICES:
        os.mknod(root / name, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        os.chown(root / name, uid, gid)


if __name__ == "__main__":
    main(sys.argv[1:])
