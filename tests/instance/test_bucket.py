"""A whole instance whose artifacts are in a bucket: builds with files, captured layers, restarts without its own folder, collection."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import oci
from tests.e2e.oci import Entry, Image
from tests.instance.conftest import Instance, until
from tests.instance.survival import carrying, kill
from tests.objects.server import S3Server


@pytest.fixture
def kept(fresh: Callable[[], Instance], tmp_path: Path) -> Iterator[tuple[Instance, S3Server]]:
    """An instance that was moved to a bucket after its first start."""
    server = S3Server(tmp_path / "s3")
    server.path.mkdir()
    server.start()
    instance = fresh()
    try:
        instance.run("up", "--no-demo")
        owner = instance.layout.secrets.stat()
        server.keep_credentials(instance.layout.secrets / "bucket.json", owner=(owner.st_uid, owner.st_gid))
        instance.layout.control_config.write_text(server.toml("secrets/bucket.json"))
        restart(instance, "control", "agent")
        yield instance, server
    finally:
        instance.run("down", check=False)
        server.stop()


def restart(instance: Instance, *names: str) -> None:
    before = {name: instance.pid(name) for name in names}
    kill(instance, *names)
    until(lambda: all(instance.pid(name) not in (None, before[name]) for name in names), within_s=60)
    instance.until_well()


def said(instance: Instance, name: str, *command: str) -> str:
    sandbox = instance.create("--template", name)
    try:
        return instance.exec(sandbox, *command).strip()
    finally:
        instance.run("sandbox", "rm", sandbox)


def test_builds_stand_on_what_is_in_the_bucket(kept: tuple[Instance, S3Server], tmp_path: Path) -> None:
    instance, server = kept
    name, context = f"b-{uuid.uuid4().hex[:12]}", tmp_path / "context"
    context.mkdir()
    (context / "note").write_text("from the client")
    (context / "Dockerfile").write_text("FROM e2bdev/base\nRUN echo one >/home/user/one\nCOPY note /home/user/note\n")
    instance.run("template", "build", name, str(context))
    files = server.files / "deployment"
    assert list((files / "blobs" / "sha256").iterdir())
    assert len(list((files / "uploads").rglob("files/*"))) == 1
    assert said(instance, name, "cat", "/home/user/one", "/home/user/note").split() == ["one", "from", "the", "client"]
    assert (files / "manifests" / "sha256").exists()

    # Another replica, or this one on another disk: nothing is left of the folder, and the next build uses what there is in the bucket.
    for directory in ("blobs", "uploads"):
        shutil.rmtree(instance.layout.blobs / directory)
    shutil.rmtree(instance.layout.images, ignore_errors=True)
    shutil.rmtree(instance.layout.fetched, ignore_errors=True)
    restart(instance, "control", "agent")
    assert said(instance, name, "cat", "/home/user/one") == "one", "fetched and unpacked anew"
    (context / "Dockerfile").write_text(
        "FROM e2bdev/base\nRUN echo one >/home/user/one\nCOPY note /home/user/note\nRUN echo two >>/home/user/one\n"
    )
    again = instance.run("template", "build", name, str(context))
    told = again.stdout + again.stderr
    for step, cached in (("RUN echo one", True), ("COPY note", True), ("RUN echo two", False)):
        (line,) = [line for line in told.splitlines() if step in line and "]" in line]
        assert line.startswith("CACHED") is cached, told
    assert said(instance, name, "cat", "/home/user/one").split() == ["one", "two"]


@pytest.mark.skipif(oci.BUSYBOX is None, reason="busybox is missing: apt-get install busybox-static")
def test_an_agent_that_is_killed_while_it_fetches_goes_on(kept: tuple[Instance, S3Server], tmp_path: Path) -> None:
    """Killed alone, while its fetching program goes on, and both: the image is whole afterwards; pruned, it is fetched anew."""
    instance, _ = kept
    partial = instance.layout.fetched / "partial"

    def begun() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_size > 1 << 20 for path in partial.glob("fetch-*"))
        return False

    for with_program in (False, True):
        content, name = os.urandom(64 << 20), f"k-{uuid.uuid4().hex[:12]}"
        image = Image([oci.busybox(), oci.layer(Entry("big", content))], {"Env": ["PATH=/bin"]})
        instance.run("template", "import", name, f"oci-layout:{image.write(tmp_path / name)}")
        with ThreadPoolExecutor(1) as threads:
            creating = threads.submit(instance.create, "--template", name)
            program, before = carrying(instance, "unpack", begun), instance.pid("agent")
            kill(instance, "agent")
            until(lambda before=before: instance.pid("agent") not in (None, before), within_s=60)
            os.kill(program, signal.SIGKILL if with_program else signal.SIGCONT)
            sandbox = creating.result(timeout=120)
        assert instance.exec(sandbox, "/bin/busybox", "sha256sum", "/big").split()[0] == hashlib.sha256(content).hexdigest()
        assert not list(partial.iterdir())
        assert instance.json("image", "verify", "--json") == {"problems": []}

        made = instance.json("template", "get", name, "--json")["image"]
        kept_blobs = instance.layout.fetched / "blobs" / "sha256"
        assert (kept_blobs / made.removeprefix("sha256:")).exists()
        instance.run("image", "prune", "--all")
        assert made in {one["digest"] for one in instance.json("image", "ls", "--json")["images"]}, "a sandbox stands on it"
        assert not list(kept_blobs.iterdir())
        instance.run("sandbox", "rm", sandbox)
        until(lambda made=made: made in {one["digest"] for one in instance.json("image", "prune", "--all", "--json")["images"]})
        assert said(instance, name, "/bin/busybox", "sha256sum", "/big").split()[0] == hashlib.sha256(content).hexdigest()
