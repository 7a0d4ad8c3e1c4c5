"""Cases about layers: what a guest has written is handed out, all of it and nothing else."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from pathlib import Path

from atoll.base.errors import Code
from atoll.drivers.port import Change, Order, Power
from atoll.testing.conformance.stand import Stand, refusal, shell


async def _written(stand: Stand, order: Order, script: str) -> None:
    await stand.driver.prepare(order)
    guest = await stand.guest(order, await stand.driver.start(order))
    done = await shell(guest, script)
    assert done.status == 0, done


async def _captured(stand: Stand, order: Order, directory: str) -> tuple[Change, dict[str, tarfile.TarInfo]]:
    target = Path(directory) / "layer.tar"
    change = await stand.driver.capture(order.placement_id, target)
    content = target.read_bytes()
    assert change.size == len(content)
    assert change.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
    with tarfile.open(target) as archive:
        return change, {member.name: member for member in archive}


async def a_layer_holds_what_the_guest_wrote(stand: Stand) -> None:
    order = stand.order(tmp_on_disk=True)
    await _written(
        stand,
        order,
        "set -e; umask 022; mkdir -p /opt/new/deep; echo content >/opt/new/file; chown 1234:1235 /opt/new/file; chmod 4750 /opt/new/file; "
        "ln /opt/new/file /opt/new/same; ln -s file /opt/new/link; mkfifo /opt/new/pipe; "
        "rm -r /etc/skel; mkdir /etc/skel; echo fresh >/etc/skel/only; rm /etc/issue; echo more >>/etc/passwd; "
        "echo kept >/tmp/left-for-later; echo lost >/run/lost; echo changed >>/etc/hosts",
    )
    with tempfile.TemporaryDirectory() as directory:
        change, found = await _captured(stand, order, directory)
        with tarfile.open(Path(directory) / "layer.tar") as archive:
            passwd = archive.extractfile("etc/passwd")
            assert passwd is not None
            assert passwd.read().endswith(b"more\n")
    assert change.entries == len([name for name in found if name != "."])
    regular = found["opt/new/file"] if found["opt/new/file"].isreg() else found["opt/new/same"]
    linked = found["opt/new/same"] if found["opt/new/file"].isreg() else found["opt/new/file"]
    assert (regular.mode, regular.uid, regular.gid, regular.size) == (0o4750, 1234, 1235, 8)
    assert linked.islnk()
    assert linked.linkname == regular.name
    assert (found["opt/new/link"].issym(), found["opt/new/link"].linkname) == (True, "file")
    assert found["opt/new/pipe"].isfifo()
    assert found["opt/new/deep"].isdir()
    assert "etc/skel/.wh..wh..opq" in found or any(name.startswith("etc/skel/.wh.") for name in found), "what was there shows through"
    assert "etc/.wh.issue" in found
    assert "tmp/left-for-later" in found
    outside = [name for name in found if name.split("/")[0] in ("proc", "sys", "dev", "run", ".atoll") or name.startswith("tmp/.atoll")]
    assert not outside
    assert not {"etc/hosts", "etc/resolv.conf", "etc/hostname"} & found.keys()
    await stand.driver.remove(order.placement_id)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.ABSENT
    assert not stand.traces(order)
    assert order.placement_id not in [placement_id for placement_id, _ in stand.exits], "a capture was told as the guest's own end"


async def what_was_not_touched_is_in_no_layer(stand: Stand) -> None:
    order = stand.order()
    await _written(stand, order, "cat /etc/passwd >/dev/null; ls -lR /usr/lib >/dev/null; true")
    with tempfile.TemporaryDirectory() as directory:
        _, found = await _captured(stand, order, directory)
    assert not [name for name, member in found.items() if not member.isdir()], found.keys()
    await stand.driver.remove(order.placement_id)


async def of_nothing_there_is_no_layer(stand: Stand) -> None:
    order = stand.order()
    with tempfile.TemporaryDirectory() as directory:
        error = await refusal(stand.driver.capture(order.placement_id, Path(directory) / "layer.tar"))
        assert error.code is Code.PLACEMENT_LOST, error
        assert not list(Path(directory).iterdir()), "half a layer is left"
