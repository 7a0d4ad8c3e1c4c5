"""A running product for the tests that drive it from outside.

In this order: the instance in ATOLL_E2E_HOME (its `atoll env` says how to reach it); what E2B_API_URL and E2B_API_KEY name; an instance
of our own, started beside whatever else runs here, with a directory and ports of its own. Tests see nothing but the public surface.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from atoll.programs.layout import BINARIES
from tests.removal import leave

ROOT = Path(__file__).resolve().parents[2]
ATOLL = ROOT / ".venv" / "bin" / "atoll"
UP_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.runtime)
            item.add_marker(pytest.mark.sdk)
            if item.get_closest_marker("timeout") is None:
                # The first one starts the instance.
                item.add_marker(pytest.mark.timeout(UP_S))


@dataclass(frozen=True)
class Product:
    """How to reach it, with an operator's key."""

    url: str
    sandbox_url: str
    key: str
    domain: str
    environment: dict[str, str]
    http: httpx.Client

    def call(self, method: str, path: str, *, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {"X-API-KEY": key or self.key, **options.pop("headers", {})}
        return self.http.request(method, self.url + path, headers=headers, **options)

    def streamed(self, sandbox: Sandbox, path: str, *, port: int) -> contextlib.AbstractContextManager[httpx.Response]:
        """A request to a port of a sandbox whose answer is read as it comes."""
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
        return self.http.stream("GET", self.sandbox_url + path, headers=headers)

    def inside(self, sandbox: Sandbox, method: str, path: str, *, port: int = 49983, token: bool = True, **options: Any) -> httpx.Response:
        """A request to a port of a sandbox, by header."""
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port), **options.pop("headers", {})}
        if token and sandbox._envd_access_token:
            headers.setdefault("X-Access-Token", sandbox._envd_access_token)
        return self.http.request(method, self.sandbox_url + path, headers=headers, **options)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.sandbox_url.removeprefix("http://").partition(":")
        return host, int(port)


def _exports(home: str) -> dict[str, str]:
    """What `atoll env` prints, as a shell would take it."""
    ran = subprocess.run([ATOLL, "env"], env={**os.environ, "ATOLL_HOME": home}, capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 0, f"atoll env failed: {ran.stderr}"
    values = {}
    for line in ran.stdout.splitlines():
        words = shlex.split(line)
        if len(words) == 2 and words[0] == "export":
            name, _, value = words[1].partition("=")
            values[name] = value
    return values


def _free_ports(count: int) -> int:
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "free_ports.py", str(count)], capture_output=True, text=True, timeout=30, check=True
    )
    return int(ran.stdout)


@contextlib.contextmanager
def _own_instance() -> Iterator[dict[str, str]]:
    if os.geteuid() != 0:
        pytest.skip("starting an instance needs root; run as root, or name a running one with ATOLL_E2E_HOME")
    missing = [name for name in BINARIES if not (Path(os.environ.get("ATOLL_BIN") or ROOT / "build" / "bin") / name).exists()]
    if missing or not ATOLL.exists():
        pytest.skip(f"not built: {', '.join(missing) or ATOLL}; `make test` builds it")
    home = Path(tempfile.mkdtemp(prefix="atoll-e2e.", dir="/var/tmp"))
    home.chmod(0o755)
    environment = {**os.environ, "ATOLL_HOME": str(home), "ATOLL_PORT": str(_free_ports(3))}
    try:
        ran = subprocess.run([ATOLL, "up", "--no-demo"], env=environment, capture_output=True, text=True, timeout=UP_S, check=False)
        if ran.returncode != 0:
            logs = "\n".join(
                f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:]) for log in home.glob("log/*.log")
            )
            pytest.fail(f"atoll up: status {ran.returncode}\n{ran.stdout}\n{ran.stderr}\n{logs}", pytrace=False)
        yield _exports(str(home))
    finally:
        down = subprocess.run([ATOLL, "down"], env=environment, capture_output=True, text=True, timeout=120, check=False)
        if down.returncode == 0:
            leave(home)
        else:
            print(f"atoll down failed, state is left in {home}:\n{down.stdout}\n{down.stderr}", file=sys.stderr)


@pytest.fixture(scope="session", autouse=True)
def product() -> Iterator[Product]:
    """The product under test. For every test: whichever is first, the SDKs find it in the environment."""
    with contextlib.ExitStack() as stack:
        if home := os.environ.get("ATOLL_E2E_HOME"):
            values = _exports(home)
        elif os.environ.get("E2B_API_URL") and os.environ.get("E2B_API_KEY"):
            values = {name: value for name, value in os.environ.items() if name.startswith("E2B_")}
        else:
            values = stack.enter_context(_own_instance())
        values.setdefault("E2B_SANDBOX_URL", values["E2B_API_URL"])
        # As after `eval "$(atoll env)"`: the SDKs find everything by themselves.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in values.items():
            patch.setenv(name, value)
        patch.delenv("E2B_DEBUG", raising=False)
        domain = values.get("E2B_DOMAIN") or values["E2B_API_URL"].removeprefix("http://").replace("127.0.0.1", "localhost")
        http = stack.enter_context(httpx.Client(timeout=70))
        yield Product(values["E2B_API_URL"], values["E2B_SANDBOX_URL"], values["E2B_API_KEY"], domain, values, http)


@pytest.fixture(scope="session")
def stranger(product: Product) -> str:
    """A key of another team."""
    answer = product.call("POST", "/v1/keys", json={"name": "stranger", "team": f"strangers-{os.getpid()}"})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["secret"])


CLASSES = ["default", pytest.param("shared-kernel", marks=pytest.mark.long)]
"""The isolations: gVisor always, containers of the shared kernel in the full matrices."""


@pytest.fixture(scope="module", params=CLASSES)
def sandbox(product: Product, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One sandbox for the tests of a module."""
    made = _create(product, request.param)
    yield made
    made.kill()


def _create(product: Product, class_name: str) -> Sandbox:
    if class_name == "default":
        return Sandbox.create(timeout=900)
    # E2B's API has no word for it; what /v1 makes is an ordinary sandbox for the SDK.
    answer = product.call("POST", "/v1/sandboxes", json={"class": class_name, "timeoutSeconds": 900})
    assert answer.status_code == 201, answer.text
    return Sandbox.connect(answer.json()["id"], timeout=900)


@pytest.fixture
def make(product: Product) -> Iterator[Callable[..., Sandbox]]:
    """Sandboxes of the test's own; killed after it."""
    made: list[Sandbox] = []

    def create(*arguments: Any, **options: Any) -> Sandbox:
        one = Sandbox.create(*arguments, **{"timeout": 300, **options})
        made.append(one)
        return one

    yield create
    for one in made:
        with contextlib.suppress(Exception):
            one.kill()


@pytest.fixture
def directory(sandbox: Sandbox) -> Iterator[str]:
    """A fresh directory inside."""
    path = sandbox.commands.run("mktemp -d").stdout.strip()
    yield path
    sandbox.commands.run(f"rm -rf {path}", user="root")


@pytest.fixture
def connect_by_name(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve every name below `localhost` to this machine: not every C library does, and the test is about the edge."""
    real = socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        return real("127.0.0.1" if isinstance(name, str) and name.endswith(".localhost") else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
