"""Bring control's database to the newest schema in a process of its own: what alembic loads stays out of one that runs for months.

    python -m atoll.programs.migration DATABASE

Only a help: control does the same when it opens the database, and says what is wrong where something is.
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

from atoll.store.engine import SqliteStore
from atoll.store.schema import VERSIONS, migrate, newest


def is_newest(database: Path) -> bool:
    """Whether nothing is to be done; False when it cannot be told."""
    try:
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        try:
            return connection.execute(f"SELECT version_num FROM {VERSIONS}").fetchall() == [(newest(),)]  # noqa: S608 - a constant
        finally:
            connection.close()
    except sqlite3.Error:
        return False


def migrate_apart(database: Path) -> None:
    """Do it in another process, if anything is to be done; its failure is left to whoever opens the database next."""
    if not is_newest(database):
        subprocess.run([sys.executable, "-P", "-m", "atoll.programs.migration", str(database)], stdin=subprocess.DEVNULL, check=False)


async def _migrate(database: Path) -> None:
    store = SqliteStore(database)
    try:
        await store.write(migrate)
    finally:
        await store.close()


if __name__ == "__main__":
    from atoll.telemetry.log import configure

    configure("control")
    asyncio.run(_migrate(Path(sys.argv[1])))
