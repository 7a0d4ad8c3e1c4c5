"""What may end in the middle of a template's build, in each of its phases: it goes on, or says clearly why not, and leaves nothing.

`test_builds.py` has the commonest ones; here is the rest of the matrix: guest, puller, disk, and steps and start commands that never end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atoll.programs import identity
from tests.e2e import oci
from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, kill, look
from tests.instance.test_builds import ended, nothing_left, start, status, until_said


@pytest.fixture
def name() -> str:
    return f"b-{uuid.uuid4().hex[:12]}"


def builds_again(client: Client, name: str) -> None:
    done = ended(client, start(client, name, ["true"]))
    assert done["status"] == "ready", done


def kill_guests(instance: Instance) -> int:
    pids = [pid for pids in look(instance).guests.values() for pid in pids]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def test_a_guest_that_is_killed_ends_its_build_with_the_step(instance: Instance, client: Client, name: str) -> None:
    build = start(client, name, ["true", "echo begun; sleep 60"])
    until_said(client, build, "begun")
    assert kill_guests(instance)
    done = ended(client, build)
    assert done["status"] == "error", done
    assert done["reason"]["step"] == "2", done
    assert "ended while the command ran" in done["reason"]["message"], done
    nothing_left(instance)
    builds_again(client, name)


def test_a_guest_that_is_killed_before_it_is_ready_is_started_anew(instance: Instance, client: Client, name: str) -> None:
    words = "sleep 5; touch /home/user/up; sleep 600"
    build = start(client, name, ["true"], startCmd=words, readyCmd="test -e /home/user/up")
    until(lambda: any(entry.get("step") == "finalize" for entry in status(client, build)["logEntries"]), within_s=90)
    time.sleep(1)
    until(lambda: kill_guests(instance), within_s=60)
    done = ended(client, build)
    assert done["status"] == "ready", done
    nothing_left(instance)


class Slow(BaseHTTPRequestHandler):
    """A registry with one image, whose layer comes slowly."""

    protocol_version = "HTTP/1.1"
    layout: Path
    begun: threading.Event
    go_on: threading.Event

    def do_GET(self) -> None:
        if self.path == "/v2/":
            self._say(b"{}", "application/json")
            return
        pointer = json.loads((self.layout / "index.json").read_text())["manifests"][0]
        kind, wanted = self.path.split("/")[-2:]
        if kind == "manifests":
            self._say(oci.blob(self.layout, pointer["digest"]).read_bytes(), pointer["mediaType"])
            return
        content = oci.blob(self.layout, wanted).read_bytes()
        self._head(len(content), "application/octet-stream")
        self.wfile.write(content[:1000])
        if len(content) > 100_000:
            self.wfile.flush()
            self.begun.set()
            self.go_on.wait(60)
        with contextlib.suppress(OSError):
            self.wfile.write(content[1000:])

    do_HEAD = do_GET  # noqa: N815 - as the library calls it

    def _head(self, length: int, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _say(self, content: bytes, kind: str) -> None:
        self._head(len(content), kind)
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[str, type[Slow]]]:
    layer = oci.layer(oci.Entry("etc/large", os.urandom(500_000)))
    handler = type(
        "Handler", (Slow,), {"layout": oci.Image([layer]).write(tmp_path), "begun": threading.Event(), "go_on": threading.Event()}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}/team/app:one", handler
    handler.go_on.set()
    server.shutdown()
    server.server_close()


def pullers(instance: Instance) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"pull" in words and str(instance.layout.blobs).encode() in words:
                    found.append(int(process.name))
    return found


def from_image(client: Client, name: str, image: str) -> dict[str, Any]:
    asked = client.http.post("/v3/templates", json={"name": name}).json()
    path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    begun = client.http.post(f"/v2{path}", json={"fromImage": image, "steps": []})
    assert begun.status_code == 202, begun.text
    return {"path": f"{path}/status", **asked}


@pytest.mark.parametrize("program", ["atoll-io", "control", "agent"])
def test_a_pull_that_is_killed_is_told_or_taken_again(
    instance: Instance, client: Client, name: str, slow: tuple[str, type[Slow]], program: str
) -> None:
    image, handler = slow
    build = from_image(client, name, image)
    assert handler.begun.wait(60)
    if program == "atoll-io":
        (pid,) = pullers(instance)
        os.kill(pid, signal.SIGKILL)
    else:
        kill(instance, program)
    handler.go_on.set()
    instance.until_well()
    done = ended(client, build)
    if program == "atoll-io":
        assert done["status"] == "error", done
        assert done["reason"]["step"] == "base", done
        assert "broke off" in done["reason"]["message"], done
    else:
        assert done["status"] == "ready", done
    until(lambda: not pullers(instance), within_s=30)
    until(lambda: not list((instance.layout.blobs / "partial").iterdir()), within_s=10)
    nothing_left(instance)
    done = ended(client, from_image(client, name, image))
    assert done["status"] == "ready", done


@pytest.fixture
def small_store(instance: Instance) -> Iterator[Callable[[], None]]:
    """Control's store of images on a disk of its own of 24 MiB; called, it has the room that it had before."""
    place = instance.layout.blobs
    owner = place.parent.stat()
    place.mkdir(exist_ok=True, mode=0o750)
    # Control makes it when it first needs it: it is control's, also where this test is the first.
    os.chown(place, owner.st_uid, owner.st_gid)
    options = f"size=24m,mode=0750,uid={owner.st_uid},gid={owner.st_gid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    mounted = [place]

    def larger() -> None:
        subprocess.run(["mount", "-o", "remount,size=400m", place], check=True)

    try:
        yield larger
    finally:
        for one in mounted:
            subprocess.run(["umount", "--lazy", one], check=True)


def test_a_disk_that_gets_full_in_a_capture_is_named(
    instance: Instance, client: Client, name: str, small_store: Callable[[], None]
) -> None:
    build = start(client, name, ["echo small >/home/user/small", "head -c 60M /dev/urandom >/home/user/large"])
    done = ended(client, build)
    assert done["status"] == "error", done
    assert done["reason"]["step"] == "2", done
    assert "No space left" in done["reason"]["message"], done
    assert any("HOST_DISK_FULL" in line for line in done["logs"]), done
    nothing_left(instance)
    small_store()
    again = ended(client, start(client, name, ["echo small >/home/user/small", "head -c 60M /dev/urandom >/home/user/large"]))
    assert again["status"] == "ready", again
    assert any(line.startswith("CACHED [1/2]") for line in again["logs"]), again["logs"]
    # Nothing of it is to be counted on once this disk is gone.
    assert client.http.delete(f"/templates/{name}").status_code == 204


@pytest.mark.parametrize("program", ["control", "agent"])
def test_what_is_killed_while_the_start_command_is_awaited(instance: Instance, client: Client, name: str, program: str) -> None:
    build = start(client, name, ["true"], startCmd="sleep 8; touch /home/user/up; sleep 600", readyCmd="test -e /home/user/up")
    until(lambda: any(entry.get("step") == "finalize" for entry in status(client, build)["logEntries"]), within_s=90)
    until(lambda: look(instance).guests, within_s=60)
    kill(instance, program)
    instance.until_well()
    done = ended(client, build)
    assert done["status"] == "ready", done
    nothing_left(instance)


def test_a_start_command_that_is_not_ready_in_time_says_what_it_wrote_last(instance: Instance, client: Client, name: str) -> None:
    build = start(client, name, ["true"], startCmd="echo the last words; exit 4", readyCmd="test -e /nothing")
    done = ended(client, build)
    assert done["status"] == "error", done
    assert done["reason"]["step"] == "finalize", done
    assert "the last words" in json.dumps(done["reason"]), done
    nothing_left(instance)


def test_a_start_command_that_never_gets_ready_fails_its_sandbox(instance: Instance, client: Client, name: str) -> None:
    """It was ready in its build: there the machine was smaller. Nothing of the sandbox stays, and the template is as good as it was."""
    smaller = "test $(sed -n 's/^MemTotal: *//p' /proc/meminfo | cut -d' ' -f1) -lt 700000"
    done = ended(client, start(client, name, ["true"], startCmd="echo waiting for less memory; sleep infinity", readyCmd=smaller))
    assert done["status"] == "ready", done
    asked = client.http.post("/v1/sandboxes", json={"template": name, "size": {"memoryMib": 1024}, "wait": False}).raise_for_status().json()
    view: dict[str, Any] = {}

    def over() -> bool:
        view.update(client.http.get(f"/v1/sandboxes/{asked['id']}").json())
        return view["state"] in ("failed", "released", "ready")

    until(over, within_s=200, what=lambda: str(view))
    assert (view["state"], view["reason"]) == ("failed", "START_COMMAND_FAILED"), view
    assert "was not ready within 45 s" in view["detail"], view
    assert "waiting for less memory" in view["detail"], "what it has said last"
    nothing_left(instance)
    sandbox = client.create(template=name)
    sandbox.kill()


def test_what_steps_leave_in_tmp_is_there_for_the_next_and_not_in_sandboxes(instance: Instance, client: Client, name: str) -> None:
    done = ended(client, start(client, name, ["echo kept >/tmp/kept", "cp /tmp/kept /home/user/copied", "ls /tmp"]))
    assert done["status"] == "ready", done
    sandbox = client.create(template=name)
    try:
        assert sandbox.commands.run("cat /home/user/copied").stdout == "kept\n"
        assert sandbox.commands.run("ls -A /tmp").stdout == ""
    finally:
        sandbox.kill()
    assert identity.living(instance.layout.pid_file("control")) is not None
