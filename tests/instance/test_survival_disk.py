"""The state directory on a disk that is full to the last block, and programs killed on it: what is there can be ended, all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, kill, look, problems

SIZE_MIB = 4096
LAST_MIB = 32
"""What is written, and not only set aside."""


@pytest.fixture
def small(fresh: Callable[[], Instance]) -> Iterator[Instance]:
    """A running instance on a disk of its own."""
    one = fresh()
    # A new file each time: a loop device may outlive its mount in somebody's mount namespace.
    image = one.home.with_name(f"{one.home.name}.img")
    with image.open("wb") as file:
        file.truncate(SIZE_MIB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, one.home], check=True)
    one.home.chmod(0o755)
    try:
        one.run("up", "--no-demo")
        yield one
    finally:
        spare(one)
        one.run("down", check=False)
        subprocess.run(["umount", one.home], check=True)
        image.unlink()


def fill(one: Instance) -> None:
    """Take every block, the last ones in small pieces. Most are only set aside: thousands of MiB of zeros would be written for minutes."""
    with (one.home / "filler-most").open("wb") as filler:
        free = os.statvfs(one.home)
        os.posix_fallocate(filler.fileno(), 0, max(1, free.f_bavail * free.f_frsize - (LAST_MIB << 20)))
    for number, size_bytes in enumerate((1 << 20, 4096, 512)):
        with (one.home / f"filler-{number}").open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(size_bytes))
            except OSError:
                os.fsync(filler.fileno())
    assert os.statvfs(one.home).f_bavail == 0


def spare(one: Instance) -> None:
    for filler in one.home.glob("filler-*"):
        filler.unlink()


def content(sandbox: Sandbox) -> str:
    return str(sandbox.files.read("/home/user/kept"))


@pytest.mark.timeout(600)
def test_a_full_disk(small: Instance, clients: ExitStack) -> None:
    client = clients.enter_context(Client(small))
    boxes = [client.create(name) for name in ("default", "shared-kernel", "default", "shared-kernel")]
    for box in boxes:
        box.files.write("/home/user/kept", "kept")
    fill(small)

    refused = client.http.post("/v1/sandboxes", json={}, timeout=90)
    # Whichever of the three finds out first: control's store, the placement, or the host that was asked before it had said so.
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["code"] in {"STORE_FULL", "NO_CAPACITY", "HOST_DISK_FULL"}, refused.text
    assert [content(box) for box in boxes] == ["kept"] * 4

    # The programs come back on the full disk, and know everything.
    for names in (("control",), ("agent",), ("control", "agent", "edge")):
        before = {name: small.pid(name) for name in names}
        kill(small, *names)
        until(lambda: all(small.pid(name) not in (None, before[name]) for name in names), what=small.last_words)  # noqa: B023
        until(lambda: answers(client), what=small.last_words)
    # A create that was on record by the time of its refusal ends, too.
    until(lambda: set(client.living()) == {box.sandbox_id for box in boxes}, what=lambda: f"{refused.text} {client.living()}")
    assert [content(box) for box in boxes] == ["kept"] * 4

    # Deletes and ends work, and give space back.
    boxes[0].set_timeout(3)
    assert client.kill(boxes[1].sandbox_id) is True
    until(lambda: {client.state(box.sandbox_id) for box in boxes[:2]} == {"released"}, what=small.last_words)
    assert client.get(boxes[0].sandbox_id)["reason"] == "END_REACHED"
    assert not set(look(small).sandboxes.values()) & {box.sandbox_id for box in boxes[:2]}

    # The supervisor, too; and whoever runs `up` is told what is wrong.
    kill(small, "supervisor", "agent", "control")
    said = small.run("up", "--no-demo", check=False)
    assert said.returncode != 0
    assert "host.disk" in said.stderr
    assert content(boxes[2]) == "kept"
    boxes[2].set_timeout(3)
    until(lambda: client.state(boxes[2].sandbox_id) == "released", what=small.last_words)

    spare(small)
    small.until_well(90)
    assert content(boxes[3]) == "kept"
    assert client.create().commands.run("echo on").stdout == "on\n"
    for sandbox_id in client.living():
        client.kill(sandbox_id)
    until(lambda: not problems(small, client), what=lambda: str(problems(small, client)))


def answers(client: Client) -> bool:
    try:
        return client.http.get("/v1/sandboxes").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.timeout(600)
def test_sandboxes_that_fill_the_disk_end_all_the_same(small: Instance, clients: ExitStack) -> None:
    """Each block that becomes free is taken at once by a guest that goes on writing."""
    client = clients.enter_context(Client(small))
    greedy = [client.create(name) for name in ("default", "shared-kernel")]
    other = client.create()
    for number in range(2):
        with (small.home / f"filler-{number}").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, max(1, (os.statvfs(small.home).f_bavail * 4096 >> 21) - 100) << 20)
    write = "i=0; while true; do i=$((i+1)); dd if=/dev/zero of=/home/user/big$i bs=1M count=64 2>/dev/null || sleep 0.05; done"
    for box in greedy:
        box.commands.run(write, background=True, timeout=0)
    until(lambda: os.statvfs(small.home).f_bavail * 4096 < 1 << 20, within_s=90)
    kill(small, "control", "agent")
    until(lambda: answers(client), what=small.last_words)
    other.set_timeout(5)
    ended = time.monotonic()
    until(lambda: client.state(other.sandbox_id) == "released", what=small.last_words)
    assert time.monotonic() - ended < 15
    for box in greedy:
        assert client.kill(box.sandbox_id) is True
    until(lambda: not problems(small, client), what=lambda: str(problems(small, client)))
    spare(small)
    small.until_well(90)
    assert client.create().commands.run("echo on").stdout == "on\n"


def test_logs_that_cannot_be_written_stop_nobody(instance: Instance, client: Client, tmp_path: Path) -> None:
    """Every write of a log fails, the rest of the disk is fine."""
    log = instance.layout.log
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "atoll-test", log], check=True)
    try:
        (log / "filler").write_bytes(b"")
        with (log / "filler").open("ab", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
        kill(instance, "control", "agent", "edge")
        instance.until_well()
        sandbox = client.create()
        assert sandbox.commands.run("echo on").stdout == "on\n"
        kill(instance, "edge", number=signal.SIGTERM)
        instance.until_well()
        assert client.kill(sandbox.sandbox_id) is True
        until(lambda: client.state(sandbox.sandbox_id) == "released")
        assert all(path.stat().st_size == 0 for path in log.glob("*.log"))
    finally:
        kill(instance, "control", "agent", "edge")
        subprocess.run(["umount", "-l", log], check=True)
    instance.until_well()
