"""A really full disk under control's database: what ends sandboxes is recorded, more records are refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.base.errors import Code, Unavailable
from atoll.store import schema
from atoll.store.engine import SqliteStore
from atoll.store.room import Room

pytestmark = pytest.mark.root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "atoll-test", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("cannot mount a tmpfs here: run as root in a mount namespace of your own")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("ab", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError:
            pass
    assert os.statvfs(disk).f_bavail == 0


def note(text: str) -> object:
    return lambda conn: conn.execute(sa.text("INSERT INTO notes VALUES (:text)"), {"text": text * 500})


async def test_commits_go_on_and_records_are_refused(small_disk: Path) -> None:
    store = SqliteStore(small_disk / "atoll.db")
    await store.write(schema.migrate)
    await store.write(lambda conn: conn.exec_driver_sql("CREATE TABLE notes (text TEXT)"))
    store.require_room()
    fill(small_disk)
    store.require_room()
    for number in range(1000, 1700):
        await store.write(note(str(number)))
        # Whoever fills the disk takes each block that becomes free.
        fill(small_disk)
    for _ in range(3):
        await store.write(note("y" * 4000))
        fill(small_disk)
    with pytest.raises(Unavailable) as refused:
        store.require_room()
    assert refused.value.code is Code.STORE_FULL
    (small_disk / "filler").unlink()
    store.require_room()
    assert await store.read(lambda conn: conn.exec_driver_sql("SELECT count(*) FROM notes").scalar_one()) == 703
    await store.close()


async def test_what_a_killed_process_kept_is_there_for_the_next(small_disk: Path) -> None:
    log = small_disk / "log"
    log.write_bytes(b"x" * 5000)
    first = Room(log, ahead_bytes=1 << 20)
    assert first.keep()
    first.close()
    fill(small_disk)
    assert log.stat().st_size == 5000
    assert Room(log, ahead_bytes=1 << 20).keep()
    with log.open("ab") as file:
        file.write(b"x" * (900 << 10))
    assert not Room(log, ahead_bytes=1 << 20).keep()


def test_a_log_that_is_not_there_yet_is_no_reason_to_refuse(tmp_path: Path) -> None:
    assert Room(tmp_path / "log").keep()
