"""A really full disk under the journal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from atoll.agent.journal import Journal, load_records, put_record
from atoll.agent.lock import Lock, holder_of
from atoll.agent.record import Record
from atoll.base.errors import Code, Unavailable
from atoll.domain.command import Kind

pytestmark = pytest.mark.root


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "atoll-test", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("cannot mount a tmpfs here: run as root in a mount namespace of your own")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("ab", buffering=0) as filler:
        block = b"x" * 4096
        try:
            while True:
                filler.write(block)
        except OSError:
            pass
    assert os.statvfs(disk).f_bavail == 0


def record(n: int) -> Record:
    return Record(f"plc_{n:020d}", f"i{n}", "tea", 1, Kind.ENSURE_ABSENT, 1, "c", "d", "b", detail="x" * 1500)


@pytest.mark.parametrize("inline", [True, False])
async def test_removal_can_be_recorded_on_a_full_disk(small_disk, inline):
    journal = Journal(small_disk / "agent.db", inline=inline)
    await journal.write(put_record(record(0)))
    fill(small_disk)
    for n in range(1, 300):
        await journal.write(put_record(record(n)))
        # Whoever fills the disk takes each block that becomes free.
        fill(small_disk)
    assert len(journal.read(load_records)) == 300
    journal.close()
    fill(small_disk)
    again = Journal(small_disk / "agent.db", inline=inline)
    await again.write(put_record(record(300)))
    assert len(again.read(load_records)) == 301
    again.close()


@pytest.mark.parametrize("inline", [True, False])
async def test_when_the_room_is_used_up_it_says_so_and_keeps_nothing_of_the_job(small_disk, inline):
    journal = Journal(small_disk / "agent.db", inline=inline)
    await journal.write(put_record(record(0)))
    fill(small_disk)
    with pytest.raises(Unavailable) as refused:
        for n in range(1, 5000):
            await journal.write(put_record(record(n)))
    assert refused.value.code is Code.STORE_FULL
    kept = len(journal.read(load_records))
    (small_disk / "filler").unlink()
    await journal.write(put_record(record(9999)))
    assert len(journal.read(load_records)) == kept + 1
    journal.close()


def test_the_lock_can_be_taken_on_a_full_disk(small_disk):
    with Lock(small_disk / "lock"):
        pass
    fill(small_disk)
    with Lock(small_disk / "lock"):
        assert holder_of(small_disk / "lock") == str(os.getpid())
