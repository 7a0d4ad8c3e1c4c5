"""Starting and stopping at the worst moments: twice at once, in the middle of creates, after the power has gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from atoll.programs import identity
from tests.instance.conftest import Instance, until
from tests.instance.storm import WEATHER
from tests.instance.survival import PROGRAMS, Client, kill, look, problems

ENDED = {"released", "failed"}


@pytest.fixture
def running(fresh: Callable[[], Instance]) -> Instance:
    one = fresh()
    one.run("up", "--no-demo")
    return one


class Creators:
    """Clients that create without pause until they are stopped, and what they got."""

    def __init__(self, client: Client, count: int = 4) -> None:
        self._client = client
        self._over = threading.Event()
        self.made: list[str] = []
        self.strange: list[BaseException] = []
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int) -> None:
        while not self._over.is_set():
            try:
                sandbox = self._client.create(("default", "shared-kernel")[number % 2])
                self.made.append(sandbox.sandbox_id)
            except WEATHER:
                time.sleep(0.1)
            except BaseException as error:
                self.strange.append(error)
                raise

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)
        assert self.strange == []


def all_ended(client: Client, ids: list[str]) -> bool:
    """What clients knew has ended; what no client heard of may have been placed again since, and works."""
    ended = all(client.state(one) in ENDED and client.get(one)["reason"] for one in ids)
    return ended and {one["state"] for one in client.living().values()} <= {"ready"}


@pytest.mark.parametrize("after", [1, pytest.param(5, marks=pytest.mark.long), pytest.param(12, marks=pytest.mark.long)])
def test_down_in_the_middle_of_creates_leaves_nothing(running: Instance, clients: ExitStack, after: int) -> None:
    client = clients.enter_context(Client(running))
    creators = Creators(client)
    until(lambda: len(creators.made) >= after, within_s=60)
    down = running.run("down", check=False)
    creators.stop()
    assert down.returncode == 0, down.stderr
    assert running.leftovers() == []
    running.run("up", "--no-demo")
    until(lambda: all_ended(client, creators.made), within_s=60, what=lambda: str(client.living()))
    until(lambda: not problems(running, client), what=lambda: str(problems(running, client)))


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.long)])
def test_after_a_power_cut_everything_is_told_as_it_is(running: Instance, clients: ExitStack, busy: bool) -> None:
    """Every process of the instance dies, guests too; what is on the disk stays."""
    client = clients.enter_context(Client(running))
    ready = [client.create(name).sandbox_id for name in ("default", "shared-kernel")]
    creators = Creators(client) if busy else None
    if creators is not None:
        until(lambda: len(creators.made) >= 2, within_s=60)
    cut_the_power(running)
    if creators is not None:
        creators.stop()
        ready += creators.made
    running.run("up", "--no-demo")
    until(lambda: all_ended(client, ready), within_s=60, what=lambda: f"{client.living()}\n{running.last_words()}")
    assert {client.get(one)["reason"] for one in ready} <= {"GUEST_EXITED", "PLACEMENT_LOST", "START_FAILED"}
    until(lambda: not problems(running, client), what=lambda: str(problems(running, client)))
    assert client.create().commands.run("echo on").stdout == "on\n"


def cut_the_power(instance: Instance) -> None:
    """Kill whatever runs, again and again until nothing does: a runtime may be starting a guest in that moment."""
    while True:
        kill(instance, *PROGRAMS)
        pids = set().union(*look(instance).pids.values(), set(of_this_home(instance)))
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def of_this_home(instance: Instance) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with suppress(OSError):
                mine = f"ATOLL_HOME={instance.home}\0".encode() in (process / "environ").read_bytes()
                if mine and identity.of(int(process.name)):
                    found.append(int(process.name))
    return found


def test_several_ups_at_once_give_one_instance(fresh: Callable[[], Instance], clients: ExitStack) -> None:
    one = fresh()
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: one.run("up", "--no-demo", check=False), range(3)))
    assert [each.returncode for each in done] == [0, 0, 0], [each.stderr for each in done]
    running = [pid for pid in of_this_home(one) if "atoll.programs." in command(pid) or " edge " in command(pid)]
    assert len(running) == len(PROGRAMS), [command(pid) for pid in running]
    assert clients.enter_context(Client(one)).create().commands.run("echo on").stdout == "on\n"


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def test_up_and_down_at_once_end_in_one_of_both(running: Instance) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda verb: running.run(verb[0], *verb[1:], check=False), [("down",), ("up", "--no-demo")] * 2))
    assert {each.returncode for each in done} <= {0, 4}, [each.stderr for each in done]
    running.run("up", "--no-demo")
    running.until_well()
    running.run("down")
    assert running.leftovers() == []


@pytest.mark.parametrize(
    ("program", "code"), [("agent_main", "AGENT_LOCKED"), ("control_main", "STORE_LOCKED"), ("supervisor", "ALREADY_RUNNING")]
)
def test_a_second_program_of_one_instance_is_refused(instance: Instance, client: Client, program: str, code: str) -> None:
    sandbox = client.create()
    environment = {**os.environ, "ATOLL_HOME": str(instance.home)}
    started = [sys.executable, "-P", "-m", f"atoll.programs.{program}"]
    second = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert code in second.stderr
    instance.until_well()
    assert sandbox.commands.run("echo on").stdout == "on\n"


@pytest.mark.parametrize(("name", "offset"), [("control", 1), ("edge", 0)])
def test_a_port_taken_while_its_program_is_away_is_named(instance: Instance, client: Client, name: str, offset: int) -> None:
    """`doctor` and `status` say who has it; when it is free again, the program comes back by itself."""
    sandbox = client.create()
    kill(instance, "supervisor", number=signal.SIGSTOP)
    kill(instance, name)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        until(lambda: bound(thief, instance.port + offset))
        thief.listen()
        kill(instance, "supervisor", number=signal.SIGCONT)
        until(
            lambda: "address already in use" in (instance.layout.log_file(name)).read_text(errors="replace").lower(),
            what=instance.last_words,
        )
        doctor = instance.run("doctor", check=False)
        assert doctor.returncode == 1
        assert f"pid {os.getpid()}" in doctor.stdout or str(os.getpid()) in doctor.stdout, doctor.stdout
        assert instance.run("status", check=False).returncode == 4
    instance.until_well()
    assert sandbox.commands.run("echo on").stdout == "on\n"


def bound(listener: socket.socket, port: int) -> bool:
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_a_guest_that_is_stopped_can_be_ended(instance: Instance, client: Client) -> None:
    """It answers nobody: neither its users nor its own runtime."""
    for class_name in ("default", "shared-kernel"):
        sandbox = client.create(class_name)
        machine = look(instance)
        placement = client.get(sandbox.sandbox_id)["placement"]["id"]
        for pid in machine.pids[placement]:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises((*WEATHER, httpx.HTTPError)):
            sandbox.commands.run("echo on", timeout=3, request_timeout=3)
        assert client.kill(sandbox.sandbox_id) is True
        until(lambda: client.state(sandbox.sandbox_id) == "released")  # noqa: B023
    until(lambda: not problems(instance, client), what=lambda: str(problems(instance, client)))


@pytest.mark.parametrize("class_name", ["default", "shared-kernel"])
def test_a_guest_agent_that_is_killed_inside_ends_its_sandbox_or_lives(instance: Instance, client: Client, class_name: str) -> None:
    """It is PID 1 in there: root inside may try."""
    sandbox = client.create(class_name)
    with suppress(*WEATHER):
        sandbox.commands.run("kill -9 1; sleep 1", user="root", timeout=10)
    # A guest that has just ended may be counted as running for a moment, but it is one or the other.
    until(lambda: client.state(sandbox.sandbox_id) in ENDED or echoes(sandbox))
    if client.state(sandbox.sandbox_id) == "ready":
        assert client.kill(sandbox.sandbox_id) is True
    until(lambda: client.state(sandbox.sandbox_id) in ENDED)
    assert client.get(sandbox.sandbox_id)["reason"] in {"RELEASE_REQUESTED", "GUEST_EXITED"}
    until(lambda: not problems(instance, client), what=lambda: str(problems(instance, client)))


def echoes(sandbox: Sandbox) -> bool:
    with suppress(*WEATHER):
        return sandbox.commands.run("echo on").stdout == "on\n"
    return False
