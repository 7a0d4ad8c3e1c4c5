"""What the agent knows of its host, and the small things that it keeps running."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from atoll.agent import doctor
from atoll.agent.alarm import BootAlarm, LoopAlarm
from atoll.agent.children import Child, _bound, supervise
from atoll.agent.facts import memory_mib, read_facts
from atoll.agent.lock import Lock, holder_of
from atoll.agent.vault import Vault
from atoll.base.errors import Code, Refused, Unavailable
from atoll.domain.spec import Isolation
from atoll.drivers.port import Capabilities, Probe
from atoll.wire.agent import InitPayload, Payloads


class RealClock:
    def now(self):
        return time.time()

    def boot(self):
        return time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("MemTotal:       16384000 kB\nMemFree: 1 kB\n", 16000),
        ("MemFree: 1 kB\n", 0),
        ("", 0),
        ("MemTotal:\n", 0),
        ("MemTotal: lots kB", 0),
    ],
)
def test_memory(text, mib):
    assert memory_mib(text) == mib


def test_facts_of_this_machine(tmp_path):
    facts = read_facts(tmp_path)
    assert facts.cpu_count >= 1
    assert facts.memory_mib > 100
    assert facts.disk_mib > 1
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts.arch == os.uname().machine


def test_the_lock_is_exclusive_and_given_back(tmp_path):
    path = tmp_path / "lock"
    with Lock(path):
        assert holder_of(path) == str(os.getpid())
        with pytest.raises(Refused) as raised:
            Lock(path).__enter__()
        assert raised.value.code is Code.AGENT_LOCKED
        assert str(os.getpid()) in raised.value.message
    assert holder_of(path) is None


def make_alarm(kind):
    return BootAlarm() if kind == "timerfd" else LoopAlarm(RealClock())


@pytest.mark.parametrize("kind", ["timerfd", "loop"])
async def test_alarms(kind):
    alarm, clock, loop = make_alarm(kind), RealClock(), asyncio.get_running_loop()
    began = loop.time()
    await alarm.sleep_until(clock.boot() + 0.05)
    assert 0.045 <= loop.time() - began < 0.5
    await alarm.sleep_until(clock.boot() - 100)
    await alarm.sleep_until(0.0)
    loop.call_later(0.02, alarm.poke)
    await alarm.sleep_until(None)
    alarm.poke()
    await alarm.sleep_until(clock.boot() + 1000)
    assert loop.time() - began < 1.0
    alarm.close()


async def test_a_child_is_started_again_and_ended_with_us(tmp_path):
    mark = tmp_path / "starts"
    script = f"open({str(mark)!r}, 'a').write(str(__import__('os').getpid()) + '\\n'); import time; time.sleep(0 if len(open({str(mark)!r}).readlines()) < 2 else 60)"
    task = asyncio.create_task(supervise(Child("x", (sys.executable, "-c", script)), clock=RealClock(), dice=os.urandom))
    async with asyncio.timeout(10):
        while not mark.exists() or len(mark.read_text().split()) < 2:
            await asyncio.sleep(0.02)
    pid = int(mark.read_text().split()[-1])
    assert Path(f"/proc/{pid}").exists()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not Path(f"/proc/{pid}").exists()


async def test_a_child_dies_with_an_agent_that_is_killed(tmp_path):
    mark = tmp_path / "pid"
    inner = f"open({str(mark)!r}, 'w').write(str(__import__('os').getpid())); import time; time.sleep(60)"
    outer = f"""
import asyncio, os, sys, time
from atoll.agent.children import Child, supervise
class Clock:
    def now(self): return 0.0
    def boot(self): return time.monotonic()
asyncio.run(supervise(Child("x", (sys.executable, "-c", {inner!r})), clock=Clock(), dice=os.urandom))
"""
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", outer, env={**os.environ, "PYTHONPATH": "src"})
    async with asyncio.timeout(20):
        while not mark.exists() or not mark.read_text():
            await asyncio.sleep(0.02)
        pid = int(mark.read_text())
        agent.kill()
        await agent.wait()
        while not ended(pid):
            await asyncio.sleep(0.02)


def ended(pid: int) -> bool:
    """Gone, or waited for by nobody."""
    try:
        return b") Z" in Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_a_child_of_an_agent_that_died_meanwhile_does_not_begin(tmp_path):
    """Killed between making a child and its asking to die with us: it would hold the address that the next run needs."""
    mark = tmp_path / "ran"
    command = _bound(["touch", str(mark)])
    # Whoever starts it here is not who it was made by.
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", f"import subprocess; subprocess.run({command!r})")
    assert await other.wait() == 0
    assert not mark.exists()
    own = await asyncio.create_subprocess_exec(*command)
    assert await own.wait() == 0
    assert mark.exists()


async def test_a_command_that_does_not_exist_is_tried_again_later():
    task = asyncio.create_task(supervise(Child("x", ("/nonexistent/x",)), clock=RealClock(), dice=os.urandom))
    await asyncio.sleep(0.1)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Probed:
    def __init__(self, probes):
        self.probes = probes
        self.capabilities = Capabilities(name="x", isolation=Isolation.GVISOR, arch="x86_64")

    async def probe(self):
        if isinstance(self.probes, Exception):
            raise self.probes
        return self.probes


async def test_probes_are_findings_and_a_check_that_breaks_is_one_too():
    good = Probed([Probe("x.start", True, "ok"), Probe("x.net", False, "no", fix="do", fatal=False)])
    bad = Probed(RuntimeError("broken"))
    found = await doctor.Registry(doctor.driver_checks({Isolation.GVISOR: good, Isolation.SHARED_KERNEL: bad})).run()
    assert [(f.id, f.ok, f.fatal) for f in found] == [
        ("x.start", True, True),
        ("x.net", False, False),
        ("driver.shared-kernel", False, True),
    ]
    assert "broken" in found[-1].detail


async def test_the_hosts_checks(tmp_path):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    checks = doctor.host_checks(state_directory=private, clock=RealClock(), disk_reserve_mib=1)
    assert all(f.ok for f in await doctor.Registry(checks).run())
    private.chmod(0o755)
    checks = doctor.host_checks(state_directory=private, clock=RealClock(), disk_reserve_mib=10**9)
    found = {f.id: f for f in await doctor.Registry(checks).run()}
    assert not found["host.state_directory"].ok
    assert not found["host.disk"].ok
    assert found["host.disk"].fatal
    assert found["host.disk"].fix


async def test_checks_from_outside(tmp_path):
    checks = doctor.agent_checks(lock_path=tmp_path / "lock", credential_path=tmp_path / "credential", control_url="http://127.0.0.1:1")
    assert {f.id: f.ok for f in await doctor.Registry(checks).run()} == {
        "agent.running": False,
        "agent.credential": False,
        "control.reachable": False,
    }
    (tmp_path / "credential").touch(mode=0o600)
    closed = asyncio.Event()

    async def hang_up(_reader, writer):
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    checks = doctor.agent_checks(lock_path=tmp_path / "lock", credential_path=tmp_path / "credential", control_url=url)
    with Lock(tmp_path / "lock"):
        assert all(f.ok for f in await doctor.Registry(checks).run())
    await closed.wait()
    server.close()


async def test_the_vault_asks_until_it_is_told():
    calls = []

    async def fetch(refs, placement_ids, _missing):
        calls.append((refs, placement_ids))
        if len(calls) == 1:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "down")
        return Payloads(payloads={"ref": InitPayload(env={"A": "1"})}, guest_tokens={"plc_1": "t"})

    vault = Vault(fetch, lambda n: b"\0" * n)
    assert (await vault.token("plc_1")).reveal() == "t"
    assert (await vault.payload("plc_1", "ref")).env == {"A": "1"}
    assert (await vault.payload("plc_2", None)).env == {}
    assert "A" not in repr(vault._entries)
    count = len(calls)
    await vault.token("plc_1")
    assert len(calls) == count


async def test_a_command_that_comes_again_wakes_who_waits():
    async def fetch(_refs, _ids, _missing):
        return Payloads()

    vault = Vault(fetch, lambda n: b"\xff" * n)
    waiting = asyncio.create_task(vault.token("plc_1"))
    await asyncio.sleep(0.01)
    vault.put("plc_1", token="t", payload=None)
    async with asyncio.timeout(0.04):
        assert (await waiting).reveal() == "t"
    vault.drop("plc_1")
    assert not vault._entries
