"""The guest's contract on the wire, where the SDKs hide it: Connect in JSON, frames, error codes, ranges, metrics."""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from atoll.wire.guest import ENVD_VERSION


@pytest.fixture
def rpc(product, sandbox):
    """A unary call: the answer as it came."""

    def call(method: str, body: Any = None, *, user: str | None = None, **headers: str) -> httpx.Response:
        sent = {"Content-Type": "application/json", "Connect-Protocol-Version": "1", **headers}
        if user is not None:
            sent["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        return product.inside(sandbox, "POST", f"/{method}", headers=sent, content=json.dumps(body or {}).encode())

    return call


def _frame(message: Any, flag: int = 0) -> bytes:
    raw = json.dumps(message).encode()
    return struct.pack(">BI", flag, len(raw)) + raw


def _frames(chunks: Iterator[bytes]) -> Iterator[tuple[int, Any]]:
    buffer = b""
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= 5:
            flag, length = struct.unpack(">BI", buffer[:5])
            if len(buffer) < 5 + length:
                break
            yield flag, json.loads(buffer[5 : 5 + length])
            buffer = buffer[5 + length :]
    assert buffer == b"", "the stream ends within a frame"


@pytest.fixture
def stream(product, sandbox):
    """A server stream: its frames as (flag, message)."""

    def call(method: str, body: Any, *, user: str | None = None, **headers: str) -> Iterator[tuple[int, Any]]:
        sent = {
            "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", "E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983",
            "X-Access-Token": sandbox._envd_access_token or "", **headers,
        }  # fmt: skip
        if user is not None:
            sent["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        with httpx.stream("POST", f"{product.sandbox_url}/{method}", headers=sent, content=_frame(body), timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"] == "application/connect+json"
            yield from _frames(answer.iter_raw())

    return call


def _start(command: str, **more: Any) -> dict[str, Any]:
    return {"process": {"cmd": "/bin/sh", "args": ["-c", command], **more.pop("process", {})}, **more}


def test_a_process_from_start_to_end(stream) -> None:
    frames = list(stream("process.Process/Start", _start("printf out; printf err >&2; exit 5")))
    assert frames[-1] == (2, {})
    events = [message["event"] for flag, message in frames if flag == 0]
    assert isinstance(events[0]["start"]["pid"], int)
    out = b"".join(base64.b64decode(event["data"]["stdout"]) for event in events if "stdout" in event.get("data", {}))
    err = b"".join(base64.b64decode(event["data"]["stderr"]) for event in events if "stderr" in event.get("data", {}))
    assert (out, err) == (b"out", b"err")
    end = events[-1]["end"]
    assert (end["exitCode"], end["exited"], end["status"]) == (5, True, "exit status 5")


def test_failures_of_start_come_in_the_stream(stream) -> None:
    def failure(body: Any, **options: Any) -> dict[str, Any]:
        flag, message = list(stream("process.Process/Start", body, **options))[-1]
        assert flag == 2
        return message["error"]

    error = failure(_start("true", process={"cwd": "/nowhere"}))
    assert (error["code"], error["message"]) == ("invalid_argument", "cwd '/nowhere' does not exist")
    error = failure(_start("true"), user="ghost")
    assert (error["code"], error["message"]) == ("unauthenticated", "invalid username: 'ghost'")
    assert failure({"process": {"cmd": "/no/such/program", "args": []}})["code"]


def test_a_deadline_of_the_stream_kills_the_process(stream, sandbox) -> None:
    began = time.monotonic()
    frames = list(stream("process.Process/Start", _start("exec sleep 77.7"), **{"Connect-Timeout-Ms": "1000"}))
    assert frames[-1][1]["error"]["code"] == "deadline_exceeded"
    assert time.monotonic() - began < 5
    assert "sleep 77.7" not in sandbox.commands.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '").stdout


def test_silence_is_kept_alive(stream) -> None:
    frames = list(stream("process.Process/Start", _start("sleep 3.5"), **{"Keepalive-Ping-Interval": "1"}))
    assert sum("keepalive" in message.get("event", {}) for _, message in frames) >= 2


def test_unary_failures(rpc) -> None:
    for method, body in (
        ("process.Process/SendSignal", {"process": {"pid": 999999}, "signal": "SIGNAL_SIGKILL"}),
        ("process.Process/SendInput", {"process": {"pid": 999999}, "input": {"stdin": base64.b64encode(b"x").decode()}}),
        ("process.Process/Update", {"process": {"pid": 999999}, "pty": {"size": {"cols": 1, "rows": 1}}}),
        ("filesystem.Filesystem/Stat", {"path": "/nowhere"}),
        ("filesystem.Filesystem/ListDir", {"path": "/nowhere", "depth": 1}),
        ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": "none"}),
    ):
        answer = rpc(method, body)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), (method, answer.text)
    assert (
        rpc("process.Process/SendSignal", {"process": {"pid": 999999}, "signal": "SIGNAL_SIGKILL"}).json()["message"]
        == "process with pid 999999 not found"
    )
    answer = rpc("filesystem.Filesystem/MakeDir", {"path": "/tmp"})
    assert (answer.status_code, answer.json()["code"]) == (409, "already_exists")
    answer = rpc("filesystem.Filesystem/ListDir", {"path": "/etc/hostname"})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
    assert rpc("process.Process/Nothing").status_code in (404, 501)
    assert rpc("no.Such/Service").status_code == 404
    assert rpc("process.Process/List", user="ghost").status_code in (200, 401)


def test_json_forms(rpc) -> None:
    entry = rpc("filesystem.Filesystem/Stat", {"path": "/etc/passwd"}).json()["entry"]
    assert entry["type"] == "FILE_TYPE_FILE"
    assert isinstance(entry["size"], str)
    assert entry["size"].isdigit()
    assert entry["permissions"] == "-rw-r--r--"
    assert "T" in entry["modifiedTime"]
    # Unknown fields are ignored, as proto3 readers do.
    assert rpc("filesystem.Filesystem/Stat", {"path": "/etc/passwd", "futureField": 1}).status_code == 200


def test_tags(rpc, stream) -> None:
    frames = stream("process.Process/Start", _start("sleep 30", tag="by-tag"))
    assert "start" in next(frames)[1]["event"]
    assert "by-tag" in [one.get("tag") for one in rpc("process.Process/List").json()["processes"]]
    assert rpc("process.Process/SendSignal", {"process": {"tag": "by-tag"}, "signal": "SIGNAL_SIGTERM"}).status_code == 200
    rest = list(frames)
    assert rest[-2][1]["event"]["end"]["status"] == "signal: terminated"


def test_ranges(product, sandbox, directory) -> None:
    sandbox.files.write(f"{directory}/range", "0123456789")
    whole = product.inside(sandbox, "GET", f"/files?path={directory}/range")
    assert whole.status_code == 200
    part = product.inside(sandbox, "GET", f"/files?path={directory}/range", headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    beyond = product.inside(sandbox, "GET", f"/files?path={directory}/range", headers={"Range": "bytes=100-"})
    assert beyond.status_code == 416


def test_files_failures(product, sandbox, directory) -> None:
    missing = product.inside(sandbox, "GET", f"/files?path={directory}/none")
    assert (missing.status_code, missing.json()) == (404, {"code": 404, "message": f"path '{directory}/none' does not exist"})
    assert product.inside(sandbox, "GET", f"/files?path={directory}").status_code == 400
    assert product.inside(sandbox, "GET", f"/files?path={directory}/none&username=ghost").status_code == 401
    sandbox.files.write(f"{directory}/here", "x")
    refused = product.inside(sandbox, "GET", f"/files?path={directory}/here", headers={"Accept-Encoding": "identity;q=0, *;q=0"})
    assert refused.status_code == 406


def test_multipart_names_paths(product, sandbox, directory) -> None:
    parts = [("file", (f"{directory}/m1", b"one")), ("file", (f"{directory}/m2", b"two"))]
    answer = product.inside(sandbox, "POST", "/files", files=parts)
    assert answer.status_code == 200, answer.text
    assert [entry["path"] for entry in answer.json()] == [f"{directory}/m1", f"{directory}/m2"]
    assert sandbox.files.read(f"{directory}/m2") == "two"


def test_compose(product, sandbox, directory) -> None:
    for number in range(3):
        sandbox.files.write(f"{directory}/part{number}", f"<{number}>")
    answer = product.inside(
        sandbox,
        "POST",
        "/files/compose",
        json={"source_paths": [f"{directory}/part{n}" for n in range(3)], "destination": f"{directory}/whole"},
    )
    assert answer.status_code in (200, 204), answer.text
    assert sandbox.files.read(f"{directory}/whole") == "<0><1><2>"


def test_rest(product, sandbox) -> None:
    assert product.inside(sandbox, "GET", "/health", token=False).status_code == 204
    metrics = product.inside(sandbox, "GET", "/metrics").json()
    assert {"ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "disk_used", "disk_total"} <= set(metrics)
    assert metrics["mem_total"] > metrics["mem_used"] > 0
    assert metrics["disk_total"] > 0
    assert abs(metrics["ts"] - time.time()) < 60
    assert isinstance(product.inside(sandbox, "GET", "/envs").json(), dict)
    assert product.inside(sandbox, "GET", "/nothing").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/init", "/upgrade", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/atoll/hello", "/atoll/init", "/atoll/connect/80"],
)
def test_the_control_side_is_closed(product, sandbox, path) -> None:
    for method in ("GET", "POST"):
        assert product.inside(sandbox, method, path).status_code == 404
    # Nor by any spelling of it.
    for spelled in (path.upper(), f"/{path}", f"/.{path}", path.replace("/", "/%2e/", 1), path + "/"):
        raw = product.inside(sandbox, "POST", spelled)
        assert raw.status_code in (301, 307, 400, 404, 405), (spelled, raw.status_code)


def test_version(sandbox) -> None:
    assert str(sandbox._envd_version) == ENVD_VERSION
