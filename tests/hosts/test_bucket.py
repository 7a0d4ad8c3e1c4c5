"""Images in a bucket: control writes them there, a machine that joined has them from there, and no credential of the bucket reaches it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.oci import Entry as File
from tests.e2e.oci import Image, layer
from tests.hosts.rig import ATOLL, Rig, opened, run, until
from tests.objects.server import S3Server

BIG = 24 << 20

# What the driver does with a spec, in the machine and with what it was told when it joined; it needs no sandbox.
WORK = """
import asyncio, json, sys
from dataclasses import replace
from atoll.base.errors import AtollError
from atoll.domain.deployment import WorkloadClass
from atoll.domain.template import Template
from atoll.images.carrier import Carrier
from atoll.images.unpacking import Unpacking
from atoll.planning.resolve import CreateRequest, resolve
from atoll.programs import agent_main, hosting
from atoll.programs.layout import bin_directory, layout_of

image, manifest = sys.argv[1:]
place = layout_of()
config = hosting.load(place)
trust = agent_main.trusting(place, config)
unpacking = Unpacking(Carrier(bin_directory() / "atoll-io", place.fetched), place.images, objects=lambda: agent_main.objects(place, config))
made = Template("t", "tea", "t", (), False, "b", image, 1000, 512, 1024, "user", None, 0.0, 0.0)
spec = replace(resolve(CreateRequest(), template=made, policy=WorkloadClass(name="c")), manifest=manifest)

async def work():
    await trust.check(spec, ready=lambda: False)
    await unpacking.have(image)
    await unpacking.ensure(image)

try:
    asyncio.run(work())
    print(json.dumps({"code": None}))
except AtollError as error:
    print(json.dumps({"code": error.code, "message": error.message}))
"""


class World:
    """A rig whose control keeps its artifacts in a bucket on the bridge."""

    def __init__(self, rig: Rig, server: S3Server) -> None:
        self.rig, self.server = rig, server
        self.control = rig.replicas[0]
        self.machine = rig.machines[1]
        self.machine.join(rig.operator_token(self.machine.name))
        server.keep_credentials(self.control.layout.secrets / "bucket.json")
        with self.control.layout.control_config.open("a") as file:
            file.write("\n" + server.toml("secrets/bucket.json"))
        self.restart()

    def restart(self) -> None:
        self.control.program.kill()
        self.control.start()
        until(self.control.well, within_s=60, what=self.rig.last_words)

    def kept(self, kind: str, digest: str) -> Path:
        return self.server.files / "deployment" / kind / "sha256" / digest.removeprefix("sha256:")

    def imported(self, name: str, content: bytes) -> tuple[str, str, str]:
        """A template made of an archive: its image, the image's one layer, the signed manifest that its first create wants."""
        key = self.control.layout.operator_key.read_text().strip()
        before = set(self.kept("manifests", "").glob("*")) if self.kept("manifests", "").exists() else set()
        with tempfile.TemporaryDirectory() as directory:
            made = Image([layer(File("content", content))]).write(Path(directory))
            environment = self.rig.environment(ATOLL_API_URL=self.control.url, ATOLL_API_KEY=key)
            said = run(ATOLL, "template", "import", name, f"oci-layout:{made}", "--json", env=environment)
        image = str(json.loads(said.stdout)["template"]["image"])
        document = json.loads(self.kept("blobs", image).read_bytes())
        answer = self.rig.call("POST", "/v1/sandboxes", template=name, wait=False, timeoutSeconds=60)
        (manifest,) = set(self.kept("manifests", "").glob("*")) - before
        self.rig.call("DELETE", f"/v1/sandboxes/{answer['id']}")
        return image, str(document["layers"][0]["digest"]), f"sha256:{manifest.name}"

    def bare(self) -> None:
        """Control's own folder has no blob any more: whatever hosts get, they get from the bucket."""
        for blob in (self.control.layout.blobs / "blobs" / "sha256").iterdir():
            blob.unlink()

    def fetch(self, image: str, manifest: str) -> str | None:
        said = self.machine.inside(sys.executable, "-P", "-c", WORK, image, manifest)
        code = json.loads(said.stdout.splitlines()[-1])["code"]
        return None if code is None else str(code)

    def start_fetch(self, image: str, manifest: str) -> subprocess.Popen[str]:
        words = self.machine.command(sys.executable, "-P", "-c", WORK, image, manifest)
        return subprocess.Popen(words, env=self.machine.environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)

    def partial(self, digest: str) -> Path:
        return self.machine.home / "agent" / "blobs" / "partial" / f"fetch-{digest.removeprefix('sha256:')}"

    def tree(self, image: str) -> Path:
        return self.machine.home / "agent" / "images" / "sha256" / image.removeprefix("sha256:") / "rootfs"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with opened(replicas=1, machines=2) as rig:
        server = S3Server(tmp_path_factory.mktemp("s3"), address=rig.address)
        server.start()
        try:
            yield World(rig, server)
        finally:
            server.stop()


def test_a_machine_elsewhere_has_an_image_from_the_bucket(world: World) -> None:
    image, only, manifest = world.imported("first", b"hello")
    assert world.kept("blobs", only).exists()
    assert not list((world.control.layout.blobs / "uploads").rglob("*.tar")), "the archive went when it had become a template"
    assert not list((world.server.files / "deployment" / "uploads").rglob("*.tar"))
    world.bare()
    assert world.fetch(image, manifest) is None
    assert (world.tree(image) / "content").read_bytes() == b"hello"
    log = (world.server.path / "log").read_text()
    assert f"blobs/sha256/{only.removeprefix('sha256:')}" in log
    for place in (world.machine.home, world.control.layout.log):
        for file in place.rglob("*"):
            if file.is_file() and not file.is_symlink():
                assert world.server.secret.encode() not in file.read_bytes(), file
    assert world.server.secret not in world.rig.last_words()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert world.server.secret.encode() not in process.read_bytes()
        except OSError:
            continue


def test_a_second_replica_with_an_empty_folder_gives_it_too(world: World) -> None:
    image, _, manifest = world.imported("second", b"again")
    world.bare()
    world.restart()
    assert world.fetch(image, manifest) is None


def test_tampered_objects_make_no_tree(world: World) -> None:
    image, only, manifest = world.imported("tampered", os.urandom(4000))
    layer_file, envelope = world.kept("blobs", only), world.kept("manifests", manifest)
    good, signed = layer_file.read_bytes(), envelope.read_bytes()
    world.bare()
    envelope.write_bytes(signed[:-9])
    assert world.fetch(image, manifest) == "IMAGE_CORRUPT"
    foreign = json.loads(signed)
    foreign["signatures"] = []
    envelope.write_text(json.dumps(foreign))
    assert world.fetch(image, manifest) == "IMAGE_UNTRUSTED"
    assert not world.partial(only).exists(), "no layer was asked for before the manifest held"
    envelope.write_bytes(signed)
    for spoilt in (b"X" + good[1:], good[:-64], good + b"more"):
        layer_file.write_bytes(spoilt)
        assert world.fetch(image, manifest) == "IMAGE_CORRUPT"
        assert not world.tree(image).exists()
    quarantine = world.machine.home / "agent" / "blobs" / "quarantine" / only.removeprefix("sha256:")
    assert quarantine.exists()
    layer_file.write_bytes(good)
    assert world.fetch(image, manifest) is None


def test_a_layer_that_is_gone_from_the_bucket_is_unavailable(world: World) -> None:
    image, only, manifest = world.imported("gone", b"gone")
    world.bare()
    world.kept("blobs", only).unlink()
    assert world.fetch(image, manifest) == "IMAGE_UNAVAILABLE"


def test_a_cut_or_a_kill_in_a_layer_is_gone_on_with(world: World) -> None:
    image, only, manifest = world.imported("big", os.urandom(BIG))
    size = world.kept("blobs", only).stat().st_size
    world.bare()
    rules = "add table inet cut; add chain inet cut input { type filter hook input priority -400; };"
    world.machine._nft(f"{rules} add rule inet cut input iifname eth0 quota over 8 mbytes drop")
    try:
        with world.start_fetch(image, manifest) as process:
            until(
                lambda: world.partial(only).exists() and world.partial(only).stat().st_size > 1 << 20,
                within_s=30,
                what=world.rig.last_words,
            )
            os.killpg(process.pid, signal.SIGKILL)
    finally:
        world.machine._nft("delete table inet cut")
    got = world.partial(only).stat().st_size
    assert 0 < got < size
    asked = len((world.server.path / "log").read_text().splitlines())
    assert world.fetch(image, manifest) is None
    lines = (world.server.path / "log").read_text().splitlines()[asked:]
    assert any(only.removeprefix("sha256:") in line and " 206 " in line for line in lines), lines
    assert hashlib.sha256((world.tree(image) / "content").read_bytes()).digest()


def test_a_server_that_goes_and_comes_back_in_a_layer_is_waited_for(world: World) -> None:
    image, only, manifest = world.imported("patient", os.urandom(BIG))
    world.bare()
    rules = "add table inet slow; add chain inet slow input { type filter hook input priority -400; };"
    world.machine._nft(f"{rules} add rule inet slow input iifname eth0 limit rate over 8 mbytes/second burst 1 mbytes drop")
    with world.start_fetch(image, manifest) as process:
        until(lambda: world.partial(only).exists() and world.partial(only).stat().st_size > 1 << 20, within_s=30, what=world.rig.last_words)
        world.server.stop()
        world.machine._nft("delete table inet slow")
        assert process.poll() is None
        world.server.start()
        assert process.stdout is not None
        assert json.loads(process.stdout.read()) == {"code": None}


def test_a_server_that_is_away_is_said_so_and_asked_again(world: World) -> None:
    image, _, manifest = world.imported("away", b"away")
    world.bare()
    world.server.stop()
    try:
        assert world.fetch(image, manifest) == "IMAGE_UNAVAILABLE"
        with world.rig.api() as api:
            archive = io.BytesIO()
            with tarfile.open(fileobj=archive, mode="w"):
                pass
            answer = api.put("/v1/template-archives", content=archive.getvalue())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ARTIFACTS_UNAVAILABLE")
    finally:
        world.server.start()
    assert world.fetch(image, manifest) is None


def test_credentials_that_the_bucket_refuses_are_named(world: World) -> None:
    world.server.keep_credentials(world.control.layout.secrets / "bucket.json", secret="nobody-knows-this-one")
    world.restart()
    try:
        with world.rig.api() as api:
            answer = api.put("/v1/template-archives", content=gzip.compress(b"x"))
        assert answer.json()["error"]["code"] == "ARTIFACTS_DENIED"
        assert "nobody-knows" not in answer.text + world.rig.last_words()
    finally:
        world.server.keep_credentials(world.control.layout.secrets / "bucket.json")
        world.restart()
