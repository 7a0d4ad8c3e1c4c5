"""A second host gets everything from the artifact store, a folder or a bucket: not from what control, or the first host, has besides."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.rig import Rig, opened, until
from tests.hosts.test_bucket import World
from tests.objects.server import S3Server

BIG = 3 << 20


class InAFolder(World):
    """The same with control's folder as the store."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.control = rig.replicas[0]
        self.machine = rig.machines[1]
        self.machine.join(rig.operator_token(self.machine.name))

    def kept(self, kind: str, digest: str) -> Path:
        return self.control.layout.blobs / kind / "sha256" / digest.removeprefix("sha256:")

    def bare(self) -> None:
        """Nothing is left of control's but objects of the store."""
        for path in self.control.layout.blobs.iterdir():
            if path.name not in ("blobs", "manifests"):
                shutil.rmtree(path)


@pytest.fixture(scope="module", params=["folder", "bucket"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with opened(replicas=1, machines=2) as rig:
        if request.param == "folder":
            yield InAFolder(rig)
            return
        server = S3Server(tmp_path_factory.mktemp("s3"), address=rig.address)
        server.start()
        try:
            yield World(rig, server)
        finally:
            server.stop()


def test_a_second_host_gets_everything_from_the_store(world: World) -> None:
    content = os.urandom(BIG)
    image, only, manifest = world.imported("everywhere", content)
    first, second = world.machine, world.rig.machines[0]
    assert world.fetch(image, manifest) is None
    # The first host has lost it all, and control has its store alone, in a process that knows nothing yet.
    for place in ("blobs", "images", "manifests"):
        shutil.rmtree(first.home / "agent" / place)
    world.bare()
    world.restart()
    second.join(world.rig.operator_token(second.name))
    for world.machine in (second, first):
        assert world.fetch(image, manifest) is None
        assert (world.tree(image) / "content").read_bytes() == content
        blobs = {path.name for path in (world.machine.home / "agent" / "blobs" / "blobs" / "sha256").iterdir()}
        assert {image.removeprefix("sha256:"), only.removeprefix("sha256:")} <= blobs
    # And what the store has not, nobody makes up.
    world.kept("blobs", only).unlink()
    for place in ("blobs", "images"):
        shutil.rmtree(second.home / "agent" / place)
    world.machine = second
    assert world.fetch(image, manifest) == "IMAGE_UNAVAILABLE"
    until(world.control.well, within_s=30, what=world.rig.last_words)
