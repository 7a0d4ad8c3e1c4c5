"""Backup and restore of the embedded store: one file, made while control runs, and put in its place while nobody has it open.

Theory of operation. A backup is a tar of a manifest and of the database as SQLite's online backup copies it in one step: the state of one
moment, which holds up no writer (a reader of a write-ahead log). It is looked through before it gets its name, and again before it is
taken back. To restore, the copy is brought to the present schema and told that it is another life of the store (`restoring.py`) while it
is still beside the database; whoever opens the database next, under its lock, puts it in its place (`put_in_place`). Each step of that
can be repeated: what a crash leaves is either the old database with the new one beside it, or the new one.
Sealed values stay sealed: the keys are not in the file, only their fingerprints.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import sqlite3
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.base.errors import Code, Refused, Unavailable
from atoll.store import restoring, schema

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
DATABASE: Final = "atoll.db"
PENDING: Final = ".restore"
REPLACED: Final = ".replaced"
_MANIFEST_BYTES_MAX: Final = 65_536
_CHUNK: Final = 1 << 20


class Manifest(BaseModel):
    """What the file says of itself. *Units*: bytes, wall seconds."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: int
    version: str
    """Of the release that made it."""
    schema_step: str
    install_id: str
    incarnation: str
    made_at: float
    size_bytes: int
    sha256: str
    keys: dict[str, str]
    """Name of a key's file → its fingerprint."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore has prepared or done."""

    manifest: Manifest
    incarnation: str
    previous: str | None
    """The incarnation of what it replaces; None where that could not be read."""


def fingerprint(key: bytes) -> str:
    """Of a key: says whether it is the same one, and nothing else of it."""
    return hashlib.sha256(b"atoll backup key\0" + key.strip()).hexdigest()[:16]


def create(database: Path, target: Path, *, version: str, now: float, keys: Mapping[str, str]) -> Manifest:
    """Back the database up into a new file of mode 0600.

    *Errors*: Refused INVALID_REQUEST (the file is there), BACKUP_INVALID (the copy is damaged, and so is the database); Unavailable
    STORE_UNAVAILABLE, STORE_FULL. Then no file is left.
    """
    if target.exists():
        raise Refused(Code.INVALID_REQUEST, f"{target} is there already", hint="Choose another name: a backup replaces nothing.")
    if not database.exists():
        raise Refused(Code.NOT_RUNNING, f"there is no database {database}")
    copy, whole = _beside(target, ".db.part"), _beside(target, ".part")
    with _translated(), _gone_afterwards(copy, whole):
        _new_file(copy)
        _copy(database, copy)
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            _look_through(connection, copy)
            found = connection.execute("SELECT install_id, incarnation FROM deployment").fetchone()
            step = connection.execute(f"SELECT version_num FROM {schema.VERSIONS}").fetchone()  # noqa: S608 - a constant
        if found is None or step is None:
            raise Refused(Code.BACKUP_INVALID, f"{database} holds no deployment yet")
        manifest = Manifest(
            format=FORMAT,
            version=version,
            schema_step=step[0],
            install_id=found[0],
            incarnation=found[1],
            made_at=now,
            size_bytes=copy.stat().st_size,
            sha256=_digest(copy),
            keys=dict(keys),
        )
        _pack(whole, manifest, copy)
        os.link(whole, target)
        _flush_directory(target.parent)
    return manifest


def read(file: Path) -> Manifest:
    """The manifest of a backup, the rest unread. *Errors*: Refused BACKUP_INVALID."""
    with _opened(file) as archive:
        return _manifest(archive)


def prepare(
    file: Path,
    database: Path,
    *,
    install_id: str,
    keys: Mapping[str, str],
    now: float,
    chance: Callable[[int], bytes],
    owner: tuple[int, int] | None = None,
) -> Restored:
    """Check a backup and lay it beside the database as the next life of the store, for `put_in_place`. *Idempotency*: the last one counts.

    *Errors*: Refused BACKUP_INVALID (no backup, damaged), BACKUP_MISMATCH (another install's, or made under other keys), STORE_NEWER;
    Unavailable STORE_*.
    """
    part, pending = _beside(database, f"{PENDING}.part"), Path(f"{database}{PENDING}")
    with _translated(), _gone_afterwards(part, Path(f"{part}-wal"), Path(f"{part}-shm"), Path(f"{part}-journal")):
        with _opened(file) as archive:
            manifest = _manifest(archive)
            _match(manifest, install_id=install_id, keys=keys)
            _unpack(archive, manifest, part)
        with contextlib.closing(sqlite3.connect(part)) as connection:
            _look_through(connection, file)
        previous = _incarnation(database)
        incarnation = restoring.after(manifest.incarnation, previous, chance=chance)
        _begin_anew(part, incarnation=incarnation, now=now, chance=chance)
        if owner is not None:
            os.chown(part, *owner)
        _flush(part)
        part.rename(pending)
        _flush_directory(database.parent)
    return Restored(manifest, incarnation, previous)


def put_in_place(database: Path) -> Path | None:
    """Let a prepared restore be the database; where the replaced one is kept now. None when nothing was prepared.

    *Errors*: Refused STORE_LOCKED while somebody has the database open. *Idempotency*: goes on where a crash has left it.
    """
    pending = Path(f"{database}{PENDING}")
    if not pending.exists():
        return None
    lock = os.open(f"{database}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(Code.STORE_LOCKED, f"{database} is used by another process") from None
        if not pending.exists():
            return None
        with _translated():
            return _swap(database, pending)
    finally:
        os.close(lock)


def _swap(database: Path, pending: Path) -> Path:
    kept = Path(f"{database}{REPLACED}")
    logs = [Path(f"{database}-wal"), Path(f"{database}-shm")]
    if database.exists():
        # What is only in the log belongs to the old database: moved into it where it can be read, kept beside it where not.
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for log in logs:
            if log.exists():
                log.rename(f"{kept}{log.name.removeprefix(database.name)}")
        database.rename(kept)
        _flush_directory(database.parent)
    for log in logs:
        # A log of the old database would be applied to the new one.
        log.unlink(missing_ok=True)
    pending.rename(database)
    _flush_directory(database.parent)
    return kept


def _begin_anew(path: Path, *, incarnation: str, now: float, chance: Callable[[int], bytes]) -> None:
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool)
    try:
        with engine.begin() as conn:
            schema.migrate(conn)
            restoring.begin_anew(conn, incarnation=incarnation, now=now, chance=chance)
    finally:
        engine.dispose()


def _match(manifest: Manifest, *, install_id: str, keys: Mapping[str, str]) -> None:
    if manifest.install_id != install_id:
        raise Refused(
            Code.BACKUP_MISMATCH,
            f"it is a backup of install {manifest.install_id}, and this is {install_id}",
            hint="Restore it where config.toml has its install id: hosts and sandboxes are marked with it.",
        )
    others = sorted(name for name, made_under in manifest.keys.items() if keys.get(name, made_under) != made_under or name not in keys)
    if others:
        raise Refused(
            Code.BACKUP_MISMATCH,
            f"it was made under other keys: {', '.join(others)}",
            hint="Put back the files of `secrets` that were kept with it: without them sealed values and tokens are lost.",
        )


def _look_through(connection: sqlite3.Connection, of: Path) -> None:
    """*Errors*: Refused BACKUP_INVALID when the database is damaged."""
    try:
        found = connection.execute("PRAGMA integrity_check(1)").fetchone()
        strays = connection.execute("PRAGMA foreign_key_check").fetchone()
    except sqlite3.DatabaseError as error:
        raise Refused(Code.BACKUP_INVALID, f"{of}: {error}") from error
    if found != ("ok",) or strays is not None:
        raise Refused(Code.BACKUP_INVALID, f"{of}: {found[0] if found != ('ok',) else f'a row of {strays[0]} leads nowhere'}")


def _copy(database: Path, copy: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10.0)) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
        # One file: it would bring a log of its own to wherever it is opened.
        target.execute("PRAGMA journal_mode=DELETE").close()


def _incarnation(database: Path) -> str | None:
    """What the present database says; None where there is none, or it does not say."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            found = connection.execute("SELECT incarnation FROM deployment").fetchone()
    except sqlite3.Error:
        return None
    return str(found[0]) if found else None


# The file.


def _pack(whole: Path, manifest: Manifest, copy: Path) -> None:
    _new_file(whole)
    with whole.open("r+b") as output:
        with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
            text = json.dumps(manifest.model_dump(), indent=2, sort_keys=True).encode() + b"\n"
            archive.addfile(_entry(MANIFEST, len(text), manifest.made_at), io.BytesIO(text))
            with copy.open("rb") as content:
                archive.addfile(_entry(DATABASE, manifest.size_bytes, manifest.made_at), content)
        output.flush()
        os.fsync(output.fileno())


def _entry(name: str, size: int, at: float) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, int(at), 0o600
    return entry


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(file, mode="r:") as archive:
            yield archive
    except FileNotFoundError:
        raise Refused(Code.BACKUP_INVALID, f"there is no file {file}") from None
    except (tarfile.TarError, IsADirectoryError) as error:
        raise Refused(Code.BACKUP_INVALID, f"{file} is not a backup, or is cut short: {error}") from error


def _manifest(archive: tarfile.TarFile) -> Manifest:
    entry = archive.next()
    content = archive.extractfile(entry) if entry is not None and entry.name == MANIFEST and entry.size <= _MANIFEST_BYTES_MAX else None
    if content is None:
        raise Refused(Code.BACKUP_INVALID, "it does not begin with a manifest")
    try:
        manifest = Manifest.model_validate_json(content.read())
    except ValidationError as error:
        raise Refused(Code.BACKUP_INVALID, f"its manifest makes no sense: {error.errors(include_input=False)[0]['msg']}") from None
    if manifest.format != FORMAT:
        raise Refused(Code.STORE_NEWER, f"it has format {manifest.format}, and this program knows format {FORMAT}")
    return manifest


def _unpack(archive: tarfile.TarFile, manifest: Manifest, to: Path) -> None:
    """The database, whole and as the manifest says. *Errors*: Refused BACKUP_INVALID."""
    entry = archive.next()
    content = archive.extractfile(entry) if entry is not None and entry.name == DATABASE and entry.size == manifest.size_bytes else None
    if content is None:
        raise Refused(Code.BACKUP_INVALID, "the database is not in it, or has another size than its manifest says")
    _new_file(to)
    whole = hashlib.sha256()
    with to.open("r+b") as output:
        while chunk := content.read(_CHUNK):
            whole.update(chunk)
            output.write(chunk)
    if whole.hexdigest() != manifest.sha256:
        raise Refused(Code.BACKUP_INVALID, "the database in it is not the one that its manifest describes")


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# Files.


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _new_file(path: Path) -> None:
    """An empty one that only its owner can read, whatever the process's mask; what an earlier run left goes."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _gone_afterwards(*paths: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """What the machine refuses, in our words."""
    try:
        yield
    except FileExistsError as error:
        raise Refused(Code.INVALID_REQUEST, f"{error.filename} is there already") from error
    except (OSError, sqlite3.Error, sa.exc.DBAPIError) as error:
        full = getattr(error, "errno", None) == 28 or "disk is full" in str(error)
        raise Unavailable(Code.STORE_FULL if full else Code.STORE_UNAVAILABLE, f"{type(error).__name__}: {error}") from error
