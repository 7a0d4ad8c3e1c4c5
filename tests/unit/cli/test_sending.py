"""What a step copies, on its way to control: archives that ADD unpacks and those that it refuses, files of the Dockerfile itself, and URLs."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.base.errors import Refused
from atoll.cli import sending
from atoll.cli.context import ignoring
from atoll.cli.dockerfile.reading import read
from atoll.cli.dockerfile.stages import Copied
from atoll.cli.sending import Parcel, parcel

ADD = Copied("a.tar", "/opt/", "", "", line=7, word="ADD")


def sent(context: Path, one: Copied) -> tuple[Parcel, bytes]:
    target = io.BytesIO()
    with parcel(context, one, ignoring(context)) as found:
        found.write(target)
    return found, target.getvalue()


def packed(*members: tuple[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda _: None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.uid = len(content), 12
            change(info)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


PLAIN = packed(("one", b"1"), ("two/three", b"23"))


def zstd(content: bytes) -> bytes:
    return subprocess.run(["zstd", "-qc"], input=content, capture_output=True, check=True).stdout


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress, zstd], ids=["tar", "gz", "bz2", "xz", "zstd"])
def test_archives_are_sent_as_every_image_can_unpack_them(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.tar").write_bytes(compress(PLAIN))
    found, content = sent(tmp_path, ADD)
    assert (found.word, found.source, found.names) == ("ADD", "a.tar", 2)
    assert (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content) == PLAIN
    assert sent(tmp_path, replace(ADD, target="/srv/"))[0].files_hash != found.files_hash
    # To a COPY it is a file like any other.
    copied, _ = sent(tmp_path, replace(ADD, word="COPY"))
    assert (copied.word, copied.source) == ("COPY", "a.tar")


def test_zstd_that_holds_no_tar_is_copied_and_a_hostile_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar").write_bytes(zstd(b"no tar" * 1000))
    assert sent(tmp_path, ADD)[0].word == "COPY"
    (tmp_path / "a.tar").write_bytes(zstd(packed(("../up", b""))))
    with pytest.raises(Refused, match="leads out"):
        sent(tmp_path, ADD)
    (tmp_path / "a.tar").write_bytes(zstd(packed(("zeros", b"\0" * (1 << 20)))))
    monkeypatch.setattr(sending, "BYTES_MAX", 4096)
    with pytest.raises(Refused, match="unpacks to more than 4096 bytes"):
        sent(tmp_path, ADD)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match=r"line 7: ADD a\.tar: the program zstd is needed"):
        sent(tmp_path, ADD)


@pytest.fixture
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A git repository's address, and its first commit."""
    root = tmp_path_factory.mktemp("git")
    place = root / "app.git"

    def git(*words: str) -> str:
        who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
        ran = subprocess.run(["git", "-C", str(place), *words], env={**os.environ, **who}, capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    (place / "sub").mkdir(parents=True)
    (place / "sub" / "file").write_text("one")
    git("init", "--quiet", "--initial-branch", "main")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    first = git("rev-parse", "HEAD")
    git("tag", "v1")
    (place / "sub" / "file").write_text("two")
    git("commit", "--quiet", "-am", "two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["git", "daemon", "--export-all", "--reuseaddr", f"--base-path={root}", "--listen=127.0.0.1", f"--port={port}", str(root)]
    # A session of its own: the program that serves is a child of this one.
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    for _ in range(200):
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"git://127.0.0.1:{port}/app.git", first
    os.killpg(daemon.pid, signal.SIGKILL)
    daemon.wait()


def test_a_repository_comes_at_what_was_asked_for(tmp_path: Path, repository: tuple[str, str]) -> None:
    address, first = repository

    def names(source: str, **more: Any) -> tuple[Parcel, dict[str, bytes]]:
        found, content = sent(tmp_path, replace(ADD, source=source, git=True, **more))
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            assert {info.uid for info in tar.getmembers()} == {0}
            return found, {info.name: tar.extractfile(info).read() for info in tar.getmembers() if info.isfile()}  # type: ignore[union-attr]

    newest, files = names(address)
    assert (newest.word, newest.source, files) == ("COPY", ".", {"sub/file": b"two"})
    assert names(f"{address}#v1")[1] == {"sub/file": b"one"}
    assert names(f"{address}#v1:sub")[1] == {"file": b"one"}
    assert names(f"{address}#v1", checksum=first)[0].files_hash == names(f"{address}#v1")[0].files_hash
    assert ".git/HEAD" in names(address, keep_git=True)[1]
    for source, more, words in (
        (f"{address}#nothere", {}, "cannot be had"), (f"{address}#:nothere", {}, "has no directory"), (f"{address}#:../..", {}, ""),
        (address, {"checksum": first}, "not " + first), ("git://127.0.0.1:9/x.git", {}, "cannot be had"),
        ("git@-oProxyCommand=touch:x", {}, "cannot be had"), ("ssh://-oProxyCommand=touch/x", {}, "cannot be had"),
    ):  # fmt: skip
        if words:
            with pytest.raises(Refused, match=f"line 7: .*{words}"):
                sent(tmp_path, replace(ADD, source=source, git=True, **more))
        else:
            assert names(source)[1] == {"sub/file": b"two"}, "above its root there is nothing"


def test_what_is_no_archive_is_copied(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_text("only called so")
    assert sent(tmp_path, ADD)[0].word == "COPY"
    (tmp_path / "a.tar").write_bytes(gzip.compress(b"no tar"))
    assert sent(tmp_path, ADD)[0].word == "COPY"


def _link(info: tarfile.TarInfo, kind: bytes, to: str) -> None:
    info.type, info.linkname, info.size = kind, to, 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (packed(("../up", b"")), "'../up', which leads out"),
        (packed(("a/../../up", b"")), "'../up', which leads out"),
        (packed(("/etc/passwd", b"")), "'/etc/passwd', which leads out"),
        (packed(("hard", b""), change=lambda info: _link(info, tarfile.LNKTYPE, "/etc/shadow")), "'/etc/shadow', which leads out"),
        (packed(("hard", b""), change=lambda info: _link(info, tarfile.LNKTYPE, "../x")), "'../x', which leads out"),
        (packed(("disk", b""), change=lambda info: _link(info, tarfile.BLKTYPE, "")), "the device 'disk'"),
        (
            packed(("out", b""), ("out/x", b""), change=lambda info: _link(info, tarfile.SYMTYPE, "/etc") if info.name == "out" else None),
            "'out/x' behind a link",
        ),
        (gzip.compress(packed(("one", b"1" * 9000)))[:-30], "is broken"),
        (b"\x28\xb5\x2f\xfd....", "a.tar is broken"),
    ],
    ids=["up", "up again", "absolute", "hard link", "hard link up", "device", "behind a link", "cut", "zstd"],
)
def test_hostile_and_broken_archives_are_refused_with_their_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(Refused, match=words) as refused:
        sent(tmp_path, ADD)
    assert refused.value.message.startswith("line 7: ")


def test_more_than_fits_is_refused_before_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "BYTES_MAX", 2)
    (tmp_path / "a.tar").write_bytes(PLAIN)
    with pytest.raises(Refused, match="unpacks to more than 2 bytes"):
        sent(tmp_path, ADD)


def test_what_stands_in_the_dockerfile_is_a_file(tmp_path: Path) -> None:
    found, content = sent(tmp_path, Copied("note", "/opt/", "root", "", content="text\n"))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        (member,) = tar
        file = tar.extractfile(member)
        assert file is not None
        assert (member.name, member.mode, file.read()) == ("note", 0o644, b"text\n")
    assert found.word == "COPY"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404) if "missing" in request.url.path else httpx.Response(200, content=b"fetched")

    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(sending.httpx, "stream", client.stream)
    yield
    client.close()


@pytest.mark.usefixtures("web")
def test_what_a_url_leads_to_is_a_file_of_roots_alone(tmp_path: Path) -> None:
    url = replace(ADD, source="http://example.org/a/x.bin?query")
    found, content = sent(tmp_path, replace(url, checksum=f"sha256:{hashlib.sha256(b'fetched').hexdigest()}"))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert [(member.name, member.mode) for member in tar] == [("x.bin", 0o600)]
    assert (found.word, found.source) == ("COPY", "x.bin")
    assert sent(tmp_path, replace(url, source="http://example.org/", target="/opt/name"))[0].source == "name"


@pytest.mark.usefixtures("web")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checksum": "sha256:00"}, "leads to is sha256:"),
        ({"source": "http://example.org/missing"}, "status 404"),
        ({"source": "http://example.org/"}, "names no file"),
    ],
)
def test_what_a_url_does_not_lead_to(tmp_path: Path, change: dict[str, str], words: str) -> None:
    with pytest.raises(Refused, match=f"line 7: .*{words}"):
        sent(tmp_path, replace(ADD, **{"source": "http://example.org/x", **change}))


def test_a_link_that_is_asked_for_is_sent_as_what_it_leads_to(tmp_path: Path) -> None:
    """As Docker has it: the link alone would lead nowhere where it is copied to."""
    (tmp_path / "real").write_text("content")
    (tmp_path / "link").symlink_to("real")
    found, content = sent(tmp_path, Copied("link", "/opt/", "root", ""))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        (member,) = tar.getmembers()
        file = tar.extractfile(member)
        assert file is not None
        assert (member.name, member.isreg(), file.read()) == ("link", True, b"content")
    (tmp_path / "real").write_text("changed")
    assert sent(tmp_path, Copied("link", "/opt/", "root", ""))[0].files_hash != found.files_hash


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("FROM a\nCOPY here /x\nCOPY *.gone /x/", 3),
        ("FROM a\nADD ignored /x", 2),
        ("FROM a AS one\nCOPY gone /x\nFROM b\nCOPY --from=one /x /x", 2),
        ("FROM a\nRUN --mount=type=bind,source=gone,target=/x true", 2),
    ],
)
def test_what_is_not_there_is_said_before_control_hears_of_a_build(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "here").write_text("1")
    (tmp_path / "ignored").write_text("1")
    (tmp_path / ".dockerignore").write_text("ignored\n")
    with pytest.raises(Refused) as refused:
        sending.check(tmp_path, read(text, {}), ignoring(tmp_path))
    assert refused.value.message.startswith(f"line {line}: ")
    assert refused.value.message.endswith("has nothing of that name")


def test_what_comes_from_elsewhere_is_not_looked_for_in_the_directory(tmp_path: Path) -> None:
    text = "FROM a AS one\nFROM b\nCOPY --from=one /x /x\nADD http://127.0.0.1:1/x /x\nCOPY <<EOF /y\nz\nEOF\nRUN --mount=type=cache,target=/x true"
    sending.check(tmp_path, read(text, {}), ignoring(tmp_path))
