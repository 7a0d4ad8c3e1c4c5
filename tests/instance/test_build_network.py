"""A network that is cut in the middle of a layer, disks that are full while an image or files come, and an agent that is killed between
two stages: each ends in a clear status, and nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.e2e import oci
from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, kill
from tests.instance.test_build_faults import Slow, from_image, name, small_store
from tests.instance.test_builds import ended, nothing_left

__all__ = ["name", "small_store"]


class Cut(Slow):
    """Goes away in the middle of its layer, so many times; then it goes on where it is asked to."""

    left: ClassVar[list[int]]
    piece: ClassVar[int] = 50_000
    asked: ClassVar[list[str]]

    def do_GET(self) -> None:
        wanted = self.path.rpartition("/")[2]
        path = oci.blob(self.layout, wanted) if wanted.startswith("sha256:") else None
        if path is None or "/blobs/" not in self.path or path.stat().st_size < 100_000:
            super().do_GET()
            return
        content = path.read_bytes()
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.asked.append(self.headers.get("Range") or "")
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.left[0] > 0:
            self.left[0] -= 1
            self.wfile.write(content[begin : begin + self.piece])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(content[begin:])

    do_HEAD = do_GET  # noqa: N815 - as the library calls it


Made = Callable[[int], tuple[str, type[Cut]]]


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[Made]:
    """A registry whose layer breaks off so many times: its image, and the handler."""
    servers = []

    def make(times: int) -> tuple[str, type[Cut]]:
        layout = oci.Image([oci.layer(oci.Entry("etc/large", os.urandom(500_000)))]).write(tmp_path)
        more = {"layout": layout, "begun": threading.Event(), "go_on": threading.Event(), "left": [times], "asked": []}
        handler = type("Handler", (Cut,), more)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_port}/team/app:one", handler

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_layer_that_breaks_off_is_gone_on_with(instance: Instance, client: Client, name: str, cut: Made) -> None:
    image, handler = cut(2)
    done = ended(client, from_image(client, name, image))
    assert done["status"] == "ready", done
    assert any(asked not in {"", "bytes=0-"} for asked in handler.asked), f"it was asked for from its beginning each time: {handler.asked}"
    sandbox = client.create(template=name)
    assert sandbox.files.get_info("/etc/large").size == 500_000
    sandbox.kill()
    nothing_left(instance)


def test_a_registry_that_always_breaks_off_ends_the_build(instance: Instance, client: Client, name: str, cut: Made) -> None:
    image, handler = cut(10_000)
    handler.piece = 0
    done = ended(client, from_image(client, name, image))
    assert done["status"] == "error", done
    assert done["reason"]["step"] == "base", done
    assert client.http.post("/sandboxes", json={"templateID": name}).status_code == 404
    nothing_left(instance)


def test_a_disk_that_gets_full_in_a_pull_is_named(
    instance: Instance, client: Client, name: str, tmp_path: Path, small_store: Callable[[], None]
) -> None:
    layout = oci.Image([oci.layer(oci.Entry("etc/large", os.urandom(60 << 20)))]).write(tmp_path)
    handler = type("Handler", (Slow,), {"layout": layout, "begun": threading.Event(), "go_on": threading.Event()})
    handler.go_on.set()  # type: ignore[attr-defined]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        image = f"127.0.0.1:{server.server_port}/team/app:one"
        done = ended(client, from_image(client, name, image))
        assert done["status"] == "error", done
        assert done["reason"]["step"] == "base", done
        assert any("HOST_DISK_FULL" in line for line in done["logs"]), done
        nothing_left(instance)
        small_store()
        assert ended(client, from_image(client, name, image))["status"] == "ready"
    finally:
        server.shutdown()
        server.server_close()
        client.http.delete(f"/templates/{name}")


def test_files_that_do_not_fit_are_refused_and_leave_nothing(
    instance: Instance, name: str, tmp_path: Path, small_store: Callable[[], None]
) -> None:
    (tmp_path / "large").write_bytes(os.urandom(60 << 20))
    (tmp_path / "Dockerfile").write_text("FROM template:base\nCOPY large /srv/large\n")
    done = instance.run("template", "build", name, str(tmp_path), check=False)
    assert done.returncode != 0
    assert "there is room for 0 bytes" in done.stderr, done.stderr
    assert not [path for path in (instance.layout.blobs / "uploads").rglob("*") if path.is_file()]
    nothing_left(instance)


@pytest.mark.parametrize("programs", [("agent",), ("edge",), ("control", "agent")], ids="+".join)
def test_what_is_killed_between_two_stages(instance: Instance, tmp_path: Path, name: str, programs: tuple[str, ...]) -> None:
    text = f"FROM template:base AS a\nRUN head -c 300M /dev/urandom >/large; echo {name}\nFROM template:base\nCOPY --from=a /large /large\nRUN true\n"
    (tmp_path / "Dockerfile").write_text(text)
    uploads = instance.layout.blobs / "uploads"
    building = threading.Thread(target=lambda: instance.run("template", "build", name, str(tmp_path), check=False))
    building.start()

    def passing() -> list[Path]:
        return [path for path in uploads.rglob(".passing-*") if path.stat().st_size > 1 << 20]

    def coming() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(passing())
        return False

    until(coming, within_s=90, what=instance.last_words)
    kill(instance, *programs)
    instance.until_well()
    building.join(150)
    # Whoever was cut off says so, or has gone on; the next build finds what was done.
    done = instance.run("template", "build", name, str(tmp_path))
    assert "CACHED" in done.stderr
    assert not list(uploads.rglob(".passing-*"))
    nothing_left(instance)
    instance.run("template", "delete", name)
