"""Commands through the unmodified SDK."""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
import time

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)


def test_output_and_status(sandbox) -> None:
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo before; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "before\n")
    assert "exit status 3" in (failed.value.error or "")
    with pytest.raises(CommandExitException) as missing:
        sandbox.commands.run("no-such-command")
    assert missing.value.exit_code == 127


def test_callbacks_see_output_as_it_comes(sandbox) -> None:
    seen: list[tuple[float, str]] = []
    sandbox.commands.run("echo a; sleep 0.6; echo b", on_stdout=lambda text: seen.append((time.monotonic(), text)))
    assert "".join(text for _, text in seen) == "a\nb\n"
    assert seen[-1][0] - seen[0][0] > 0.4


def test_users_and_directories(sandbox) -> None:
    assert sandbox.commands.run("whoami; pwd").stdout == "user\n/home/user\n"
    assert sandbox.commands.run("whoami; pwd; echo $HOME $USER $LOGNAME", user="root").stdout == "root\n/root\n/root root root\n"
    assert sandbox.commands.run("sudo -n whoami").stdout == "root\n"
    assert sandbox.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert sandbox.commands.run("id -nG").stdout.split()
    with pytest.raises(InvalidArgumentException, match="/nowhere"):
        sandbox.commands.run("pwd", cwd="/nowhere")
    with pytest.raises(AuthenticationException, match="nobody-here"):
        sandbox.commands.run("whoami", user="nobody-here")


def test_large_output_comes_whole(sandbox) -> None:
    result = sandbox.commands.run("head -c 5000000 /dev/zero | tr '\\0' x; echo; echo done")
    assert len(result.stdout) == 5_000_006
    assert result.stdout.endswith("x\ndone\n")


def test_text_of_any_kind(sandbox) -> None:
    text = "žluťoučký 🐎 \t 'quotes' \"double\" $dollar `tick` \\ end"
    sandbox.files.write("/tmp/text", text)
    assert sandbox.commands.run("cat /tmp/text").stdout == text
    # More than one chunk, so that characters are split somewhere.
    assert sandbox.commands.run("for i in $(seq 20000); do printf 🐎; done").stdout == "🐎" * 20000


def test_background_list_connect_kill(sandbox) -> None:
    handle = sandbox.commands.run("echo started; sleep 60", background=True)
    listed = {one.pid: one for one in sandbox.commands.list()}
    assert handle.pid in listed
    assert listed[handle.pid].cmd == "/bin/bash"
    assert listed[handle.pid].args == ["-l", "-c", "echo started; sleep 60"]
    assert handle.kill() is True
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert "killed" in (ended.value.error or "")
    assert sandbox.commands.kill(handle.pid) is False
    assert handle.pid not in {one.pid for one in sandbox.commands.list()}
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(999999)


def test_disconnect_leaves_it_running_and_connect_follows(sandbox) -> None:
    handle = sandbox.commands.run("for i in $(seq 40); do echo $i; sleep 0.1; done; exit 4", background=True, timeout=0)
    handle.disconnect()
    time.sleep(0.3)
    again = sandbox.commands.connect(handle.pid)
    other = sandbox.commands.connect(handle.pid)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ends = []
        for future in [pool.submit(one.wait) for one in (again, other)]:
            with pytest.raises(CommandExitException) as ended:
                future.result(30)
            ends.append(ended.value)
    assert [end.exit_code for end in ends] == [4, 4]
    assert all(end.stdout.endswith("39\n40\n") for end in ends)
    # For a while after its end it can still be asked.
    late = sandbox.commands.connect(handle.pid)
    with pytest.raises(CommandExitException) as ended:
        late.wait()
    assert ended.value.exit_code == 4


def test_output_that_nobody_reads_does_not_block(sandbox) -> None:
    sandbox.commands.run("rm -f /tmp/unread")
    handle = sandbox.commands.run("head -c 20000000 /dev/zero; touch /tmp/unread; sleep 30", background=True)
    handle.disconnect()
    deadline = time.monotonic() + 20
    while not sandbox.files.exists("/tmp/unread"):
        assert time.monotonic() < deadline, "the process waits for a reader"
        time.sleep(0.1)
    sandbox.commands.kill(handle.pid)


def test_a_deadline_kills(sandbox) -> None:
    sandbox.commands.run("rm -f /tmp/outlived")
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 3; touch /tmp/outlived", timeout=1)
    time.sleep(3)
    assert not sandbox.files.exists("/tmp/outlived")


def test_stdin(sandbox) -> None:
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    handle.send_stdin("one\n")
    sandbox.commands.send_stdin(handle.pid, "two\n")
    handle.close_stdin()
    assert handle.wait().stdout == "one\ntwo\n"
    # Without it, standard input is empty and the command does not wait.
    assert sandbox.commands.run("cat; echo end", timeout=5).stdout == "end\n"


def test_stdin_streamed(sandbox) -> None:
    handle = sandbox.commands.run("sha256sum", background=True, stdin=True)
    sandbox.commands.stream_input(handle.pid, (b"x" * 10_000 for _ in range(50)))
    handle.close_stdin()
    assert handle.wait().stdout.split()[0] == hashlib.sha256(b"x" * 500_000).hexdigest()


def test_stdin_of_one_that_has_none(sandbox) -> None:
    handle = sandbox.commands.run("sleep 20", background=True)
    with pytest.raises(SandboxException):
        handle.send_stdin("text")
    handle.kill()
    with pytest.raises(NotFoundException):
        sandbox.commands.send_stdin(999999, "text")


def test_many_at_once(sandbox) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: sandbox.commands.run(f"sleep 0.2; echo {number}").stdout, range(24)))
    assert results == [f"{number}\n" for number in range(24)]


def test_children_of_a_command_may_stay(sandbox) -> None:
    result = sandbox.commands.run("nohup sleep 25 >/dev/null 2>&1 & echo $!", timeout=10)
    pid = result.stdout.strip()
    assert sandbox.commands.run(f"kill -0 {pid} && echo alive").stdout == "alive\n"
    sandbox.commands.run(f"kill {pid}")
    # And they are reaped: no zombie stays.
    time.sleep(0.5)
    assert sandbox.commands.run(f"cat /proc/{pid}/stat 2>/dev/null | cut -d' ' -f3 || true").stdout.strip() != "Z"


def test_a_quiet_command_is_not_cut(sandbox) -> None:
    done = threading.Event()

    def run() -> None:
        assert sandbox.commands.run("sleep 8; echo late", timeout=30).stdout == "late\n"
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(25)
    assert done.is_set()


def test_languages_of_the_base_template(sandbox) -> None:
    assert sandbox.commands.run("python -c 'import sys; print(sys.version_info.major)'").stdout == "3\n"
    assert sandbox.commands.run("node -e 'console.log(1 + 1)'").stdout == "2\n"
    for tool in ("git", "curl", "pip", "ip", "tput", "bash", "sudo"):
        assert sandbox.commands.run(f"command -v {tool}").exit_code == 0


def test_limits_are_seen_inside(sandbox, product) -> None:
    info = product.call("GET", f"/sandboxes/{sandbox.sandbox_id}").json()
    size_kib = int(sandbox.commands.run("df -k --output=size / | tail -1").stdout)
    assert size_kib <= info["diskSizeMB"] * 1024 * 1.05
    total_kib = int(sandbox.commands.run("awk '/MemTotal/{print $2}' /proc/meminfo").stdout)
    isolation = product.call("GET", f"/v1/sandboxes/{sandbox.sandbox_id}").json()["isolation"]
    if isolation == "gvisor":
        # A container of the shared kernel sees the machine's memory there; only its limit holds it.
        assert total_kib <= info["memoryMB"] * 1024 * 1.05
