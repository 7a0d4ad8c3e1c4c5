"""`cp`: one file as it is, a directory as a tar archive; never out of the directory that was named."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, cast

from atoll.base.errors import AtollError, Code, Refused
from atoll.cli.unpacking import unpack
from atoll.client.guest import Ended, Guest, Output

CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied, and where it is now."""

    target: str
    size_bytes: int


def upload(guest: Guest, source: str, target: str, *, user: str | None = None, quiet: bool = False) -> Copied:
    """Copy a local file or directory into the sandbox. *Errors*: Refused INVALID_REQUEST when there is no such source."""
    local = Path(source)
    if not local.exists():
        raise Refused(Code.INVALID_REQUEST, f"there is no {source} here", hint="Look at the source path.")
    place = _remote_place(guest, target, local.absolute().name, user=user)
    if local.is_dir():
        return _upload_directory(guest, local, place, user=user, quiet=quiet)
    size = local.stat().st_size
    with local.open("rb") as file, _progress(f"{local.name} →", size, quiet=quiet) as advance:
        guest.write(place, _counted(_pieces(file), advance), user=user, size=size)
    return Copied(f"{guest.sandbox_id}:{place}", size)


def download(guest: Guest, source: str, target: str, *, user: str | None = None, quiet: bool = False) -> Copied:
    """Copy a file or directory out of the sandbox. *Errors*: Refused INVALID_REQUEST when there is no such source."""
    entry = guest.stat(source, user=user)
    if entry is None:
        raise Refused(Code.INVALID_REQUEST, f"there is no {source} in {guest.sandbox_id}", hint="Look at the source path.")
    name = PurePosixPath(str(entry.get("path") or source)).name or "root"
    local = Path(target)
    if local.is_dir() or target.endswith("/"):
        local = local / name
    if str(entry.get("type", "")).endswith("DIRECTORY"):
        return _download_directory(guest, source, local, user=user, quiet=quiet)
    local.parent.mkdir(parents=True, exist_ok=True)
    with guest.read(source, user=user) as (size, data), _progress(f"{name} ←", size, quiet=quiet) as advance:
        written = _write_whole(local, _counted(data, advance), expected=size)
    return Copied(str(local), written)


def _remote_place(guest: Guest, target: str, name: str, *, user: str | None) -> str:
    if target.endswith("/"):
        return target + name
    entry = guest.stat(target, user=user)
    if entry is not None and str(entry.get("type", "")).endswith("DIRECTORY"):
        return f"{target}/{name}"
    return target


def _write_whole(path: Path, data: Iterable[bytes], *, expected: int | None) -> int:
    """Under another name first: a copy that broke off must not look whole."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    written = 0
    try:
        with temporary.open("wb") as file:
            for piece in data:
                file.write(piece)
                written += len(piece)
        if expected is not None and written != expected:
            raise Refused(Code.OUTCOME_UNKNOWN, f"only {written} of {expected} bytes came", hint="Copy it again.")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return written


def _upload_directory(guest: Guest, local: Path, place: str, *, user: str | None, quiet: bool) -> Copied:
    remote = f"/tmp/.atoll-cp-{secrets.token_hex(8)}.tar"  # noqa: S108 - inside the sandbox, with a name nobody can guess
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(local, arcname=".")
        size = archive.tell()
        archive.seek(0)
        with _progress(f"{local.name}/ →", size, quiet=quiet) as advance:
            guest.write(remote, _counted(_pieces(cast("IO[bytes]", archive)), advance), user=user, size=size)
    try:
        unpack = f"mkdir -p -- {shlex.quote(place)} && tar -xf {remote} --no-same-owner -C {shlex.quote(place)}"
        result = guest.run(["/bin/sh", "-c", unpack], user=user, timeout_s=None)
    finally:
        guest.run(["/bin/rm", "-f", remote], user=user)
    if result.exit_code != 0:
        raise Refused(
            Code.INVALID_REQUEST,
            f"unpacking in the sandbox failed: {result.stderr.decode(errors='replace').strip()[:300]}",
            hint="See above.",
        )
    return Copied(f"{guest.sandbox_id}:{place}", size)


def _download_directory(guest: Guest, source: str, local: Path, *, user: str | None, quiet: bool) -> Copied:
    local.mkdir(parents=True, exist_ok=True)
    with (
        guest.start(["/bin/tar", "-cf", "-", "-C", source, "."], user=user) as events,
        _progress(f"{local.name}/ ←", None, quiet=quiet) as advance,
    ):
        stream = _TarStream(events, advance)
        try:
            left_out = unpack(cast("IO[bytes]", stream), local)
        except tarfile.TarError as error:
            raise _tar_failed(source, stream, error) from error
        stream.drain()
    if stream.exit_code != 0:
        raise _tar_failed(source, stream, None)
    for name in left_out:
        print(f"left out (no file, directory or link): {name}", file=sys.stderr)
    return Copied(str(local), stream.size_bytes)


def _tar_failed(source: str, stream: _TarStream, error: Exception | None) -> AtollError:
    stream.drain()
    words = bytes(stream.errors).decode(errors="replace").strip()[:300] or str(error or f"status {stream.exit_code}")
    return Refused(
        Code.INVALID_REQUEST, f"packing {source} in the sandbox failed: {words}", hint="Look at the source path and its permissions."
    )


class _TarStream:
    """The output of a command as a file to read."""

    def __init__(self, events: Iterable[Any], advance: Any) -> None:
        self._events = iter(events)
        self._advance = advance
        self._waiting = bytearray()
        self.errors = bytearray()
        self.size_bytes = 0
        self.exit_code: int | None = None

    def read(self, size: int) -> bytes:
        while len(self._waiting) < size and self.exit_code is None:
            self._step()
        data = bytes(self._waiting[:size])
        del self._waiting[:size]
        return data

    def drain(self) -> None:
        while self.exit_code is None:
            self._step()
            self._waiting.clear()

    def _step(self) -> None:
        match next(self._events, None):
            case Output(stream="stderr", data=data):
                self.errors += data[:4096]
            case Output(data=data):
                self._waiting += data
                self.size_bytes += len(data)
                self._advance(len(data))
            case Ended(exit_code=code):
                self.exit_code = code
            case None:
                self.exit_code = -1
            case _:
                pass


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(CHUNK_BYTES):
        yield data


def _counted(data: Iterable[bytes], advance: Any) -> Iterator[bytes]:
    for piece in data:
        advance(len(piece))
        yield piece


@contextmanager
def _progress(label: str, size: int | None, *, quiet: bool) -> Iterator[Any]:
    """A bar on standard error, where that is a terminal."""
    if quiet or not os.isatty(2):
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=size)
        yield lambda count: bar.update(task, advance=count)
