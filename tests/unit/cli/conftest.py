"""The command line against the real API over a service in memory, and a small guest that runs commands on this machine."""

import asyncio
import base64
import io
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import uvicorn
from typer.testing import CliRunner, Result

from atoll.client import connect
from atoll.control.api.app import build_app
from atoll.control.api.settings import ApiSettings
from atoll.domain.tenancy import Role
from atoll.programs.main import app
from atoll.telemetry.log import configure
from atoll.testing.fake_operations import FakeOperations
from atoll.testing.fake_service import FakeService

RPC = "/process.Process/"


@dataclass
class Guest:
    """What `atoll-guest` would answer, as far as the command line asks it. Paths inside are below `root`."""

    root: Path
    running: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    lost_answers: int = 0
    """So many answers of control to a create are cut off after it did what was asked."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        self.tokens.append(headers.get("x-access-token", ""))
        path = scope["path"]
        if path == f"{RPC}Start":
            await self._start(await body(receive), headers, send)
        elif path.startswith(RPC):
            await self._unary(path.removeprefix(RPC), json.loads(await body(receive)), send)
        elif path == "/filesystem.Filesystem/Stat":
            await self._stat(json.loads(await body(receive))["path"], send)
        elif path == "/files":
            await self._files(scope, receive, send)
        else:
            await answer(send, 204 if path == "/health" else 404, b"")

    def inside(self, path: str) -> Path:
        return self.root / path.removeprefix("/")

    async def _start(self, data: bytes, headers: dict[str, str], send: Any) -> None:
        ((_, message),) = connect.Frames().feed(data)
        process, stdin = message["process"], message["stdin"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/connect+json")]})
        try:
            child = await asyncio.create_subprocess_exec(
                process["cmd"],
                *process.get("args", []),
                stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self.inside(process.get("cwd", "/")),
                env={"PATH": os.environ["PATH"], **process.get("envs", {})},
            )
        except OSError as error:
            await frame(send, {"error": {"code": "invalid_argument", "message": str(error)}}, last=True)
            return
        self.running[child.pid] = child
        await event(send, {"start": {"pid": child.pid}})
        await event(send, {"keepalive": {}})
        await asyncio.gather(*(pump(send, name, stream) for name, stream in (("stdout", child.stdout), ("stderr", child.stderr))))
        status = await child.wait()
        if status < 0:
            await event(send, {"end": {"exitCode": -1, "status": f"signal: {signal.Signals(-status).name.removeprefix('SIG').lower()}ed"}})
        else:
            await event(send, {"end": {"exitCode": status, "exited": True, "status": f"exit status {status}"}})
        await frame(send, {}, last=True)

    async def _unary(self, method: str, message: dict[str, Any], send: Any) -> None:
        child = self.running[message["process"]["pid"]]
        if method == "SendInput":
            assert child.stdin is not None
            child.stdin.write(base64.b64decode(message["input"]["stdin"]))
            await child.stdin.drain()
        elif method == "CloseStdin":
            assert child.stdin is not None
            child.stdin.close()
        elif method == "SendSignal":
            child.send_signal({"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL}[message["signal"]])
        await answer(send, 200, b"{}")

    async def _stat(self, path: str, send: Any) -> None:
        place = self.inside(path)
        if not place.exists():
            await answer(send, 404, b'{"code":"not_found","message":"no such file"}')
            return
        kind = "FILE_TYPE_DIRECTORY" if place.is_dir() else "FILE_TYPE_FILE"
        await answer(send, 200, json.dumps({"entry": {"name": place.name, "path": path, "type": kind}}).encode())

    async def _files(self, scope: Any, receive: Any, send: Any) -> None:
        place = self.inside(parse_qs(scope["query_string"].decode())["path"][0])
        if scope["method"] == "POST":
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(await body(receive))
            await answer(send, 200, b"[]")
        elif place.is_file():
            await answer(send, 200, place.read_bytes())
        else:
            await answer(send, 404, b'{"code":404,"message":"path does not exist"}')


async def unsent(_message: Any) -> None:
    """An answer that goes nowhere."""


async def body(receive: Any) -> bytes:
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body"):
            return data


async def answer(send: Any, status: int, content: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers if status != 204 else []})
    await send({"type": "http.response.body", "body": content})


async def frame(send: Any, message: dict[str, Any], *, last: bool = False) -> None:
    data = connect.encode(message)
    await send({"type": "http.response.body", "body": b"\x02" + data[1:] if last else data, "more_body": not last})


async def event(send: Any, message: dict[str, Any]) -> None:
    await frame(send, {"event": message})


async def pump(send: Any, name: str, stream: Any) -> None:
    while data := await stream.read(32768):
        await event(send, {"data": {name: base64.b64encode(data).decode()}})


@dataclass
class Atoll:
    """A running API, and the command line pointed at it."""

    service: FakeService
    guest: Guest
    url: str
    key: str
    operator_key: str
    loop: asyncio.AbstractEventLoop
    operations: FakeOperations

    def run(self, *arguments: str, key: str | None = None, **environment: str) -> Result:
        variables = {"ATOLL_API_URL": self.url, "ATOLL_API_KEY": key or self.key, "COLUMNS": "200", **environment}
        return CliRunner().invoke(app, list(arguments), env=variables)

    def json(self, *arguments: str, key: str | None = None) -> Any:
        done = self.run(*arguments, key=key)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def create(self, *arguments: str) -> str:
        return str(self.json("sandbox", "create", "--json", *arguments)["id"])


class Current:
    """The service of the running test: the application is built once, because making its OpenAPI document takes a while."""

    service: FakeService
    operations: FakeOperations

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


@cache
def application() -> tuple[Any, Current]:
    current: Any = Current()
    settings = ApiSettings(domain="localhost:3000", install_id="ins_" + "a" * 20, version="0.0.0")
    current.operations = FakeOperations(current)
    return build_app(current, operations=current.operations, settings=settings, ready=lambda: True, dice=os.urandom), current


@pytest.fixture
def unheard_logs() -> Iterator[None]:
    """The API's logs would come between the lines of the command line, which shares this process here."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    configure("test", "error", stream=io.StringIO())
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def atoll(tmp_path: Path, unheard_logs: None) -> Iterator[Atoll]:
    service = FakeService(time.time)
    _, key = service.add_team("default")
    _, operator_key = service.add_team("operators", role=Role.OPERATOR)
    (tmp_path / "guest").mkdir()
    guest = Guest(tmp_path / "guest")
    api, current = application()
    current.service = service
    current.operations.alerts_known.clear()
    current.operations.entries.clear()

    async def edge(scope: Any, receive: Any, send: Any) -> None:
        if any(name == b"e2b-sandbox-id" for name, _ in scope.get("headers", [])):
            await guest(scope, receive, send)
        elif guest.lost_answers and scope["type"] == "http" and scope["method"] == "POST":
            guest.lost_answers -= 1
            await api(scope, receive, unsent)
            # A head whose body never comes: the server closes the connection.
            await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"10")]})
        else:
            await api(scope, receive, send)

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(edge, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield Atoll(service, guest, f"http://127.0.0.1:{listener.getsockname()[1]}", key, operator_key, loop, current.operations)
    finally:
        server.should_exit = True
        thread.join(10)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        listener.close()
