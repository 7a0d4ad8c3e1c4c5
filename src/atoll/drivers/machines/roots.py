"""An image's tree as one file that machines have as a disk: a read-only erofs, made once beside the tree, and looked at before it is used.

`DIRECTORY/machine.erofs` beside `rootfs`, with `machine.json` that has its size, SHA-256 and fingerprint and is written last. So it is shared by all instances
that share the tree, and goes with it. It is digested once in each process; after that its identity is compared. One that was
damaged is made again: the tree is what counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.drivers.machines import erofs
from atoll.images.cache import MACHINE_DISK as FILE

NOTE: Final = "machine.json"
LOCK: Final = ".machine-lock"
MAKE_S: Final = 600.0
_SPARE_BYTES: Final = 64 << 20


class Roots:
    """What makes these files. Blocking; for any thread."""

    def __init__(self, program: Path) -> None:
        """`program`: mkfs.erofs."""
        self._program = program
        self._whole: dict[Path, tuple[int, int, int]] = {}
        """file → inode, size and change time when it was digested."""

    def of(self, directory: Path) -> Path:
        """The file of an image's directory, made if need be. *Errors*: Refused HOST_DISK_FULL, RUNTIME_MISSING, IMAGE_CORRUPT."""
        file = directory / FILE
        if self._whole.get(file) == _identity(file) is not None:
            return file
        with _locked(directory / LOCK):
            if not self._is_whole(directory):
                self._make(directory)
                if not self._is_whole(directory):
                    raise Refused(Code.IMAGE_CORRUPT, f"{file} is not what was just written")
        return file

    def _is_whole(self, directory: Path) -> bool:
        file = directory / FILE
        try:
            said = json.loads((directory / NOTE).read_text())
            before = _identity(file)
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if before is None or (digest, before[1]) != (said["sha256"], said["size"]) or not said["fingerprint"]:
                return False
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self._whole[file] = before
        return True

    def _make(self, directory: Path) -> None:
        for leftover in directory.glob(f".{FILE}.*"):
            leftover.unlink(missing_ok=True)
        (directory / NOTE).unlink(missing_ok=True)
        self._require_room(directory)
        unfinished = directory / f".{FILE}.{os.getpid()}"
        try:
            self._run(directory / "rootfs", unfinished)
            with unfinished.open("rb") as content:
                note = {"sha256": hashlib.file_digest(content, "sha256").hexdigest(), "size": os.fstat(content.fileno()).st_size}
                os.fsync(content.fileno())
            note["fingerprint"] = erofs.fingerprint(unfinished)
            unfinished.chmod(0o444)
            unfinished.replace(directory / FILE)
            temporary = directory / f".{FILE}.note"
            temporary.write_text(json.dumps(note))
            temporary.replace(directory / NOTE)
        except OSError as error:
            raise _refused(error, directory) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def _require_room(self, directory: Path) -> None:
        try:
            need = int(json.loads((directory / "manifest.json").read_text())["size_bytes"]) + _SPARE_BYTES
        except (OSError, ValueError, KeyError, TypeError):
            need = _SPARE_BYTES
        space = os.statvfs(directory)
        if space.f_bavail * space.f_frsize < need:
            raise Refused(Code.HOST_DISK_FULL, f"{directory} has no room for {need >> 20} MiB")

    def _run(self, tree: Path, target: Path) -> None:
        """Not compressed: what is not unpacked again and again is shared by all machines in the host's memory."""
        command = [str(self._program), "--quiet", str(target), str(tree)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=MAKE_S, check=False)
        except (FileNotFoundError, PermissionError) as error:
            raise Refused(Code.RUNTIME_MISSING, f"{self._program} cannot be run: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise Refused(Code.START_FAILED, f"{tree} was not made a disk within {MAKE_S:g} s") from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout).decode(errors="replace").strip()[-600:]
            if "No space left" in said:
                raise Refused(Code.HOST_DISK_FULL, said)
            raise Refused(Code.START_FAILED, f"{self._program.name} ended with {done.returncode}: {said}")


def fingerprint_of(file: Path) -> str:
    """Of one that `of` has given (`erofs.fingerprint`); empty where nobody has noted any."""
    try:
        return str(json.loads((file.parent / NOTE).read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _identity(file: Path) -> tuple[int, int, int] | None:
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def _refused(error: OSError, directory: Path) -> Refused:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Refused(Code.HOST_DISK_FULL if full else Code.START_FAILED, f"{directory}: {error}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One at a time, in this process and in others: the tree may be shared by several instances."""
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refused(error, path.parent) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
