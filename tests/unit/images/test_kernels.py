"""Kernels are looked at before they are used; their first file system is an archive that the kernel can read."""

import hashlib
import json
import os
import stat

import pytest

from atoll.base.errors import Code, Refused
from atoll.images import kernels


def make(cache, **files):
    """A kernel of these files in a cache."""
    directory = cache / "kernels" / "1.2-cloud"
    (directory / "modules").mkdir(parents=True)
    about = {}
    for name, content in files.items():
        path = directory / name.replace("__", "/")
        path.write_bytes(content)
        about[str(path.relative_to(directory))] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps({"version": "1.2-cloud", "arch": "x86_64", "files": about}))
    (cache / "kernels" / "current").symlink_to("1.2-cloud")
    return directory


def entries(archive):
    """Read a cpio archive as the kernel does: (name, mode, device, content)."""
    found, offset = [], 0
    while True:
        head = archive[offset : offset + 110]
        assert head[:6] == b"070701"
        fields = [int(head[6 + 8 * place : 14 + 8 * place], 16) for place in range(13)]
        size, name_size = fields[6], fields[11]
        name = archive[offset + 110 : offset + 110 + name_size - 1].decode()
        start = offset + (110 + name_size + 3) // 4 * 4
        if name == "TRAILER!!!":
            return found
        found.append((name, fields[1], (fields[9], fields[10]), archive[start : start + size]))
        offset = start + (size + 3) // 4 * 4


def test_a_kernel_is_found_with_its_modules_in_order(tmp_path):
    make(tmp_path, vmlinuz=b"kernel", **{"modules__01-b.ko": b"b", "modules__00-a.ko": b"a"})
    found = kernels.look_up(tmp_path)
    assert (found.version, found.image.read_bytes()) == ("1.2-cloud", b"kernel")
    assert [path.name for path in found.modules] == ["00-a.ko", "01-b.ko"]


def test_without_a_kernel_it_is_said(tmp_path):
    with pytest.raises(Refused) as refused:
        kernels.look_up(tmp_path)
    assert refused.value.code is Code.IMAGE_UNAVAILABLE


@pytest.mark.parametrize("name", ["vmlinuz", "modules/00-a.ko"])
@pytest.mark.parametrize("content", [b"other!", b"short", None])
def test_what_was_changed_is_refused(tmp_path, name, content):
    directory = make(tmp_path, vmlinuz=b"kernel", **{"modules__00-a.ko": b"module"})
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_bytes(content)
    with pytest.raises(Refused) as refused:
        kernels.look_up(tmp_path)
    assert refused.value.code is Code.IMAGE_CORRUPT


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"version": "1", "files": []}', '{"version": "1", "files": {}}'])
def test_a_manifest_that_is_none_is_refused(tmp_path, manifest):
    (make(tmp_path, vmlinuz=b"kernel") / "manifest.json").write_text(manifest)
    with pytest.raises(Refused) as refused:
        kernels.look_up(tmp_path)
    assert refused.value.code is Code.IMAGE_CORRUPT


def test_the_first_file_system_holds_the_guest_and_the_modules(tmp_path):
    make(tmp_path, vmlinuz=b"kernel", **{"modules__00-a.ko": b"module", "modules__01-b.ko": b"more"})
    guest = tmp_path / "guest"
    guest.write_bytes(b"program")
    kernel = kernels.look_up(tmp_path)
    usual = os.umask(0o077)
    try:
        file = kernels.first_files(kernel, guest, tmp_path)
    finally:
        os.umask(usual)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644, "machines have users of their own"
    found = {name: (mode, device, content) for name, mode, device, content in entries(file.read_bytes())}
    assert found["init"] == (stat.S_IFREG | 0o755, (0, 0), b"program")
    assert [content for name, (_, _, content) in found.items() if name.startswith("modules/")] == [b"module", b"more"]
    assert found["dev/console"][:2] == (stat.S_IFCHR | 0o600, (5, 1)), "the kernel gives init its output there"
    before = file.stat().st_mtime_ns
    assert kernels.first_files(kernel, guest, tmp_path) == file
    assert file.stat().st_mtime_ns == before
    guest.write_bytes(b"newer")
    assert kernels.first_files(kernel, guest, tmp_path) != file, "another guest, another file: machines that run keep theirs"
