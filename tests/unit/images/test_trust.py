"""A host's trust: which images it starts, by which keys, and what it asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.control.artifacts.manifests import Manifests
from atoll.domain.deployment import WorkloadClass
from atoll.domain.spec import Spec
from atoll.domain.template import Template
from atoll.images import signing
from atoll.images.artifacts import MANIFESTS, Folder, key_of
from atoll.images.trust import KEPT, KEYS_FILE, Trust, keep_keys
from atoll.planning.resolve import CreateRequest, resolve
from atoll.wire.manifests import KeyChain, KeySet
from tests.builders import NOW, template

MACHINE = os.uname().machine
POLICY = WorkloadClass(name="default")


class World:
    """Control's folder and keys, and a host that asks it."""

    def __init__(self, path: Path) -> None:
        self.secrets, self.store, self.host = path / "secrets", path / "store", path / "agent"
        self.secrets.mkdir()
        self.host.mkdir()
        pem = signing.new_key()
        self.write(signing.KEY_FILE, pem)
        self.write(signing.CHAIN_FILE, signing.first_chain(pem))
        self.artifacts = Folder(self.store)
        self.control = Manifests(self.secrets, self.artifacts)
        self.asked: list[str] = []
        self.away = False
        self.trust = Trust(self.host, self)

    def write(self, name: str, content: bytes) -> None:
        (self.secrets / name).write_bytes(content)
        # Files that are written within one tick of the clock are others all the same.
        self.ticks = getattr(self, "ticks", 0) + 1
        os.utime(self.secrets / name, (NOW + self.ticks, NOW + self.ticks))

    def restarted(self) -> Trust:
        return Trust(self.host, self)

    def blob(self, document: object) -> str:
        content = json.dumps(document).encode()
        path = self.store / "blobs" / "sha256" / hashlib.sha256(content).hexdigest()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return f"sha256:{path.name}"

    def image(self, *, architecture: str = "") -> str:
        processor = architecture or {"x86_64": "amd64", "aarch64": "arm64"}[MACHINE]
        layer = "sha256:" + "5" * 64
        config = self.blob({"architecture": processor, "os": "linux", "rootfs": {"type": "layers", "diff_ids": [layer]}})
        return self.blob({"config": {"digest": config, "size": 1}, "layers": [{"digest": layer, "size": 7}]})

    async def spec(self, **changes: object) -> tuple[Template, Spec]:
        made = replace(template(), team_id="tea_1", image=self.image(), source="registry:x", **changes)
        spec = resolve(CreateRequest(), template=made, policy=POLICY)
        return made, replace(spec, manifest=await self.control.of(made))

    def envelope(self, spec: Spec) -> Path:
        return self.store / key_of(MANIFESTS, spec.manifest)

    # As images.trust.Source.

    async def manifest(self, digest: str) -> bytes:
        self._ask("manifest")
        return await self.control.give(digest)

    async def key_chain(self) -> KeyChain:
        self._ask("chain")
        return self.control.chain()

    async def first_keys(self) -> KeySet:
        self._ask("first")
        return self.control.current()

    def _ask(self, what: str) -> None:
        if self.away:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "away")
        self.asked.append(what)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def code(trust: Trust, spec: Spec, *, ready: bool = False) -> Code | None:
    try:
        await trust.check(spec, ready=lambda: ready)
    except (Refused, Unavailable) as error:
        return error.code
    return None


async def test_what_control_has_signed_is_started_and_asked_for_once(world: World) -> None:
    _, spec = await world.spec(command=("/bin/sh", "-c", "serve"))
    assert [await code(world.trust, spec) for _ in range(3)] == [None] * 3
    assert world.asked == ["first", "manifest"]
    assert {(path.stat().st_mode & 0o777) for path in (world.host / KEYS_FILE, world.host / KEPT / spec.manifest[7:])} == {0o600}
    world.away = True
    assert await code(world.restarted(), spec) is None, "a restart without control"


async def test_the_same_version_has_the_same_manifest_whoever_signs_it(world: World) -> None:
    made, spec = await world.spec()
    assert await Manifests(world.secrets, world.artifacts).of(made) == spec.manifest
    world.envelope(spec).unlink()
    assert await Manifests(world.secrets, world.artifacts).of(made) == spec.manifest, "as of builds that are older than manifests"
    assert await code(world.trust, spec) is None


async def test_ready_made_images_have_none_and_are_started_where_they_are_ready(world: World) -> None:
    ready_made = template()
    assert ready_made.team_id is None
    assert await world.control.of(ready_made) == ""
    spec = resolve(CreateRequest(), template=ready_made, policy=POLICY)
    assert await code(world.trust, spec, ready=True) is None
    assert await code(world.trust, spec, ready=False) is Code.IMAGE_UNTRUSTED
    assert world.asked == []


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        pytest.param(lambda content: content[:-30], Code.IMAGE_CORRUPT, id="cut"),
        pytest.param(lambda _content: b"{}", Code.IMAGE_CORRUPT, id="another form"),
        pytest.param(lambda content: content.replace(b'"payload":"', b'"payload":"AAAA', 1), Code.IMAGE_CORRUPT, id="tampered"),
        pytest.param(lambda content: json.dumps({**json.loads(content), "signatures": []}).encode(), Code.IMAGE_UNTRUSTED, id="bare"),
    ],
)
async def test_what_is_spoilt_in_the_store_is_refused(world: World, spoil, expected: Code) -> None:
    _, spec = await world.spec()
    path = world.envelope(spec)
    path.write_bytes(spoil(path.read_bytes()))
    if expected is Code.IMAGE_UNTRUSTED:
        # Control would sign what one of its keys has signed; this is signed by none.
        assert json.loads(await world.control.give(spec.manifest))["signatures"] == []
    assert await code(world.trust, spec) is expected
    assert not (world.host / KEPT / spec.manifest[7:]).exists()


async def test_another_deployments_key_is_refused_and_stays_so(world: World, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    made, spec = await world.spec()
    other.store.rmdir() if other.store.exists() else None
    other.artifacts = Folder(world.store)
    foreign = await Manifests(other.secrets, world.artifacts).of(replace(made, source="registry:y"))
    keep_keys(world.host, world.control.current())
    assert await code(world.trust, replace(spec, manifest=foreign)) is Code.IMAGE_UNTRUSTED
    assert world.asked[-1] == "chain", "it looked whether there are newer keys"


async def test_a_command_that_does_not_fit_its_manifest_is_refused(world: World) -> None:
    _, spec = await world.spec(command=("/bin/sh", "-c", "serve"))
    _, another = await world.spec(command=())
    for wrong in (
        replace(spec, image="sha256:" + "1" * 64),
        replace(spec, command=("/bin/sh", "-c", "mine")),
        replace(spec, command_user="root"),
        replace(spec, ready_command=("/bin/true",)),
        replace(spec, manifest=another.manifest),
        replace(spec, manifest="", image=spec.image),
        replace(spec, manifest="sha256:" + "2" * 64),
    ):
        assert await code(world.trust, wrong) is Code.IMAGE_UNTRUSTED


async def test_an_image_for_another_processor_is_refused(world: World) -> None:
    image = world.image(architecture="arm64" if MACHINE == "x86_64" else "amd64")
    made = replace(template(), team_id="tea_1", image=image, source="x")
    spec = replace(resolve(CreateRequest(), template=made, policy=POLICY), manifest=await world.control.of(made))
    assert await code(world.trust, spec) is Code.IMAGE_REFUSED


async def test_a_spoilt_document_is_not_signed(world: World) -> None:
    made = replace(template(), team_id="tea_1", image=world.image(), source="x")
    path = world.store / "blobs" / "sha256" / made.image[7:]
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(Refused) as caught:
        await world.control.of(made)
    assert caught.value.code is Code.IMAGE_CORRUPT


async def test_control_away_is_no_refusal_for_good(world: World) -> None:
    _, spec = await world.spec()
    keep_keys(world.host, world.control.current())
    world.away = True
    assert await code(world.trust, spec) is Code.IMAGE_UNAVAILABLE
    world.away = False
    assert await code(world.trust, spec) is None


async def test_a_rotation_is_followed_and_a_retired_key_counts_no_more(world: World) -> None:
    made, spec = await world.spec()
    assert await code(world.trust, spec) is None
    older = world.control.keys().id
    signing.rotate(world.secrets, world.write)
    _, fresh = await world.spec(command=("/bin/new",))
    assert await code(world.trust, fresh) is None, "the newer key came with a signature of the older"
    assert await code(world.trust, spec) is None
    assert await world.control.of(made) == spec.manifest, "the name does not follow from the key"
    assert await world.control.sign_again() == 2
    signed = {one["key"] for one in json.loads(world.envelope(spec).read_bytes())["signatures"]}
    assert signed == {older, world.control.keys().id}
    kept_by_the_older = world.host / KEPT / spec.manifest[7:]
    signing.retire(world.secrets, older, world.write)
    await world.trust.follow()
    assert await code(world.trust, spec) is None, "signed again before"
    assert older.encode() in kept_by_the_older.read_bytes() or kept_by_the_older.exists()
    # What nobody has signed again counts no more, here or after a restart.
    only_older = json.loads(world.envelope(fresh).read_bytes())
    only_older["signatures"] = []
    world.envelope(fresh).write_text(json.dumps(only_older))
    (world.host / KEPT / fresh.manifest[7:]).unlink()
    assert await code(world.restarted(), fresh) is Code.IMAGE_UNTRUSTED


async def test_a_key_that_was_retired_is_refused_where_nothing_is_signed_again(world: World) -> None:
    _, spec = await world.spec()
    assert await code(world.trust, spec) is None
    old_envelope = world.envelope(spec).read_bytes()
    older = world.control.keys().id
    signing.rotate(world.secrets, world.write)
    signing.retire(world.secrets, older, world.write)
    world.control.keys()
    world.envelope(spec).write_bytes(old_envelope)
    await world.trust.follow()
    assert await code(world.trust, spec) is Code.IMAGE_UNTRUSTED


def test_the_key_that_signs_is_not_retired_and_strangers_are_not_known(world: World) -> None:
    for key_id, expected in ((world.control.keys().id, Code.INVALID_REQUEST), ("ik_" + "0" * 32, Code.KEY_NOT_FOUND)):
        with pytest.raises(Refused) as caught:
            signing.retire(world.secrets, key_id, world.write)
        assert caught.value.code is expected


def test_a_rotation_that_was_cut_short_leaves_the_older_key_signing(world: World) -> None:
    older = world.control.keys().id

    def cut(name: str, content: bytes) -> None:
        if name == signing.KEY_FILE:
            raise OSError
        world.write(name, content)

    with pytest.raises(OSError):
        signing.rotate(world.secrets, cut)
    keys = signing.load(world.secrets)
    assert keys.id == older
    assert len(keys.current.keys) == 2
    assert signing.rotate(world.secrets, world.write).id != older


def test_a_chain_of_another_key_is_named(world: World) -> None:
    world.write(signing.KEY_FILE, signing.new_key())
    with pytest.raises(Refused) as caught:
        signing.load(world.secrets)
    assert caught.value.code is Code.SETUP_FAILED
    assert base64.b64encode(b"PRIVATE").decode() not in caught.value.message
