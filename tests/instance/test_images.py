"""Signed manifests in a whole instance: what is spoilt, unsigned, or signed by a key that counts no more, starts nothing, and is told."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from atoll.drivers.oci.programs import PROGRAMS as COPIES
from tests.e2e import oci
from tests.e2e.oci import Entry, Image
from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, carrying, kill

pytestmark = pytest.mark.skipif(oci.BUSYBOX is None, reason="busybox is missing: apt-get install busybox-static")


def imported(instance: Instance, tmp_path: Path) -> str:
    """An image of its own as a template; the name."""
    name = f"t-{uuid.uuid4().hex[:12]}"
    image = Image([oci.busybox()], {"Env": ["PATH=/bin", f"ONLY={name}"]})
    instance.run("template", "import", name, f"oci-layout:{image.write(tmp_path / name)}")
    return name


def said(instance: Instance, name: str) -> str:
    sandbox = instance.create("--template", name)
    try:
        return instance.exec(sandbox, "/bin/echo", "up").strip()
    finally:
        instance.run("sandbox", "rm", sandbox)


def fails(client: Client, name: str) -> dict[str, Any]:
    """A sandbox of the template that no host starts, once it has failed."""
    answer = client.http.post("/v1/sandboxes", json={"template": name, "timeoutSeconds": 60, "wait": False})
    assert answer.status_code in (201, 202), answer.text
    path = f"/v1/sandboxes/{answer.json()['id']}"
    until(lambda: client.http.get(path).json()["state"] == "failed", within_s=60, what=lambda: client.http.get(path).text)
    return dict(client.http.get(path).json())


def envelopes(instance: Instance) -> set[Path]:
    return set((instance.layout.blobs / "manifests" / "sha256").glob("*"))


def forget(instance: Instance, envelope: Path) -> None:
    """The host's agent has not heard of the manifest."""
    (instance.layout.agent / "manifests" / envelope.name).unlink(missing_ok=True)
    before = instance.pid("agent")
    kill(instance, "agent")
    until(lambda: instance.pid("agent") not in (None, before), within_s=60)
    instance.until_well()


@pytest.fixture
def signed(instance: Instance, tmp_path: Path) -> tuple[str, Path]:
    """A template that has run once, and its manifest in control's store."""
    before = envelopes(instance)
    name = imported(instance, tmp_path)
    assert said(instance, name) == "up"
    (envelope,) = envelopes(instance) - before
    assert (instance.layout.agent / "manifests" / envelope.name).read_bytes() == envelope.read_bytes(), "what the host has verified"
    return name, envelope


def test_a_spoilt_manifest_starts_nothing_and_is_told(instance: Instance, client: Client, signed: tuple[str, Path]) -> None:
    name, envelope = signed
    good = envelope.read_bytes()
    payload = json.loads(good)["payload"]
    for spoilt, code in (
        (good[:-10], "IMAGE_CORRUPT"),
        (good.replace(payload[:8].encode(), b"AAAAAAAA"), "IMAGE_CORRUPT"),
        (json.dumps({**json.loads(good), "signatures": []}).encode(), "IMAGE_UNTRUSTED"),
    ):
        envelope.write_bytes(spoilt)
        forget(instance, envelope)
        seen = fails(client, name)
        assert seen["reason"] == code
        events = client.http.get(f"/v1/sandboxes/{seen['id']}/events").json()["items"]
        assert code in {one.get("reason") for one in events}

    def told() -> list[str]:
        items = client.http.get("/v1/operations/alerts").json()["items"]
        return [one["detail"] for one in items if one["kind"] == "image.refused"]

    until(lambda: any(name in detail for detail in told()), within_s=20, what=lambda: str(told()))
    assert {path.name for path in instance.layout.sandboxes.iterdir()} <= {COPIES}, "nothing was begun"
    envelope.write_bytes(good)
    assert said(instance, name) == "up"


def test_another_deployments_keys_are_refused(instance: Instance, client: Client, signed: tuple[str, Path], tmp_path: Path) -> None:
    """Whoever has control's store and key files, and not what this host was told when it joined, starts nothing on it."""
    from atoll.images import signing

    name, envelope = signed
    secrets = instance.layout.secrets
    owner = secrets.stat()
    for file in (signing.KEY_FILE, signing.CHAIN_FILE):
        shutil.copy2(secrets / file, tmp_path / file)
    try:
        foreign = signing.new_key()
        for file, content in ((signing.CHAIN_FILE, signing.first_chain(foreign)), (signing.KEY_FILE, foreign)):
            (secrets / file).write_bytes(content)
        envelope.unlink()
        forget(instance, envelope)
        assert fails(client, name)["reason"] == "IMAGE_UNTRUSTED"
    finally:
        for file in (signing.KEY_FILE, signing.CHAIN_FILE):
            shutil.copy2(tmp_path / file, secrets / file)
            shutil.chown(secrets / file, owner.st_uid, owner.st_gid)
    assert said(instance, name) == "up"


def test_keys_are_rotated_under_running_programs(instance: Instance, signed: tuple[str, Path], tmp_path: Path) -> None:
    name, _ = signed
    (older,) = [one["id"] for one in instance.json("image", "key", "show", "--json")["keys"] if one["signs"]]
    rotated = instance.json("image", "key", "rotate", "--json")
    assert [one["signs"] for one in rotated["keys"] if one["id"] == older] == [False]
    assert said(instance, name) == "up"
    fresh = imported(instance, tmp_path)
    assert said(instance, fresh) == "up", "signed by the newer key, which the host has followed to"
    retired = instance.json("image", "key", "retire", older, "--json")
    assert older not in {one["id"] for one in retired["keys"]}
    assert said(instance, name) == "up"
    files = (instance.layout.secrets / "image-ed25519", instance.layout.secrets / "image-keys.json")
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert "PRIVATE" not in instance.last_words()


def test_images_of_a_host_are_shown_pinned_and_pruned(instance: Instance, client: Client, signed: tuple[str, Path]) -> None:
    name, _ = signed
    image = instance.json("template", "get", name, "--json")["image"]

    def listed() -> dict[str, dict[str, Any]]:
        return {one["digest"]: one for one in instance.json("image", "ls", "--json")["images"]}

    assert (listed()[image]["own"], listed()[image]["in_use"]) == (True, False)
    assert instance.json("image", "verify", "--json") == {"problems": []}
    sandbox = instance.create("--template", name)
    assert listed()[image]["in_use"]
    assert image not in {one["digest"] for one in instance.json("image", "prune", "--all", "--dry-run", "--json")["images"]}
    instance.run("sandbox", "rm", sandbox)
    until(lambda: not listed()[image]["in_use"], within_s=30)
    instance.run("image", "pin", image)
    instance.run("image", "prune", "--all")
    assert image in listed()
    instance.run("image", "unpin", image)
    assert image in {one["digest"] for one in instance.json("image", "prune", "--all", "--json")["images"]}
    assert image not in listed()
    assert said(instance, name) == "up", "made anew of what control has"
    page = client.http.get("/v1/operations/metrics").text
    assert 'atoll_host_image_entries{what="trees"}' in page

    # The store keeps what a template needs, and says what it would remove of others.
    instance.run("template", "delete", name)
    assert instance.json("image", "gc", "--dry-run", "--json")["busy"] is False
    assert not (instance.layout.blobs / "blobs" / "sha256" / image.removeprefix("sha256:")).exists()


@pytest.mark.parametrize("verb", ["suspend", "pause"])
def test_pruning_takes_nothing_from_a_sandbox_at_rest(instance: Instance, client: Client, tmp_path: Path, verb: str) -> None:
    """All is pruned, by an agent that has begun anew, while its image is wanted by what is saved only: it comes back, and reads what it has not read before."""
    name, content = f"t-{uuid.uuid4().hex[:12]}", os.urandom(1 << 20)
    image = Image([oci.busybox(), oci.layer(Entry("data", content))], {"Env": ["PATH=/bin"]})
    instance.run("template", "import", name, f"oci-layout:{image.write(tmp_path / name)}")
    digest = instance.json("template", "get", name, "--json")["image"]
    sandbox = instance.create("--template", name)
    instance.exec(sandbox, "/bin/sh", "-c", "echo kept >/tmp/written")
    assert client.http.post(f"/v1/sandboxes/{sandbox}/{verb}").status_code == 200
    before = instance.pid("agent")
    kill(instance, "agent")
    until(lambda: instance.pid("agent") not in (None, before), within_s=60)
    instance.until_well()
    assert digest not in {one["digest"] for one in instance.json("image", "prune", "--all", "--json")["images"]}
    (listed,) = [one for one in instance.json("image", "ls", "--json")["images"] if one["digest"] == digest]
    assert listed["in_use"]
    assert client.http.post(f"/v1/sandboxes/{sandbox}/resume").status_code == 200
    read = "cat /tmp/written; busybox wc -c </data; busybox md5sum </data"
    assert instance.exec(sandbox, "/bin/sh", "-c", read).split()[:3] == ["kept", str(len(content)), hashlib.md5(content).hexdigest()]
    instance.run("sandbox", "rm", sandbox)
    until(lambda: digest in {one["digest"] for one in instance.json("image", "prune", "--all", "--json")["images"]}, within_s=30)


@pytest.mark.parametrize("with_program", [False, True])
def test_an_agent_that_is_killed_while_it_unpacks_goes_on(
    instance: Instance, client: Client, tmp_path: Path, *, with_program: bool
) -> None:
    """Killed alone, while its unpacking program goes on, or both: the sandbox gets ready, of a whole tree, and nothing half-made stays."""
    trees, content, name = instance.layout.images / "sha256", os.urandom(64 << 20), f"t-{uuid.uuid4().hex[:12]}"
    image = Image([oci.busybox(), oci.layer(Entry("big", content))], {"Env": ["PATH=/bin"]})
    instance.run("template", "import", name, f"oci-layout:{image.write(tmp_path / name)}")
    answer = client.http.post("/v1/sandboxes", json={"template": name, "timeoutSeconds": 300, "wait": False})
    assert answer.status_code in (201, 202), answer.text
    sandbox = answer.json()["id"]
    program, before = carrying(instance, "unpack", lambda: any(trees.glob(".unfinished-*/rootfs/big"))), instance.pid("agent")
    kill(instance, "agent")
    until(lambda: instance.pid("agent") not in (None, before), within_s=60)
    os.kill(program, signal.SIGKILL if with_program else signal.SIGCONT)
    until(lambda: client.state(sandbox) in ("ready", "failed"), within_s=90, what=instance.last_words)
    assert client.state(sandbox) == "ready", client.get(sandbox)
    assert instance.exec(sandbox, "/bin/busybox", "sha256sum", "/big").split()[0] == hashlib.sha256(content).hexdigest()
    assert not [path.name for path in trees.iterdir() if path.name.startswith((".unfinished", ".doomed", ".lock"))]
    assert instance.json("image", "verify", "--json") == {"problems": []}
    instance.run("sandbox", "rm", sandbox)
