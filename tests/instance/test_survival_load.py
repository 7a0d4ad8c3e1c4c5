"""More than fits, at once, and clients that behave badly: clean refusals, nothing lost, nobody else hurt."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, problems

MANY = 200


def settled(instance: Instance, client: Client) -> None:
    until(lambda: not problems(instance, client), within_s=60, what=lambda: str(problems(instance, client)))


def end_all(instance: Instance, client: Client) -> None:
    for sandbox_id in client.living():
        client.kill(sandbox_id)
    until(lambda: not client.living(), within_s=90, what=lambda: str(client.living()))
    settled(instance, client)


@pytest.mark.timeout(600)
def test_many_more_creates_than_fit(instance: Instance, client: Client) -> None:
    """Those that fit are made; the others are refused in time by the same stable code, and hold nothing."""
    end_all(instance, client)
    room = client.host()["capacity"]["cpuMillis"] // 1000

    def ask(number: int) -> tuple[int, str]:
        with httpx.Client(base_url=client.url, headers={"X-API-KEY": client.options["api_key"]}, timeout=120) as http:
            # Half of them by E2B's route, half by our own, of both isolations.
            if number % 2:
                answer = http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600})
            else:
                answer = http.post("/v1/sandboxes", json={"class": ("default", "shared-kernel")[number // 2 % 2], "timeoutSeconds": 600})
            return answer.status_code, answer.text

    began = time.monotonic()
    with ThreadPoolExecutor(MANY) as pool:
        answers = list(pool.map(ask, range(MANY)))
    counts = Counter(status for status, _ in answers)
    refusals = [text for status, text in answers if status != 201]
    assert set(counts) <= {201, 503}, f"{counts}\n{refusals[:5]}"
    assert 1 <= counts[201] <= room
    assert all("INSUFFICIENT" in text or "CREATE_TIMEOUT" in text or "not ready in time" in text for text in refusals), refusals[:5]
    assert time.monotonic() - began < 120
    until(
        lambda: len(client.living()) == counts[201],
        within_s=90,
        what=lambda: f"{counts} {Counter(one['state'] for one in client.living().values())}",
    )
    settled(instance, client)
    end_all(instance, client)
    assert client.create().commands.run("echo on").stdout == "on\n"


@pytest.mark.parametrize("class_name", ["default", "shared-kernel"])
def test_one_of_many_kills_ends_it(instance: Instance, client: Client, class_name: str) -> None:
    sandbox = client.create(class_name)
    with ThreadPoolExecutor(10) as pool:
        said = list(pool.map(client.kill, [sandbox.sandbox_id] * 10))
    assert Counter(said) == {True: 1, False: 9}
    until(lambda: client.state(sandbox.sandbox_id) == "released")
    settled(instance, client)


@pytest.mark.parametrize("class_name", ["default", "shared-kernel"])
def test_a_kill_during_the_create(instance: Instance, client: Client, class_name: str) -> None:
    """At each moment of it: the create fails or has succeeded before, and nothing is left."""
    for pause_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.3):
        kill_during_create(client, class_name, pause_s)
    settled(instance, client)


def kill_during_create(client: Client, class_name: str, pause_s: float) -> None:
    known = set(client.living())

    def create() -> httpx.Response:
        body = {"class": class_name, "timeoutSeconds": 600}
        return httpx.post(f"{client.url}/v1/sandboxes", json=body, headers=client.http.headers, timeout=70)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(create)
        until(lambda: set(client.living()) - known)
        (made,) = set(client.living()) - known
        time.sleep(pause_s)
        client.http.delete(f"/v1/sandboxes/{made}").raise_for_status()
        assert answer.result().status_code in {201, 409, 503}, answer.result().text
    until(lambda: client.state(made) in {"released", "failed"})
    assert client.get(made)["reason"] == "RELEASE_REQUESTED"


def test_a_kill_ends_a_hundred_streams(instance: Instance, client: Client) -> None:
    sandbox = client.create()
    handle = sandbox.commands.run("while true; do echo x; sleep 0.2; done", background=True, timeout=0)
    ended: list[float] = []
    fed = Counter[int]()

    def follow(number: int) -> None:
        with contextlib.suppress(Exception):
            for _ in sandbox.commands.connect(handle.pid, timeout=0):
                fed[number] += 1
        ended.append(time.monotonic())

    readers = [threading.Thread(target=follow, args=(number,), daemon=True) for number in range(100)]
    for reader in readers:
        reader.start()
    until(lambda: len(fed) == 100, within_s=60)
    assert ended == []
    asked = time.monotonic()
    assert client.kill(sandbox.sandbox_id) is True
    for reader in readers:
        reader.join(max(0.0, asked + 10 - time.monotonic()))
    assert len(ended) == 100
    settled(instance, client)


class Stalled:
    """Connections that say something and then nothing, and read nothing."""

    def __init__(self, client: Client) -> None:
        self._address = ("127.0.0.1", int(client.url.rpartition(":")[2]))
        self._open: list[socket.socket] = []

    def say(self, text: str) -> None:
        connection = socket.create_connection(self._address, timeout=10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._open.append(connection)
        connection.sendall(text.encode())

    def close(self) -> None:
        for connection in self._open:
            connection.close()


def test_clients_that_stall_hold_up_nobody(instance: Instance, client: Client) -> None:
    sandbox = client.create()
    flood = sandbox.commands.run("yes 0123456789abcdef", background=True, timeout=0)
    key = client.options["api_key"]
    stalled = Stalled(client)
    try:
        for _ in range(100):
            stalled.say("POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\n")
            stalled.say(
                f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {key}\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{{"
            )
            stalled.say(request(sandbox, "/process.Process/Connect", {"process": {"pid": flood.pid}}))
        began = time.monotonic()
        other = client.create()
        assert other.commands.run("echo on").stdout == "on\n"
        assert sandbox.commands.run("echo on").stdout == "on\n"
        assert time.monotonic() - began < 20
        assert client.kill(sandbox.sandbox_id) is True
        until(lambda: client.state(sandbox.sandbox_id) == "released")
    finally:
        stalled.close()
    settled(instance, client)


def request(sandbox: Sandbox, path: str, message: dict[str, Any]) -> str:
    """A streaming Connect request whose answer nobody reads."""
    content = json.dumps(message)
    envelope = f"\0\0\0{chr(len(content) >> 8)}{chr(len(content) & 255)}{content}"
    headers = {
        "Host": "x",
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox._envd_access_token or "",
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
        "Content-Length": str(len(envelope)),
    }
    return f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + f"\r\n{envelope}"
