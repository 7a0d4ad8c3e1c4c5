"""`atoll backup create` and `restore`: control's embedded database into one file and back, while everything runs.

A restore stops nothing but control, for a second: sandboxes, their agent and the edge go on. What a backup does not hold is said each
time: the keys, without which sealed values and tokens are lost, and the install id that everything on the hosts is marked with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.programs import identity, instance, probes, supervision
from atoll.programs.layout import Layout
from atoll.store import backup

DATABASE_URL: Final = "database.url"
APPLIED_S: Final = 60.0
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Made:
    """What `create` tells."""

    file: str
    size_bytes: int
    sha256: str
    install_id: str
    incarnation: str
    schema: str
    version: str
    keep_with_it: list[str]
    """Without these it restores nothing; they are not in it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What `restore` tells. `running`: control has taken it and serves; else the next start begins with it."""

    file: str
    made_at: float
    incarnation: str
    previous: str | None
    replaced: str
    """Where the database is kept that was replaced."""
    running: bool


def create(place: Layout, file: Path, *, version: str, now: Callable[[], float] = time.time) -> Made:
    """*Errors*: those of store.backup.create; Refused NOT_SUPPORTED where the store is PostgreSQL, NOT_RUNNING where there is none."""
    config = instance.load(place)
    _embedded(place)
    manifest = backup.create(place.database, file.absolute(), version=version, now=now(), keys=fingerprints(place))
    return Made(
        file=str(file.absolute()),
        size_bytes=file.stat().st_size,
        sha256=manifest.sha256,
        install_id=config.install_id,
        incarnation=manifest.incarnation,
        schema=manifest.schema_step,
        version=manifest.version,
        keep_with_it=[str(place.config), *(str(place.secrets / name) for name in manifest.keys)],
    )


def restore(place: Layout, file: Path, *, now: Callable[[], float] = time.time, patience_s: float = APPLIED_S) -> Taken:
    """*Errors*: those of store.backup.prepare; Refused NOT_SUPPORTED where the store is PostgreSQL; Unavailable CONTROL_UNAVAILABLE when
    control does not come back with it in time.
    """
    config = instance.load(place)
    _embedded(place)
    info = place.control.stat()
    owner = (info.st_uid, info.st_gid) if os.geteuid() == 0 else None
    prepared = backup.prepare(
        file.absolute(),
        place.database,
        install_id=config.install_id,
        keys=fingerprints(place),
        now=now(),
        chance=os.urandom,
        owner=owner,
    )
    running = identity.living(place.pid_file("control")) is not None
    if running:
        _restart_control(place)
        _wait_until_served(place, config, patience_s)
    else:
        backup.put_in_place(place.database)
    return Taken(
        file=str(file.absolute()),
        made_at=prepared.manifest.made_at,
        incarnation=prepared.incarnation,
        previous=prepared.previous,
        replaced=f"{place.database}{backup.REPLACED}",
        running=running,
    )


def restored(place: Layout, *, now: Callable[[], float] = time.time) -> str:
    """A PostgreSQL database was restored by its own tools: begin its next life. Its new incarnation. No control process may use it meanwhile.

    *Errors*: Refused NOT_SUPPORTED where the store is the embedded one.
    """
    named = place.secrets / DATABASE_URL
    if not named.exists():
        raise Refused(Code.NOT_SUPPORTED, "this instance has the embedded store", hint="Use `atoll backup restore FILE`.")
    import asyncio

    from atoll.store import restoring, schema
    from atoll.store.postgres import PostgresStore

    async def begin() -> str:
        store = PostgresStore(named.read_text().strip(), dice=os.urandom)
        try:
            await store.write(schema.migrate)
            return await store.write(lambda conn: restoring.next_life(conn, now=now(), chance=os.urandom))
        finally:
            await store.close()

    return asyncio.run(begin())


def fingerprints(place: Layout) -> dict[str, str]:
    """Of the keys that this instance has now."""
    found: dict[str, str] = {}
    for name in instance.SEALS:
        try:
            found[name] = backup.fingerprint((place.secrets / name).read_bytes())
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise Refused(Code.NOT_ROOT, f"{error.filename} is not readable") from error
    return found


def _embedded(place: Layout) -> None:
    if (place.secrets / DATABASE_URL).exists():
        raise Refused(
            Code.NOT_SUPPORTED,
            "this instance's store is a PostgreSQL database, which its own tools back up",
            hint="Use pg_dump or a base backup; after a restore of it run `atoll backup restored` before any control process starts.",
        )


def _restart_control(place: Layout) -> None:
    if supervision.running(place) is None:
        raise Unavailable(
            Code.NOT_RUNNING,
            "control runs without a supervisor, which would start it again",
            hint="Stop it and start it; it takes the backup then.",
        )
    supervision.ask(place, "restart", name="control")


def _wait_until_served(place: Layout, config: instance.Config, patience_s: float) -> None:
    pending = Path(f"{place.database}{backup.PENDING}")
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            if not pending.exists() and probes.look("control", place, config).healthy:
                return
        except AtollError:
            pass
        time.sleep(_LOOK_S)
    raise Unavailable(
        Code.CONTROL_UNAVAILABLE,
        f"control has not come back with the backup within {patience_s:.0f} s",
        hint=f"Its log says why: {place.log_file('control')}.",
    )
