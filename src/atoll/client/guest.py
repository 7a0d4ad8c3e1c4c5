"""What is inside a sandbox: commands, terminals and files, by the guest's envd contract through the edge. Synchronous.

*Errors* of every call: `failures.of_guest` and `of_stream`; SANDBOX_NOT_FOUND when the sandbox has gone.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Final, Self

import httpx

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.client import connect, failures

GUEST_PORT: Final = 49983
CONNECT_S: Final = 5.0
UNARY_S: Final = 60.0
KEEPALIVE_S: Final = 50
CHUNK_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Started:
    """The process runs."""

    pid: int


@dataclass(frozen=True, slots=True)
class Output:
    """Some of what it wrote: `stdout`, `stderr` or `pty`."""

    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """It ended, and all its output came before."""

    exit_code: int
    status: str
    error: str | None = None


Event = Started | Output | Ended


@dataclass(frozen=True, slots=True)
class Result:
    """A command that was run to its end."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    status: str
    pid: int


class Guest:
    """One sandbox's inside. Threads may share it."""

    def __init__(self, url: str, sandbox_id: str, access_token: str | None, *, transport: httpx.BaseTransport | None = None) -> None:
        self.sandbox_id = sandbox_id
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(GUEST_PORT), "User-Agent": "atoll-cli"}
        if access_token:
            headers["X-Access-Token"] = access_token
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(UNARY_S, connect=CONNECT_S),
            transport=transport,
            trust_env=not url.startswith(("http://127.0.0.1", "http://localhost")),
        )
        self._url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give back the connections; what runs inside goes on."""
        self._http.close()

    # commands
    @contextlib.contextmanager
    def start(
        self,
        command: list[str],
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        pty: tuple[int, int] | None = None,
        stdin: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[Iterator[Event]]:
        """Start a command and give its events. `pty` is (columns, rows). Leaving the context does not end the command.

        *Units*: seconds; `timeout_s` None lets it run for as long as the sandbox does.
        """
        process: dict[str, Any] = {"cmd": command[0], "args": command[1:]}
        if env:
            process["envs"] = dict(env)
        if cwd:
            process["cwd"] = cwd
        body: dict[str, Any] = {"process": process, "stdin": stdin}
        if pty is not None:
            body["pty"] = {"size": {"cols": pty[0], "rows": pty[1]}}
        headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", "Keepalive-Ping-Interval": str(KEEPALIVE_S)}
        headers |= _as_user(user)
        if timeout_s is not None:
            headers["Connect-Timeout-Ms"] = str(max(1, int(timeout_s * 1000)))
        # A stream is silent for as long as the command is; keep-alives come more often than this.
        timeout = httpx.Timeout(UNARY_S, connect=CONNECT_S, read=3.0 * KEEPALIVE_S)
        request = self._http.build_request("POST", "/process.Process/Start", headers=headers, content=connect.encode(body), timeout=timeout)
        answer = self._send(request)
        try:
            yield self._events(answer)
        finally:
            answer.close()

    def run(self, command: list[str], *, user: str | None = None, timeout_s: float | None = 60.0, **options: Any) -> Result:
        """Run a command to its end and keep what it wrote. A status other than 0 is a result, not an error."""
        kept: dict[str, list[bytes]] = {"stdout": [], "stderr": [], "pty": []}
        pid = 0
        with self.start(command, user=user, timeout_s=timeout_s, **options) as events:
            for event in events:
                match event:
                    case Started():
                        pid = event.pid
                    case Output():
                        kept[event.stream].append(event.data)
                    case Ended():
                        return Result(event.exit_code, b"".join(kept["stdout"]), b"".join(kept["stderr"]), event.status, pid)
        raise Unavailable(Code.OUTCOME_UNKNOWN, f"the stream of a command in {self.sandbox_id} ended before the command did")

    def _events(self, answer: httpx.Response) -> Iterator[Event]:
        frames = connect.Frames()
        try:
            for data in answer.iter_raw():
                for flags, message in frames.feed(data):
                    if flags & connect.END_STREAM:
                        if message.get("error"):
                            raise failures.of_stream(message["error"], sandbox_id=self.sandbox_id)
                        return
                    event = _event(message.get("event") or {})
                    if event is not None:
                        yield event
        except httpx.TransportError as error:
            raise self._cut(error) from error
        except connect.FramingError as error:
            raise Unavailable(Code.OUTCOME_UNKNOWN, f"the stream of {self.sandbox_id} is broken: {error}") from error
        raise self._cut(None)

    def _cut(self, error: Exception | None) -> AtollError:
        """Why a stream broke: the sandbox has gone, or only the way to it."""
        try:
            if self._http.get("/health", timeout=CONNECT_S).status_code == 502:
                return Refused(Code.SANDBOX_NOT_FOUND, f"sandbox {self.sandbox_id} ended while the command ran")
        except httpx.HTTPError:
            pass
        return Unavailable(Code.OUTCOME_UNKNOWN, f"the connection to sandbox {self.sandbox_id} broke: {error or 'it was closed'}")

    def send_input(self, pid: int, data: bytes, *, pty: bool = False) -> None:
        """Give the process bytes to read."""
        self._unary("SendInput", {"process": {"pid": pid}, "input": {"pty" if pty else "stdin": base64.b64encode(data).decode()}})

    def close_stdin(self, pid: int) -> None:
        """No more input will come."""
        self._unary("CloseStdin", {"process": {"pid": pid}})

    def resize(self, pid: int, *, columns: int, rows: int) -> None:
        """The terminal has another size."""
        self._unary("Update", {"process": {"pid": pid}, "pty": {"size": {"cols": columns, "rows": rows}}})

    def signal(self, pid: int, name: str) -> None:
        """`SIGNAL_SIGTERM` or `SIGNAL_SIGKILL`."""
        self._unary("SendSignal", {"process": {"pid": pid}, "signal": name})

    def processes(self) -> list[dict[str, Any]]:
        """What was started through this contract and still runs."""
        return list(self._unary("List", {}).get("processes") or [])

    # files
    def stat(self, path: str, *, user: str | None = None) -> dict[str, Any] | None:
        """The entry at `path`; None when there is none."""
        answer = self._rpc("/filesystem.Filesystem/Stat", {"path": path}, user=user)
        if answer.status_code == 404 and failures.connect_code(answer.content) == "not_found":
            return None
        self._raise_for(answer)
        return dict(answer.json().get("entry") or {})

    @contextlib.contextmanager
    def read(self, path: str, *, user: str | None = None) -> Iterator[tuple[int | None, Iterator[bytes]]]:
        """A file's size, when it is told, and its bytes."""
        parameters = {"path": path, **({"username": user} if user else {})}
        request = self._http.build_request("GET", "/files", params=parameters, headers={"Accept-Encoding": "identity"})
        answer = self._send(request)
        try:
            size = answer.headers.get("content-length")
            yield (int(size) if size and size.isdigit() else None), answer.iter_raw(CHUNK_BYTES)
        except httpx.TransportError as error:
            raise self._cut(error) from error
        finally:
            answer.close()

    def write(self, path: str, content: Iterable[bytes] | bytes | IO[bytes], *, user: str | None = None, size: int | None = None) -> None:
        """Write a file; parents are made. `size` is sent when it is known, so that a broken upload is noticed."""
        parameters = {"path": path, **({"username": user} if user else {})}
        headers = {"Content-Type": "application/octet-stream"}
        if size is not None:
            headers["Content-Length"] = str(size)
        request = self._http.build_request("POST", "/files", params=parameters, headers=headers, content=content)
        self._send(request).close()

    def _unary(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._rpc(f"/process.Process/{method}", body)
        self._raise_for(answer)
        value = answer.json()
        return value if isinstance(value, dict) else {}

    def _rpc(self, path: str, body: dict[str, Any], *, user: str | None = None) -> httpx.Response:
        headers = {"Connect-Protocol-Version": "1", **_as_user(user)}
        try:
            return self._http.post(path, json=body, headers=headers)
        except httpx.TransportError as error:
            raise failures.unreachable(self._url, error, sent=not isinstance(error, httpx.ConnectError)) from error

    def _send(self, request: httpx.Request) -> httpx.Response:
        """The open answer of a request that streams one way or the other."""
        try:
            answer = self._http.send(request, stream=True)
            if not answer.is_success:
                answer.read()
        except httpx.TransportError as error:
            raise failures.unreachable(self._url, error, sent=not isinstance(error, httpx.ConnectError)) from error
        self._raise_for(answer)
        return answer

    def _raise_for(self, answer: httpx.Response) -> None:
        if not answer.is_success:
            raise failures.of_guest(answer.status_code, answer.content, sandbox_id=self.sandbox_id)


def _as_user(user: str | None) -> dict[str, str]:
    if not user:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}


def _event(event: dict[str, Any]) -> Event | None:
    if "start" in event:
        return Started(int(event["start"].get("pid", 0)))
    if "data" in event:
        for stream in ("stdout", "stderr", "pty"):
            if stream in event["data"]:
                return Output(stream, base64.b64decode(event["data"][stream]))
        return None
    if "end" in event:
        end = event["end"]
        return Ended(int(end.get("exitCode", 0)), str(end.get("status", "")), end.get("error"))
    return None
