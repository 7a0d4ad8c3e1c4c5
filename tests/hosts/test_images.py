"""A machine that joined has its images from control: fetched over the connection that its agent trusts, checked, and unpacked."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hosts.rig import Machine, Rig, until

BIG = 24 << 20

# What the driver does with a spec's image, in the machine and with its host.toml; it needs no sandbox.
WORK = """
import asyncio, json, sys
from atoll.base.errors import AtollError
from atoll.images.carrier import Carrier
from atoll.images.unpacking import Unpacking
from atoll.programs import agent_main, hosting
from atoll.programs.layout import bin_directory, layout_of

place = layout_of()
config = hosting.load(place)
carrier = Carrier(bin_directory() / "atoll-io", place.fetched)
unpacking = Unpacking(carrier, place.images, objects=lambda: agent_main.objects(place, config))

async def work():
    await unpacking.have(sys.argv[1])
    await unpacking.ensure(sys.argv[1])

try:
    asyncio.run(work())
    print(json.dumps({"code": None}))
except AtollError as error:
    print(json.dumps({"code": error.code, "message": error.message}))
"""


def put(store: Path, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    blobs = store / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def layer(**files: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def image(rig: Rig, *layers: bytes) -> tuple[str, list[str]]:
    """One in control's store: its digest, and its layers'."""
    store = rig.replicas[0].layout.blobs
    made = [put(store, one) for one in layers]
    digests = [one["digest"] for one in made]
    processor = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    config = {"os": "linux", "architecture": processor, "config": {}, "rootfs": {"type": "layers", "diff_ids": digests}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **put(store, json.dumps(config).encode())},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", **one} for one in made],
    }
    return put(store, json.dumps(manifest).encode())["digest"], digests


@pytest.fixture(scope="module")
def machine(joining: Rig) -> Machine:
    one = joining.machines[1]
    if not (one.home / "host.toml").exists():
        one.join(joining.operator_token(one.name))
    return one


def fetch(machine: Machine, digest: str) -> str | None:
    said = machine.inside(sys.executable, "-P", "-c", WORK, digest)
    code = json.loads(said.stdout.splitlines()[-1])["code"]
    return None if code is None else str(code)


def blob(machine: Machine, digest: str, place: str = "blobs/sha256") -> Path:
    return machine.home / "agent" / "blobs" / place / digest.removeprefix("sha256:")


def test_an_image_of_controls_store_becomes_a_tree_on_a_machine_elsewhere(joining: Rig, machine: Machine) -> None:
    digest, layers = image(joining, layer(first=b"1", both=b"old"), layer(both=b"new"))
    assert fetch(machine, digest) is None
    tree = machine.home / "agent" / "images" / "sha256" / digest.removeprefix("sha256:") / "rootfs"
    assert ((tree / "first").read_text(), (tree / "both").read_text()) == ("1", "new")
    assert all(blob(machine, one).exists() for one in layers)
    credential = json.loads((machine.home / "agent" / "credential").read_text())
    assert "credential" in credential, "what is looked for below"
    assert credential["credential"] not in json.dumps(joining.last_words())


def test_a_tampered_and_a_truncated_blob_make_no_tree(joining: Rig, machine: Machine) -> None:
    for spoil in (lambda content: b"X" + content[1:], lambda content: content[:-512]):
        digest, (only,) = image(joining, layer(file=os.urandom(4000)))
        kept = joining.replicas[0].layout.blobs / "blobs" / "sha256" / only.removeprefix("sha256:")
        kept.write_bytes(spoil(kept.read_bytes()))
        assert fetch(machine, digest) == "IMAGE_CORRUPT"
        assert not blob(machine, only).exists()
        assert blob(machine, only, "quarantine").exists()
        assert not (machine.home / "agent" / "images" / "sha256" / digest.removeprefix("sha256:")).exists()


def test_what_control_has_not_is_unavailable(machine: Machine) -> None:
    assert fetch(machine, "sha256:" + "7" * 64) == "IMAGE_UNAVAILABLE"


def test_a_cut_or_a_kill_in_a_layer_is_gone_on_with(joining: Rig, machine: Machine) -> None:
    """The network goes in the middle of a big layer, then the program is killed; the next run brings the rest."""
    digest, (only,) = image(joining, layer(big=os.urandom(BIG)))
    partial = machine.home / "agent" / "blobs" / "partial" / f"fetch-{only.removeprefix('sha256:')}"
    # After so many bytes nothing comes any more.
    rules = "add table inet cut; add chain inet cut input { type filter hook input priority -400; };"
    machine._nft(f"{rules} add rule inet cut input iifname eth0 quota over 8 mbytes drop")
    try:
        words = machine.command(sys.executable, "-P", "-c", WORK, digest)
        process = subprocess.Popen(
            words, env=machine.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        until(lambda: partial.exists() and partial.stat().st_size > 1 << 20, within_s=60, what=joining.last_words)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        machine._nft("delete table inet cut")
    got = partial.stat().st_size
    assert 0 < got < BIG
    assert fetch(machine, digest) is None
    assert blob(machine, only).stat().st_size > BIG
    assert not partial.exists()


def test_a_control_that_is_killed_in_a_layer_is_waited_for(joining: Rig, machine: Machine) -> None:
    """One run sees control go and come back, and goes on with the layer."""
    digest, (only,) = image(joining, layer(big=os.urandom(BIG)))
    partial = blob(machine, only, "partial").with_name(f"fetch-{only.removeprefix('sha256:')}")
    rules = "add table inet slow; add chain inet slow input { type filter hook input priority -400; };"
    machine._nft(f"{rules} add rule inet slow input iifname eth0 limit rate over 8 mbytes/second burst 1 mbytes drop")
    words = machine.command(sys.executable, "-P", "-c", WORK, digest)
    with subprocess.Popen(words, env=machine.environment(), stdout=subprocess.PIPE, text=True) as process:
        until(lambda: partial.exists() and partial.stat().st_size > 1 << 20, within_s=60, what=joining.last_words)
        joining.replicas[0].program.kill()
        machine._nft("delete table inet slow")
        assert process.poll() is None
        joining.replicas[0].start()
        assert process.stdout is not None
        assert json.loads(process.stdout.read()) == {"code": None}
    until(joining.replicas[0].well, within_s=30, what=joining.last_words)
    assert blob(machine, only).stat().st_size > BIG


def test_a_control_that_is_away_when_an_image_is_wanted_is_waited_for(joining: Rig, machine: Machine) -> None:
    """The image's manifest, which is asked for first, is worth no less patience than its layers."""
    digest, (only,) = image(joining, layer(file=os.urandom(4000)))
    joining.replicas[0].program.kill()
    try:
        words = machine.command(sys.executable, "-P", "-c", WORK, digest)
        with subprocess.Popen(words, env=machine.environment(), stdout=subprocess.PIPE, text=True) as process:
            time.sleep(2)
            assert process.poll() is None, "it was given up"
            joining.replicas[0].start()
            assert process.stdout is not None
            assert json.loads(process.stdout.read()) == {"code": None}
    finally:
        if not joining.replicas[0].program.running:
            joining.replicas[0].start()
        until(joining.replicas[0].well, within_s=60, what=joining.last_words)
    assert blob(machine, only).exists()


def test_a_disk_that_gets_full_in_a_layer_is_named_and_nothing_stays(joining: Rig, machine: Machine) -> None:
    digest, (only,) = image(joining, layer(big=os.urandom(BIG)))
    blobs = machine.home / "agent" / "blobs"
    blobs.mkdir(exist_ok=True)
    machine.inside("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", blobs)
    try:
        assert fetch(machine, digest) == "HOST_DISK_FULL"
        left = [Path(name).name for name in machine.inside("find", blobs, "-type", "f", "-size", "+1k").stdout.split()]
        assert left == [], "a layer that does not fit leaves nothing of it"
    finally:
        machine.inside("umount", blobs)
    assert fetch(machine, digest) is None
    assert blob(machine, only).exists()


def test_blobs_are_given_to_hosts_alone(joining: Rig, machine: Machine) -> None:
    digest, _ = image(joining, layer(file=b"x"))
    credential = json.loads((machine.home / "agent" / "credential").read_text())["credential"]
    url = f"{joining.replicas[0].url}/agent/v1/blobs/{digest}"
    host = {"Authorization": f"Bearer {credential}"}

    def ask(headers: dict[str, str], at: str = url) -> httpx.Response:
        return httpx.get(at, headers=headers, trust_env=False)

    whole = ask(host)
    assert (whole.status_code, f"sha256:{hashlib.sha256(whole.content).hexdigest()}") == (200, digest)
    part = ask({**host, "Range": "bytes=5-8"})
    assert (part.status_code, part.content) == (206, whole.content[5:9])
    assert part.headers["content-range"] == f"bytes 5-8/{len(whole.content)}"
    assert ask({**host, "Range": f"bytes={len(whole.content)}-"}).status_code == 400
    assert (ask({}).status_code, ask({"Authorization": "Bearer hk_none"}).status_code) == (401, 401)
    assert ask(host, f"{joining.replicas[0].url}/agent/v1/blobs/sha256:..%2f..%2fatoll.db").status_code == 400
