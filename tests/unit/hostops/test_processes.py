"""Processes are found, watched and ended by what the kernel says, with real ones."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.hostops import processes


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_what_runs_and_what_does_not(sleeper):
    assert processes.alive(sleeper.pid)
    assert processes.arguments(sleeper.pid) == ["sleep", "60"]
    assert sleeper.pid in processes.children(os.getpid())
    assert processes.started_ticks(sleeper.pid) > 0
    sleeper.kill()
    assert processes.wait_end(sleeper.pid, 5.0)
    assert not processes.alive(sleeper.pid), "a zombie does not run"
    sleeper.wait()
    assert not processes.alive(sleeper.pid)
    assert processes.arguments(sleeper.pid) == []
    assert processes.started_ticks(sleeper.pid) is None
    assert processes.descendants(sleeper.pid) == []


def test_a_program_in_the_midst_of_its_execve_is_waited_for(sleeper, monkeypatch):
    # The kernel shows no command line between the new memory and its arguments.
    read, looks, places = Path.read_bytes, iter([b"", b"", b""]), iter([(0, 0), (4096, 4096), (4096, 8192)])
    monkeypatch.setattr(Path, "read_bytes", lambda path: next(looks, read(path)))
    monkeypatch.setattr(processes, "_arguments_at", lambda _pid: next(places))
    assert processes.arguments(sleeper.pid) == ["sleep", "60"]
    assert next(looks, None) is None


@pytest.mark.skipif(
    Path("/proc/2/comm").read_text() != "kthreadd\n" if Path("/proc/2/comm").exists() else True,
    reason="no kernel threads in this namespace",
)
def test_a_kernel_thread_has_no_command_line():
    assert processes.arguments(2) == []


@pytest.mark.parametrize(("code", "reason"), [("raise SystemExit(3)", "exit 3"), ("import os; os.kill(os.getpid(), 9)", "signal 9")])
def test_how_it_ended_is_known_before_and_after_it_is_reaped(code, reason):
    process = subprocess.Popen([sys.executable, "-c", code])
    pidfd = os.pidfd_open(process.pid)
    try:
        assert processes.wait_end(process.pid, 10.0)
        assert processes.exit_reason(process.pid, pidfd) == reason
        process.wait()
        assert processes.exit_reason(process.pid, pidfd) in (reason, None), "older kernels forget"
    finally:
        os.close(pidfd)


def test_waiting_has_an_end(sleeper):
    began = time.monotonic()
    assert not processes.wait_end(sleeper.pid, 0.05)
    assert time.monotonic() - began < 2.0


def test_ending_asks_again_until_nothing_is_found():
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & wait"], start_new_session=True)
    while len(processes.descendants(parent.pid)) < 2:
        time.sleep(0.01)
    family = {parent.pid, *processes.descendants(parent.pid)}
    assert processes.end_all(lambda: [pid for pid in family if processes.alive(pid)]) == []
    parent.wait()
    assert not any(processes.alive(pid) for pid in family)


def test_what_does_not_end_is_named():
    """A process that is found but is gone each time stands for one that cannot be killed: the search must still come to an end."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert processes.end_all(lambda: [gone.pid], patience_s=0.1) == [gone.pid]


def test_a_search_reads_every_command_line(sleeper):
    marked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "mark-4711"])
    try:
        while "mark-4711" not in processes.arguments(marked.pid):
            time.sleep(0.01)
        assert processes.mentioning("mark-4711") == [marked.pid]
    finally:
        marked.kill()
        marked.wait()


def test_scores_of_what_is_gone_are_no_error(sleeper):
    assert processes.set_oom_score(sleeper.pid, 900)
    assert Path(f"/proc/{sleeper.pid}/oom_score_adj").read_text().strip() == "900"
    assert not processes.set_oom_score(2**22 - 1, 900)
