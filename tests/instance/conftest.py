"""Instances of our own, with directories and ports of their own, that tests may kill."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from atoll.drivers.oci.moving import INBOX
from atoll.drivers.oci.programs import PROGRAMS as COPIES
from atoll.drivers.oci.saves import SNAPSHOTS
from atoll.programs import identity
from atoll.programs.layout import BINARIES, Layout
from tests.instance.survival import Client
from tests.removal import leave

ROOT = Path(__file__).resolve().parents[2]
ATOLL = ROOT / ".venv" / "bin" / "atoll"
UP_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for marker in ("root", "runtime", "kill"):
                item.add_marker(getattr(pytest.mark, marker))
            item.add_marker(pytest.mark.timeout(UP_S))


@dataclass
class Instance:
    """One instance and its command line."""

    home: Path
    port: int
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return Layout(self.home)

    def run(self, *arguments: str, check: bool = True, within_s: float = UP_S, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "ATOLL_API"))}
        variables = {**kept, "ATOLL_HOME": str(self.home), "ATOLL_PORT": str(self.port), **self.environment, **environment}
        done = subprocess.run([ATOLL, *arguments], env=variables, capture_output=True, text=True, timeout=within_s, check=False)
        assert not check or done.returncode == 0, (
            f"atoll {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.last_words()}"
        )
        return done

    def json(self, *arguments: str, check: bool = True) -> Any:
        return json.loads(self.run(*arguments, check=check).stdout)

    def last_words(self) -> str:
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            for log in sorted(self.home.glob("log/*.log"))
        )

    def pid(self, name: str) -> int | None:
        running = identity.living(self.layout.pid_file(name))
        return running.pid if running else None

    def create(self, *arguments: str) -> str:
        return self.run("sandbox", "create", "--timeout", "10m", *arguments).stdout.strip()

    def exec(self, sandbox: str, *command: str, check: bool = True) -> str:
        return self.run("sandbox", "exec", sandbox, "--", *command, check=check).stdout

    def ids(self) -> set[str]:
        return set(self.run("sandbox", "list", "-q").stdout.split())

    def until_well(self, within_s: float = 60.0) -> None:
        until(lambda: self.run("status", check=False).returncode == 0, within_s=within_s, what=self.last_words)

    def leftovers(self) -> list[str]:
        """What this machine still has of the instance besides its directory."""
        install = json.loads(self.run("status", "--json", check=False).stdout)["install_id"].removeprefix("ins_")
        found = [f"link {path.name}" for path in Path("/sys/class/net").iterdir() if path.name.startswith(f"at{install[:6]}")]
        found += [f"cgroup {path}" for path in Path("/sys/fs/cgroup").glob(f"*/atoll-{install[:8]}")]
        tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
        found += [f"table {line}" for line in tables.splitlines() if f"atoll_{install[:8]}" in line]
        found += [f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if str(self.home) in line]
        loops = subprocess.run(["losetup", "--list", "--noheadings"], capture_output=True, text=True, check=True).stdout
        found += [f"loop {line}" for line in loops.splitlines() if str(self.home) in line]
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) != os.getpid():
                try:
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    variables = (process / "environ").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                if str(self.home) in words or f"ATOLL_HOME={self.home}\0" in variables:
                    found.append(f"process {process.name} {words}")
        found += [
            f"directory {path}"
            for path in self.layout.sandboxes.iterdir()
            if path.is_dir() and path.name != COPIES and (path.name not in (SNAPSHOTS, INBOX) or any(path.iterdir()))
        ]
        return found


def until(condition: Callable[[], object], *, within_s: float = 30.0, what: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {within_s:.0f} s\n{what()}"
        time.sleep(0.1)


def _free_ports() -> int:
    ran = subprocess.run([sys.executable, ROOT / "scripts" / "free_ports.py", "3"], capture_output=True, text=True, check=True)
    return int(ran.stdout)


@contextlib.contextmanager
def _instances() -> Iterator[Callable[[], Instance]]:
    if os.geteuid() != 0:
        pytest.skip("starting an instance needs root; run as root")
    missing = [name for name in BINARIES if not (Path(os.environ.get("ATOLL_BIN") or ROOT / "build" / "bin") / name).exists()]
    if missing or not ATOLL.exists():
        pytest.skip(f"not built: {', '.join(missing) or ATOLL}; `make test` builds it")
    made: list[Instance] = []

    def make() -> Instance:
        home = Path(tempfile.mkdtemp(prefix="atoll-instance.", dir="/var/tmp"))
        home.chmod(0o755)
        made.append(Instance(home, _free_ports()))
        return made[-1]

    yield make
    for one in made:
        done = one.run("down", check=False)
        if done.returncode == 0:
            leave(one.home)
        else:
            print(f"atoll down failed, state is left in {one.home}:\n{done.stdout}\n{done.stderr}", file=sys.stderr)


@pytest.fixture
def fresh() -> Iterator[Callable[[], Instance]]:
    """Makes instances that were never started; they are taken down and removed after the test."""
    with _instances() as make:
        yield make


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    """A running one for all tests of a file."""
    with _instances() as make:
        one = make()
        one.run("up", "--no-demo")
        yield one


@pytest.fixture
def clients() -> Iterator[contextlib.ExitStack]:
    """Keeps the public clients that a test makes, and closes them."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def client(instance: Instance, clients: contextlib.ExitStack) -> Client:
    """The running instance as its users see it."""
    return clients.enter_context(Client(instance))
