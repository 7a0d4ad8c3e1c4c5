"""What limits create and release pairs on PostgreSQL: `python -m bench.postgres [SECONDS]`, as root, with the distribution's package.

Three figures of one run, on one disk: how many commits a second the server makes durable, alone and with NOTIFY inside or after them; and how
many pairs a second one control and two make of them, with a scripted agent in the same process (no runtime, no sockets but the database's).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import asyncpg

from atoll.base.units import Vector
from atoll.domain.deployment import ClientLimits, Deployment, DeploymentLimits, TeamLimits
from atoll.telemetry.log import configure
from tests.sim.world import TOKEN, Agent, World

AT_ONCE: Final = (1, 8, 32)
SETTINGS: Final = {"listen_addresses": "", "max_connections": "100", "shared_buffers": "128MB"}
"""What is not named is as the server has it: fsync and synchronous_commit are on."""
UNLIMITED: Final = Deployment(
    client=ClientLimits(requests=None),
    team=TeamLimits(requests=None, sandboxes=None, records=None),
    deployment=DeploymentLimits(sandboxes=None),
)
ROOM: Final = Vector(10_000_000, 10_000_000, 100_000_000, 100_000)


class Server:
    """A PostgreSQL of its own below /var/tmp, by socket."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="atoll-pg.", dir="/var/tmp"))
        programs = max(Path("/usr/lib/postgresql").glob("*/bin"))
        account = pwd.getpwnam("postgres")
        os.chown(self.home, account.pw_uid, account.pw_gid)
        own = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "cwd": "/"}
        subprocess.run(
            [programs / "initdb", "-D", self.home / "data", "-A", "trust", "-U", "postgres"], check=True, capture_output=True, **own
        )  # type: ignore[call-overload]
        options = [part for pair in {**SETTINGS, "unix_socket_directories": str(self.home)}.items() for part in ("-c", "=".join(pair))]
        self._process = subprocess.Popen([programs / "postgres", "-D", self.home / "data", *options], stderr=subprocess.DEVNULL, **own)  # type: ignore[call-overload]
        while subprocess.run([programs / "pg_isready", "-q", "-h", self.home], check=False).returncode:
            time.sleep(0.1)

    async def database(self, name: str) -> str:
        connection = await asyncpg.connect(host=str(self.home), user="postgres", database="postgres")
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()
        return f"postgresql+asyncpg://postgres@/{name}?host={self.home}"

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self.home)


async def rate(work: Callable[[], Awaitable[None]], *, at_once: int, seconds: float) -> float:
    """How often `work` is done in a second by so many at once."""
    done = 0
    until = time.perf_counter() + seconds

    async def one() -> None:
        nonlocal done
        while time.perf_counter() < until:
            await work()
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(at_once)))
    return done / (time.perf_counter() - began)


async def commits(server: Server, seconds: float) -> AsyncIterator[tuple[int, dict[str, float]]]:
    """One row a commit, bare; with a notification inside; with one after it that waits for no disk, for all of the moment: by how many at
    once, commits a second.
    """
    await server.database("bare")
    where = {"host": str(server.home), "user": "postgres", "database": "bare"}
    pool = await asyncpg.create_pool(**where, min_size=8, max_size=8)
    ear, mouth = await asyncpg.connect(**where), await asyncpg.connect(**where)
    await pool.execute("CREATE TABLE rows (id serial PRIMARY KEY, value text)")
    await mouth.execute("SET synchronous_commit = off")
    await ear.add_listener("hints", lambda *_: None)
    waiting = asyncio.Event()

    async def speak() -> None:
        while True:
            await waiting.wait()
            waiting.clear()
            await mouth.execute("SELECT pg_notify('hints', $1)", "x" * 100)

    speaking = asyncio.create_task(speak())

    async def commit(how: str) -> None:
        async with pool.acquire() as connection:
            async with connection.transaction():
                await connection.execute("INSERT INTO rows (value) VALUES ('x')")
                if how == "inside":
                    await connection.execute("SELECT pg_notify('hints', $1)", "x" * 100)
            if how == "after":
                waiting.set()

    for at_once in AT_ONCE:
        rates: dict[str, list[float]] = {"bare": [], "inside": [], "after": []}
        for _ in range(3):
            for how, found in rates.items():
                found.append(await rate(lambda how=how: commit(how), at_once=at_once, seconds=seconds / 3))  # type: ignore[misc]
        yield at_once, {how: statistics.median(found) for how, found in rates.items()}
    speaking.cancel()
    await pool.close()
    await ear.close()
    await mouth.close()


@contextlib.asynccontextmanager
async def controls(server: Server | None, count: int, name: str) -> AsyncIterator[tuple[Sequence[World], Agent]]:
    """So many controls on one database (None: one on SQLite), and an agent at the last one."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        first = World(Path(directory), changes={"deployment": UNLIMITED})
        first.write_files()
        if server is not None:
            (Path(directory) / "secrets" / "database.url").write_text(await server.database(name))
        worlds = [first, *(World(Path(directory), install_id=first.install_id, changes=first.changes) for _ in range(count - 1))]
        try:
            for world in worlds:
                await world.start()
            agent = Agent(worlds[-1], capacity=ROOM)
            await agent.enroll(TOKEN)
            await agent.poll()
            async with agent.at_work():
                await asyncio.sleep(0.5)
                yield worlds, agent
        finally:
            for world in worlds:
                await world.stop()


async def pairs(server: Server | None, count: int, name: str, seconds: float) -> AsyncIterator[tuple[int, float, float]]:
    """Create and release through each control in turn: by how many at once, pairs a second, and how much of a core this process took."""
    async with controls(server, count, name) as (worlds, _):
        turn = 0

        async def pair() -> None:
            nonlocal turn
            turn += 1
            world = worlds[turn % len(worlds)]
            made = await world.create(template="base")
            await world.release(made["id"])

        for at_once in AT_ONCE:
            cpu, began = time.process_time(), time.perf_counter()
            found = await rate(pair, at_once=at_once, seconds=seconds)
            busy = (time.process_time() - cpu) / (time.perf_counter() - began)
            yield at_once, found, busy


async def main(seconds: float) -> None:
    configure("bench", "critical")
    server = Server()
    try:
        async for at_once, rates in commits(server, seconds):
            told = ", ".join(f"{how} {found:.0f}" for how, found in rates.items())
            print(f"commits a second, {at_once} at once: {told}", flush=True)
        for where, count in ((None, 1), (server, 1), (server, 2)):
            what = "SQLite" if where is None else f"PostgreSQL, {count} controls"
            async for at_once, found, busy in pairs(where, count, f"pairs{count}", seconds):
                print(f"pairs a second, {what}, {at_once} at once: {found:.0f} (this process {busy:.0%} of a core)", flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 6.0))
