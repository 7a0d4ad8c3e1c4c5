"""Databases at the newest schema, made once in a process and copied for each test: the steps that lead there take longer than most tests.

Whoever copies one has its store migrated all the same, which finds nothing to do. How the steps lead there from nothing, and from each
release, is in `test_migrations.py` and `test_schema.py`; there, and where control starts on PostgreSQL, databases begin empty.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path

from atoll.store import schema
from atoll.store.engine import SqliteStore
from atoll.store.postgres import PostgresStore
from tests.store.server import Server

_SQLITE: list[bytes] = []


async def sqlite(path: Path) -> None:
    """A file that a store has just made and left."""
    if not _SQLITE:
        with tempfile.TemporaryDirectory() as place:
            first = Path(place) / "atoll.db"
            store = SqliteStore(first)
            await store.write(schema.migrate)
            await store.close()
            with contextlib.closing(sqlite3.connect(first)) as own:
                left = own.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            assert left == (0, 0, 0), "not all of it is in the file"
            _SQLITE.append(first.read_bytes())
    path.write_bytes(_SQLITE[0])


async def postgres(server: Server) -> str:
    """The URL of a new database."""
    if server.whole is None:
        url = await server.database()
        store = PostgresStore(url, dice=os.urandom)
        await store.write(schema.migrate)
        await store.close()
        server.whole = url.partition("@/")[2].partition("?")[0]
    return await server.database(like=server.whole)
