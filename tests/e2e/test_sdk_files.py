"""Files through the unmodified SDK, in every form that it has, and signed URLs."""

from __future__ import annotations

import gzip
import io
import os
import time

import httpx
import pytest
from e2b import AuthenticationException, FileType, InvalidArgumentException, NotEnoughSpaceException, NotFoundException, SandboxException
from e2b.sandbox.filesystem.filesystem import WriteEntry

FULL = os.environ.get("ATOLL_TEST_MATRICES") == "full"
BIG = (64 if FULL else 12) << 20


@pytest.mark.parametrize("octets", [False, True])
@pytest.mark.parametrize("squeezed", [False, True])
def test_write_and_read(sandbox, directory, octets, squeezed) -> None:
    if squeezed and not octets:
        octets = None
    path = f"{directory}/a/b/file.txt"
    text = "first line\nžluťoučký 🐎\n"
    info = sandbox.files.write(path, text, gzip=squeezed, use_octet_stream=octets)
    assert (info.name, info.path, info.type) == ("file.txt", path, FileType.FILE)
    assert sandbox.files.read(path) == text
    assert sandbox.files.read(path, gzip=True) == text
    assert bytes(sandbox.files.read(path, format="bytes")) == text.encode()
    assert b"".join(sandbox.files.read(path, format="stream")) == text.encode()
    sandbox.files.write(path, "shorter", gzip=squeezed, use_octet_stream=octets)
    assert sandbox.files.read(path) == "shorter"
    assert sandbox.commands.run(f"stat -c %U:%G {path} {directory}/a").stdout == "user:user\nuser:user\n"


def test_empty_and_binary(sandbox, directory) -> None:
    for content in (b"", b"\0\xff\xfe" * 1000, bytes(range(256)) * 300):
        for octets in (False, True):
            sandbox.files.write(f"{directory}/bin", content, use_octet_stream=octets)
            assert bytes(sandbox.files.read(f"{directory}/bin", format="bytes")) == content


def test_sources_of_every_kind(sandbox, directory) -> None:
    sandbox.files.write(f"{directory}/io", io.BytesIO(b"from bytes io"))
    sandbox.files.write(f"{directory}/text", io.StringIO("from string io"))
    sandbox.files.write(f"{directory}/parts", (part for part in (b"one ", b"two ", b"three")))
    assert [sandbox.files.read(f"{directory}/{name}") for name in ("io", "text", "parts")] == [
        "from bytes io",
        "from string io",
        "one two three",
    ]


def test_large(sandbox, directory) -> None:
    block = os.urandom(1 << 20)

    def blocks():
        for _ in range(BIG >> 20):
            yield block

    sandbox.files.write(f"{directory}/large", blocks())
    size = 0
    for chunk in sandbox.files.read(f"{directory}/large", format="stream"):
        size += len(chunk)
    assert size == BIG
    assert sandbox.files.get_info(f"{directory}/large").size == BIG
    import hashlib

    digest = hashlib.sha256(block * (BIG >> 20)).hexdigest()
    assert sandbox.commands.run(f"sha256sum {directory}/large").stdout.split()[0] == digest


def test_many_at_once(sandbox, directory) -> None:
    entries = [WriteEntry(path=f"{directory}/many/{number}.txt", data=f"content {number}") for number in range(20)]
    written = sandbox.files.write_files(entries)
    assert [info.path for info in written] == [entry["path"] for entry in entries]
    assert sandbox.commands.run(f"cat {directory}/many/7.txt").stdout == "content 7"
    written = sandbox.files.write_files(entries[:3], use_octet_stream=True)
    assert len(written) == 3
    assert sandbox.files.write_files([]) == []


def test_relative_and_home_paths(sandbox) -> None:
    sandbox.files.write("relative.txt", "here")
    assert sandbox.files.get_info("relative.txt").path == "/home/user/relative.txt"
    assert sandbox.files.read("~/relative.txt") == "here"
    sandbox.files.write("relative.txt", "root's", user="root")
    assert sandbox.files.get_info("relative.txt", user="root").path == "/root/relative.txt"
    sandbox.files.remove("relative.txt")
    sandbox.files.remove("relative.txt", user="root")


def test_users(sandbox, directory) -> None:
    sandbox.files.write(f"{directory}/roots", "x", user="root")
    assert sandbox.files.get_info(f"{directory}/roots").owner == "root"
    with pytest.raises((AuthenticationException, InvalidArgumentException)):
        sandbox.files.write(f"{directory}/x", "x", user="nobody-here")


def test_info_list_exists(sandbox, directory) -> None:
    sandbox.files.write(f"{directory}/one.txt", "12345")
    sandbox.files.make_dir(f"{directory}/sub/deep")
    sandbox.commands.run(
        "chmod 640 one.txt; ln -s one.txt link; ln -s nowhere dangling; ln -s sub dirlink; touch sub/deep/leaf", cwd=directory
    )
    info = sandbox.files.get_info(f"{directory}/one.txt")
    assert (info.name, info.type, info.size, info.owner, info.group) == ("one.txt", FileType.FILE, 5, "user", "user")
    assert info.mode & 0o777 == 0o640
    assert info.permissions == "-rw-r-----"
    assert abs(info.modified_time.timestamp() - time.time()) < 60
    names = [entry.name for entry in sandbox.files.list(directory)]
    assert names == sorted(names)
    assert set(names) >= {"one.txt", "sub", "link", "dirlink"}
    by_name = {entry.name: entry for entry in sandbox.files.list(directory)}
    assert by_name["sub"].type is FileType.DIR
    assert by_name["link"].symlink_target == f"{directory}/one.txt"
    deep = {entry.path for entry in sandbox.files.list(directory, depth=3)}
    assert f"{directory}/sub/deep/leaf" in deep
    # A link to a directory is not followed.
    assert f"{directory}/dirlink/deep" not in deep
    assert f"{directory}/sub/deep" not in {entry.path for entry in sandbox.files.list(directory, depth=1)}
    assert sandbox.files.exists(f"{directory}/one.txt")
    assert sandbox.files.exists(directory)
    assert not sandbox.files.exists(f"{directory}/none")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list(directory, depth=0)
    with pytest.raises(NotFoundException):
        sandbox.files.list(f"{directory}/none")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list(f"{directory}/one.txt")


def test_directories_rename_remove(sandbox, directory) -> None:
    assert sandbox.files.make_dir(f"{directory}/d") is True
    assert sandbox.files.make_dir(f"{directory}/d") is False
    sandbox.files.write(f"{directory}/d/f", "x")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.make_dir(f"{directory}/d/f")
    moved = sandbox.files.rename(f"{directory}/d", f"{directory}/e")
    assert (moved.name, moved.path, moved.type) == ("e", f"{directory}/e", FileType.DIR)
    assert sandbox.files.read(f"{directory}/e/f") == "x"
    with pytest.raises(NotFoundException):
        sandbox.files.rename(f"{directory}/d", f"{directory}/z")
    sandbox.files.remove(f"{directory}/e")
    assert not sandbox.files.exists(f"{directory}/e")
    sandbox.files.remove(f"{directory}/e")


def test_failures(sandbox, directory) -> None:
    with pytest.raises(NotFoundException, match="does not exist"):
        sandbox.files.read(f"{directory}/none")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read(directory)
    with pytest.raises(SandboxException):
        sandbox.files.write(directory, "x")


def test_metadata(sandbox, directory) -> None:
    path = f"{directory}/tagged"
    written = sandbox.files.write(path, "x", metadata={"source": "test", "other": "2"})
    assert written.metadata == {"source": "test", "other": "2"}
    assert sandbox.files.get_info(path).metadata == {"source": "test", "other": "2"}
    sandbox.files.write(path, "x", use_octet_stream=True, metadata={"only": "this"})
    assert sandbox.files.get_info(path).metadata == {"only": "this"}
    listed = {entry.name: entry.metadata for entry in sandbox.files.list(directory)}
    assert listed["tagged"] == {"only": "this"}
    with pytest.raises(SandboxException):
        sandbox.files.write(path, "x", metadata={"big": "x" * 5000})


def test_a_full_disk_says_so(make) -> None:
    sandbox = make()
    size_mib = int(sandbox.commands.run("df -m --output=avail / | tail -1").stdout)
    sandbox.commands.run(f"head -c {max(1, size_mib - 8)}M /dev/zero > /home/user/filler", timeout=120)
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("/home/user/more", (b"x" * (1 << 20) for _ in range(64)))
    sandbox.commands.run("rm -f /home/user/filler /home/user/more")
    sandbox.files.write("/home/user/again", "fits")
    assert sandbox.files.read("/home/user/again") == "fits"


def test_signed_urls(sandbox, directory, product) -> None:
    path = f"{directory}/signed.txt"
    upload = sandbox.upload_url(path)
    assert upload.startswith(product.sandbox_url)
    sent = httpx.post(upload, files={"file": ("signed.txt", b"by url")}, timeout=30)
    assert sent.status_code == 200, sent.text
    assert sent.json() == [{"path": path, "name": "signed.txt", "type": "file"}]
    got = httpx.get(sandbox.download_url(path), timeout=30)
    assert (got.status_code, got.content) == (200, b"by url")
    limited = sandbox.download_url(path, use_signature_expiration=60)
    assert httpx.get(limited, timeout=30).content == b"by url"
    other = httpx.get(limited.replace("signed.txt", "other.txt"), timeout=30)
    assert other.status_code in (401, 404, 502)
    assert b"by url" not in other.content
    roots = sandbox.upload_url("/root/signed", user="root")
    assert httpx.post(roots, files={"file": ("signed", b"root's")}, timeout=30).status_code == 200
    assert sandbox.files.read("/root/signed", user="root") == "root's"


def test_a_signature_ends(sandbox, directory, product) -> None:
    path = f"{directory}/short.txt"
    sandbox.files.write(path, "x")
    url = sandbox.download_url(path, use_signature_expiration=1)
    time.sleep(2.1)
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    late = httpx.get(url, headers=headers, timeout=30)
    assert (late.status_code, late.json()) == (401, {"code": 401, "message": "signature is already expired"})
    forged = sandbox.download_url(path).replace("signature=v1_", "signature=v1_x")
    assert httpx.get(forged, headers=headers, timeout=30).status_code == 401


def test_compressed_transfers_are_what_they_say(sandbox, directory, product) -> None:
    path = f"{directory}/zip"
    content = b"a lot of the same " * 10_000
    sent = product.inside(
        sandbox,
        "POST",
        f"/files?path={path}",
        content=gzip.compress(content),
        headers={"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"},
    )
    assert sent.status_code == 200, sent.text
    assert bytes(sandbox.files.read(path, format="bytes")) == content
    plain = product.inside(sandbox, "GET", f"/files?path={path}", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert len(plain.content) == len(content)
    with httpx.stream(
        "GET",
        f"{product.sandbox_url}/files?path={path}",
        headers={
            "E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": sandbox._envd_access_token or "", "Accept-Encoding": "gzip",
        },
    ) as squeezed:  # fmt: skip
        assert squeezed.headers["content-encoding"] == "gzip"
        assert len(b"".join(squeezed.iter_raw())) < len(content) / 10
