"""A really full disk under the journal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from atoll.agent.journal import Journal, load_records, put_fact, put_record
from atoll.agent.record import Record
from atoll.agent.reserve import Reserve
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
    journal = Journal(small_disk / "agent.db", inline=inline, reserve=Reserve(small_disk / "reserve"))
    assert (small_disk / "reserve").stat().st_blocks * 512 >= 4 * 2**20
    fill(small_disk)
    for n in range(300):
        await journal.write(put_record(record(n)))
    assert len(journal.read(load_records)) == 300
    assert not (small_disk / "reserve").exists()
    (small_disk / "filler").unlink()
    for n in range(200):
        await journal.write(put_fact("a", str(n)))
    if not inline:
        assert (small_disk / "reserve").exists()
    journal.close()


@pytest.mark.parametrize("inline", [True, False])
async def test_without_a_reserve_it_says_so_and_keeps_nothing_of_the_job(small_disk, inline):
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


def test_the_reserve_is_not_taken_from_the_last_room(small_disk):
    assert not Reserve(small_disk / "reserve", size_bytes=8 * 2**20).lay_in()
    assert not (small_disk / "reserve").exists()
