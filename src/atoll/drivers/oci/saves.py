"""What was saved of a placement: a directory in its own, which appears by one rename and says what is in it.

Theory of operation. A runtime writes into a fresh private directory; its files are looked at, a list of their names and sizes is written
beside them, and the directory is renamed to `saved`. So whatever is called that is whole, or was damaged since, which the list shows. A
guest that lives beside it has not been used since: it is about to end after its save, or was restored and nobody has met it yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.domain.spec import SaveMode
from atoll.drivers.oci import programs
from atoll.drivers.oci import record as records

SNAPSHOTS: Final = ".snapshots"
"""Beside the placements' directories: what is kept for longer than its placement, by id."""
SHOWN: Final = "shown"
"""In a placement's directory: what its guest is shown of whose it is."""
SAVED: Final = "saved"
DRAFT: Final = "saved.draft"
PAST: Final = "saved.past"
"""How directories begin to be called that are to be removed, when nobody waits."""
LIST: Final = "saved.json"
FORMAT: Final = 1
DURABLE: Final = "durable"
"""Beside the list, once all of it is on the host's disk."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Save:
    """One save. *Units*: bytes."""

    directory: Path
    mode: SaveMode
    files: Mapping[str, int]
    size_bytes: int
    """What it takes of the disk."""
    named: bool = True
    """Its guest is shown whose it is. One that was saved by an earlier release is not: its mounts are those that it had."""
    image: str = ""
    """Digest of the image that it is written above; with the next unknown of what an earlier release has saved."""
    runtime: str = ""
    """Of which driver's guest it is: a snapshot's directory does not say so otherwise."""
    received: bool = False
    """It came from the artifact store."""


def exists(directory: Path) -> bool:
    """Whether something is saved in a placement's directory."""
    return (directory / SAVED / LIST).exists()


def begin(directory: Path) -> Path:
    """A fresh directory to save into; what an earlier try has left goes."""
    shutil.rmtree(directory / DRAFT, ignore_errors=True)
    draft = directory / DRAFT
    draft.mkdir(mode=0o700)
    return draft


def kept(state_dir: Path, snapshot_id: str) -> Path:
    """Where a snapshot is."""
    return state_dir / SNAPSHOTS / snapshot_id


def publish(directory: Path, mode: SaveMode, place: Path | None = None) -> Save:
    """Let the draft be what is saved, in the placement's directory or in another place.

    *Errors*: Refused SAVE_FAILED when there is nothing in it; OSError.
    """
    draft, named = directory / DRAFT, (directory / SHOWN).exists()
    place = directory / SAVED if place is None else place
    stored = sum(path.stat().st_blocks * 512 for path in draft.iterdir())
    if mode is SaveMode.FULL:
        programs.keep(programs.GUEST, directory, draft)
    files = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
    # This one stays on its host: it is no part of what is sent.
    programs.keep(programs.RUNTIME, directory, draft)
    empty = [name for name, size in files.items() if size == 0]
    if empty:
        raise Refused(Code.SAVE_FAILED, f"what was saved is not whole: {', '.join(empty)} has nothing in it")
    record = records.read(directory)
    image, runtime = (record.image, record.runtime) if record is not None else ("", "")
    save = Save(place, mode, files, stored, named, image, runtime)
    _write_list(draft, save)
    _remove(place)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    draft.rename(place)
    return save


def take_in(directory: Path, save: Save) -> Save:
    """Let a directory of files that came from elsewhere be what is saved, or kept: whole, and on the disk. Blocks. *Errors*: OSError."""
    came = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.name != programs.RUNTIME}
    stored = sum(found.st_blocks * 512 for found in came.values() if found.st_nlink == 1)
    save = replace(save, files={name: found.st_size for name, found in came.items()}, size_bytes=stored, received=True)
    _write_list(directory, save)
    (directory / DURABLE).touch()
    for path in (*directory.iterdir(), directory):
        _sync(path)
    _remove(save.directory)
    save.directory.parent.mkdir(mode=0o700, exist_ok=True)
    directory.rename(save.directory)
    _sync(save.directory.parent)
    return save


def _write_list(directory: Path, save: Save) -> None:
    said = {
        "format": FORMAT,
        "mode": save.mode.value,
        "files": dict(save.files),
        "stored": save.size_bytes,
        "named": save.named,
        "image": save.image,
        "runtime": save.runtime,
        "received": save.received,
        "boot_id": BOOT_ID.read_text().strip(),
    }
    (directory / LIST).write_text(json.dumps(said))


def predates_names(directory: Path) -> bool:
    """Whether what is saved of a placement is of a guest that is not shown whose it is."""
    try:
        return exists(directory) and not read(directory / SAVED).named
    except Refused:
        return False


def read(place: Path) -> Save:
    """What is saved there. *Errors*: Refused RESUME_FAILED when it is not there or not whole."""
    try:
        said: dict[str, Any] = json.loads((place / LIST).read_text())
        files = {str(name): int(size) for name, size in said["files"].items()}
        save = Save(
            place,
            SaveMode(said["mode"]),
            files,
            int(said.get("stored", sum(files.values()))),
            bool(said.get("named")),
            str(said.get("image", "")),
            str(said.get("runtime", "")),
            bool(said.get("received")),
        )
        if said["format"] != FORMAT:
            raise Refused(Code.RESUME_FAILED, f"it was saved in format {said['format']}, and this release reads {FORMAT}")
        if not (place / DURABLE).exists() and said.get("boot_id", BOOT_ID.read_text().strip()) != BOOT_ID.read_text().strip():
            # Sizes say nothing here: blocks that had not reached the disk read as nothing.
            raise Refused(Code.RESUME_FAILED, "the host lost power before all of what was saved was on its disk")
        for name, size in save.files.items():
            if (place / name).stat().st_size != size:
                raise Refused(Code.RESUME_FAILED, f"{name} of what was saved is not as long as it was")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(Code.RESUME_FAILED, f"what was saved cannot be read: {error}") from error
    return save


def drop(directory: Path) -> None:
    """Nothing is saved any more. The list goes first: what is half removed is not saved."""
    with contextlib.suppress(FileNotFoundError):
        (directory / SAVED / LIST).unlink()
    for place in (directory / SAVED, directory / DRAFT, *directory.glob(f"{PAST}-*")):
        _remove(place)


def set_aside(directory: Path) -> Path:
    """Nothing is saved any more, as after `drop`, but that its files are yet to be removed: where they are. *Errors*: OSError."""
    past = directory / f"{PAST}-{time.monotonic_ns():x}"
    with contextlib.suppress(FileNotFoundError):
        (directory / SAVED / LIST).unlink()
        (directory / SAVED).rename(past)
    return past


def clear_past(directory: Path) -> None:
    """Remove what was set aside, also by an earlier run. *Idempotency*: also what somebody else is removing."""
    for past in directory.glob(f"{PAST}-*"):
        _remove(past)


def _remove(place: Path) -> None:
    """Twice, as a flush that is under way may put its mark there once more."""
    for _ in range(2):
        shutil.rmtree(place, ignore_errors=True)


def drop_kept(place: Path) -> None:
    """A snapshot goes. *Idempotency*: also what is left of one that was going."""
    with contextlib.suppress(FileNotFoundError):
        (place / LIST).unlink()
    _remove(place)
    if place.exists():
        raise Refused(Code.CLEANUP_FAILED, f"{place} cannot be removed")


def flush(save: Save, disk: Path | None = None) -> None:
    """Have it on the host's disk, for a host that loses power. Never raises: what is not there any more need not be."""
    with contextlib.suppress(OSError):
        make_durable(save, disk)


def make_durable(save: Save, disk: Path | None = None) -> None:
    """Have it on the host's disk. `disk`: what is saved besides. *Errors*: OSError. *Idempotency*: once it is there nothing is done."""
    # By a descriptor, so that the mark is put where the files are: by the end of it the next save may be called as this one is.
    place = os.open(save.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(DURABLE, dir_fd=place)
            return
        for name in (*save.files, LIST):
            _sync(name, place)
        if disk is not None:
            _sync(disk)
        os.fsync(place)
        os.close(os.open(DURABLE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=place))
        os.fsync(place)
    finally:
        os.close(place)
    _sync(save.directory.parent)


def _sync(path: Path | str, directory: int | None = None) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
