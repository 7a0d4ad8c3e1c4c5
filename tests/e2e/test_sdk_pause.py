"""Unmodified E2B SDK: pause and connect, with memory and without, over many cycles."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import time

import httpx
import pytest
from e2b import Sandbox, SandboxException, SandboxNotFoundException, SandboxQuery, SandboxState

CYCLES = 20
COUNTER = "i=0; while true; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"


def count(sandbox: Sandbox) -> int:
    """What the counter wrote last; between its truncation and its write there is nothing."""
    while not (said := sandbox.files.read("/tmp/count")):
        time.sleep(0.01)
    return int(said)


def test_a_process_and_its_files_outlast_a_pause(make) -> None:
    sandbox = make(timeout=120, metadata={"case": "pause"}, envs={"GIVEN": "once"})
    content = os.urandom(300_000)
    sandbox.files.write("/home/user/kept.bin", content)
    handle = sandbox.commands.run(COUNTER, background=True)
    boot = sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout
    time.sleep(0.3)
    assert sandbox.pause()
    assert sandbox.pause() is False
    assert not sandbox.is_running()
    info = sandbox.get_info()
    assert (info.state, info.metadata) == (SandboxState.PAUSED, {"case": "pause"})
    query = SandboxQuery(state=[SandboxState.PAUSED], metadata={"case": "pause"})
    assert [one.sandbox_id for one in Sandbox.list(query=query).next_items()] == [sandbox.sandbox_id]
    back = Sandbox.connect(sandbox.sandbox_id, timeout=100)
    assert back.is_running()
    assert bytes(back.files.read("/home/user/kept.bin", format="bytes")) == content
    first = count(back)
    time.sleep(0.5)
    assert count(back) > first, "the process that counts goes on"
    assert handle.pid in [one.pid for one in back.commands.list()]
    assert back.commands.run("cat /proc/sys/kernel/random/boot_id").stdout == boot
    assert back.commands.run("echo $GIVEN").stdout == "once\n"
    assert abs(float(back.commands.run("date +%s.%N").stdout) - time.time()) < 2.0, "its clock is right"
    left = back.get_info().end_at.timestamp() - time.time()
    assert 80 < left < 105, "it lives from then on as connect says"
    assert back.kill()


def test_twenty_cycles_lose_nothing(make) -> None:
    sandbox = make(timeout=600)
    sandbox.commands.run(COUNTER, background=True)
    time.sleep(0.2)
    sums: dict[str, str] = {}
    last = 0
    for number in range(CYCLES):
        content = os.urandom(50_000)
        path = f"/home/user/{number}.bin"
        sandbox.files.write(path, content)
        sums[path] = hashlib.sha256(content).hexdigest()
        assert sandbox.pause()
        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
        said = sandbox.commands.run(f"sha256sum {' '.join(sums)}").stdout
        assert {line.split()[1]: line.split()[0] for line in said.splitlines()} == sums, f"cycle {number}"
        time.sleep(0.1)
        now = count(sandbox)
        assert now > last, f"cycle {number}"
        last = now


def test_files_alone_boot_anew(make) -> None:
    sandbox = make(timeout=120, envs={"GIVEN": "once"})
    sandbox.files.write("/home/user/kept.txt", "kept")
    sandbox.commands.run("sleep 1000", background=True)
    boot = sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout
    assert sandbox.pause(keep_memory=False)
    back = Sandbox.connect(sandbox.sandbox_id, timeout=100)
    assert back.files.read("/home/user/kept.txt") == "kept"
    assert back.commands.run("cat /proc/sys/kernel/random/boot_id").stdout != boot
    assert back.commands.list() == []
    assert back.commands.run("echo $GIVEN").stdout == "once\n"


def test_a_reboot_of_what_was_saved_whole(make) -> None:
    sandbox = make(timeout=120)
    sandbox.files.write("/home/user/kept.txt", "kept")
    sandbox.commands.run("sleep 1000", background=True)
    assert sandbox.pause()
    back = Sandbox.connect(sandbox.sandbox_id, timeout=100, on_resume="reboot")
    assert back.files.read("/home/user/kept.txt") == "kept"
    assert back.commands.list() == []


def test_at_its_timeout_it_is_paused(make) -> None:
    sandbox = make(timeout=3, lifecycle={"on_timeout": "pause"})
    sandbox.files.write("/home/user/kept.txt", "kept")
    deadline = time.monotonic() + 30
    while sandbox.get_info().state is not SandboxState.PAUSED:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    back = Sandbox.connect(sandbox.sandbox_id, timeout=60)
    assert back.files.read("/home/user/kept.txt") == "kept"
    assert back.get_info().state is SandboxState.RUNNING


def test_kill_of_a_paused_one(make) -> None:
    sandbox = make(timeout=120)
    assert sandbox.pause()
    assert sandbox.kill()
    assert sandbox.kill() is False
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()
    with pytest.raises(SandboxException):
        Sandbox.connect(sandbox.sandbox_id)


def test_a_stream_is_cut_by_a_pause_and_can_be_taken_up_again(make) -> None:
    sandbox = make(timeout=120)
    handle = sandbox.commands.run("for i in $(seq 1 400); do echo $i; sleep 0.05; done", background=True, timeout=0)
    time.sleep(0.3)
    assert sandbox.pause()
    back = Sandbox.connect(sandbox.sandbox_id, timeout=100)
    seen: list[str] = []
    again = back.commands.connect(handle.pid)
    for out, _, _ in again:
        if out:
            seen.append(out)
        if len(seen) > 3:
            break
    assert seen, "what it says after the pause is heard"
    assert back.commands.kill(handle.pid)


DRIPPING = """
import http.server, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\\r\\nbegun\\r\\n")
        time.sleep(60)
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""
"""It begins to answer, and then says nothing."""


def test_an_answer_that_a_pause_cuts_is_broken_off(make, product) -> None:
    sandbox = make(timeout=60)
    sandbox.files.write("/home/user/dripping.py", DRIPPING)
    sandbox.commands.run("python3 dripping.py", background=True)
    deadline = time.monotonic() + 10
    there = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))' 2>/dev/null && echo there || true"
    while sandbox.commands.run(there).stdout != "there\n":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with product.streamed(sandbox, "/", port=8000) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"begun"
        assert sandbox.pause()
        began = time.monotonic()
        with pytest.raises(httpx.TransportError):
            next(pieces)
        assert time.monotonic() - began < 5.0, "its client is not left to wait"
    assert Sandbox.connect(sandbox.sandbox_id, timeout=60).is_running()


def test_traffic_wakes_what_says_so(make, product) -> None:
    sandbox = make(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.files.write("/home/user/kept.txt", "kept")
    sandbox.commands.run("cd /home/user && python3 -m http.server 8000", background=True)
    deadline = time.monotonic() + 10
    while product.inside(sandbox, "GET", "/kept.txt", port=8000).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert sandbox.pause()
    assert sandbox.get_info().state is SandboxState.PAUSED
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda _: product.inside(sandbox, "GET", "/kept.txt", port=8000), range(64)))
    assert {(answer.status_code, answer.text) for answer in answers} == {(200, "kept")}
    info = sandbox.get_info()
    assert (info.state, info.lifecycle["auto_resume"]) == (SandboxState.RUNNING, True)
    assert 200 < info.end_at.timestamp() - time.time() < 310, "woken by traffic it lives for five minutes"
    events = product.call("GET", f"/v1/sandboxes/{sandbox.sandbox_id}/events").json()["items"]
    assert [one["type"] for one in events].count("sandbox.resuming") == 1
    assert sandbox.pause()
    assert sandbox.files.read("/home/user/kept.txt") == "kept", "and so does a call of the SDK"


def test_what_does_not_say_so_stays_paused(make, product) -> None:
    sandbox = make(timeout=60)
    assert sandbox.pause()
    assert product.inside(sandbox, "GET", "/health").status_code == 502
    assert sandbox.get_info().state is SandboxState.PAUSED
