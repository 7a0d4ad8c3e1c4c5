"""Control and agent without runtimes: a real control, a real agent, and a driver that only pretends. What remains is what we add.

As a program (`python -m bench.alone HOME HOSTS`) this is the agents' side: the first enrols with the token that is in the home, others with
tokens that they ask for with the operator's key; all run in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import aiohttp

from atoll.agent.agent import Agent
from atoll.agent.config import AgentConfig
from atoll.agent.enrollment import by_token, obtain
from atoll.agent.facts import read_facts
from atoll.agent.transport import HttpTransport
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.domain.spec import Isolation
from atoll.drivers.fake.driver import FakeDriver, FakeMachine
from atoll.drivers.port import Image, Mark
from atoll.images.cache import ImageCache
from atoll.programs import instance
from atoll.programs.clock import SystemClock
from atoll.programs.layout import Layout, cache_directory
from atoll.programs.users import Account
from atoll.wire.agent import Registration
from bench.product import ROOT, CannotMeasure, free_ports

ROOM: Final = Vector(10_000_000, 10_000_000, 100_000_000, 100_000)
START_S: Final = 60.0
CLIENTS: Final = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """A control and its agent."""

    url: str
    operator: str
    """An operator's key."""
    keys: tuple[str, ...]
    """Of as many clients: each has a limit of requests a second of its own."""
    control: int
    agent: int


@contextlib.asynccontextmanager
async def pair(hosts: int = 1) -> AsyncIterator[Pair]:
    """Start both, ready for creates; both are gone afterwards. `hosts`: of agents in the one process. *Errors*: CannotMeasure."""
    home = Path(tempfile.mkdtemp(prefix="atoll-alone.", dir="/var/tmp"))
    layout, me = Layout(home), Account("root", os.geteuid(), os.getegid())
    instance.ensure_directories(layout, me)
    config = instance.ensure_config(layout, port=free_ports(3), dice=os.urandom)
    instance.ensure_secrets(layout, me, os.urandom)
    key = instance.ensure_operator_key(layout)
    instance.ensure_bootstrap(layout, me, config)
    environment = {**os.environ, "ATOLL_HOME": str(home), "MALLOC_ARENA_MAX": "2", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    log = (home / "log" / "all.log").open("ab")
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in (["atoll.programs.control_main"], ["bench.alone", str(home), str(hosts)]):
            running.append(_start(command, environment, log))
        await _until_healthy(config.control_url, key, home, hosts)
        keys = await _keys(config.control_url, key)
        yield Pair(config.control_url, key, keys, running[0].pid, running[1].pid)
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()
        log.close()
        shutil.rmtree(home, ignore_errors=True)


def _start(command: list[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    whole = [sys.executable, "-P", "-m", *command]
    return subprocess.Popen(whole, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log)


async def _keys(url: str, operator: str) -> tuple[str, ...]:
    async with aiohttp.ClientSession(headers={"X-API-KEY": operator}) as session:
        found = []
        for number in range(CLIENTS):
            async with session.post(f"{url}/v1/keys", json={"name": f"bench-{number}"}) as answer:
                found.append((await answer.json())["secret"])
        return tuple(found)


async def _until_healthy(url: str, key: str, home: Path, hosts: int) -> None:
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession(headers={"X-API-KEY": key}) as session:
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/v1/status") as answer:
                    if answer.status == 200 and (await answer.json())["hosts"]["healthy"] == hosts:
                        return
            await asyncio.sleep(0.1)
    raise CannotMeasure(f"control and its agent did not start: {(home / 'log' / 'all.log').read_text()[-1000:]}")


async def _act(home: Path, hosts: int) -> None:
    layout = Layout(home)
    config = instance.load(layout)
    agents = [await _agent(layout, config, number) for number in range(hosts)]

    def stop() -> None:
        for agent in agents:
            agent.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await asyncio.gather(*(agent.run() for agent in agents))


async def _agent(layout: Layout, config: instance.Config, number: int) -> Agent:
    state = layout.agent if number == 0 else layout.agent.with_name(f"agent-{number}")
    state.mkdir(mode=0o700, exist_ok=True)
    name = config.host_name if number == 0 else f"{config.host_name}-{number}"
    settings = AgentConfig(state_directory=state, control_url=config.control_url, facts=read_facts(state), agent_version="0")
    token = layout.enrollment_token.read_text().strip() if number == 0 else await _token(layout, config, name)
    wanted = Registration(name=name, capacity=ROOM, facts=settings.facts)
    identity = None
    while identity is None:
        opened: list[HttpTransport] = []

        def connect(credential: Secret, opened: list[HttpTransport] = opened) -> HttpTransport:
            opened.append(HttpTransport(config.control_url, credential))
            return opened[-1]

        with contextlib.suppress(Exception):
            identity = (await obtain(settings, wanted, connect=connect, admit=by_token(Secret(token)), dice=os.urandom)).identity
        for transport in opened:
            await transport.close()
        if identity is None:
            await asyncio.sleep(0.1)
    image = ImageCache(cache_directory()).current("base")
    machine = FakeMachine(images=[Image(image.digest, image.name, labels={"arch": image.arch})])
    return Agent(
        settings,
        identity,
        drivers={Isolation.GVISOR: FakeDriver(Mark(config.install_id, identity.host_id), machine=machine)},
        clock=SystemClock(),
        dice=os.urandom,
        transport=HttpTransport(config.control_url, identity.credential),
    )


async def _token(layout: Layout, config: instance.Config, name: str) -> str:
    headers = {"X-API-KEY": layout.operator_key.read_text().strip()}
    url = f"{config.control_url}/v1/enrollment-tokens"
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json={"hostName": name}) as answer:
        return str((await answer.json())["token"])


if __name__ == "__main__":
    import uvloop

    from atoll.telemetry.log import configure

    configure("agent", "info")
    uvloop.run(_act(Path(sys.argv[1]), int(sys.argv[2])))
