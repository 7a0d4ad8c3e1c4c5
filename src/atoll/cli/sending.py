"""What a step copies, on its way to control: files of the directory, archives, what a URL leads to, and what a Dockerfile holds itself."""

from __future__ import annotations

import bz2
import hashlib
import io
import lzma
import os
import posixpath
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit

import httpx

from atoll.base.errors import Code, Refused
from atoll.cli.context import Found, chosen, digest
from atoll.cli.dockerfile.reading import URLS
from atoll.cli.dockerfile.stages import Built, Copied, Mounted, Ran, Step

BYTES_MAX: Final = 8 << 30
TIMEOUT_S: Final = 60.0
GIT_S: Final = 600.0
_BZIP2, _XZ, _ZSTD = b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"
_PIECE: Final = 1 << 20
_MAGIC_BYTES: Final = 1 << 16
_COMMIT_DIGITS_MIN: Final = 7


@dataclass(frozen=True, slots=True)
class Parcel:
    """One archive to be sent. `word` and `source`: as the step says it then; `write`: puts the bytes into a file."""

    word: str
    source: str
    files_hash: str
    names: int
    write: Callable[[IO[bytes]], None]


def check(context: Path, built: Built, ignored: Callable[[str], bool]) -> None:
    """*Errors*: Refused INVALID_REQUEST, with the line, when a step copies what the directory does not have."""
    for stage in built.stages:
        for step in stage.steps:
            for one in _taken(step):
                if one.origin is None and one.content is None and not one.git and not one.source.startswith(URLS):
                    with _at(one):
                        next(_found(context, one, ignored))


def _taken(step: Step) -> Iterator[Copied]:
    if isinstance(step, Copied):
        yield step
    elif isinstance(step, Ran):
        yield from (as_copied(one) for one in step.mounts if one.kind == "files" and one.source is not None)


def as_copied(one: Mounted) -> Copied:
    """What a RUN mounts of the directory or of another stage, as what would copy it."""
    return Copied(one.source or ".", one.target, "", "", one.line, "RUN --mount", one.origin)


@contextmanager
def _at(one: Copied) -> Iterator[None]:
    try:
        yield
    except Refused as error:
        if not one.line or error.message.startswith("line "):
            raise
        raise Refused(error.code, f"line {one.line}: {error.message}", hint=error.hint) from error


@contextmanager
def parcel(context: Path, one: Copied, ignored: Callable[[str], bool]) -> Iterator[Parcel]:
    """What is to be sent for a step. *Errors*: Refused INVALID_REQUEST, with the line."""
    with _at(one):
        if one.git:
            with repository(one) as (place, commit):
                yield _repository(one, place, commit)
        elif one.content is not None:
            yield _alone(one, one.source, io.BytesIO(one.content.encode()), mode=0o644)
        elif one.source.startswith(URLS):
            with tempfile.TemporaryFile() as file:
                name = _download(one, file)
                yield _alone(one, name, file, mode=0o600)
        else:
            yield _local(context, one, ignored)


def _local(context: Path, one: Copied, ignored: Callable[[str], bool]) -> Parcel:
    files = list(_found(context, one, ignored))
    if one.word == "ADD" and len(files) == 1 and files[0].path.is_file() and not files[0].path.is_symlink() and is_archive(files[0].path):
        return _archive(files[0].path, one)

    def write(target: IO[bytes]) -> None:
        with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as tar:
            for name, path in files:
                tar.add(path, arcname=name, recursive=False)

    return Parcel("COPY", one.source, digest(files, one), len(files), write)


def _found(context: Path, one: Copied, ignored: Callable[[str], bool]) -> Iterator[Found]:
    """*Errors*: Refused INVALID_REQUEST when there is nothing."""
    files = chosen(context, one.source, ignored=ignored, excluded=one.excluded)
    first = next(files, None)
    if first is None:
        raise Refused(Code.INVALID_REQUEST, f"{one.word} {one.source}: {context} has nothing of that name")
    yield first
    yield from files


def _alone(one: Copied, name: str, content: IO[bytes], *, mode: int) -> Parcel:
    """A file that is in no directory."""
    content.seek(0)
    found = hashlib.sha256()
    for piece in iter(lambda: content.read(_PIECE), b""):
        found.update(piece)
    if one.checksum and one.checksum != f"sha256:{found.hexdigest()}":
        raise Refused(Code.INVALID_REQUEST, f"what {one.source[:200]} leads to is sha256:{found.hexdigest()}, not {one.checksum[:80]}")
    size = content.seek(0, io.SEEK_END)

    def write(target: IO[bytes]) -> None:
        content.seek(0)
        with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as tar:
            info = tarfile.TarInfo(name)
            info.size, info.mode = size, mode
            tar.addfile(info, content)

    return Parcel("COPY", name, hashlib.sha256(repr((name, one.target, mode, found.digest())).encode()).hexdigest(), 1, write)


def _download(one: Copied, file: IO[bytes]) -> str:
    """The name of what a URL leads to."""
    name = posixpath.basename(urlsplit(one.source).path)
    if not name:
        if one.target.endswith("/"):
            raise Refused(
                Code.INVALID_REQUEST, f"{one.source[:200]} names no file", hint="Say as which file it is kept, not in which directory."
            )
        name = posixpath.basename(one.target)
    taken = 0
    try:
        with httpx.stream("GET", one.source, follow_redirects=True, timeout=TIMEOUT_S) as answer:
            if answer.status_code != httpx.codes.OK:
                raise Refused(Code.INVALID_REQUEST, f"{one.source[:200]} answers with status {answer.status_code}")
            for part in answer.iter_bytes():
                taken += len(part)
                if taken > BYTES_MAX:
                    raise Refused(Code.BODY_TOO_LARGE, f"{one.source[:200]} has more than {BYTES_MAX} bytes")
                file.write(part)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Refused(Code.INVALID_REQUEST, f"{one.source[:200]} cannot be read: {error}") from error
    return name


def is_archive(path: Path) -> bool:
    """Whether ADD unpacks it: a tar, as it is or compressed. *Errors*: Refused INVALID_REQUEST of one that would be, and cannot."""
    with path.open("rb") as file:
        zstd = file.read(4) == _ZSTD
    try:
        if not zstd:
            return tarfile.is_tarfile(path)
        with unpacked(path, _MAGIC_BYTES) as begins:
            return _is_tar(begins)
    except (EOFError, OSError, lzma.LZMAError, ValueError):
        return False


def _is_tar(file: IO[bytes]) -> bool:
    """By its first header, where only its beginning is at hand."""
    try:
        tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


@contextmanager
def unpacked(path: Path, first: int | None = None) -> Iterator[IO[bytes]]:
    """What a file of zstd holds, or so many bytes of its beginning, by the program of that name. *Errors*: Refused INVALID_REQUEST."""
    if shutil.which("zstd") is None:
        message = f"ADD {path.name}: the program zstd is needed to unpack it, and is not here"
        raise Refused(Code.INVALID_REQUEST, message, hint="Install zstd, compress it with gzip or xz, or COPY it.")
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as said:
        with subprocess.Popen(["zstd", "-dcq", "--", str(path)], stdout=subprocess.PIPE, stderr=said) as program:
            assert program.stdout is not None
            left = BYTES_MAX + 1 if first is None else first
            while left > 0 and (piece := program.stdout.read(min(_PIECE, left))):
                left -= len(piece)
                file.write(piece)
            cut = left <= 0
            program.stdout.close()
            if cut:
                program.kill()
        if not cut and program.returncode != 0:
            said.seek(0)
            raise Refused(Code.INVALID_REQUEST, f"the archive {path.name} is broken: {said.read(300).decode(errors='replace').strip()}")
        if cut and first is None:
            raise Refused(Code.INVALID_REQUEST, f"{path.name} unpacks to more than {BYTES_MAX} bytes")
        file.seek(0)
        yield file


@contextmanager
def repository(one: Copied) -> Iterator[tuple[Path, str]]:
    """A clone of a git repository at what was asked for, and the commit that it is. *Errors*: Refused INVALID_REQUEST."""
    address, _, fragment = one.source.partition("#")
    reference, _, below = fragment.partition(":")
    if shutil.which("git") is None:
        raise Refused(Code.INVALID_REQUEST, f"ADD {address[:200]}: the program git is needed, and is not here")
    with tempfile.TemporaryDirectory() as place:
        _git(place, one, "init", "--quiet")
        _git(place, one, "fetch", "--quiet", "--depth", "1", "--end-of-options", address, reference or "HEAD")
        _git(place, one, "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD")
        if Path(place, ".gitmodules").exists():
            _git(place, one, "submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1")
        commit = _git(place, one, "rev-parse", "HEAD").strip()
        if one.checksum and not (len(one.checksum) >= _COMMIT_DIGITS_MIN and commit.startswith(one.checksum.lower())):
            raise Refused(Code.INVALID_REQUEST, f"what {one.source[:200]} leads to is commit {commit}, not {one.checksum[:80]}")
        inside = Path(place, posixpath.normpath(f"/{below}").lstrip("/"))
        if not inside.is_dir() or not inside.resolve().is_relative_to(Path(place).resolve()):
            raise Refused(Code.INVALID_REQUEST, f"{one.source[:200]} has no directory {below[:200]!r}")
        yield inside, commit


def _git(place: str, one: Copied, *words: str) -> str:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:http:ssh:git", "LC_ALL": "C"}
    try:
        ran = subprocess.run(
            ["git", "-C", place, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=GIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Refused(Code.INVALID_REQUEST, f"{one.source[:200]} was not there within {GIT_S} s") from error
    if ran.returncode != 0:
        raise Refused(
            Code.INVALID_REQUEST,
            f"{one.source[:200]} cannot be had: {ran.stderr.strip().splitlines()[-1][:300] if ran.stderr.strip() else 'git failed'}",
        )
    return ran.stdout


def _repository(one: Copied, place: Path, commit: str) -> Parcel:
    def kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = info.name.split("/")
        # Whoever cloned it here is nobody there; times are those of the clone.
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return None if ".git" in parts and not one.keep_git else info

    def write(target: IO[bytes]) -> None:
        with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as tar:
            for path in sorted(place.iterdir()):
                tar.add(path, arcname=path.name, filter=kept)

    names = sum(1 for path in place.rglob("*") if one.keep_git or ".git" not in path.relative_to(place).parts)
    said = ("GIT", one.target, commit, one.source.partition("#")[2].partition(":")[2], one.keep_git)
    return Parcel("COPY", ".", hashlib.sha256(repr(said).encode()).hexdigest(), names, write)


def _archive(path: Path, one: Copied) -> Parcel:
    names = check_archive(path)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").digest()

    def write(target: IO[bytes]) -> None:
        with path.open("rb") as file:
            begins = file.read(8)
            file.seek(0)
            opened: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {_BZIP2: bz2.open, _XZ: lzma.open}
            if begins.startswith(_ZSTD):
                with unpacked(path) as plain:
                    shutil.copyfileobj(plain, target, _PIECE)
                return
            unpack = next((opened[magic] for magic in opened if begins.startswith(magic)), None)
            # What builds unpack with knows gzip and nothing else everywhere.
            shutil.copyfileobj(file if unpack is None else unpack(file), target, _PIECE)

    return Parcel("ADD", path.name, hashlib.sha256(repr(("ADD", one.target, found)).encode()).hexdigest(), names, write)


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    with path.open("rb") as file:
        zstd = file.read(4) == _ZSTD
    if zstd:
        with unpacked(path) as plain, tarfile.open(fileobj=plain, mode="r:") as tar:
            yield tar
    else:
        with tarfile.open(path) as tar:
            yield tar


def check_archive(path: Path) -> int:
    """How many names an archive has. *Errors*: Refused INVALID_REQUEST of one that is broken, or would write where it was not asked to."""
    links: set[str] = set()
    count = size = 0
    try:
        with _opened(path) as tar:
            for member in tar:
                count, size = count + 1, size + member.size
                name = posixpath.normpath(member.name)
                _check_member(path.name, member, name, links)
                if size > BYTES_MAX:
                    raise Refused(Code.INVALID_REQUEST, f"{path.name} unpacks to more than {BYTES_MAX} bytes")
                if member.issym():
                    links.add(name)
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, ValueError) as error:
        raise Refused(Code.INVALID_REQUEST, f"the archive {path.name} is broken: {error}") from error
    return count


def _check_member(archive: str, member: tarfile.TarInfo, name: str, links: set[str]) -> None:
    for one in (name, posixpath.normpath(member.linkname)) if member.islnk() else (name,):
        if one.startswith(("/", "../")) or one == "..":
            raise Refused(Code.INVALID_REQUEST, f"{archive} has {one[:200]!r}, which leads out of where it is unpacked")
    if member.ischr() or member.isblk():
        raise Refused(Code.INVALID_REQUEST, f"{archive} has the device {name[:200]!r}: a sandbox has its own")
    parts = name.split("/")
    if any("/".join(parts[:end]) in links for end in range(1, len(parts))):
        raise Refused(Code.INVALID_REQUEST, f"{archive} has {name[:200]!r} behind a link of its own")
