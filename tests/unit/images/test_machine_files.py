"""What virtual machines boot by: published and signed by control, believed, fetched and looked at again by hosts."""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.control.artifacts.machines import Machines, MachineSource
from atoll.images import kernels, signing
from atoll.images.artifacts import MACHINES
from atoll.images.library import Library
from atoll.images.machine_files import SIGNED, MachineFiles, is_told, read
from atoll.wire import manifests
from tests.unit.images.test_trust import MACHINE, World

IMAGE = "sha256:" + "0" * 64


class Deployment(World):
    """Control with a kernel of its set-up's, and a host."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.cache, self.guest, self.own = path / "cache", path / "atoll-guest", self.host / "machine"
        self.guest.write_bytes(b"the guest program")
        self.library = Library(self.store, self.artifacts, lambda: 0.0)
        self.spoil = lambda tree: None
        self.unpacked: list[str] = []
        self.fetched("6.1.0-1")
        self.publisher = self.machines()

    def machines(self, release: str = "1.2.3", cache: Path | None = None) -> Machines:
        return Machines(self.control, self.artifacts, self.library, MachineSource(cache or self.cache, self.guest, release, MACHINE))

    def fetched(self, version: str, cache: Path | None = None) -> None:
        """As `scripts/setup.py` has it."""
        place = (cache or self.cache) / "kernels"
        files = {"vmlinuz": b"packed " + version.encode(), "vmlinux": b"unpacked " + version.encode(), "modules/00-a.ko": b"a module"}
        for name, content in files.items():
            (place / version / name).parent.mkdir(parents=True, exist_ok=True)
            (place / version / name).write_bytes(content)
        about = {name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
        (place / version / "manifest.json").write_text(json.dumps({"version": version, "files": about}))
        (place / "current").unlink(missing_ok=True)
        (place / "current").symlink_to(version)

    @property
    def document(self) -> Path:
        return self.store / MACHINES / MACHINE

    def machine_files(self) -> MachineFiles:
        return MachineFiles(self.own, self, self.restarted(), self.unpack, MACHINE)

    async def unpack(self, digest: str) -> Path:
        """As `atoll-io` does it, of which no other test is here: what is in the one layer."""
        self.unpacked.append(digest)
        blobs = self.store / "blobs" / "sha256"
        (layer,) = json.loads((blobs / digest.removeprefix("sha256:")).read_bytes())["layers"]
        tree = self.host / "trees" / digest
        with tarfile.open(blobs / layer["digest"].removeprefix("sha256:")) as archive:
            tree.mkdir(parents=True, exist_ok=True)
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                (tree / member.name).write_bytes(file.read())
        self.spoil(tree)
        return tree

    async def machine(self, architecture: str) -> bytes:
        self._ask("machine")
        return await self.publisher.give(architecture)

    async def boots_by(self) -> kernels.Kernel:
        """As a run of the host has it. *Errors*: Refused, with nothing to boot by."""
        await self.machine_files().bring()
        return kernels.look_up(self.own if is_told(self.own) else self.cache)


@pytest.fixture
def world(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


async def refused(world: Deployment) -> Refused:
    with pytest.raises(Refused) as told:
        await world.boots_by()
    return told.value


async def test_a_host_boots_by_what_is_published_and_asks_for_its_bytes_once(world: Deployment, tmp_path: Path) -> None:
    assert await world.publisher.publish()
    kernel = await world.boots_by()
    assert kernel.directory.parent == world.own / "kernels"
    assert (kernel.version, kernel.image.read_bytes(), kernel.unpacked.read_bytes()) == ("6.1.0-1", b"packed 6.1.0-1", b"unpacked 6.1.0-1")
    initrd = kernels.first_files(kernel, tmp_path / "no guest program is needed here", tmp_path)
    assert initrd == kernel.initrd
    own = kernels.first_files(kernels.look_up(world.cache), world.guest, tmp_path)
    assert initrd.read_bytes() == own.read_bytes(), "byte for byte what a host's own set-up boots by (tests/conformance/test_qemu.py)"
    assert await world.boots_by() == kernel
    assert len(world.unpacked) == 1
    # Control is away, and this host has all that it needs.
    world.away = True
    assert await world.boots_by() == kernel


async def test_what_could_not_be_fetched_is_asked_for_again(world: Deployment) -> None:
    await world.publisher.publish()

    def breaks(_tree: Path) -> None:
        raise Unavailable(Code.CONTROL_UNAVAILABLE, "cut off")

    world.spoil = breaks
    assert "CONTROL_UNAVAILABLE: cut off" in (await refused(world)).message
    files = world.machine_files()
    assert files.lacks
    world.spoil = lambda tree: None
    await files.bring()
    assert not files.lacks
    assert kernels.look_up(world.own).version == "6.1.0-1"


async def test_where_nothing_is_published_the_hosts_own_set_up_counts(world: Deployment) -> None:
    assert (await world.boots_by()).directory == (world.cache / "kernels" / "6.1.0-1").resolve()
    assert not is_told(world.own)


def _foreign(world: Deployment) -> None:
    """Signed by a key that no host was told."""
    payload = manifests.opened(world.document.read_bytes())[1]
    key = signing._key(signing.new_key())
    world.document.write_text(manifests.sealed(payload, manifests.MACHINE_FORM, [key]).model_dump_json())


def _tampered(world: Deployment) -> None:
    """Another kernel in the place of the one that was signed."""
    envelope, payload = manifests.opened(world.document.read_bytes())
    other = read(world.document.read_bytes()).model_copy(update={"image": IMAGE})
    made = manifests.sealed(manifests.canonical(other), manifests.MACHINE_FORM, [])
    assert payload
    world.document.write_text(made.model_copy(update={"signatures": envelope.signatures}).model_dump_json())


def _cut(world: Deployment) -> None:
    world.document.write_bytes(world.document.read_bytes()[:-40])


def _another_kind(world: Deployment) -> None:
    """The deployment's own signature, of the form that images have."""
    payload = manifests.opened(world.document.read_bytes())[1]
    world.document.write_text(manifests.sealed(payload, manifests.IMAGE_FORM, [world.control.keys().signing]).model_dump_json())


@pytest.mark.parametrize("spoil", [_foreign, _tampered, _cut, _another_kind])
async def test_a_document_that_cannot_be_believed_boots_nothing_and_is_told(world: Deployment, spoil) -> None:
    await world.publisher.publish()
    spoil(world)
    told = await refused(world)
    assert told.code is Code.IMAGE_UNTRUSTED
    assert "IMAGE_" in told.message
    assert world.unpacked == []
    # It is not forgotten while control is away, and is over once the document is right again.
    world.away = True
    assert (await refused(world)).code is Code.IMAGE_UNTRUSTED
    world.away = False
    world.document.unlink()
    await world.publisher.publish()
    assert (await world.boots_by()).version == "6.1.0-1"
    assert not (world.own / kernels.REFUSED).exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tree: (tree / "vmlinuz").write_bytes(b"PACKED 6.1.0-1"),
        lambda tree: (tree / "vmlinux").write_bytes(b"unpacked 6.1"),
        lambda tree: (tree / "initrd").write_bytes((tree / "initrd").read_bytes()[:-512]),
        lambda tree: (tree / "initrd").unlink(),
    ],
    ids=["tampered kernel", "truncated kernel", "truncated initrd", "no initrd"],
)
async def test_files_that_are_not_what_was_signed_boot_nothing_and_are_told(world: Deployment, spoil) -> None:
    await world.publisher.publish()
    world.spoil = spoil
    told = await refused(world)
    assert told.code is Code.IMAGE_UNTRUSTED
    assert "IMAGE_CORRUPT" in told.message
    assert not list((world.own / "kernels").iterdir()), "nothing half taken stays"
    world.spoil = lambda tree: None
    assert (await world.boots_by()).version == "6.1.0-1"


@pytest.mark.parametrize("name", ["vmlinuz", "vmlinux", "initrd", SIGNED])
async def test_what_is_spoilt_on_the_host_is_found_by_its_next_run(world: Deployment, name: str) -> None:
    await world.publisher.publish()
    kernel = await world.boots_by()
    path = kernel.directory / name
    path.write_bytes(bytes(path.stat().st_size))
    world.away = True
    assert (await refused(world)).code is Code.IMAGE_UNTRUSTED
    world.away = False
    assert (await world.boots_by()).version == "6.1.0-1"


async def test_a_refusal_leaves_what_was_believed_before(world: Deployment) -> None:
    await world.publisher.publish()
    kernel = await world.boots_by()
    _foreign(world)
    assert await world.boots_by() == kernel


async def test_a_newer_kernel_or_release_takes_its_place_and_an_older_one_never(world: Deployment, tmp_path: Path) -> None:
    await world.publisher.publish()
    await world.publisher.publish()
    assert read(world.document.read_bytes()).revision == 1, "the same files are no news"
    first = await world.boots_by()
    old = world.document.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    world.fetched("6.1.0-10", elsewhere)
    await world.machines(cache=elsewhere).publish()
    second = await world.boots_by()
    assert (second.version, first.directory.exists()) == ("6.1.0-10", False)
    await world.publisher.publish()
    assert read(world.document.read_bytes()).version == "6.1.0-10", "a replica with an older kernel does not take turns with it"
    world.guest.write_bytes(b"the next guest program")
    await world.machines("1.2.10", elsewhere).publish()
    await world.machines("1.2.9", elsewhere).publish()
    assert (read(world.document.read_bytes()).release, read(world.document.read_bytes()).revision) == ("1.2.10", 3)
    third = await world.boots_by()
    # Who puts an older document back, signed as it was, is refused by hosts that have had a newer one.
    world.document.write_bytes(old)
    assert await world.boots_by() == third


async def test_another_architecture_or_protocol_is_refused(world: Deployment) -> None:
    await world.publisher.publish()
    told = read(world.document.read_bytes())
    for changes in ({"architecture": "riscv64"}, {"protocol_min": 1000, "protocol_max": 1000}):
        other = manifests.canonical(told.model_copy(update=changes))
        world.document.write_text(manifests.sealed(other, manifests.MACHINE_FORM, [world.control.keys().signing]).model_dump_json())
        assert (await refused(world)).code is Code.IMAGE_UNTRUSTED


async def test_hosts_follow_a_rotation_of_keys(world: Deployment) -> None:
    await world.publisher.publish()
    kernel = await world.boots_by()
    older = world.control.keys().id
    signing.rotate(world.secrets, world.write)
    await world.publisher.sign_again()
    envelope, _ = manifests.opened(world.document.read_bytes())
    assert older not in {one.key for one in envelope.signatures}
    assert await world.boots_by() == kernel
    signing.retire(world.secrets, older, world.write)
    assert await world.boots_by() == kernel


async def test_what_is_published_is_not_collected(world: Deployment) -> None:
    await world.publisher.publish()
    stray = world.blob({"nobody": "needs this"})
    gone = await world.library.collect(())
    assert [key.rpartition("/")[2] for key in gone.keys] == [stray.removeprefix("sha256:")]
    assert (await world.boots_by()).version == "6.1.0-1"


async def test_control_publishes_no_kernel_that_is_not_whole(world: Deployment) -> None:
    (world.cache / "kernels" / "6.1.0-1" / "vmlinuz").write_bytes(b"other")
    with pytest.raises(Refused) as told:
        await world.publisher.publish()
    assert told.value.code is Code.IMAGE_CORRUPT
    assert not world.document.exists()
    with pytest.raises(Refused) as told:
        await world.publisher.give("../keys")
    assert told.value.code is Code.INVALID_REQUEST
    nothing = replace(world.publisher, source=MachineSource(world.host, world.guest, "1", MACHINE))
    assert await nothing.publish(), "a machine whose set-up fetched none has nothing to say"
