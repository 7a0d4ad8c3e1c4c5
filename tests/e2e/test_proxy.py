"""The way to a sandbox's ports: by header, by host name, and what is said when there is none."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest
from e2b import Sandbox

NOBODY = "i" + "0" * 20

SERVER = """
import base64, hashlib, http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket"); self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
            self.end_headers(); self.wfile.flush()
            while True:
                data = self.rfile.read1(65536)
                if not data: return
                self.wfile.write(data); self.wfile.flush()
        body = ("%s %s host=%s" % (self.command, self.path, self.headers["Host"])).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.send_header("X-Inside", "yes"); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while True:
                size = int(self.rfile.readline(), 16)
                body += self.rfile.read(size); self.rfile.readline()
                if not size: break
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(201); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def served(sandbox: Sandbox) -> Sandbox:
    """A server on every address of port 8000, one on loopback only of port 8001."""
    sandbox.files.write("/tmp/server.py", SERVER)
    for address, port in (("0.0.0.0", 8000), ("127.0.0.1", 8001)):
        sandbox.commands.run(f"python3 /tmp/server.py {address} {port}", background=True, timeout=0).disconnect()
        deadline = time.monotonic() + 20
        while sandbox.commands.run(f"curl -s -o /dev/null -w %{{http_code}} http://127.0.0.1:{port}/ || true").stdout != "200":
            assert time.monotonic() < deadline
            time.sleep(0.2)
    return sandbox


def test_by_header(product, served) -> None:
    for port in (8000, 8001):
        answer = product.inside(served, "GET", "/path?q=1", port=port)
        assert answer.status_code == 200
        assert answer.text.startswith("GET /path?q=1 ")
        assert answer.headers["x-inside"] == "yes"
    assert product.inside(served, "POST", "/", port=8000, content=b"x" * 100_000).content == b"x" * 100_000

    def chunks():
        for _ in range(10):
            yield b"y" * 1000

    assert product.inside(served, "POST", "/", port=8000, content=chunks()).content == b"y" * 10_000


@pytest.mark.usefixtures("connect_by_name")
def test_by_host_name(product, served) -> None:
    assert served.get_host(8000) == f"8000-{served.sandbox_id}.{product.domain}"
    answer = httpx.get(f"http://{served.get_host(8000)}/by-name", timeout=20)
    assert answer.text.startswith("GET /by-name ")
    assert httpx.get(f"http://{served.get_host(8001)}/", timeout=20).status_code == 200
    envd = httpx.get(f"http://{served.get_host(49983)}/health", timeout=20)
    assert envd.status_code == 204


def test_by_a_name_in_the_host_header(product, served) -> None:
    answer = httpx.get(f"{product.sandbox_url}/x", headers={"Host": served.get_host(8000)}, timeout=20)
    assert answer.text.startswith("GET /x ")


def _upgrade(product, served, host: str | None = None) -> socket.socket:
    connection = socket.create_connection(product.address, timeout=20)
    where = f"Host: {host}\r\n" if host else f"Host: edge\r\nE2b-Sandbox-Id: {served.sandbox_id}\r\nE2b-Sandbox-Port: 8000\r\n"
    connection.sendall(
        f"GET /ws HTTP/1.1\r\n{where}Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(4096)
    assert b" 101 " in head.split(b"\r\n")[0] + b" ", head
    assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head
    return connection


def test_websockets(product, served) -> None:
    for host in (None, served.get_host(8000)):
        with _upgrade(product, served, host) as connection:
            for size in (1, 1000, 60_000):
                connection.sendall(b"w" * size)
                got = b""
                while len(got) < size:
                    got += connection.recv(65536)
                assert got == b"w" * size


def test_unknown_sandbox(product, served) -> None:
    answer = httpx.get(f"{product.sandbox_url}/health", headers={"E2b-Sandbox-Id": NOBODY, "E2b-Sandbox-Port": "49983"}, timeout=20)
    assert (answer.status_code, answer.json()) == (502, {"sandboxId": NOBODY, "message": "The sandbox was not found", "code": 502})
    named = httpx.get(f"{product.sandbox_url}/", headers={"Host": f"8000-{NOBODY}.{product.domain}"}, timeout=20)
    assert (named.status_code, named.json()) == (502, {"sandboxId": NOBODY, "message": "The sandbox was not found", "code": 502})


def test_closed_port(product, served) -> None:
    answer = product.inside(served, "GET", "/", port=8999)
    assert (answer.status_code, answer.json()) == (
        502,
        {"sandboxId": served.sandbox_id, "message": "The sandbox is running but port is not open", "port": 8999, "code": 502},
    )


def test_browsers_get_a_page(product, served) -> None:
    answer = product.inside(served, "GET", "/", port=8999, headers={"Accept": "text/html,application/xhtml+xml"})
    assert answer.status_code == 502
    assert answer.headers["content-type"].startswith("text/html")
    assert "<html" in answer.text.lower()


@pytest.mark.parametrize(
    ("sandbox_id", "port"), [("UPPER", "80"), ("../x", "80"), ("", "80"), (NOBODY, "0"), (NOBODY, "65536"), (NOBODY, "x"), (NOBODY, "-1")]
)
def test_headers_that_cannot_be(product, sandbox_id, port) -> None:
    answer = httpx.get(f"{product.sandbox_url}/", headers={"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": port}, timeout=20)
    assert (answer.status_code, answer.json()["code"]) == (400, 400)


def test_private_traffic(make, product) -> None:
    sandbox = make(network={"allow_public_traffic": False})
    sandbox.files.write("/tmp/server.py", SERVER)
    sandbox.commands.run("python3 /tmp/server.py 0.0.0.0 8000", background=True, timeout=0).disconnect()
    token = sandbox.traffic_access_token
    assert token
    deadline = time.monotonic() + 20
    while product.inside(sandbox, "GET", "/", port=8000, headers={"E2b-Traffic-Access-Token": token}).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert product.inside(sandbox, "GET", "/", port=8000).status_code == 403
    assert product.inside(sandbox, "GET", "/", port=8000, headers={"E2b-Traffic-Access-Token": "wrong"}).status_code == 403
    # The guest has a token of its own.
    assert sandbox.commands.run("echo fine").stdout == "fine\n"


def test_connections_end_with_the_sandbox(make, product) -> None:
    sandbox = make()
    sandbox.files.write("/tmp/server.py", SERVER)
    sandbox.commands.run("python3 /tmp/server.py 0.0.0.0 8000", background=True, timeout=0).disconnect()
    deadline = time.monotonic() + 20
    while product.inside(sandbox, "GET", "/", port=8000).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    with _upgrade(product, sandbox) as connection:
        connection.sendall(b"ping")
        assert connection.recv(100) == b"ping"
        ended = threading.Event()

        def read() -> None:
            try:
                while connection.recv(100):
                    pass
            except OSError:
                pass
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        assert sandbox.kill()
        answer = product.inside(sandbox, "GET", "/", port=8000)
        assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")
        assert ended.wait(3), "the connection outlives its sandbox"


def test_a_new_sandbox_is_reachable_at_once(product) -> None:
    for _ in range(5):
        made = product.call("POST", "/v2/sandboxes", json={"templateID": "base", "timeout": 60})
        sandbox_id = made.json()["sandboxID"]
        assert "atoll-changed" not in made.headers
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983"}
        assert httpx.get(f"{product.sandbox_url}/health", headers=headers, timeout=20).status_code == 204
        assert product.call("DELETE", f"/sandboxes/{sandbox_id}").status_code == 204
        gone = httpx.get(f"{product.sandbox_url}/health", headers=headers, timeout=20)
        assert (gone.status_code, json.loads(gone.content)["message"]) == (502, "The sandbox was not found")


def test_internal_routes_are_not_for_clients(product) -> None:
    for path in ("/internal/edge/v1/routes/stream", "/internal/agent/v1/poll", "/internal/edge/v1/locate"):
        for method in ("GET", "POST"):
            assert product.call(method, path).status_code in (401, 403, 404, 405)
