"""kill -9 of the programs, singly and together: sandboxes and what runs in them go on, and nothing is lost or left."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time

import pytest

from atoll.drivers.oci.programs import PROGRAMS as COPIES
from tests.instance.conftest import Instance, until

TICK = "nohup sh -c 'while true; do echo tick >> /tmp/ticks; sleep 0.1; done' >/dev/null 2>&1 &"
ALL = ("control", "agent", "edge")
MATRIX = [
    pytest.param(names, id="+".join(names), marks=[pytest.mark.long] if size == 2 else [])
    for size in (1, 2, 3)
    for names in itertools.combinations(ALL, size)
]


def kill(instance: Instance, *names: str) -> None:
    for pid in [instance.pid(name) for name in names]:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def ticks(instance: Instance, sandbox: str) -> int:
    return len(instance.exec(sandbox, "cat", "/tmp/ticks").split())


@pytest.mark.parametrize("class_name", ["default", "shared-kernel"])
@pytest.mark.parametrize("names", MATRIX)
def test_what_runs_in_sandboxes_goes_on(instance: Instance, names: tuple[str, ...], class_name: str) -> None:
    sandbox = instance.create("--class", class_name)
    instance.exec(sandbox, "sh", "-c", TICK)
    started = instance.exec(sandbox, "sh", "-c", "cat /proc/sys/kernel/random/boot_id; stat -c %Y /proc/1")
    before = {name: instance.pid(name) for name in names}
    kill(instance, *names)
    until(lambda: all(instance.pid(name) not in (None, before[name]) for name in names), what=instance.last_words)
    instance.until_well()
    seen = ticks(instance, sandbox)
    until(lambda: ticks(instance, sandbox) > seen)
    assert instance.exec(sandbox, "sh", "-c", "cat /proc/sys/kernel/random/boot_id; stat -c %Y /proc/1") == started
    assert sandbox in instance.ids()
    instance.run("sandbox", "rm", "--wait", sandbox)
    assert sandbox not in instance.ids()


def test_without_a_supervisor_all_goes_on_and_the_next_adopts(instance: Instance) -> None:
    sandbox = instance.create()
    for _ in range(3):  # somebody may be changing the code of this checkout: then the programs are replaced instead
        before = {name: instance.pid(name) for name in ALL}
        kill(instance, "supervisor")
        assert instance.exec(sandbox, "echo", "on") == "on\n"
        other = instance.create()
        assert instance.run("status", check=False).returncode == 4
        said = instance.run("up", "--no-demo").stdout
        if "stop what is older" not in said:
            break
    assert {name: instance.pid(name) for name in ALL} == before
    kill(instance, "edge")
    instance.until_well()
    instance.run("sandbox", "rm", "--wait", sandbox, other)


def test_everything_at_once(instance: Instance) -> None:
    sandbox = instance.create()
    instance.exec(sandbox, "sh", "-c", TICK)
    kill(instance, "supervisor", *ALL)
    assert instance.run("sandbox", "list", check=False).returncode == 4
    instance.run("up", "--no-demo")
    seen = ticks(instance, sandbox)
    until(lambda: ticks(instance, sandbox) > seen)
    instance.run("sandbox", "rm", "--wait", sandbox)


def test_a_storm(instance: Instance) -> None:
    """Creates, runs and removals while programs die at random: afterwards each sandbox works or has ended with a reason."""
    made: list[str] = []
    over = time.monotonic() + 20
    dice = random.Random(11)

    def work(number: int) -> None:
        for turn in itertools.count():
            if time.monotonic() > over:
                return
            class_name = ("default", "shared-kernel")[(number + turn) % 2]
            created = instance.run("sandbox", "create", "--class", class_name, "--timeout", "10m", check=False)
            if created.returncode == 0:
                sandbox = created.stdout.strip()
                made.append(sandbox)
                instance.run("sandbox", "exec", sandbox, "--", "true", check=False)
                if turn % 2:
                    instance.run("sandbox", "rm", sandbox, check=False)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    while time.monotonic() < over:
        time.sleep(dice.uniform(0.5, 2.0))
        kill(instance, *dice.sample(ALL, dice.choice((1, 1, 2, 3))))
    for worker in workers:
        worker.join()
    instance.until_well(120)
    settled = {"ready", "released", "failed"}

    def living() -> dict[str, str]:
        return {str(one["id"]): str(one["state"]) for one in instance.json("sandbox", "list", "--json")["items"]}

    until(lambda: set(living().values()) <= {"ready"}, within_s=120, what=lambda: f"{living()}\n{instance.last_words()}")
    for sandbox in made:
        state = instance.json("sandbox", "get", "--json", sandbox)
        assert state["state"] in settled
        assert state["state"] == "ready" or state["reason"], state
    for sandbox in living():
        assert instance.exec(sandbox, "echo", "on") == "on\n"
    instance.run("sandbox", "rm", "--all", "--wait")
    assert instance.ids() == set()
    directories = [path.name for path in instance.layout.sandboxes.iterdir() if path.is_dir() and path.name != COPIES]
    assert directories == []
    (host,) = instance.json("host", "list", "--json")["items"]
    assert (host["sandboxes"], host["used"]["cpuMillis"]) == (0, 0)
