"""What a control process opens by its settings: the store, its clock, keys, artifacts, and what works on those."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from atoll.base.clock import Clock, ShiftedClock
from atoll.base.errors import Bug, Code
from atoll.base.ids import Dice
from atoll.control.artifacts.imports import Imports
from atoll.control.artifacts.own_registry import OwnRegistry
from atoll.images.artifacts import Artifacts, Folder
from atoll.images.carrier import Carrier
from atoll.images.library import Library
from atoll.store import backup
from atoll.store.engine import SqliteStore, Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire.registry import signing_key

if TYPE_CHECKING:
    from atoll.control.settings import ControlSettings

LOG = get_logger()

DATABASE_URL: Final = "database.url"
"""Of `secrets`, optional: `postgresql+asyncpg://...`, a secret because it holds a password."""


async def clock_of(store: Store, clock: Clock) -> Clock:
    """The clock that the store's records go by: where replicas share it, the database's, read once and counted on from then.

    Else an end that one replica wrote would be read by another by a clock that is an hour off.
    """
    asked_at = clock.boot()
    shown = await store.wall()
    if shown is None:
        return clock
    return ShiftedClock(clock, by_s=shown + (clock.boot() - asked_at) / 2 - clock.now())


def store_of(settings: ControlSettings, dice: Dice) -> Store:
    """PostgreSQL where the operator names one, else the embedded file."""
    named = settings.secrets / DATABASE_URL
    if not named.exists():
        kept = backup.put_in_place(settings.database)
        if kept is not None:
            LOG.warning(names.STORE_RESTORED, path=str(kept))
        return SqliteStore(settings.database)
    from atoll.store.postgres import PostgresStore

    return PostgresStore(named.read_text().strip(), dice=dice)


def artifacts_of(settings: ControlSettings) -> Artifacts | None:
    if settings.images is None:
        return None
    if settings.bucket is None:
        return Folder(settings.images)
    # An instance without a bucket does without its library.
    from atoll.images.bucket import Bucket

    return Bucket(settings.bucket)


def imports_of(
    settings: ControlSettings, own: OwnRegistry, artifacts: Artifacts | None, *, store: Store, clock: Clock, dice: Dice
) -> Imports:
    carrier = library = None
    if settings.images is not None and artifacts is not None:
        library = Library(settings.images, artifacts, clock.now)
        if settings.image_program is not None:
            carrier = Carrier(settings.image_program, settings.images, settings.registries)
    uploads = (settings.images or settings.secrets) / "uploads"
    return Imports(store=store, clock=clock, dice=dice, carrier=carrier, uploads=uploads, own=own, library=library)


def own_registry_of(settings: ControlSettings, *, clock: Clock, dice: Dice, public: Callable[[], Collection[str]]) -> OwnRegistry:
    port = settings.domain.rpartition(":")[2]
    addresses = dict.fromkeys((settings.domain, f"localhost:{port}", f"127.0.0.1:{port}"))
    return OwnRegistry(tuple(addresses), signing_key(key_of(settings.secrets / "token.key")), clock, dice, public)


def key_of(path: Path) -> bytes:
    return base64.b64decode(path.read_text())


def signing_of(path: Path) -> Ed25519PrivateKey:
    key = load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise Bug(Code.INTERNAL, f"{path.name} is not an Ed25519 key")
    return key
