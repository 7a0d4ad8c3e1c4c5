"""The command line on the running product: what needs a real guest, above all the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.base.errors import Code

CLI = [sys.executable, "-m", "atoll.programs.main"]


@pytest.fixture(scope="module", params=["default", "shared-kernel"])
def box(product, request) -> Iterator[str]:
    """A sandbox for the tests of this file."""
    done = run("sandbox", "create", "--timeout", "20m", "--class", request.param)
    sandbox = done.stdout.strip()
    yield sandbox
    run("sandbox", "rm", sandbox, check=False)


def environment() -> dict[str, str]:
    """What `eval "$(atoll env)"` leaves: the fixture has set E2B's variables, and no instance is named."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}


def run(*arguments: str, check: bool = True, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*CLI, *arguments], env=environment(), input=stdin, capture_output=True, timeout=120, check=False)
    answer = subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
    assert not check or done.returncode == 0, answer
    return answer


class Terminal:
    """`atoll sandbox shell` on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.said = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [*CLI, "sandbox", "shell", *arguments], {**environment(), "COLUMNS": "80", "LINES": "24"})
        self.resize(30, 100, tell=False)

    def resize(self, rows: int, columns: int, *, tell: bool = True) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if tell:
            os.kill(self.pid, signal.SIGWINCH)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, text: str, within_s: float = 20.0) -> None:
        """Wait until this was said since the last wait."""
        deadline = time.monotonic() + within_s
        while text.encode() not in self.said:
            assert time.monotonic() < deadline, self.said
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.said += os.read(self.fd, 65536)
                except OSError as error:
                    raise AssertionError(self.said) from error
        self.said = self.said.partition(text.encode())[2]

    def status(self) -> int:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if select.select([self.fd], [], [], 0.05)[0]:
                    self.said += os.read(self.fd, 65536)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(self.said)


def test_the_terminal_is_one(box) -> None:
    terminal = Terminal(box)
    terminal.until("$ ")
    terminal.type("tty; stty size; echo $TERM\n")
    terminal.until("/dev/pts/")
    terminal.until("30 100")
    terminal.resize(50, 132)
    time.sleep(0.5)
    terminal.type("stty size\n")
    terminal.until("50 132")
    terminal.type("exit 5\n")
    assert terminal.status() == 5


def test_keys_go_to_the_program_not_to_the_client(box) -> None:
    terminal = Terminal(box)
    terminal.until("$ ")
    terminal.type("sleep 100\n")
    time.sleep(1)
    terminal.type("\x03")
    terminal.until("$ ")
    terminal.type("echo interrupted-$?\n")
    terminal.until("interrupted-130")
    terminal.type("\x04")
    assert terminal.status() == 0


def test_what_is_typed_ahead_counts(box) -> None:
    terminal = Terminal(box, "sh", "-c", "read line; echo got-$line; exit 3")
    terminal.type("über\n")
    terminal.until("got-über")
    assert terminal.status() == 3


def test_our_terminal_is_as_before(box) -> None:
    script = f"{' '.join(CLI)} sandbox shell {box} true; stty -a | grep -o '[ -]echo '"
    pid, fd = pty.fork()
    if pid == 0:
        os.execve("/bin/sh", ["sh", "-c", script], environment())
    said = b""
    with contextlib.suppress(OSError):
        while data := os.read(fd, 65536):
            said += data
    os.waitpid(pid, 0)
    os.close(fd)
    assert said.strip() == b"echo"


@pytest.mark.parametrize("end", [b"exit 4\n", b"exit 4"], ids=["whole lines", "no last newline"])
def test_a_shell_without_a_terminal_takes_a_script(box, end) -> None:
    done = run("sandbox", "shell", box, "bash", stdin=b"echo $((6 * 7))\n" + end, check=False)
    assert done.returncode == 4
    assert "42" in done.stdout


@pytest.mark.parametrize("command", [(), ("bash",), ("cat",), ("sh", "-c", "sleep 2; bash")], ids=["login", "bash", "cat", "late"])
def test_a_shell_without_any_input_ends(box, command) -> None:
    assert run("sandbox", "shell", box, *command, stdin=b"").returncode == 0


def test_the_sandbox_ends_under_the_terminal(product) -> None:
    sandbox = run("sandbox", "create").stdout.strip()
    terminal = Terminal(sandbox)
    terminal.until("$ ")
    run("sandbox", "rm", sandbox)
    assert terminal.status() == 3
    assert str(Code.SANDBOX_NOT_FOUND).encode() in terminal.said


def test_exec_output_status_user_and_environment(box) -> None:
    done = run(
        "sandbox", "exec", "-u", "root", "-w", "/tmp", "-e", "A=b c", box, "--",
        "sh", "-c", 'id -un; pwd; echo "$A"; echo err >&2; exit 9', check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (9, "root\n/tmp\nb c\n", "err\n")


def test_exec_passes_bytes_through(box) -> None:
    data = os.urandom(2_000_000)
    done = subprocess.run(
        [*CLI, "sandbox", "exec", "-i", box, "cat"], env=environment(), input=data, capture_output=True, timeout=120, check=True
    )
    assert done.stdout == data


def test_exec_of_what_is_not_there(box) -> None:
    assert run("sandbox", "exec", box, "/not/there", check=False).returncode == 127


def test_exec_with_a_limit_is_killed(box) -> None:
    started = time.monotonic()
    done = run("sandbox", "exec", "--timeout", "1s", box, "sleep", "60", check=False)
    assert time.monotonic() - started < 20
    assert done.returncode == 1
    assert "END_REACHED" in done.stderr


def test_cp_of_files_and_trees(box, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "big").write_bytes(os.urandom(5_000_000))
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("run.sh")
    run("sandbox", "cp", str(tree), f"{box}:/home/user/")
    assert run("sandbox", "exec", box, "/home/user/tree/link").stdout == "ran\n"
    run("sandbox", "cp", f"{box}:/home/user/tree", str(tmp_path / "back"))
    assert (tmp_path / "back" / "sub" / "big").read_bytes() == (tree / "sub" / "big").read_bytes()
    assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "back" / "link").readlink() == Path("run.sh")
    told = json.loads(run("sandbox", "cp", "--json", f"{box}:tree/sub/big", str(tmp_path)).stdout)
    assert told["bytes"] == 5_000_000


def test_a_strangers_sandbox_is_not_there(box, stranger) -> None:
    variables = {**environment(), "E2B_API_KEY": stranger}
    for command in (["get"], ["logs"], ["events"], ["rm"], ["exec"]):
        more = ["true"] if command == ["exec"] else []
        done = subprocess.run(
            [*CLI, "sandbox", *command, box, *more], env=variables, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 3, (command, done)
        assert "SANDBOX_NOT_FOUND" in done.stderr
