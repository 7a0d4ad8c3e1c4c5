"""Which address range an instance's slots have: 10.(64+n).0.0/16, n chosen once and written down for all instances of the machine.

The registry is a directory with one small file per range, changed under a lock. A file whose instance is gone (its home has no
configuration with that install id any more, and the process that made the claim has ended) counts for nothing. A range in which this machine already has a route is not chosen.
"""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.programs.files import read_json, write_whole

REGISTRY_DEFAULT: Final = Path("/run/atoll-instances")
COUNT: Final = 64
FIRST_OCTET: Final = 64


def registry_directory() -> Path:
    """Where the machine's instances are listed: ATOLL_INSTANCES, else below /run."""
    return Path(os.environ.get("ATOLL_INSTANCES") or REGISTRY_DEFAULT)


def cidr(index: int) -> str:
    """The range of an instance."""
    return f"10.{FIRST_OCTET + index}.0.0/16"


def index_of(text: str) -> int | None:
    """The index of a range; None when it is not one of ours."""
    return next((index for index in range(COUNT) if cidr(index) == text), None)


def claim(
    home: Path,
    install_id: str,
    *,
    wanted: int | None = None,
    avoid: Collection[int] = (),
    registry: Path | None = None,
    routes: Path = Path("/proc/net/route"),
) -> int:
    """Have a range for this instance: `wanted` (what its configuration says), or the first free one that is not in `avoid`.

    *Errors*: Refused SETUP_FAILED when another living instance has it, or none is left. *Idempotency*: the same instance gets the same.
    """
    directory = registry or registry_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    with _locked(directory):
        living = list(_living(directory))
        taken = {index: owner for index, owner, _ in living}
        for _, owner, other_home in living:
            if owner == install_id and other_home != str(home):
                # Both would find each other's interfaces, groups and tables under one mark.
                raise Refused(
                    Code.SETUP_FAILED,
                    f"this machine is a host of install {install_id} already, in {other_home}",
                    hint=f"Use that one (ATOLL_HOME={other_home}), or remove it first.",
                )
        mine = {index for index, owner in taken.items() if owner == install_id}
        if wanted is not None:
            other = taken.get(wanted)
            if other not in (None, install_id):
                raise Refused(Code.SETUP_FAILED, f"the address range {cidr(wanted)} belongs to another instance ({other}) on this machine")
            index = wanted
        elif mine:
            index = min(mine)
        else:
            closed = set(taken) | _routed(routes)
            # Two machines may have the same range, if need be; two instances of one machine may not.
            index = _first_free(closed | set(avoid) if len(closed | set(avoid)) < COUNT else closed)
        record = {"home": str(home), "install_id": install_id, "claimed_by": os.getpid()}
        write_whole(directory / f"{index}.json", json.dumps(record) + "\n", mode=0o644)
    return index


def release(install_id: str, *, registry: Path | None = None) -> None:
    """Strike the instance from the list. *Idempotency*: nothing to do is fine."""
    directory = registry or registry_directory()
    if not directory.is_dir():
        return
    with _locked(directory):
        for file in directory.glob("*.json"):
            if (read_json(file) or {}).get("install_id") == install_id:
                file.unlink(missing_ok=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _living(directory: Path) -> Iterator[tuple[int, str, str]]:
    """Index, install id and home of each claim that counts."""
    for file in directory.glob("*.json"):
        record = read_json(file)
        if record is None or not file.stem.isdigit():
            continue
        if Path(f"/proc/{record.get('claimed_by')}").exists():
            # It may be about to write its configuration.
            yield int(file.stem), str(record["install_id"]), str(record.get("home"))
            continue
        if str(record.get("install_id")) in _installs(Path(str(record.get("home")))):
            yield int(file.stem), str(record["install_id"]), str(record.get("home"))


def _installs(home: Path) -> Iterator[str]:
    """The install ids that a home is about: its instance's, or the one that it joined."""
    for name in ("config.toml", "host.toml"):
        try:
            yield str(tomllib.loads((home / name).read_text()).get("install_id"))
        except (OSError, tomllib.TOMLDecodeError):
            continue


def _routed(routes: Path) -> set[int]:
    """Indices whose range meets a route of this machine other than the default one."""
    found: set[int] = set()
    try:
        lines = routes.read_text().splitlines()[1:]
    except OSError:
        return found
    for line in lines:
        fields = line.split()
        destination = int.from_bytes(bytes.fromhex(fields[1]), "little")
        mask = int.from_bytes(bytes.fromhex(fields[7]), "little")
        if mask == 0:
            continue
        for index in range(COUNT):
            base = (10 << 24) | ((FIRST_OCTET + index) << 16)
            common = mask & 0xFFFF0000
            if base & common == destination & common:
                found.add(index)
    return found


def _first_free(taken: set[int]) -> int:
    for index in range(COUNT):
        if index not in taken:
            return index
    raise Refused(
        Code.SETUP_FAILED,
        f"all {COUNT} address ranges (10.{FIRST_OCTET}.0.0/16 and on) are taken by instances or routes of this machine",
        hint="Remove an instance: `atoll down`, then delete its ATOLL_HOME.",
    )
