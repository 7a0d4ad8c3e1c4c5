"""Ends come at their time, whatever becomes of control, the agent and the wall clock."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.instance.conftest import Instance, until
from tests.instance.storm import WEATHER
from tests.instance.survival import Client, kill, look

LATE_S = 2.0
"""The promise is one second; the rest is for looking, on a machine with better things to do."""
HEARD_S = 1.0
"""By then the agent has the end of what has become ready: it comes with control's answer to that."""
ASKING_S = 6.0
HOUR_S = 3600


def end_at(client: Client, sandbox_id: str) -> float:
    return datetime.fromisoformat(client.get(sandbox_id)["endAt"]).timestamp()


def gone_at(instance: Instance, placement: str, *, within_s: float) -> float:
    """When its last process was gone. *Units*: wall seconds."""
    until(lambda: not look(instance).pids.get(placement), within_s=within_s, what=instance.last_words)
    return time.time()


@pytest.fixture(params=["default", pytest.param("shared-kernel", marks=pytest.mark.long)])
def class_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_end_comes_while_control_is_away(instance: Instance, client: Client, class_name: str) -> None:
    sandbox = client.create(class_name, timeout=12)
    time.sleep(HEARD_S)
    due, placement = end_at(client, sandbox.sandbox_id), client.get(sandbox.sandbox_id)["placement"]["id"]
    kill(instance, "supervisor", number=signal.SIGSTOP)
    try:
        kill(instance, "control")
        ended = gone_at(instance, placement, within_s=30)
    finally:
        kill(instance, "supervisor", number=signal.SIGCONT)
    assert -0.1 < ended - due < LATE_S
    instance.until_well()
    until(lambda: client.state(sandbox.sandbox_id) == "released")
    assert client.get(sandbox.sandbox_id)["reason"] == "END_REACHED"


def test_an_end_comes_after_the_agent_was_killed_while_control_is_silent(instance: Instance, client: Client, class_name: str) -> None:
    sandbox = client.create(class_name, timeout=20)
    time.sleep(HEARD_S)
    due, placement = end_at(client, sandbox.sandbox_id), client.get(sandbox.sandbox_id)["placement"]["id"]
    (stopped,) = kill(instance, "control", number=signal.SIGSTOP)
    try:
        (before,) = kill(instance, "agent")
        until(lambda: instance.pid("agent") not in (None, before))
        ended = gone_at(instance, placement, within_s=40)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert -0.1 < ended - due < LATE_S
    instance.until_well()
    until(lambda: client.state(sandbox.sandbox_id) == "released")
    assert client.get(sandbox.sandbox_id)["reason"] == "END_REACHED"


@pytest.mark.parametrize("after_s", [0.0, 0.5, pytest.param(0.1, marks=pytest.mark.long), pytest.param(2.0, marks=pytest.mark.long)])
def test_an_end_is_known_though_control_never_heard_of_readiness(
    instance: Instance, client: Client, class_name: str, after_s: float
) -> None:
    """Control stands still from before the guest is ready until after its end, and the agent is killed at about that moment."""
    timeout = 10
    answer = client.http.post("/v1/sandboxes", json={"class": class_name, "timeoutSeconds": timeout})
    answer.raise_for_status()
    sandbox_id, began = str(answer.json()["id"]), time.time()
    placement = client.get(sandbox_id)["placement"]["id"]
    while not (instance.layout.sandboxes / placement).exists():
        assert time.time() < began + 30, instance.last_words()
        time.sleep(0.002)
    (stopped,) = kill(instance, "control", number=signal.SIGSTOP)
    try:
        until(lambda: look(instance).guests.get(placement), within_s=30, what=instance.last_words)
        time.sleep(after_s)
        (before,) = kill(instance, "agent")
        until(lambda: instance.pid("agent") not in (None, before))
        back = time.time()
        ended = gone_at(instance, placement, within_s=90)
    finally:
        os.kill(stopped, signal.SIGCONT)
    # Sooner than it was ready it cannot have begun to count, and later than the next run found the guest neither.
    assert began + timeout - 0.1 < ended < back + timeout + LATE_S
    instance.until_well()
    until(lambda: client.state(sandbox_id) == "released")
    assert client.get(sandbox_id)["reason"] == "END_REACHED"


def test_a_stream_is_cut_at_the_end_while_control_is_silent(instance: Instance, client: Client, class_name: str) -> None:
    """The edge cannot hear of the end; its connections to the guest are ended under it."""
    sandbox = client.create(class_name, timeout=8)
    due = end_at(client, sandbox.sandbox_id)
    running = sandbox.commands.run("echo on; sleep 1000", background=True, timeout=0)
    seen = iter(running)
    assert next(seen)
    (stopped,) = kill(instance, "control", number=signal.SIGSTOP)
    try:
        with pytest.raises(WEATHER):
            list(seen)
        cut = time.time()
    finally:
        os.kill(stopped, signal.SIGCONT)
    # The SDK then asks for the guest's health, and the edge has control's silence to wait for before it answers that.
    assert -0.1 < cut - due < LATE_S + ASKING_S
    instance.until_well()
    until(lambda: client.state(sandbox.sandbox_id) == "released")


def test_an_end_that_passed_while_no_agent_ran_comes_with_the_next_one(instance: Instance, client: Client, class_name: str) -> None:
    sandbox = client.create(class_name, timeout=8)
    due, placement = end_at(client, sandbox.sandbox_id), client.get(sandbox.sandbox_id)["placement"]["id"]
    kill(instance, "supervisor", number=signal.SIGSTOP)
    kill(instance, "agent")
    until(lambda: time.time() > due + 1)
    assert look(instance).guests[placement]
    kill(instance, "supervisor", number=signal.SIGCONT)
    gone_at(instance, placement, within_s=20)
    until(lambda: client.state(sandbox.sandbox_id) == "released")
    assert client.get(sandbox.sandbox_id)["reason"] == "END_REACHED"


class Clock:
    """The wall clock of an instance's programs, and nobody else's."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "shift"
        self.step_to(0)
        library = directory / "misfortune.so"
        source = Path(__file__).with_name("misfortune.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        self.environment = {"ATOLL_TEST_CLOCK": str(self._file), "LD_PRELOAD": str(library)}

    def step_to(self, seconds: int) -> None:
        """From now on it is this far from the truth."""
        if not self._file.exists():
            self._file.write_bytes(bytes(8))
            self._file.chmod(0o644)
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))


@pytest.fixture
def clocked(fresh: Callable[[], Instance]) -> Iterator[tuple[Instance, Clock]]:
    if shutil.which("cc") is None:
        pytest.skip("moving a program's clock needs a C compiler: apt-get install gcc libc6-dev")
    one = fresh()
    clock = Clock(one.home)
    one.environment |= clock.environment
    one.run("up", "--no-demo")
    yield one, clock
    clock.step_to(0)


@pytest.mark.parametrize("step_s", [HOUR_S, pytest.param(-HOUR_S, marks=pytest.mark.long)])
def test_a_step_of_the_clock_moves_nothing(clocked: tuple[Instance, Clock], clients: contextlib.ExitStack, step_s: int) -> None:
    instance, clock = clocked
    client = clients.enter_context(Client(instance))
    long, short, moved, told_late = (client.create(timeout=seconds) for seconds in (900, 40, 40, 900))
    placements = {one.sandbox_id: client.get(one.sandbox_id)["placement"]["id"] for one in (long, short, moved, told_late)}
    due = end_at(client, short.sandbox_id)

    # No agent hears of this end before the clock has moved.
    kill(instance, "supervisor", number=signal.SIGSTOP)
    kill(instance, "agent")
    told_late.set_timeout(60)
    told_at = time.time()
    clock.step_to(step_s)
    kill(instance, "supervisor", number=signal.SIGCONT)
    instance.until_well()

    moved.set_timeout(600)
    other = client.create(timeout=300)
    assert gone_at(instance, placements[short.sandbox_id], within_s=90) == pytest.approx(due, abs=LATE_S)
    for names in (("control",), ("agent",), ("control", "agent", "edge")):
        kill(instance, *names)
        instance.until_well()
    # On a slow machine the end of the first has come by now.
    for one in (*([told_late] if time.time() < told_at + 50 else []), long, moved, other):
        assert one.commands.run("echo on").stdout == "on\n"
    assert client.connect(moved.sandbox_id, timeout=900).is_running()
    asked = time.time()
    long.set_timeout(5)
    assert gone_at(instance, placements[long.sandbox_id], within_s=30) == pytest.approx(asked + 5, abs=LATE_S)
    # On a slow machine this end has come while the one before was waited for.
    due, looked = told_at + 60, time.time()
    assert due - LATE_S < gone_at(instance, placements[told_late.sandbox_id], within_s=120) < max(due, looked) + LATE_S
    until(lambda: set(client.living()) == {moved.sandbox_id, other.sandbox_id})
