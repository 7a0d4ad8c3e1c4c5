"""Is an address free, and who has it if not."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from atoll.base.errors import Code, Refused

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Listener:
    """Who listens on a port."""

    pid: int | None
    command: str


def is_free(port: int, address: str = LOOPBACK) -> bool:
    """Whether a program could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Servers set it too: without, a port whose last connections are in TIME_WAIT would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def listener(port: int) -> Listener | None:
    """Who listens on this TCP port in this network namespace, as far as this user may see."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _has_descriptor(process, wanted):
            return Listener(int(process.name), _command(process))
    return Listener(None, "a process that is not visible from here")


def require_free(ports: dict[str, int]) -> None:
    """*Errors*: Refused PORT_TAKEN, naming what the port is for and who has it."""
    for purpose, port in ports.items():
        if is_free(port):
            continue
        who = listener(port)
        named = "another program" if who is None else who.command if who.pid is None else f"{who.command} (pid {who.pid})"
        raise Refused(
            Code.PORT_TAKEN,
            f"port {port}, which {purpose} needs, is taken by {named}",
            hint="Stop that program or choose another port: ATOLL_PORT=PORT (it and the next two are used).",
            port=port,
            pid=who.pid if who else None,
        )


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _has_descriptor(process: Path, wanted: set[str]) -> bool:
    try:
        return any(str(link.readlink()) in wanted for link in (process / "fd").iterdir())
    except OSError:
        return False


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    return " ".join(b" ".join(words).decode(errors="replace").split())[:120] or "?"
