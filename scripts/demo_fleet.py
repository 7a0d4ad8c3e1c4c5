#!/usr/bin/env python3
"""Two replicas of control, three hosts, and kill -9 of each in turn while clients create and end sandboxes. Ends with `nothing lost`, or status 1.

    sudo .venv/bin/python scripts/demo_fleet.py [--seconds 8]

Everything is real but the sandboxes: control runs on PostgreSQL, hosts are machines made of namespaces that have joined over TLS, and what
their driver keeps are files, which outlive the agent as sandboxes do. Needs root and what `make test` installs; leaves nothing behind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.hosts.rig import Load, Program, Rig, opened, until
from tests.store.server import Server

CLIENTS = 3
EACH_MAX = 8
BACK_S = 60.0


@dataclass
class Row:
    """What happened around one kill."""

    what: str
    back_s: float
    created: int
    ended: int
    doubles: int


def main() -> int:
    """Run it; the status."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seconds", type=float, default=8.0, help="of load after each kill")
    seconds = options.parse_args().seconds
    server = Server.start(Path(tempfile.gettempdir()))
    try:
        database = asyncio.run(server.database())
        with opened(replicas=2, machines=3, database_url=database) as rig:
            print("two replicas on PostgreSQL run; three machines join", flush=True)
            rig.enrol_all()
            return _show(rig, seconds)
    finally:
        server.stop()


def _show(rig: Rig, seconds: float) -> int:
    load, stop = Load(rig), threading.Event()
    clients = [threading.Thread(target=_client, args=(load, stop, random.Random(number)), daemon=True) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    rows = []
    try:
        time.sleep(seconds)
        for replica in rig.replicas:
            rows.append(_kill(rig, load, f"replica {replica.number}", replica.program, lambda one=replica: one.well(), seconds))
        for machine in rig.machines:
            assert machine.agent is not None
            rows.append(_kill(rig, load, f"agent of {machine.name}", machine.agent, lambda: rig.healthy() == len(rig.machines), seconds))
    finally:
        stop.set()
        for client in clients:
            client.join(timeout=120)
    _print(rows)
    rig.converge(within_s=120)
    lost, undead = load.lost(), load.undead()
    held = sum(len(machine.held()) for machine in rig.machines)
    print(f"\n{len(load.created)} created, {len(load.ended)} ended, {len(load.created - load.ended)} living, {held} on the machines")
    for name, found in (("lost", lost), ("undead", undead)):
        for one in found:
            print(f"{name}: {one}")
    doubles = sum(row.doubles for row in rows)
    if lost or undead or doubles or held != len(load.created - load.ended):
        return 1
    print("nothing lost, nothing twice")
    return 0


def _client(load: Load, stop: threading.Event, dice: random.Random) -> None:
    mine: list[str] = []
    while not stop.is_set():
        if len(mine) < EACH_MAX and dice.random() < 0.6:
            made = load.create()
            mine += [made] if made is not None else []
        elif mine:
            load.end(mine.pop(dice.randrange(len(mine))))
        time.sleep(dice.uniform(0.02, 0.2))


def _kill(rig: Rig, load: Load, what: str, program: Program, well: object, seconds: float) -> Row:
    created, ended = len(load.created), len(load.ended)
    print(f"kill -9 {what}", flush=True)
    program.kill()
    killed_at, doubles = time.monotonic(), 0
    time.sleep(min(2.0, seconds / 2))
    program.start()
    assert callable(well)
    until(well, within_s=BACK_S, what=rig.last_words)
    back_s = time.monotonic() - killed_at
    while time.monotonic() - killed_at < seconds:
        doubles += len(rig.doubles())
        time.sleep(0.2)
    return Row(what, back_s, len(load.created) - created, len(load.ended) - ended, doubles)


def _print(rows: list[Row]) -> None:
    print(f"\n{'KILLED':<18} {'WELL AFTER':>11} {'CREATED':>8} {'ENDED':>6} {'TWICE':>6}")
    for row in rows:
        print(f"{row.what:<18} {row.back_s:>9.1f} s {row.created:>8} {row.ended:>6} {row.doubles:>6}")


if __name__ == "__main__":
    sys.exit(main())
