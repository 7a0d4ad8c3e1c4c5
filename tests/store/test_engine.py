"""How store functions run: durable before told, alone in their savepoint, one process per file."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from atoll.base.errors import Code, Refused, Unavailable
from atoll.store import engine, schema
from atoll.store.engine import SqliteStore
from atoll.store.tables import TEAMS
from tests.builders import NOW

ROOT = Path(__file__).resolve().parents[2]


def add(conn: sa.Connection, name: str) -> str:
    values = {"id": name, "name": name, "created_at": NOW}
    conn.execute(sa.insert(TEAMS), values)
    return name


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def names(conn: sa.Connection) -> list[str]:
    return list(conn.execute(sa.select(TEAMS.c.name).order_by(TEAMS.c.name)).scalars())


class Disk:
    """Stands for a slow one: a commit waits until it may go on."""

    def __init__(self, store: SqliteStore) -> None:
        self._begun, self._go_on = threading.Event(), threading.Event()
        commit = store._commit

        def held(group: Any) -> None:
            self._begun.set()
            assert self._go_on.wait(10)
            commit(group)

        store._commit = held  # type: ignore[method-assign]

    async def is_asked(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 10)

    def go_on(self) -> None:
        self._go_on.set()


async def test_a_write_is_seen_by_reads_and_by_other_processes_when_it_answers(sqlite: SqliteStore, tmp_path: Path) -> None:
    assert await sqlite.write(lambda conn: add(conn, "a")) == "a"
    assert await sqlite.read(names) == ["a"]
    elsewhere = sqlite3.connect(tmp_path / "atoll.db")
    assert elsewhere.execute("select name from teams").fetchall() == [("a",)]
    elsewhere.close()


async def test_it_is_durable_over_power_loss(sqlite: SqliteStore) -> None:
    def pragmas(conn: sa.Connection) -> tuple[str, int, int]:
        return tuple(conn.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("journal_mode", "synchronous", "foreign_keys"))  # type: ignore[return-value]

    full = 2
    assert await sqlite.write(pragmas) == ("wal", full, 1)


async def test_what_waits_together_is_committed_together(sqlite: SqliteStore) -> None:
    """Group commit: while one commit is under way, the others gather, and one more commit takes them all."""
    commits: list[str] = []
    sqlite._driver.set_trace_callback(commits.append)
    disk = Disk(sqlite)
    first = asyncio.ensure_future(sqlite.write(lambda conn: add(conn, "first")))
    await disk.is_asked()
    others = [asyncio.ensure_future(sqlite.write(lambda conn, n=n: add(conn, f"t{n:03}"))) for n in range(100)]  # type: ignore[misc]
    await asyncio.sleep(0)
    disk.go_on()
    await first
    assert await asyncio.gather(*others) == [f"t{n:03}" for n in range(100)]
    assert commits.count("COMMIT") == 2
    assert len(await sqlite.read(names)) == 101


async def test_what_is_asked_in_one_turn_of_the_loop_is_committed_together(sqlite: SqliteStore) -> None:
    commits: list[str] = []
    sqlite._driver.set_trace_callback(commits.append)
    await asyncio.gather(*(sqlite.write(lambda conn, n=n: add(conn, f"t{n}")) for n in range(5)))  # type: ignore[misc]
    assert commits.count("COMMIT") == 1


async def test_the_loop_turns_between_functions_that_take_long(sqlite: SqliteStore) -> None:
    done: list[str] = []

    def slow(conn: sa.Connection, name: str) -> None:
        time.sleep(engine._TURN_S * 1.5)
        done.append(add(conn, name))

    async def beside() -> None:
        while len(done) < 3:
            done.append("turn")
            await asyncio.sleep(0)

    writes = asyncio.gather(*(sqlite.write(lambda conn, name=name: slow(conn, name)) for name in "abc"))  # type: ignore[misc]
    await asyncio.gather(writes, beside())
    kept = [one for one in done if one != "turn"]
    assert kept == ["a", "b", "c"], "in the order in which they came"
    assert "turn" in done[done.index("a") : done.index("c")]
    assert await sqlite.read(names) == ["a", "b", "c"]


async def test_the_loop_does_not_wait_for_another_process_that_has_the_database(sqlite: SqliteStore, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "atoll.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    waiting = [asyncio.ensure_future(sqlite.write(lambda conn, n=n: add(conn, f"t{n}"))) for n in range(3)]  # type: ignore[misc]
    await asyncio.sleep(0.05)
    assert await sqlite.read(names) == []
    assert time.monotonic() - began < 1
    assert not any(task.done() for task in waiting)
    other.execute("COMMIT")
    assert await asyncio.gather(*waiting) == ["t0", "t1", "t2"]
    other.close()


async def test_who_waits_too_long_for_another_process_is_told(sqlite: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_BUSY_S", 0.1)
    other = sqlite3.connect(tmp_path / "atoll.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable) as refused:
        await sqlite.write(lambda conn: add(conn, "never"))
    assert refused.value.code is Code.STORE_UNAVAILABLE
    other.execute("COMMIT")
    await sqlite.write(lambda conn: add(conn, "later"))
    assert await sqlite.read(names) == ["later"]
    other.close()


async def test_a_batch_has_a_limit(sqlite: SqliteStore) -> None:
    await asyncio.gather(*(sqlite.write(lambda conn, n=n: add(conn, f"t{n:03}")) for n in range(300)))  # type: ignore[misc]
    assert len(await sqlite.read(names)) == 300


async def test_a_function_that_fails_undoes_only_its_own(sqlite: SqliteStore) -> None:
    def fails(conn: sa.Connection) -> None:
        add(conn, "half")
        raise ValueError("after a write")

    results = await asyncio.gather(
        sqlite.write(lambda conn: add(conn, "before")),
        sqlite.write(fails),
        sqlite.write(lambda conn: add(conn, "after")),
        return_exceptions=True,
    )
    assert results[0] == "before"
    assert results[2] == "after"
    assert isinstance(results[1], ValueError)
    assert await sqlite.read(names) == ["after", "before"]


async def test_who_fails_half_way_makes_the_others_run_once_more(sqlite: SqliteStore) -> None:
    runs: list[str] = []

    def adds(name: str, *, fails: bool = False) -> Callable[[sa.Connection], str]:
        def work(conn: sa.Connection) -> str:
            runs.append(name)
            add(conn, name)
            if fails:
                raise ValueError(name)
            return name

        return work

    def refuses(conn: sa.Connection) -> None:
        runs.append("refused")
        names(conn)
        raise ValueError("refused")

    works = [adds("a"), refuses, adds("b", fails=True), adds("c")]
    results = await asyncio.gather(*(sqlite.write(work) for work in works), return_exceptions=True)
    assert [str(one) for one in results] == ["a", "refused", "b", "c"]
    assert await sqlite.read(names) == ["a", "c"]
    assert runs == ["a", "refused", "b", "a", "refused", "b", "c"], "a refusal that has changed nothing costs nobody anything"


async def test_a_commit_is_told_before_its_caller_goes_on_and_without_one(sqlite: SqliteStore) -> None:
    heard: list[str] = []
    disk = Disk(sqlite)
    task = asyncio.ensure_future(sqlite.write(lambda conn: add(conn, "kept"), tell=heard.append))
    await disk.is_asked()
    task.cancel()
    await asyncio.wait({task})
    assert heard == []
    disk.go_on()
    await sqlite.write(lambda conn: add(conn, "next"), tell=lambda name: heard.append(f"told {name}"))
    assert heard == ["kept", "told next"]

    def fails(conn: sa.Connection) -> str:
        raise ValueError("nothing to tell")

    with pytest.raises(ValueError, match="nothing to tell"):
        await sqlite.write(fails, tell=heard.append)
    assert len(heard) == 2


async def test_a_refusal_passes_through_as_it_is(sqlite: SqliteStore) -> None:
    def refuses(conn: sa.Connection) -> None:
        raise Refused(Code.TEAM_SANDBOX_QUOTA, "full")

    with pytest.raises(Refused) as refused:
        await sqlite.write(refuses)
    assert refused.value.code is Code.TEAM_SANDBOX_QUOTA


async def test_a_taken_name_is_the_caller_s_to_judge(sqlite: SqliteStore) -> None:
    await sqlite.write(lambda conn: add(conn, "a"))
    with pytest.raises(sa.exc.IntegrityError):
        await sqlite.write(lambda conn: add(conn, "a"))
    await sqlite.write(lambda conn: add(conn, "b"))


async def test_a_statement_that_the_database_refuses_is_unavailable(sqlite: SqliteStore) -> None:
    for ask in (sqlite.write, sqlite.read):
        with pytest.raises(Unavailable) as refused:
            await ask(lambda conn: conn.exec_driver_sql("select * from nowhere"))
        assert refused.value.code is Code.STORE_UNAVAILABLE
    await sqlite.write(lambda conn: add(conn, "still"))


async def test_who_gives_up_waiting_does_not_undo_it(sqlite: SqliteStore) -> None:
    disk = Disk(sqlite)
    task = asyncio.ensure_future(sqlite.write(lambda conn: add(conn, "kept")))
    await disk.is_asked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    disk.go_on()
    await sqlite.write(lambda conn: None)
    assert await sqlite.read(names) == ["kept"]


async def test_a_read_does_not_wait_for_a_write(sqlite: SqliteStore) -> None:
    disk = Disk(sqlite)
    task = asyncio.ensure_future(sqlite.write(lambda conn: add(conn, "later")))
    await disk.is_asked()
    assert await sqlite.read(names) == [], "a read sees the last commit, not what is under way"
    disk.go_on()
    await task
    assert await sqlite.read(names) == ["later"]


async def test_a_file_has_one_process(sqlite: SqliteStore, tmp_path: Path) -> None:
    path = tmp_path / "atoll.db"
    with pytest.raises(Refused) as refused:
        SqliteStore(path)
    assert refused.value.code is Code.STORE_LOCKED
    program = "import sys, pathlib\nfrom atoll.store.engine import SqliteStore\nSqliteStore(pathlib.Path(sys.argv[1]))"
    other = run(sys.executable, "-c", program, path)
    assert other.returncode == 1
    assert "STORE_LOCKED" in other.stderr
    await sqlite.write(lambda conn: add(conn, "ours"))


async def test_the_lock_ends_with_the_process(tmp_path: Path) -> None:
    """kill -9 leaves no lock behind, and every answered commit is there."""
    path = tmp_path / "atoll.db"
    program = (
        "import asyncio, os, pathlib, signal, sys\n"
        "from atoll.store import schema\n"
        "from atoll.store.engine import SqliteStore\n"
        "from tests.store.test_engine import add\n"
        "async def main():\n"
        "    store = SqliteStore(pathlib.Path(sys.argv[1]))\n"
        "    await store.write(schema.migrate)\n"
        "    await store.write(lambda conn: add(conn, 'committed'))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    killed = run(sys.executable, "-c", program, path)
    assert killed.returncode == -9, killed.stderr
    store = SqliteStore(path)
    assert await store.read(names) == ["committed"]
    await store.close()


async def test_a_store_can_be_opened_again(tmp_path: Path) -> None:
    for number in range(3):
        store = SqliteStore(tmp_path / "atoll.db")
        await store.write(schema.migrate)
        await store.write(lambda conn, number=number: add(conn, f"time{number}"))  # type: ignore[misc]
        await store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "store-writer"]


async def test_after_close_nobody_waits_for_ever(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "atoll.db")
    await store.write(schema.migrate)
    await store.close()
    with pytest.raises(Unavailable) as refused:
        await asyncio.wait_for(store.write(lambda conn: add(conn, "late")), timeout=5)
    assert refused.value.code is Code.STORE_UNAVAILABLE


async def test_writes_that_wait_at_close_are_done_first(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "atoll.db")
    await store.write(schema.migrate)
    writes = [asyncio.ensure_future(store.write(lambda conn, n=n: add(conn, f"t{n:03}"))) for n in range(300)]  # type: ignore[misc]
    await asyncio.sleep(0)
    await store.close()
    assert len(await asyncio.gather(*writes)) == 300


async def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "atoll.db"
    path.write_bytes(b"this is not a database, it is a sentence. " * 100)
    with pytest.raises(Unavailable) as refused:
        SqliteStore(path)
    assert refused.value.code is Code.STORE_UNAVAILABLE
    path.unlink()
    store = SqliteStore(path)
    await store.close()


async def test_a_full_disk_is_said_to_be_full_and_loses_nothing(tmp_path: Path) -> None:
    """A file size limit stands in for the disk: the same error of the same write."""
    program = (
        "import asyncio, pathlib, resource, signal, sys\n"
        "from atoll.base.errors import Unavailable\n"
        "from atoll.store import schema\n"
        "from atoll.store.engine import SqliteStore\n"
        "from tests.store.test_engine import add, names\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "async def main():\n"
        "    path = pathlib.Path(sys.argv[1])\n"
        "    store = SqliteStore(path)\n"
        "    await store.write(schema.migrate)\n"
        "    await store.write(lambda conn: add(conn, 'before'))\n"
        "    size = pathlib.Path(f'{path}-wal').stat().st_size\n"
        "    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4096, hard))\n"
        "    try:\n"
        "        await store.write(lambda conn: add(conn, 'x' * 100_000))\n"
        "    except Unavailable as error:\n"
        "        print(error.code)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "    await store.write(lambda conn: add(conn, 'after'))\n"
        "    print(*await store.read(names))\n"
        "    await store.close()\n"
        "asyncio.run(main())\n"
    )
    ran = run(sys.executable, "-c", program, tmp_path / "atoll.db")
    assert ran.stdout.splitlines() == ["STORE_FULL", "after before"], ran.stderr


@pytest.mark.root
async def test_a_really_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk)
    if mounted.returncode != 0:
        pytest.skip(f"needs root and mount: {mounted.stderr.strip()}")
    try:
        store = SqliteStore(disk / "atoll.db")
        await store.write(schema.migrate)
        await store.write(lambda conn: add(conn, "before"))
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(8 * 1024 * 1024))
        with pytest.raises(Unavailable) as refused:
            # More than the room that was kept.
            await store.write(lambda conn: add(conn, "x" * 4_000_000))
        assert refused.value.code is Code.STORE_FULL
        assert await store.read(names) == ["before"]
        filler.unlink()
        await store.write(lambda conn: add(conn, "after"))
        assert await store.read(names) == ["after", "before"]
        await store.close()
    finally:
        assert run("umount", disk).returncode == 0


async def test_a_busy_writer_answers_each_caller_with_its_own_result(sqlite: SqliteStore) -> None:
    results = await asyncio.gather(*(sqlite.write(lambda conn, n=n: n) for n in range(2000)))  # type: ignore[misc]
    assert results == list(range(2000))


async def test_a_closed_store_reads_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "atoll.db")
    await store.close()
    with pytest.raises(Unavailable) as refused:
        await store.read(names)
    assert refused.value.code is Code.STORE_UNAVAILABLE
