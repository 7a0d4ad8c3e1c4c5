"""Virtual machines through the whole product: made, used, suspended, resumed, and taken over by an agent whose last run was killed."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.programs.layout import cache_directory
from atoll.testing.conformance.qemu_stand import missing
from tests.instance.conftest import ROOT, Instance, _instances, until

LOG = logging.getLogger(__name__)
pytestmark = [pytest.mark.long]
slow = pytest.mark.timeout(1800)
"""On each: what instances usually get is said of each, too."""
CLASSES = "version: 1\nclasses:\n  default: {isolation: gvisor}\n  machine: {isolation: vm-emulated}\n"


@pytest.fixture(scope="module")
def machines() -> Iterator[Instance]:
    """A running instance whose operator allows machines without hardware virtualization."""
    if lack := missing(Path(os.environ.get("ATOLL_BIN") or ROOT / "build" / "bin"), cache_directory()):
        pytest.skip(f"needs {lack}")
    with _instances() as make:
        one = make()
        one.environment["ATOLL_MACHINES"] = "emulated"
        one.run("up", "--no-demo")
        document = one.home / "deployment.yaml"
        document.write_text(CLASSES)
        one.run("config", "apply", str(document))
        _offered(one)
        yield one


def _offered(one: Instance) -> None:
    """Wait until its host has booted one."""
    until(lambda: "vm-emulated" in one.json("doctor", "--json", check=False)["isolations"], within_s=240, what=one.last_words)


def processes(one: Instance) -> list[int]:
    """QEMU processes of this instance, by the names of its placements."""
    names = {path.name for path in one.layout.sandboxes.iterdir()}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "qemu" in words[0] and names & set(words):
            found.append(int(process.name))
    return found


@slow
def test_a_machine_is_made_used_and_removed(machines: Instance) -> None:
    sandbox = machines.create("--class", "machine")
    assert machines.json("sandbox", "get", sandbox, "--json")["isolation"] == "vm-emulated"
    assert machines.json("sandbox", "get", sandbox, "--json")["machine"] == {
        "driver": "qemu-emulated",
        "hardware": "emulated",
        "saves": "full",
    }
    assert "cloud-amd64" in machines.exec(sandbox, "uname", "-r"), "a kernel of its own"
    assert machines.exec(sandbox, "id", "-un").strip() == "user"
    assert len(processes(machines)) == 1
    machines.run("sandbox", "rm", sandbox)
    until(lambda: not list(machines.layout.sandboxes.glob("plc_*")), within_s=30, what=machines.last_words)
    assert not processes(machines)


@slow
def test_memory_and_files_outlast_a_suspend_and_the_agents_end(machines: Instance) -> None:
    sandbox = machines.create("--class", "machine")
    machines.exec(sandbox, "sh", "-c", "echo kept >/home/user/kept; echo there >/dev/shm/kept")
    boot = machines.exec(sandbox, "cat", "/proc/sys/kernel/random/boot_id")
    _kill_agent(machines)
    assert machines.exec(sandbox, "cat", "/dev/shm/kept") == "there\n", "it goes on without its agent"
    until(lambda: machines.run("sandbox", "suspend", sandbox, check=False).returncode == 0, within_s=60, what=machines.last_words)
    until(lambda: not processes(machines), within_s=20, what=machines.last_words)
    _kill_agent(machines)
    until(lambda: machines.run("sandbox", "resume", sandbox, check=False).returncode == 0, within_s=60, what=machines.last_words)
    said = machines.exec(sandbox, "sh", "-c", "cat /home/user/kept /dev/shm/kept /proc/sys/kernel/random/boot_id; date +%s").split()
    assert said[:3] == ["kept", "there", boot.strip()]
    assert abs(int(said[3]) - time.time()) < 10, "its clock is right"
    machines.run("sandbox", "rm", sandbox)
    until(lambda: not list(machines.layout.sandboxes.glob("plc_*")), within_s=30, what=machines.last_words)


CYCLES = 20
WRITE = "head -c 300000 /dev/urandom >/home/user/all/{0}; head -c 100000 /dev/urandom >/dev/shm/all/{0}; cat /home/user/all/{0} /dev/shm/all/{0} | md5sum"
READ = "for i in $(seq 0 {0}); do cat /home/user/all/$i /dev/shm/all/$i | md5sum; done"


@slow
def test_twenty_cycles_of_rest_lose_nothing(machines: Instance) -> None:
    """Written and not synced, on the disk and in memory: what was there before a pause and a suspend is there after every later one."""
    sandbox = machines.create("--class", "machine")
    machines.exec(sandbox, "mkdir", "/home/user/all", "/dev/shm/all")
    boot = machines.exec(sandbox, "cat", "/proc/sys/kernel/random/boot_id")
    sums: list[str] = []
    for number in range(CYCLES):
        sums.append(machines.exec(sandbox, "sh", "-c", WRITE.format(number)).split()[0])
        machines.run("sandbox", "pause", sandbox)
        machines.run("sandbox", "resume", sandbox)
        machines.run("sandbox", "suspend", sandbox)
        assert not processes(machines), "it holds no memory"
        machines.run("sandbox", "resume", sandbox)
        found = [line.split()[0] for line in machines.exec(sandbox, "sh", "-c", READ.format(number)).splitlines()]
        assert found == sums, f"cycle {number + 1}"
        LOG.info("cycle %s: %s of %s files whole, the newest %s", number + 1, len(found), len(sums), sums[-1])
    assert machines.exec(sandbox, "cat", "/proc/sys/kernel/random/boot_id") == boot, "it was never booted anew"
    machines.run("sandbox", "rm", sandbox)
    until(lambda: not list(machines.layout.sandboxes.glob("plc_*")), within_s=30, what=machines.last_words)


def _kill_agent(one: Instance) -> None:
    before = one.pid("agent")
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: one.pid("agent") not in (None, before), within_s=30, what=one.last_words)


@slow
def test_nothing_is_left_of_them(machines: Instance) -> None:
    machines.create("--class", "machine")
    running = processes(machines)
    assert running
    machines.run("down")
    try:
        assert machines.leftovers() == []
        assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]
    finally:
        # For whoever comes next: tests are shuffled.
        machines.run("up", "--no-demo")
        _offered(machines)
