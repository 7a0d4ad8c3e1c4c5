"""Deployment documents that were applied: each revision's text, what it meant, when and by whom. None is ever changed or removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from pydantic import TypeAdapter

from atoll.base.errors import Code, Refused
from atoll.domain.deployment import Deployment
from atoll.store.tables import CONFIGURATIONS

_SETTINGS: Final = TypeAdapter(Deployment)
"""What a document meant, so that a later release need not read the text again: what it does not know is ignored, what is missing is
as in its own built-in document."""
_NEWEST: Final = sa.select(sa.func.coalesce(sa.func.max(CONFIGURATIONS.c.revision), 0))


@dataclass(frozen=True, slots=True)
class Configuration:
    """One applied document."""

    revision: int
    document: str
    digest: str
    deployment: Deployment
    applied_at: float
    client_id: str


def newest(conn: sa.Connection) -> int:
    """The revision that applies; 0 when no document was ever applied."""
    return int(conn.execute(_NEWEST).scalar_one())


def get(conn: sa.Connection, revision: int) -> Configuration | None:
    """One revision."""
    row = conn.execute(sa.select(CONFIGURATIONS).where(CONFIGURATIONS.c.revision == revision)).mappings().first()
    return _configuration(row) if row else None


def history(conn: sa.Connection, *, before: int | None, limit: int) -> Sequence[Configuration]:
    """Revisions below `before`, newest first."""
    query = sa.select(CONFIGURATIONS).order_by(CONFIGURATIONS.c.revision.desc()).limit(limit)
    if before is not None:
        query = query.where(CONFIGURATIONS.c.revision < before)
    return [_configuration(row) for row in conn.execute(query).mappings()]


def add(conn: sa.Connection, new: Configuration) -> Configuration:
    """The document as the revision after the newest, which must be the one below it.

    *Idempotency*: the same document for the same revision gives what is on record. *Errors*: Refused CONFIG_CONFLICT when the newest is
    another. On a shared database two may pass the look at the same moment: IntegrityError for the second.
    """
    present = newest(conn)
    if present == new.revision:
        known = get(conn, present)
        if known is not None and known.digest == new.digest:
            return known
    if present != new.revision - 1:
        raise Refused(Code.CONFIG_CONFLICT, f"the document is at revision {present}, not {new.revision - 1}")
    conn.execute(
        sa.insert(CONFIGURATIONS),
        {
            "revision": new.revision,
            "document": new.document,
            "digest": new.digest,
            "settings": _SETTINGS.dump_python(new.deployment, mode="json"),
            "applied_at": new.applied_at,
            "client_id": new.client_id,
        },
    )
    return new


def _configuration(row: sa.RowMapping) -> Configuration:
    settings: Any = row["settings"]
    return Configuration(
        revision=row["revision"],
        document=row["document"],
        digest=row["digest"],
        deployment=_SETTINGS.validate_python(settings),
        applied_at=row["applied_at"],
        client_id=row["client_id"],
    )
