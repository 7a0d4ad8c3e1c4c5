"""The API on a loopback port, over a service in memory, for clients that want a socket."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from atoll.control.api.app import build_app
from atoll.control.api.settings import ApiSettings
from atoll.domain.tenancy import Role
from atoll.testing.fake_operations import FakeOperations
from atoll.testing.fake_service import FakeService

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Served:
    url: str
    service: FakeService
    key: str
    operator_key: str
    stranger_key: str
    opts: dict[str, Any]
    http: httpx.Client
    """One for all: making one reads the machine's certificates, which takes longer than our answer."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    service = FakeService(now=time.time)
    _, key = service.add_team("ours")
    _, operator_key = service.add_team("operators", role=Role.OPERATOR)
    _, stranger_key = service.add_team("strangers")
    settings = ApiSettings(domain="localhost:3000", install_id="ins_abcdefgh0123456789ab", version="0.1.0")
    app = build_app(service, operations=FakeOperations(service), settings=settings, ready=lambda: True, dice=os.urandom)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, loop="uvloop", http="httptools", lifespan="off", log_config=None, ws="none")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the API did not start"
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=30) as http:
        yield Served(url, service, key, operator_key, stranger_key, {"api_key": key, "api_url": url, "sandbox_url": url}, http)
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="session")
def contract() -> dict[str, Any]:
    """E2B's own description of its API. It is not part of the project: where it is absent, what needs it is skipped."""
    directory = Path(os.environ.get("ATOLL_CONTRACTS") or ROOT.parent / "shared" / "contracts")
    path = directory / "e2b" / "openapi.yml"
    if not path.is_file():
        pytest.skip(f"E2B's contract file is not at {path}; set ATOLL_CONTRACTS to the directory that holds e2b/openapi.yml")
    return yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
