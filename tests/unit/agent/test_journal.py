"""The journal keeps what it was given, whole or not at all; the ledger shows nothing before it is kept."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from dataclasses import replace

import pytest

from atoll.agent import journal as journals
from atoll.agent.intake import blueprint_of
from atoll.agent.journal import (
    Journal,
    answer_epoch,
    begin_epoch,
    drop_records,
    load_epochs,
    load_facts,
    load_records,
    put_fact,
    put_record,
)
from atoll.agent.ledger import Ledger
from atoll.agent.outbox import Outbox
from atoll.agent.record import EndRule, Record, seen
from atoll.base.errors import Code, Unavailable
from atoll.domain.command import Kind
from atoll.domain.moment import Moment
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation, NetworkSpec, OnEnd, OnLeaseExpiry, Spec
from atoll.wire.agent import Command

SPEC = Spec(
    "default", "tpl_x", "sha256:aa", "base", Isolation.SHARED_KERNEL, 1000, 128, 256, 64, 300,
    command=("a", "b"), labels=(("k", "v"),), network=NetworkSpec(allow_out=("1.1.1.1/32",)),
)  # fmt: skip


def record(n=1, **more) -> Record:
    asked = Command(
        id=f"plc_{n}:1:1",
        kind=Kind.ENSURE_RUNNING,
        placement_id=f"plc_{n}",
        sandbox_id=f"i{n}",
        team_id="tea_1",
        generation=1,
        desired_revision=1,
        digest="d",
        epoch="e",
        spec=SPEC,
        nonce="n",
        guest_public_key="k",
        payload_ref="ref",
    )
    made = Record(f"plc_{n}", f"i{n}", "tea_1", 1, Kind.ENSURE_RUNNING, 1, asked.id, "d", "boot", blueprint_of(asked))
    return replace(made, **more)


@pytest.mark.parametrize("inline", [True, False])
async def test_records_come_back_as_they_were(tmp_path, inline):
    full = record(
        1,
        observed=Observed.RUNNING,
        ready=True,
        seq=7,
        end=EndRule(3, 12.5, OnEnd.SUSPEND, OnLeaseExpiry.KEEP),
        ended_by="lease",
        ended_reason="R",
        ended_detail="D",
        quarantined=True,
        address="10.0.0.1",
        guest_version="1",
    )
    bare = record(2, blueprint=None, desired=Kind.ENSURE_ABSENT)
    journal = Journal(tmp_path / "agent.db", inline=inline)
    for each in (record(1), full, bare):
        await journal.write(put_record(each))
    journal.close()
    again = Journal(tmp_path / "agent.db", inline=inline)
    assert again.read(load_records) == [full, bare]
    again.close()


async def test_what_was_written_is_on_disk_when_write_returns(tmp_path):
    journal = Journal(tmp_path / "agent.db")
    await journal.write(put_record(record()))
    # Nobody else may open it; what a crash would leave are these two files.
    for name in ("agent.db", "agent.db-wal"):
        shutil.copy(tmp_path / name, tmp_path / f"left-{name}")
    other = sqlite3.connect(tmp_path / "left-agent.db")
    assert other.execute("SELECT placement_id FROM placements").fetchall() == [("plc_1",)]
    assert journal.read(lambda c: c.execute("PRAGMA journal_mode").fetchone()) == ("wal",)
    assert journal.read(lambda c: c.execute("PRAGMA synchronous").fetchone()) == (2,)
    other.close()
    journal.close()


async def test_jobs_keep_their_order_and_a_bad_one_harms_nobody(tmp_path):
    journal = Journal(tmp_path / "agent.db")

    def bad(_connection):
        raise ValueError("bad")

    jobs = [put_record(record(1, seq=n)) if n != 20 else bad for n in range(1, 60)]
    results = await asyncio.gather(*(journal.write(job) for job in jobs), return_exceptions=True)
    assert [n for n, r in enumerate(results, 1) if isinstance(r, Exception)] == [20]
    assert journal.read(load_records)[0].seq == 59
    journal.close()


async def test_only_tombstones_are_dropped(tmp_path):
    journal = Journal(tmp_path / "agent.db", inline=True)
    await journal.write(put_record(record(1)))
    await journal.write(put_record(record(2, observed=Observed.ABSENT)))
    await journal.write(drop_records(["plc_1", "plc_2"]))
    assert [r.placement_id for r in journal.read(load_records)] == ["plc_1"]
    journal.close()


async def test_epochs_prove_the_runs_since_the_last_answer(tmp_path):
    journal = Journal(tmp_path / "agent.db", inline=True)
    assert await journal.write(begin_epoch("a", boot_id="b")) == []
    await journal.write(answer_epoch("a"))
    assert await journal.write(begin_epoch("b", boot_id="b")) == ["a"]
    assert await journal.write(begin_epoch("c", boot_id="b")) == ["b", "a"]
    await journal.write(answer_epoch("c"))
    assert await journal.write(begin_epoch("d", boot_id="b")) == ["c"]
    assert [(e.epoch, e.previous, e.answered) for e in journal.read(load_epochs)] == [("c", "b", True), ("d", "c", False)]
    journal.close()


@pytest.mark.parametrize("version", [1, 2])
async def test_a_file_of_an_earlier_release_is_taken_over(tmp_path, version):
    file = tmp_path / "agent.db"
    connection = sqlite3.connect(file)
    connection.executescript(journals._SCHEMA + (journals._REST if version > 1 else ""))
    connection.execute(f"PRAGMA user_version={version}")
    columns = [row[1] for row in connection.execute("PRAGMA table_info(placements)")]
    row = dict.fromkeys(columns, "") | {
        "placement_id": "plc_1", "generation": 1, "desired": "ensure_running", "desired_revision": 3, "observed": "running", "seq": 2,
        "applied_revision": 3, "failed_revision": 0, "ready": 1, "quarantined": 0, "blueprint": None, "end_revision": None,
    }  # fmt: skip
    row |= {"unresponsive": 0, "save_mode": None, "own_rest": None} if version > 1 else {}
    connection.execute(f"INSERT INTO placements VALUES ({', '.join('?' * len(columns))})", [row[name] for name in columns])
    connection.commit()
    connection.close()
    journal = Journal(file, inline=True)
    [found] = journal.read(load_records)
    assert (found.placement_id, found.applied_revision, found.moment, found.base) == ("plc_1", 3, None, None)
    stored = replace(found, moment=Moment("sha256:" + "5" * 64, 7, "oci/gvisor"), base="sha256:" + "6" * 64)
    await journal.write(put_record(stored))
    assert journal.read(load_records) == [stored]
    journal.close()


def test_a_newer_file_is_refused(tmp_path):
    Journal(tmp_path / "agent.db", inline=True).close()
    connection = sqlite3.connect(tmp_path / "agent.db")
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(Unavailable) as refused:
        Journal(tmp_path / "agent.db", inline=True)
    assert refused.value.code is Code.STORE_UNAVAILABLE


def test_rubbish_is_refused(tmp_path):
    (tmp_path / "agent.db").write_bytes(b"no database" * 1000)
    with pytest.raises(Unavailable) as refused:
        Journal(tmp_path / "agent.db", inline=True)
    assert refused.value.code is Code.STORE_UNAVAILABLE


class SlowJournal(Journal):
    """Commits when it is told to, or refuses."""

    def __init__(self) -> None:
        super().__init__(":memory:", inline=True)
        self.open: list[tuple[object, asyncio.Future]] = []

    def submit(self, job):
        future = asyncio.get_running_loop().create_future()
        self.open.append((job, future))
        return future

    def commit(self, error=None):
        job, future = self.open.pop(0)
        if error:
            future.set_exception(error)
        else:
            future.set_result(job(self._connection))


@pytest.fixture
async def slow():
    journal = SlowJournal()
    outbox = Outbox()
    journal._connection.execute("BEGIN")
    put_record(record(1))(journal._connection)
    journal._connection.execute("COMMIT")
    yield journal, outbox, Ledger(journal, outbox, boot_id="boot")
    journal.close()


async def test_nothing_is_seen_or_said_before_it_is_kept(slow):
    journal, outbox, ledger = slow
    task = asyncio.create_task(ledger.change("plc_1", lambda r: seen(r, Observed.RUNNING)))
    await asyncio.sleep(0)
    assert ledger.get("plc_1").observed is Observed.ACCEPTED
    assert not outbox.more()
    journal.commit()
    await task
    assert ledger.get("plc_1").observed is Observed.RUNNING
    assert outbox.more()
    assert outbox.urgent.is_set()


async def test_changes_build_on_what_is_on_its_way(slow):
    journal, _, ledger = slow
    first = asyncio.create_task(ledger.change("plc_1", lambda r: seen(r, Observed.PREPARING)))
    second = asyncio.create_task(ledger.change("plc_1", lambda r: seen(r, Observed.RUNNING)))
    await asyncio.sleep(0)
    journal.commit()
    journal.commit()
    await first
    await second
    assert (ledger.get("plc_1").observed, ledger.get("plc_1").seq) == (Observed.RUNNING, 3)


async def test_a_cancelled_caller_takes_nothing_back(slow):
    journal, _, ledger = slow
    task = asyncio.create_task(ledger.change("plc_1", lambda r: seen(r, Observed.RUNNING)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    journal.commit()
    await asyncio.sleep(0)
    assert ledger.get("plc_1").observed is Observed.RUNNING


async def test_what_the_disk_refuses_did_not_happen(slow):
    journal, outbox, ledger = slow
    task = asyncio.create_task(ledger.change("plc_1", lambda r: seen(r, Observed.RUNNING)))
    await asyncio.sleep(0)
    journal.commit(Unavailable(Code.STORE_FULL, "full"))
    with pytest.raises(Unavailable):
        await task
    assert ledger.get("plc_1").seq == 1
    assert not outbox.more()
    task = asyncio.create_task(ledger.change("plc_1", lambda r: seen(r, Observed.STARTING)))
    await asyncio.sleep(0)
    journal.commit()
    await task
    assert (ledger.get("plc_1").observed, ledger.get("plc_1").seq) == (Observed.STARTING, 2)


async def test_facts_and_the_lease(tmp_path):
    journal = Journal(tmp_path / "agent.db", inline=True)
    await journal.write(put_fact("a", "1"))
    await journal.write(put_fact("a", "2"))
    assert journal.read(load_facts) == {"a": "2"}
    ledger = Ledger(journal, Outbox(), boot_id="boot")
    assert ledger.lease_until() is None
    await ledger.keep_lease(100.25)
    await ledger.keep_lease(102.0)
    assert Ledger(journal, Outbox(), boot_id="boot").lease_until() == 100.25
    await ledger.keep_lease(106.0)
    assert Ledger(journal, Outbox(), boot_id="boot").lease_until() == 106.0
    assert Ledger(journal, Outbox(), boot_id="another").lease_until() is None
    journal.close()
