"""The supervisor with small real children: it restarts, adopts, stops in order, and is not needed by what it keeps."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.programs import identity, probes, supervision
from atoll.programs.children import ChildSpec
from atoll.programs.instance import Config
from atoll.programs.layout import Layout
from atoll.programs.supervisor import Supervisor

# Says that it runs, and at SIGTERM that it ends: the order of both is in one file.
PROGRAM = """
import os, signal, sys, time
name, told = sys.argv[1], sys.argv[2]
def say(what):
    with open(told, "a") as file:
        file.write(f"{what} {name}\\n")
def end(*_):
    say("end")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
say("start")
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def place(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "home")
    layout.run.mkdir(parents=True)
    layout.log.mkdir()
    return layout


def spec(place: Layout, name: str, *, program: str = PROGRAM, grace_s: float = 5.0) -> ChildSpec:
    command = (sys.executable, "-c", program, name, str(place.home / "told"))
    return ChildSpec(name, command, environment=dict(os.environ), grace_s=grace_s)


def told(place: Layout) -> list[str]:
    try:
        return (place.home / "told").read_text().splitlines()
    except FileNotFoundError:
        return []


async def until(condition: Callable[[], bool], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


def pid(place: Layout, name: str) -> int | None:
    running = identity.living(place.pid_file(name))
    return running.pid if running else None


@asynccontextmanager
async def running(place: Layout, *specs: ChildSpec) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(Supervisor(place, list(specs), None).run())
    try:
        yield task
    finally:
        if not task.done():
            with contextlib.suppress(Exception):
                await asyncio.to_thread(supervision.ask, place, "stop")
            await asyncio.wait_for(task, 20)


async def test_it_starts_in_order_and_ends_in_the_opposite_one(place: Layout) -> None:
    async with running(place, *(spec(place, name) for name in ("control", "agent", "edge"))):
        await until(lambda: len(told(place)) == 3)
        status = await asyncio.to_thread(supervision.ask, place, "status")
        assert status["pid"] == os.getpid()
        assert {name: child["total"] for name, child in status["children"].items()} == {"control": 0, "agent": 0, "edge": 0}
    ends = [line for line in told(place) if line.startswith("end")]
    assert ends == ["end edge", "end agent", "end control"]
    assert not place.socket.exists()


async def test_a_child_that_never_is_well_keeps_no_other_from_starting(place: Layout) -> None:
    """Without control the agent still has ends to enforce."""
    config = Config(install_id="ins_" + "0" * 20, port=1, subnet=0, host_name="h")
    children = [spec(place, name) for name in ("control", "agent", "edge")]
    task = asyncio.create_task(Supervisor(place, children, config).run())
    try:
        await until(lambda: len(told(place)) == 3)
        assert probes.look("control", place, config).healthy is False
    finally:
        await asyncio.to_thread(supervision.ask, place, "stop")
        await asyncio.wait_for(task, 20)
    assert told(place)[-3:] == ["end edge", "end agent", "end control"]


async def test_what_dies_is_started_again_at_once(place: Layout) -> None:
    async with running(place, spec(place, "control"), spec(place, "agent")):
        await until(lambda: len(told(place)) == 2)
        first, other = pid(place, "control"), pid(place, "agent")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid(place, "control") not in (None, first))
        await until(lambda: told(place).count("start control") == 2)
        assert pid(place, "agent") == other
        status = await asyncio.to_thread(supervision.ask, place, "status")
        assert status["children"]["control"]["total"] == 1
        assert status["children"]["control"]["last_end"] == "signal 9"


async def test_a_child_that_cannot_start_does_not_spin(place: Layout) -> None:
    async with running(place, spec(place, "control", program="import sys; open(sys.argv[2], 'a').write('start control\\n'); sys.exit(3)")):
        await asyncio.sleep(1.5)
        assert 2 <= len(told(place)) <= 5
        status = await asyncio.to_thread(supervision.ask, place, "status")
        assert status["children"]["control"]["last_end"] == "exit 3"


async def test_a_child_that_does_not_listen_is_killed(place: Layout) -> None:
    deaf = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[2], 'a').write('start\\n'); time.sleep(100)"
    )
    async with running(place, spec(place, "control", program=deaf, grace_s=0.3)):
        await until(lambda: bool(told(place)))
        victim = pid(place, "control")
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert victim is not None
    assert identity.of(victim) is None


async def test_there_is_one_supervisor(place: Layout) -> None:
    async with running(place, spec(place, "control")):
        await until(lambda: bool(told(place)))
        with pytest.raises(Refused) as refused:
            await Supervisor(place, [], None).run()
        assert refused.value.code is Code.ALREADY_RUNNING


async def test_a_killed_supervisor_leaves_its_children_and_the_next_adopts_them(place: Layout) -> None:
    other = other_supervisor(place)
    await until(lambda: told(place) == ["start control"])
    child = pid(place, "control")
    assert child is not None
    other.kill()
    other.wait()
    await asyncio.sleep(0.2)
    assert pid(place, "control") == child
    async with running(place, spec(place, "control")):
        await until(place.socket.exists)
        await asyncio.sleep(0.3)
        assert pid(place, "control") == child
        assert told(place) == ["start control"]
        status = await asyncio.to_thread(supervision.ask, place, "status")
        assert status["children"]["control"]["adopted"] is True
        os.kill(child, signal.SIGKILL)
        await until(lambda: told(place) == ["start control"] * 2)
    assert told(place)[-1] == "end control"


OTHER = """
import asyncio, json, os, sys
from pathlib import Path
from atoll.programs.children import ChildSpec
from atoll.programs.instance import Config
from atoll.programs.layout import Layout
from atoll.programs.supervisor import Supervisor
spec = ChildSpec("control", tuple(json.loads(sys.argv[2])), environment=dict(os.environ))
asyncio.run(Supervisor(Layout(Path(sys.argv[1])), [spec], None).run())
"""


def other_supervisor(place: Layout) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(place.home), json.dumps(spec(place, "control").command)], env=dict(os.environ)
    )


async def test_two_launches_give_one_process(place: Layout) -> None:
    """Whatever two supervisors do at once: the claim is made by the process itself."""
    base = [
        sys.executable,
        "-m",
        "atoll.programs.launch",
        "--pid-file",
        str(place.pid_file("x")),
        "--lock",
        str(place.lock_file("x")),
        "--mark",
        "m",
    ]
    launches = [launch([*base, "--", *spec(place, "x").command]) for _ in range(4)]
    try:
        await until(lambda: sum(one.poll() is None for one in launches) == 1 and told(place) == ["start x"])
        assert sorted(one.returncode for one in launches if one.returncode is not None) == [75, 75, 75]
        winner = next(one for one in launches if one.returncode is None)
        assert pid(place, "x") == winner.pid
    finally:
        for one in launches:
            one.kill()
            one.wait()


def launch(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


async def test_a_missing_program_says_so(place: Layout, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["--pid-file", str(place.pid_file("x")), "--lock", str(place.lock_file("x")), "--mark", "m", "--", "/not/there"]
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-m", "atoll.programs.launch", *command], check=False)
    assert done.returncode == 71
    assert "/not/there" in capfd.readouterr().err


async def test_the_socket_works_however_deep_the_home_is(tmp_path: Path) -> None:
    deep = Layout(tmp_path / ("d" * 60) / ("e" * 60) / "home")
    deep.run.mkdir(parents=True)
    deep.log.mkdir()
    async with running(deep, spec(deep, "control")):
        await until(lambda: bool(told(deep)))
        assert (await asyncio.to_thread(supervision.ask, deep, "status"))["ok"]
        assert not (await asyncio.to_thread(supervision.ask, deep, "nonsense"))["ok"]


async def test_stop_without_a_supervisor_ends_what_it_left(place: Layout) -> None:
    other = other_supervisor(place)
    await until(lambda: told(place) == ["start control"])
    other.kill()
    other.wait()
    assert await asyncio.to_thread(supervision.stop_outdated, place, identity.mark_of(place.pid_file("control")) or "") == []
    assert await asyncio.to_thread(supervision.stop, place) == ["control"]
    assert told(place) == ["start control", "end control"]
    assert await asyncio.to_thread(supervision.stop, place) == []


async def test_who_reads_settings_that_have_changed_is_outdated_and_starts_anew(place: Layout) -> None:
    async with running(place, spec(place, "control"), spec(place, "edge")):
        await until(lambda: len(told(place)) == 2)
        code = identity.mark_of(place.pid_file("edge")) or ""
        assert supervision.outdated(place, code) == []
        place.control_config.write_text('[agents]\nlisten = "127.0.0.1:1"\n')
        assert supervision.outdated(place, code) == ["control"]
        before = identity.living(place.pid_file("control"))
        await asyncio.to_thread(supervision.restart, place, "control")
        assert identity.living(place.pid_file("control")) not in (None, before)
        assert supervision.outdated(place, code) == []
        with pytest.raises(Unavailable, match="no such running process"):
            await asyncio.to_thread(supervision.restart, place, "registry")
