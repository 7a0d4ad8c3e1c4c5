"""Templates whose start command is kept as it runs: sandboxes begin with it, and where they cannot they begin it anew and say so."""

from __future__ import annotations

import base64
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from e2b import Sandbox, Template, wait_for_port

from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, kill, look

COUNTER = """
import http.server, itertools, os, time, urllib.parse
born, served, slow = time.time_ns(), itertools.count(1), time.sleep(2)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = f"{born} {os.getpid()} {next(served)}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    def log_message(self, *_): ...
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
"""A server that takes its time to begin, and tells when that was and how often it was asked."""
ASK = "curl -fsS http://127.0.0.1:8000/"


@pytest.fixture
def name(client: Client) -> Iterator[str]:
    name = f"h-{uuid.uuid4().hex[:12]}"
    yield name
    client.http.delete(f"/templates/{name}")


def build(client: Client, name: str, tmp: Any, *, word: str = "one") -> list[str]:
    (tmp / "server.py").write_text(f"# {word}\n{COUNTER}")
    template = (
        Template(file_context_path=tmp)
        .from_template("base")
        .copy("server.py", "/srv/server.py")
        .set_start_cmd("python3 /srv/server.py", wait_for_port(8000))
    )
    log: list[str] = []
    Template.build(template, name, cpu_count=1, memory_mb=512, on_build_logs=lambda entry: log.append(entry.message), **client.options)
    return log


def asked(sandbox: Sandbox) -> tuple[int, int]:
    """When its server was begun, and how often it was asked."""
    born, _, count = sandbox.commands.run(ASK).stdout.split()
    return int(born), int(count)


def events(client: Client, sandbox_id: str) -> dict[str, dict[str, Any]]:
    answer = client.http.get(f"/v1/sandboxes/{sandbox_id}/events").json()
    return {one["type"]: one["data"] for one in answer["items"]}


def kept(instance: Instance) -> list[str]:
    place = instance.layout.sandboxes / ".snapshots"
    return sorted(path.name for path in place.iterdir()) if place.is_dir() else []


def test_new_sandboxes_go_on_from_the_running_start_command(instance: Instance, client: Client, name: str, tmp_path: Any) -> None:
    before = client.host()["used"]["diskMib"]
    log = build(client, name, tmp_path)
    assert any("kept as it runs" in line for line in log), log
    assert client.host()["used"]["diskMib"] > before, "it is counted in its host's disk"
    (moment,) = kept(instance)
    took, seen, words = [], [], []
    for _ in range(3):
        began = time.monotonic()
        sandbox = client.create(template=name)
        seen.append(asked(sandbox))
        took.append(time.monotonic() - began)
        said = events(client, sandbox.sandbox_id)["sandbox.accepted"]
        assert said["head_start"] == moment
        words.append(sandbox.commands.run("cat /proc/sys/kernel/random/uuid; echo $E2B_SANDBOX_ID; date +%s").stdout.split())
        assert words[-1][1] == sandbox.sandbox_id
        assert abs(int(words[-1][2]) - time.time()) < 5, "its clock is the present's"
        assert "reason" not in events(client, sandbox.sandbox_id)["sandbox.ready"]
        sandbox.kill()
    assert len({born for born, _ in seen}) == 1, "one server, begun once, by the build"
    assert [count for _, count in seen] == [1, 1, 1], "and nothing of one sandbox is in another"
    assert len({uuid for uuid, *_ in words}) == 3, "chance is each one's own"
    assert min(took) < 2, f"the server took two seconds to begin: {took}"
    # A new version has its own, and the one before goes with its build.
    build(client, name, tmp_path, word="two")
    until(lambda: len(kept(instance)) == 1 and kept(instance) != [moment], within_s=60, what=lambda: str(kept(instance)))
    until(lambda: client.http.delete(f"/templates/{name}").status_code == 204, within_s=60)
    until(lambda: not kept(instance), within_s=60, what=lambda: str(kept(instance)))
    until(lambda: client.host()["used"]["diskMib"] == before, within_s=60)


def test_what_does_not_fit_begins_it_anew_and_says_why(instance: Instance, client: Client, name: str, tmp_path: Any) -> None:
    build(client, name, tmp_path)
    (moment,) = kept(instance)
    built = asked(client.create(template=name))[0]
    # An environment of its own fits: as with E2B, commands that begin later have it, and the start command runs on with the build's.
    with_env = client.create(template=name, envs={"MINE": "1"})
    assert events(client, with_env.sandbox_id)["sandbox.accepted"]["head_start"] == moment
    assert asked(with_env)[0] == built
    assert with_env.commands.run("echo $MINE").stdout == "1\n"
    assert with_env.commands.run("tr '\\0' '\\n' </proc/$(pgrep -f server.py | head -1)/environ | grep -c MINE || true").stdout == "0\n"
    other = client.http.post("/v1/sandboxes", json={"template": name, "size": {"memoryMib": 768}})
    other.raise_for_status()
    assert "memory_mib is 768, and 512" in events(client, other.json()["id"])["sandbox.accepted"]["because"]
    # Its host has it no longer whole.
    memory = instance.layout.sandboxes / ".snapshots" / moment / "pages.img"
    with memory.open("r+b") as file:
        file.truncate(4096)
    spoilt = client.create(template=name)
    assert asked(spoilt)[0] > built
    said = events(client, spoilt.sandbox_id)["sandbox.ready"]
    assert said["reason"] == "SNAPSHOT_UNAVAILABLE", said
    assert "not as long as it was" in said["detail"]
    shutil.rmtree(instance.layout.sandboxes / ".snapshots" / moment)
    missing = client.create(template=name)
    assert asked(missing)[0] > built
    assert events(client, missing.sandbox_id)["sandbox.ready"]["reason"] == "SNAPSHOT_UNAVAILABLE"
    for one in client.living():
        client.kill(one)


@pytest.mark.parametrize("programs", [("control",), ("agent",), ("control", "agent")], ids="+".join)
def test_what_is_killed_while_it_is_kept(instance: Instance, client: Client, name: str, tmp_path: Any, programs: tuple[str, ...]) -> None:
    """The build ends well, with a head start or without, and what is left of the one that was cut off goes."""
    (tmp_path / "server.py").write_text("import time\nkeep = b'x' * 400_000_000\n" + COUNTER)
    asked_for = client.http.post("/v3/templates", json={"name": name, "memoryMB": 1024}).json()
    path = f"/templates/{asked_for['templateID']}/builds/{asked_for['buildID']}"
    code = base64.b64encode((tmp_path / "server.py").read_bytes()).decode()
    step = {"type": "RUN", "args": [f"echo {code} | base64 -d >/home/user/server.py"]}
    recipe = {"fromTemplate": "base", "steps": [step], "startCmd": "python3 /home/user/server.py", "readyCmd": ASK}
    assert client.http.post(f"/v2{path}", json=recipe).status_code == 202
    until(lambda: any(instance.layout.sandboxes.glob("*/saved.draft")) or kept(instance), within_s=90)
    kill(instance, *programs)
    instance.until_well()

    def over() -> bool:
        answer = client.http.get(f"{path}/status")
        return answer.status_code == 200 and answer.json()["status"] in ("ready", "error")

    until(over, within_s=150)
    assert client.http.get(f"{path}/status").json()["status"] == "ready"
    sandbox = client.create(template=name)
    assert asked(sandbox)[1] >= 1
    sandbox.kill()
    until(lambda: client.http.delete(f"/templates/{name}").status_code == 204, within_s=60)
    until(lambda: not kept(instance), within_s=60, what=lambda: str(kept(instance)))
    until(lambda: not look(instance).placements, within_s=60, what=lambda: str(look(instance).placements))
