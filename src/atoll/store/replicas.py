"""Replicas: the control processes that use this database, where each is reached by the others, and when it was last heard of.

A row is a run of a process: it is made at its start, renewed by its heartbeat, and removed by its end or, when it has none, some time
after it was heard of last. Nothing is granted or fenced by these rows: what a replica may change is decided by revisions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import sqlalchemy as sa

from atoll.store.tables import REPLICAS

FORGET_S: Final = 600.0
"""After so long without a word a row is removed by whoever looks."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One control process. *Units*: wall seconds of the database's clock."""

    id: str
    address: str
    """Where other replicas reach it: `http://host:port`, nothing behind."""
    machine: str
    version: str
    started_at: float
    seen_at: float


def beat(conn: sa.Connection, me: Replica) -> Sequence[Replica]:
    """Say that this replica lives, forget those that are long gone, and give all, the oldest first."""
    known = conn.execute(sa.update(REPLICAS).where(REPLICAS.c.id == me.id).values(seen_at=me.seen_at, address=me.address))
    if known.rowcount == 0:
        conn.execute(sa.insert(REPLICAS), asdict(me))
    conn.execute(sa.delete(REPLICAS).where(REPLICAS.c.seen_at < me.seen_at - FORGET_S))
    return everyone(conn)


def everyone(conn: sa.Connection) -> Sequence[Replica]:
    """Every replica on record."""
    return [Replica(**row) for row in conn.execute(sa.select(REPLICAS).order_by(REPLICAS.c.started_at, REPLICAS.c.id)).mappings()]


def leave(conn: sa.Connection, replica_id: str) -> None:
    """This replica ends."""
    conn.execute(sa.delete(REPLICAS).where(REPLICAS.c.id == replica_id))
