"""A storm: clients that create, run and remove while programs and guests die, and afterwards the question whether all is accounted for.

One seed gives one order of victims; what they are doing when they die is the machine's chance.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
from e2b.exceptions import NotFoundException, SandboxException, SandboxNotRunningException, ServiceBusyException
from httpcore import NetworkError, ProtocolError, TimeoutException

from tests.instance.conftest import Instance
from tests.instance.survival import Client, kill, look, problems

COUNTER = "n=0; while true; do n=$((n+1)); echo $n; echo $n > /tmp/next && mv /tmp/next /tmp/count; sleep 0.2; done"
ROOM = 20
"""So many sandboxes of this storm may live; the machine has CPU for some more."""
YOUNG_S = 10.0
WEATHER = (SandboxException, ServiceBusyException, httpx.HTTPError, NetworkError, ProtocolError, TimeoutException)
"""What a client may meet while programs die. Anything else is a fault of ours or of the test."""


@dataclass
class Storm:
    """`run` for `seconds`, then `settle`, then look at what it tells."""

    instance: Instance
    client: Client
    seed: int
    seconds: float
    clients: int = 3
    victims: tuple[str, ...] = ("control", "agent", "edge", "supervisor")
    pause_s: tuple[float, float] = (0.3, 3.0)
    guests_too: bool = True
    known: dict[str, int] = field(default_factory=dict)
    """sandbox → pid of its counter inside, or 0 when none was started."""
    asked_to_end: set[str] = field(default_factory=set)
    guests_killed: set[str] = field(default_factory=set)
    swept: set[str] = field(default_factory=set)
    """Ended to make room: under load a client may be told of its own later than another takes it for nobody's."""
    met: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    lies: list[str] = field(default_factory=list)
    """Living sandboxes that were said to be gone."""
    _seen_since: dict[str, float] = field(default_factory=dict)
    bugs: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        over = time.monotonic() + self.seconds
        workers = [threading.Thread(target=self._work, args=(number, over), daemon=True) for number in range(self.clients)]
        for worker in workers:
            worker.start()
        dice = random.Random(self.seed)
        while time.monotonic() < over:
            time.sleep(dice.uniform(*self.pause_s))
            self._strike(dice)
        for worker in workers:
            worker.join(120)
            assert not worker.is_alive(), "a client never came back"

    def _strike(self, dice: random.Random) -> None:
        names = dice.sample(self.victims, min(len(self.victims), dice.choice((1, 1, 2, 3))))
        if self.guests_too and (not names or dice.random() < 0.25):
            self._kill_guest(dice)
        self.done.update(f"killed {name}" for name in names)
        kill(self.instance, *names)
        if "supervisor" in names:
            self.instance.run("up", "--no-demo", check=False)

    def _kill_guest(self, dice: random.Random) -> None:
        """Kill the outermost process of a sandbox on the host: the machine's end, seen from inside."""
        machine = look(self.instance)
        guests = sorted(placement for placement in machine.guests if placement in machine.sandboxes)
        if guests:
            placement = dice.choice(guests)
            self.guests_killed.add(machine.sandboxes[placement])
            self.done["killed a guest"] += 1
            for pid in machine.guests[placement]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _work(self, number: int, over: float) -> None:
        dice = random.Random(self.seed * 1000 + number)
        try:
            while time.monotonic() < over:
                self._turn(dice)
        except BaseException as error:
            self.bugs.append(error)
            raise

    def _turn(self, dice: random.Random) -> None:
        self._make_room()
        sandbox = None
        with self._tolerant("create"):
            sandbox = self.client.create(dice.choice(("default", "default", "shared-kernel")))
            self.known[sandbox.sandbox_id] = 0
        if sandbox is None:
            time.sleep(0.1)
            return
        with self._tolerant("start", sandbox.sandbox_id):
            self.known[sandbox.sandbox_id] = sandbox.commands.run(COUNTER, background=True, timeout=0).pid
        for _ in range(dice.choice((0, 1, 3))):
            with self._tolerant("run", sandbox.sandbox_id):
                assert sandbox.commands.run("echo on").stdout == "on\n"
        if dice.random() < 0.6 or len(self.known) - len(self.asked_to_end) > ROOM // 2:
            for _ in range(dice.choice((1, 1, 2))):
                self.asked_to_end.add(sandbox.sandbox_id)
                with self._tolerant("kill"):
                    self.client.kill(sandbox.sandbox_id)

    def _make_room(self) -> None:
        """End what was made though its client was never told: nobody else will before its timeout.

        What is young may be on its way to its client.
        """
        with self._tolerant("make room"):
            for sandbox_id in self.client.living():
                since = self._seen_since.setdefault(sandbox_id, time.monotonic())
                if sandbox_id not in self.known and time.monotonic() - since > YOUNG_S:
                    self.swept.add(sandbox_id)
                    self.client.kill(sandbox_id)

    @contextlib.contextmanager
    def _tolerant(self, what: str, living: str = "") -> Iterator[None]:
        """`living`: a sandbox that nobody has asked to end. That it is gone is no weather then, but a lie."""
        try:
            yield
            self.done[what] += 1
        except WEATHER as error:
            self.met[f"{what}: {type(error).__name__}: {str(error)[:80]}"] += 1
            gone = isinstance(error, NotFoundException | SandboxNotRunningException)
            if living and gone and living not in self.guests_killed and living not in self.swept:
                self.lies.append(f"{what} in {living}: {type(error).__name__}: {error}")

    def settle(self, within_s: float = 120.0) -> list[str]:
        """Wait until everything is well and agrees; what does not agree when time is up."""
        self.instance.run("up", "--no-demo")
        self.instance.until_well(within_s)
        deadline = time.monotonic() + within_s
        while (wrong := problems(self.instance, self.client)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return wrong

    def unaccounted(self) -> list[str]:
        """Sandboxes that a client knows and that neither work nor have ended with a reason."""
        wrong: list[str] = []
        for sandbox_id, pid in self.known.items():
            seen = self.client.get(sandbox_id)
            if seen["state"] in {"released", "failed"}:
                expected = sandbox_id in self.asked_to_end or sandbox_id in self.guests_killed
                if not seen["reason"] or not expected:
                    wrong.append(f"{sandbox_id} ended as {seen['state']}, {seen['reason']}: {seen['detail']}")
            elif seen["state"] != "ready":
                wrong.append(f"{sandbox_id} is {seen['state']}")
            else:
                wrong += self._works(sandbox_id, pid)
        return wrong

    def _works(self, sandbox_id: str, pid: int) -> list[str]:
        if sandbox_id in self.guests_killed:
            return [f"{sandbox_id} is ready though its guest was killed"]
        sandbox = self.client.connect(sandbox_id)
        if sandbox.commands.run("echo on").stdout != "on\n":
            return [f"{sandbox_id} does not work"]
        if pid == 0:
            return []
        if pid not in {process.pid for process in sandbox.commands.list()}:
            return [f"{sandbox_id}: the command with pid {pid} is gone"]
        lines: list[str] = []
        stream = sandbox.commands.connect(pid)
        for out, _err, _pty in stream:
            lines.append(out or "")
            if len(lines) == 3:
                break
        stream.disconnect()
        before = int(sandbox.files.read("/tmp/count"))
        return [] if before > 0 and len(lines) == 3 else [f"{sandbox_id}: its command says nothing any more"]

    def end_all(self) -> None:
        for sandbox_id in self.client.living():
            self.client.kill(sandbox_id)
