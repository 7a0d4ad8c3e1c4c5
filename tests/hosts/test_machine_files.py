"""What virtual machines boot by comes from control to a machine that joined: over the connection that its agent trusts, signed, and looked at."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.control.artifacts.machines import Machines, MachineSource
from atoll.control.artifacts.manifests import Manifests
from atoll.images import signing
from atoll.images.artifacts import MACHINES, Folder
from atoll.images.library import Library
from atoll.wire import manifests
from tests.hosts.guests import BINARIES
from tests.hosts.rig import Machine, Rig
from tests.hosts.test_images import machine as joined

ARCH = os.uname().machine
RELEASES = itertools.count(10)
machine = joined

# What the agent does before it opens its drivers, and what they look up then.
WORK = """
import asyncio, json
from atoll.base.errors import AtollError
from atoll.images import kernels
from atoll.programs import agent_main, hosting
from atoll.programs.layout import layout_of

place = layout_of()
config = hosting.load(place)
trust = agent_main.trusting(place, config)
files = agent_main.machine_files(place, config, trust, agent_main.own_images(place, config, trust))
asyncio.run(files.bring())
try:
    kernel = kernels.look_up(agent_main._kernels(place))
    print(json.dumps({"code": None, "version": kernel.version, "directory": str(kernel.directory), "initrd": str(kernel.initrd)}))
except AtollError as error:
    print(json.dumps({"code": error.code, "message": error.message}))
"""


def set_up(cache: Path, version: str) -> None:
    """As `scripts/setup.py --only machines` leaves it, but for the size."""
    place = cache / "kernels" / version
    files = {name: name.encode() + os.urandom(3 << 20) for name in ("vmlinuz", "vmlinux", "modules/00-a.ko")}
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    about = {name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    (place / "manifest.json").write_text(json.dumps({"version": version, "files": about}))
    (cache / "kernels" / "current").unlink(missing_ok=True)
    (cache / "kernels" / "current").symlink_to(version)


def newer(cache: Path) -> str:
    """Set up a kernel that is newer than all before, whichever test comes first: an older one is never published."""
    version = f"6.1.0-{next(RELEASES)}"
    set_up(cache, version)
    return version


def publish(rig: Rig, cache: Path) -> None:
    """As control does when it starts."""
    layout = rig.replicas[0].layout
    store = Folder(layout.blobs)
    source = MachineSource(cache, BINARIES / "atoll-guest", "1.0", ARCH)
    assert asyncio.run(Machines(Manifests(layout.secrets, store), store, Library(layout.blobs, store, time.time), source).publish())


def document(rig: Rig) -> Path:
    return rig.replicas[0].layout.blobs / MACHINES / ARCH


def bring(machine: Machine) -> dict[str, Any]:
    return dict(json.loads(machine.inside(sys.executable, "-P", "-c", WORK).stdout.splitlines()[-1]))


def layer(rig: Rig) -> Path:
    """The blob with the files, in control's store."""
    blobs = rig.replicas[0].layout.blobs / "blobs" / "sha256"
    payload = json.loads(manifests.opened(document(rig).read_bytes())[1])
    (only,) = json.loads((blobs / payload["image"].removeprefix("sha256:")).read_bytes())["layers"]
    return blobs / str(only["digest"]).removeprefix("sha256:")


def test_a_machine_boots_by_what_control_has_signed(joining: Rig, machine: Machine, tmp_path: Path) -> None:
    if not (BINARIES / "atoll-guest").exists():
        pytest.skip("needs build/bin/atoll-guest (make build)")
    first = newer(tmp_path)
    publish(joining, tmp_path)
    found = bring(machine)
    assert (found["code"], found["version"]) == (None, first), found
    place = Path(found["directory"])
    for name in ("vmlinuz", "vmlinux"):
        assert (place / name).read_bytes() == (tmp_path / "kernels" / "current" / name).read_bytes()
    assert (BINARIES / "atoll-guest").read_bytes() in Path(found["initrd"]).read_bytes()
    # Spoilt, cut, or another's: refused and said, and the machine goes on by what it has believed.
    for spoil in (_tampered, _truncated, _foreign):
        last = newer(tmp_path)
        publish(joining, tmp_path)
        mend = spoil(joining)
        assert bring(machine)["version"] == first
        assert "IMAGE_" in (machine.home / "agent" / "machine" / "refused").read_text()
        mend()
    assert bring(machine)["version"] == last, "right again, it is taken"


def _tampered(rig: Rig) -> Any:
    path = layer(rig)
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes([content[4096] ^ 1]) + content[4097:])
    return lambda: path.write_bytes(content)


def _truncated(rig: Rig) -> Any:
    path = layer(rig)
    content = path.read_bytes()
    path.write_bytes(content[:-4096])
    return lambda: path.write_bytes(content)


def _foreign(rig: Rig) -> Any:
    content = document(rig).read_bytes()
    payload = manifests.opened(content)[1]
    made = manifests.sealed(payload, manifests.MACHINE_FORM, [signing._key(signing.new_key())])
    document(rig).write_text(made.model_dump_json())
    return lambda: document(rig).write_bytes(content)


def test_a_machine_that_was_told_what_it_cannot_believe_boots_nothing(joining: Rig, machine: Machine, tmp_path: Path) -> None:
    """Also where its own set-up has fetched a kernel: somebody may want it to boot by that."""
    there = newer(tmp_path)
    publish(joining, tmp_path)
    own = machine.home / "agent" / "machine"
    machine.inside("rm", "-rf", str(own))
    mend = _foreign(joining)
    told = bring(machine)
    assert told["code"] == "IMAGE_UNTRUSTED"
    assert "none of these keys counts" in told["message"]
    assert not (own / "kernels").exists()
    mend()
    assert bring(machine)["version"] == there
