"""Everything that the plain `e2b` package does with one sandbox after another, against a running Atoll.

    python3 -m venv /tmp/e2b && /tmp/e2b/bin/pip install e2b==2.63.0
    eval "$(.venv/bin/atoll env)" && /tmp/e2b/bin/python examples/everything.py [WORD...]

Needs nothing else: no part of Atoll is imported. With words, only the steps whose names contain one of them; with -word, without those. One line
a step; the exit code is 1 when any failed.
"""

# ruff: noqa: BLE001, PT017, PT018, S108, S310, SLF001, T201 - a script that looks, asserts and prints

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import e2b
from e2b import AsyncSandbox, CommandExitException, Sandbox, SandboxQuery, SandboxState
from e2b.sandbox.commands.command_handle import PtySize

API = os.environ["E2B_API_URL"]
INSIDE = os.environ["E2B_SANDBOX_URL"]
KEY = os.environ["E2B_API_KEY"]

STEPS: list[tuple[str, Callable[[], None]]] = []


def step(act: Callable[[], None]) -> Callable[[], None]:
    """Register a step; its name is the function's."""
    STEPS.append((act.__name__, act))
    return act


@contextlib.contextmanager
def sandbox(**options: object) -> Iterator[Sandbox]:
    """A sandbox that is gone afterwards, whatever happened."""
    made = Sandbox.create(**{"timeout": 120, **options})
    try:
        yield made
    finally:
        made.kill()


@contextlib.contextmanager
def raises(*kinds: type[BaseException], text: str = "") -> Iterator[None]:
    """The block must raise one of these, with `text` in its message."""
    try:
        yield
    except kinds as failure:
        assert text in str(failure), f"{text!r} is not in {failure!s}"
    else:
        raise AssertionError(f"nothing was raised, expected {[kind.__name__ for kind in kinds]}")


def http(
    method: str, url: str, *, body: object = None, raw: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One plain request: status, headers in lower case, body."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as failure:
        return failure.code, {name.lower(): value for name, value in failure.headers.items()}, failure.read()


def api(method: str, path: str, *, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], object]:
    """A call of the E2B API without the SDK."""
    status, seen, content = http(method, API + path, body=body, headers={"X-API-KEY": KEY, **(headers or {})})
    return status, seen, json.loads(content) if content else None


def until(condition: Callable[[], object], *, within_s: float = 10.0) -> object:
    """The first true answer."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s} s")


# --- life ---------------------------------------------------------------------------------------------------------------------------------


@step
def create_with_everything() -> None:
    with sandbox(template="base", metadata={"who": "me & you=1", "ümlaut": "ß"}, envs={"GREETING": "hallo\nzwei"}) as made:
        assert made.commands.run('printf %s "$GREETING"').stdout == "hallo\nzwei"
        info = made.get_info()
        assert info.metadata == {"who": "me & you=1", "ümlaut": "ß"} and info.state == SandboxState.RUNNING
        assert info.name == "base" and info.cpu_count >= 1 and info.memory_mb == 512
        assert 100 < (info.end_at - datetime.now(UTC)).total_seconds() <= 120.5
        with sandbox(template=info.template_id) as by_id:
            assert by_id.get_info().template_id == info.template_id
        assert made.commands.run("printf %s $E2B_SANDBOX $E2B_SANDBOX_ID").stdout == "true" + made.sandbox_id
    with raises(e2b.SandboxException, text="404"):
        Sandbox.create("no-such-template")


@step
def create_by_both_routes() -> None:
    for path in ("/sandboxes", "/v2/sandboxes"):
        status, _, made = api("POST", path, body={"templateID": "base", "timeout": 60})
        assert status == 201 and made["sandboxID"].startswith("i"), made
        assert api("DELETE", "/sandboxes/" + made["sandboxID"])[0] == 204
        assert api("DELETE", "/sandboxes/" + made["sandboxID"])[0] == 404
    for wrong in (
        {"templateID": "base", "timeout": 0},
        {"templateID": "base", "timeout": 10**9},
        {"timeout": 5},
        {"templateID": 7},
        [],
        "x",
    ):
        status, _, answer = api("POST", "/v2/sandboxes", body=wrong)
        assert status in (400, 422) and {"code", "message"} <= set(answer), (wrong, status, answer)


@step
def create_once_for_each_idempotency_key() -> None:
    key = uuid.uuid4().hex
    made = Sandbox.create(timeout=60, idempotency_key=key)
    try:
        assert Sandbox.create(timeout=60, idempotency_key=key).sandbox_id == made.sandbox_id
        status, _, answer = api("POST", "/v2/sandboxes", body={"templateID": "base", "timeout": 61}, headers={"Idempotency-Key": key})
        assert status == 422 and answer["error_code"] == "idempotency_request_mismatch", answer
    finally:
        made.kill()
    status, _, answer = api("POST", "/v2/sandboxes", body={"templateID": "base"}, headers={"Idempotency-Key": "NOT allowed!"})
    assert status == 400, answer


@step
def list_in_pages_and_by_filters() -> None:
    run = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        ids = [stack.enter_context(sandbox(metadata={"run": run, "n": str(n)})).sandbox_id for n in range(3)]
        for order, expected in (("asc", ids), ("desc", ids[::-1])):
            pages, seen = Sandbox.list(SandboxQuery(metadata={"run": run}), limit=2, order=order), []
            while pages.has_next:
                seen += [item.sandbox_id for item in pages.next_items()]
            assert seen == expected, (order, seen, expected)
        one = Sandbox.list(SandboxQuery(metadata={"run": run, "n": "1"}, state=[SandboxState.RUNNING], template="base")).next_items()
        assert [item.sandbox_id for item in one] == [ids[1]]
        assert not Sandbox.list(SandboxQuery(metadata={"run": run}, state=[SandboxState.PAUSED])).next_items()
        assert not Sandbox.list(SandboxQuery(metadata={"run": run}, template="no-such")).next_items()
        late = Sandbox.list(SandboxQuery(metadata={"run": run}, started_after=one[0].started_at)).next_items()
        assert {item.sandbox_id for item in late} == set(ids[1:])
        status, headers, listed = api("GET", f"/v2/sandboxes?metadata=run%3D{run}&limit=1")
        assert status == 200 and len(listed) == 1 and headers["x-next-token"] and int(headers["x-total-running"]) >= 3, headers
        assert len(api("GET", f"/sandboxes?metadata=run%3D{run}")[2]) == 3
        for wrong in (
            "limit=0",
            "limit=x",
            "order=up",
            "state=dead",
            "nextToken=%%",
            "nextToken=abc",
            "startedAfter=soon",
            "template=base:x",
        ):
            assert api("GET", "/v2/sandboxes?" + wrong)[0] == 400, wrong


@step
def connect_never_shortens() -> None:
    with sandbox(timeout=300) as made:
        before = made.get_info().end_at
        assert Sandbox.connect(made.sandbox_id, timeout=10).commands.run("echo 1").stdout == "1\n"
        assert made.get_info().end_at == before
        made.connect(timeout=600)
        assert (made.get_info().end_at - before).total_seconds() > 290
        assert api("POST", f"/sandboxes/{made.sandbox_id}/connect", body={"timeout": 20})[0] == 200
        assert api("POST", f"/v2/sandboxes/{made.sandbox_id}/connect", body={})[0] == 200
        assert api("POST", f"/sandboxes/{made.sandbox_id}/refreshes", body={"duration": 900})[0] == 204
        assert (made.get_info().end_at - before).total_seconds() > 590
        made.set_timeout(30)
        assert (made.get_info().end_at - datetime.now(UTC)).total_seconds() <= 30.5
    for act in (lambda: Sandbox.connect(made.sandbox_id), made.get_info, lambda: made.set_timeout(9)):
        with raises(e2b.SandboxNotFoundException, text=made.sandbox_id):
            act()


@step
def kill_is_final_and_idempotent() -> None:
    made = Sandbox.create(timeout=60)
    assert made.is_running()
    assert made.kill() is True
    assert made.is_running() is False and made.kill() is False and Sandbox.kill("i" + "0" * 20) is False
    with raises(e2b.TimeoutException, text="sandbox"):
        made.commands.run("true")
    with raises(e2b.SandboxNotFoundException):
        made.get_info()


@step
def kill_cuts_a_running_stream_at_once() -> None:
    made = Sandbox.create(timeout=60)
    handle = made.commands.run("sleep 100", background=True)
    threading.Timer(0.3, made.kill).start()
    began = time.monotonic()
    with raises(e2b.TimeoutException, text="killed or reached its end"):
        handle.wait()
    assert time.monotonic() - began < 2, time.monotonic() - began


@step
def life_ends_within_a_second() -> None:
    made = Sandbox.create(timeout=3)
    end = made.get_info().end_at
    until(lambda: not made.is_running(), within_s=6)
    late_s = (datetime.now(UTC) - end).total_seconds()
    assert -0.2 < late_s < 1.0, late_s
    zero = Sandbox.create(timeout=60)
    zero.set_timeout(0)
    until(lambda: not zero.is_running(), within_s=1.5)


@step
def servers_are_reached_by_name_and_by_header() -> None:
    with sandbox() as made:
        made.files.write("/home/user/index.html", "from inside")
        made.commands.run("python3 -m http.server 8080", background=True)
        host = made.get_host(8080)
        assert host.startswith(f"8080-{made.sandbox_id}."), host
        by_name = {"Host": host}
        until(lambda: http("GET", INSIDE + "/index.html", headers=by_name)[2] == b"from inside")
        by_header = {"E2b-Sandbox-Id": made.sandbox_id, "E2b-Sandbox-Port": "8080"}
        assert http("GET", INSIDE + "/index.html", headers=by_header)[2] == b"from inside"
        status, _, answer = http("GET", INSIDE + "/", headers={**by_header, "E2b-Sandbox-Port": "8081"})
        assert status == 502 and json.loads(answer) == {
            "sandboxId": made.sandbox_id, "message": "The sandbox is running but port is not open", "port": 8081, "code": 502,
        }, answer  # fmt: skip
        assert b"<html" in http("GET", INSIDE + "/", headers={**by_header, "E2b-Sandbox-Port": "8081", "Accept": "text/html"})[2].lower()
        for path in ("/init", "/freeze", "/upgrade", "/fsfreeze"):
            assert http("POST", INSIDE + path, headers={**by_header, "E2b-Sandbox-Port": "49983"}, body={})[0] == 404, path
    status, _, answer = http("GET", INSIDE + "/", headers=by_header)
    assert status == 502 and json.loads(answer) == {"sandboxId": made.sandbox_id, "message": "The sandbox was not found", "code": 502}, (
        answer
    )
    assert http("GET", INSIDE + "/", headers={**by_header, "E2b-Sandbox-Port": "99999"})[0] == 400


# --- commands -----------------------------------------------------------------------------------------------------------------------------


@step
def commands_know_who_where_and_what() -> None:
    with sandbox(envs={"A": "1", "B": "2"}) as made:
        run = made.commands.run
        assert run("whoami; pwd; echo $HOME").stdout == "user\n/home/user\n/home/user\n"
        assert run("whoami; pwd", user="root").stdout == "root\n/root\n"
        assert run("sudo -n id -u").stdout == "0\n"
        assert run("pwd", cwd="/etc").stdout == "/etc\n"
        assert run("echo $A $B $C", envs={"B": "x", "C": "y"}).stdout == "1 x y\n"
        assert run("echo out; echo err >&2").stderr == "err\n"
        assert run("printf 'é😀\\n'").stdout == "é😀\n"
        with raises(CommandExitException, text="code 7"):
            run("exit 7")
        with raises(e2b.InvalidArgumentException, text="cwd '/no' does not exist"):
            run("true", cwd="/no")
        with raises(e2b.AuthenticationException, text="invalid username: 'nobody-here'"):
            run("true", user="nobody-here")


@step
def commands_in_the_background() -> None:
    with sandbox() as made:
        handle = made.commands.run("while read line; do echo got $line; done", background=True, stdin=True)
        assert [each.pid for each in made.commands.list()] == [handle.pid]
        made.commands.send_stdin(handle.pid, "one\n")
        made.commands.stream_input(handle.pid, iter(["two\n", b"three\n"]))
        made.commands.close_stdin(handle.pid)
        assert handle.wait().stdout == "got one\ngot two\ngot three\n"
        asleep = made.commands.run("sleep 1000", background=True)
        assert asleep.kill() is True and made.commands.kill(asleep.pid) is False
        with raises(CommandExitException, text="code -1"):
            asleep.wait()
        with raises(e2b.SandboxException, text="not found"):
            made.commands.send_stdin(424242, "x")


@step
def commands_with_several_listeners() -> None:
    with sandbox() as made:
        handle = made.commands.run("for i in $(seq 30); do echo $i; sleep 0.1; done; exit 3", background=True)
        heard: list[list[str]] = [[] for _ in range(3)]
        codes: list[int] = []

        def listen(into: list[str]) -> None:
            try:
                made.commands.connect(handle.pid).wait(on_stdout=into.append)
            except CommandExitException as failure:
                codes.append(failure.exit_code)

        listeners = [threading.Thread(target=listen, args=(into,)) for into in heard]
        for listener in listeners:
            listener.start()
        handle.disconnect()
        for listener in listeners:
            listener.join(20)
        assert codes == [3, 3, 3], codes
        assert all("".join(lines).endswith("29\n30\n") for lines in heard), heard
        with raises(CommandExitException, text="3"):
            made.commands.connect(handle.pid).wait()


@step
def commands_at_their_deadline() -> None:
    with sandbox() as made:
        began = time.monotonic()
        with raises(e2b.TimeoutException):
            made.commands.run("sleep 1234", timeout=1)
        assert time.monotonic() - began < 3
        assert made.commands.run("pgrep -f 'sleep 123[4]' || echo none").stdout == "none\n"
        assert made.commands.run("sleep 1; echo yes", timeout=0).stdout == "yes\n"
        # What nobody listens to must not block who writes it.
        loud = made.commands.run("head -c 50000000 /dev/zero; touch /tmp/done", background=True)
        loud.disconnect()
        until(lambda: made.files.exists("/tmp/done"), within_s=30)


@step
def commands_with_much_output() -> None:
    with sandbox() as made:
        out = made.commands.run("head -c 20000000 /dev/zero | tr '\\0' x; echo; seq 100000 >&2", timeout=120)
        assert len(out.stdout) == 20_000_001 and set(out.stdout) == {"x", "\n"}
        assert out.stderr == "".join(f"{n}\n" for n in range(1, 100_001))


def _read(terminal: e2b.CommandHandle, into: bytearray) -> None:
    # Ctrl-C's status is the shell's last one.
    with contextlib.suppress(CommandExitException):
        terminal.wait(on_pty=into.extend)


@step
def terminals() -> None:
    with sandbox() as made:
        heard = bytearray()
        handle = made.pty.create(PtySize(rows=24, cols=80), envs={"MARK": "here"}, cwd="/tmp")
        reader = threading.Thread(target=_read, args=(handle, heard))
        reader.start()
        made.pty.send_stdin(handle.pid, b"stty size; echo $MARK-$TERM-$LANG; pwd\n")
        until(lambda: b"24 80" in heard and b"here-xterm-256color-C.UTF-8" in heard and b"\n/tmp" in heard)
        made.pty.resize(handle.pid, PtySize(rows=50, cols=133))
        made.pty.send_stdin(handle.pid, b"stty size\n")
        until(lambda: b"50 133" in heard)
        made.pty.send_stdin(handle.pid, b"sleep 100\n")
        time.sleep(0.3)
        made.pty.send_stdin(handle.pid, b"\x03")
        made.pty.send_stdin(handle.pid, b"echo back$((1+1))\nexit\n")
        until(lambda: b"back2" in heard)
        reader.join(10)
        assert not reader.is_alive()
        other = made.pty.create(PtySize(rows=10, cols=10), timeout=0)
        assert made.pty.kill(other.pid) is True and made.pty.kill(other.pid) is False


# --- files --------------------------------------------------------------------------------------------------------------------------------


@step
def files_in_every_format() -> None:
    with sandbox() as made:
        files, blob = made.files, bytes(range(256)) * 5000
        written = files.write("a/b/c.txt", "text é")
        assert (written.path, written.name) == ("/home/user/a/b/c.txt", "c.txt")
        assert files.read("a/b/c.txt") == "text é"
        for octets, packed in ((True, True), (True, False), (False, False)):
            files.write("blob", blob, use_octet_stream=octets, gzip=packed)
            assert bytes(files.read("blob", format="bytes", gzip=packed)) == blob, (octets, packed)
        assert b"".join(files.read("blob", format="stream")) == blob
        files.write_files([{"path": f"many/{n}", "data": str(n)} for n in range(20)])
        assert [files.read(f"many/{n}") for n in range(20)] == [str(n) for n in range(20)]
        files.write("/root/secret", "x", user="root")
        assert files.get_info("/root/secret").owner == "root" and files.get_info("a/b").owner == "user"
        files.write("empty", "")
        assert files.read("empty") == "" and files.get_info("empty").size == 0
        files.write("tagged", "x", metadata={"author": "me"})
        assert files.get_info("tagged").metadata == {"author": "me"}
        with raises(e2b.FileNotFoundException, text="does not exist"):
            files.read("nowhere")
        with raises(e2b.InvalidArgumentException, e2b.SandboxException):
            files.read("/etc")


@step
def files_are_listed_moved_and_removed() -> None:
    with sandbox() as made:
        files = made.files
        assert files.make_dir("d/e/f") is True and files.make_dir("d/e/f") is False
        files.write("d/x", "1")
        made.commands.run("ln -s x d/link")
        listed = [(entry.name, str(entry.type.value)) for entry in files.list("d")]
        assert listed == [("e", "dir"), ("link", "symlink"), ("x", "file")], listed
        assert [entry.path for entry in files.list("d", depth=2)][:2] == ["/home/user/d/e", "/home/user/d/e/f"]
        assert files.get_info("d/link").symlink_target == "/home/user/d/x"
        info = files.get_info("d/x")
        assert (info.size, info.owner, info.permissions) == (1, "user", "-rw-r--r--"), info
        assert files.rename("d/x", "new/place").path == "/home/user/new/place"
        assert files.exists("new/place") and not files.exists("d/x")
        with raises(e2b.FileNotFoundException):
            files.rename("d/x", "y")
        with raises(e2b.FileNotFoundException):
            files.list("nowhere")
        files.remove("d")
        files.remove("d")
        assert not files.exists("d")
        with raises(e2b.InvalidArgumentException):
            files.list("d", depth=0)


@step
def files_are_watched() -> None:
    with sandbox() as made:
        made.files.make_dir("w")
        watch = made.files.watch_dir("w", recursive=True, include_entry=True)
        made.files.write("w/one", "1")
        made.files.write("w/sub/two", "2")
        time.sleep(0.5)
        made.files.write("w/sub/three", "3")
        time.sleep(0.5)
        events = watch.get_new_events()
        assert [each.type.value for each in events if each.name == "one"] == ["create", "chmod", "write"], events
        assert {"one", "sub", "sub/three"} <= {each.name for each in events}, events
        assert any(each.entry and each.entry.path == "/home/user/w/one" for each in events)
        watch.stop()
        with raises(e2b.FileNotFoundException, e2b.SandboxException):
            made.files.watch_dir("nowhere")


@step
def files_by_signed_urls() -> None:
    with sandbox() as made:
        up = made.upload_url("signed.txt", use_signature_expiration=60)
        boundary = "b" * 20
        form = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="signed.txt"\r\n\r\nby url\r\n--{boundary}--\r\n'
        status, _, answer = http("POST", up, raw=form.encode(), headers={"Content-Type": f"multipart/form-data; boundary={boundary}"})
        assert status == 200, answer
        assert made.files.read("signed.txt") == "by url"
        url = made.download_url("signed.txt")
        assert http("GET", url)[2] == b"by url"
        status, headers, part = http("GET", url, headers={"Range": "bytes=3-5"})
        assert (status, part, headers["content-range"]) == (206, b"url", "bytes 3-5/6")
        assert http("GET", url, headers={"Range": "bytes=90-"})[0] == 416
        made.files.write("long", "z" * 100_000)
        status, headers, packed = http("GET", made.download_url("long"), headers={"Accept-Encoding": "gzip"})
        assert headers.get("content-encoding") == "gzip" and gzip.decompress(packed) == b"z" * 100_000
        status, _, answer = http("GET", made.download_url("signed.txt", use_signature_expiration=-5))
        assert (status, json.loads(answer)) == (401, {"code": 401, "message": "signature is already expired"})
        assert http("GET", url.replace("signed.txt", "other"))[0] == 401
        assert http("GET", made.download_url("/etc/hostname", user="root"))[0] == 200
    assert http("GET", url)[0] in (401, 404, 502)


@step
def a_full_disk_is_said_and_survived() -> None:
    with sandbox() as made:
        with contextlib.suppress(CommandExitException):
            made.commands.run("head -c 3000000000 /dev/zero > /home/user/full", timeout=120)
        with raises(e2b.NotEnoughSpaceException):
            made.files.write("more", "x" * 1_000_000)
        made.files.remove("full")
        made.files.write("more", "x" * 1_000_000)
        assert made.commands.run("wc -c < more").stdout.strip() == "1000000"


# --- the guest's own doors ------------------------------------------------------------------------------------------------------------------


def _guest(made: Sandbox, **more: str) -> dict[str, str]:
    return {"E2b-Sandbox-Id": made.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": made._envd_access_token, **more}


@step
def the_guest_answers_its_own_routes() -> None:
    with sandbox(envs={"SEEN": "yes"}) as made:
        assert http("GET", INSIDE + "/health", headers=_guest(made))[0] == 204
        metrics = json.loads(http("GET", INSIDE + "/metrics", headers=_guest(made))[2])
        wanted = "ts cpu_count cpu_used_pct mem_total mem_used mem_cache mem_total_mib mem_used_mib disk_used disk_total"
        assert set(wanted.split()) <= set(metrics), metrics
        assert 400 <= metrics["mem_total_mib"] <= 512 and 1.8e9 < metrics["disk_total"] < 2.3e9, metrics
        assert json.loads(http("GET", INSIDE + "/envs", headers=_guest(made))[2])["SEEN"] == "yes"
        made.files.write_files([{"path": "p1", "data": "one "}, {"path": "p2", "data": "two"}])
        parts = {"source_paths": ["p1", "p2"], "destination": "whole"}
        assert http("POST", INSIDE + "/files/compose", body=parts, headers=_guest(made))[0] == 200
        assert made.files.read("whole") == "one two"
        assert http("GET", INSIDE + "/envs", headers=_guest(made, **{"X-Access-Token": "wrong"}))[0] == 401
        rpc = {"Connect-Protocol-Version": "1"}
        for name, body, expected in (
            ("process.Process/SendSignal", {"process": {"pid": 99999}, "signal": "SIGNAL_SIGTERM"}, "not_found"),
            ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGTERM"}, "not_found"),
            ("filesystem.Filesystem/Stat", {"path": "/none"}, "not_found"),
            ("filesystem.Filesystem/MakeDir", {"path": "/etc/hostname"}, "invalid_argument"),
        ):
            status, _, answer = http("POST", f"{INSIDE}/{name}", body=body, headers=_guest(made, **rpc))
            assert status >= 400 and json.loads(answer)["code"] == expected, (name, status, answer)
        asleep = made.commands.run("trap 'exit 9' TERM; while :; do sleep 0.05; done", background=True)
        time.sleep(0.3)
        body = {"process": {"pid": asleep.pid}, "signal": "SIGNAL_SIGTERM"}
        assert http("POST", f"{INSIDE}/process.Process/SendSignal", body=body, headers=_guest(made, **rpc))[0] == 200
        with raises(CommandExitException, text="9"):
            asleep.wait()


@step
def a_bad_key_is_refused() -> None:
    for wrong in ("e2b_" + "0" * 40, "", "nonsense"):
        assert api("GET", "/v2/sandboxes", headers={"X-API-KEY": wrong})[0] == 401
    with raises(e2b.AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)


# --- the same, asynchronously ---------------------------------------------------------------------------------------------------------------


async def _together() -> None:
    made = await asyncio.gather(*(AsyncSandbox.create(timeout=60, metadata={"n": str(n)}) for n in range(4)))
    try:
        said = await asyncio.gather(*(each.commands.run("echo $E2B_SANDBOX_ID") for each in made))
        assert [each.stdout.strip() for each in said] == [each.sandbox_id for each in made]
        first = made[0]
        events: list[str] = []
        await first.files.make_dir("w")
        watch = await first.files.watch_dir("w", on_event=lambda event: events.append(f"{event.type.value} {event.name}"))
        await first.files.write("w/x", "1")
        await first.files.rename("w/x", "w/y")
        await first.files.remove("w/y")
        await asyncio.sleep(0.5)
        assert events[:3] == ["create x", "chmod x", "write x"] and "remove y" in events, events
        await watch.stop()
        out: list[str] = []
        handle = await first.commands.run("cat", background=True, stdin=True, on_stdout=out.append)
        await first.commands.send_stdin(handle.pid, "typed\n")
        await first.commands.close_stdin(handle.pid)
        assert (await handle.wait()).stdout == "typed\n" and "".join(out) == "typed\n"
        heard = bytearray()
        terminal = await first.pty.create(PtySize(rows=24, cols=80), on_data=heard.extend)
        await first.pty.resize(terminal.pid, PtySize(rows=30, cols=90))
        await first.pty.send_stdin(terminal.pid, b"stty size; exit\n")
        with contextlib.suppress(CommandExitException):
            await terminal.wait()
        assert b"30 90" in heard, heard
        assert b"".join([part async for part in await first.files.read("/etc/hostname", format="stream")])
        again = await AsyncSandbox.connect(first.sandbox_id)
        assert await again.is_running() and (await again.get_info()).metadata == {"n": "0"}
        pages = AsyncSandbox.list(limit=2)
        listed = {item.sandbox_id for item in await pages.next_items()}
        assert len(listed) == 2
    finally:
        assert all(await asyncio.gather(*(each.kill() for each in made)))


@step
def asynchronously() -> None:
    asyncio.run(_together())


def main() -> int:
    """Run the steps that were asked for, say of each how it went."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    without = [word[1:] for word in sys.argv[1:] if word.startswith("-")]
    failed = 0
    for name, act in STEPS:
        if (words and not any(word in name for word in words)) or any(word in name for word in without):
            continue
        began = time.monotonic()
        try:
            act()
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok      {name} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{failed} failed" if failed else "everything works")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
