"""A backup of the embedded store: one moment of it, checked, private; and what is put in its place, whatever is cut off in between."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.base.errors import Code, Refused, Unavailable
from atoll.base.ids import Prefix
from atoll.domain.sandbox import State
from atoll.store import backup, facts, hosts, restoring, sandboxes, schema, tenancy
from atoll.store.engine import SqliteStore
from atoll.store.tables import DEPLOYMENT, ENROLLMENTS, PLACEMENTS, SANDBOXES
from tests.builders import NOW, fresh, host, placement, sandbox, team

INSTALL = "ins_one"
KEYS = {"sealing.key": backup.fingerprint(b"one"), "token.key": backup.fingerprint(b"two")}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    (tmp_path / "control").mkdir()
    return tmp_path / "control" / "atoll.db"


async def opened(database: Path) -> SqliteStore:
    store = SqliteStore(database)
    await store.write(schema.migrate)
    first = restoring.first(chance=os.urandom)
    await store.write(lambda conn: schema.deployment(conn, install_id=INSTALL, incarnation=first, now=NOW))
    return store


async def add_host(store: SqliteStore, name: str) -> str:
    made = host(name=name, epoch="epo_1", poll_seq=5)
    await store.write(lambda conn: hosts.add(conn, made, now=NOW))
    return made.id


def make(database: Path, target: Path) -> backup.Manifest:
    return backup.create(database, target, version="0.1.0", now=NOW, keys=KEYS)


def prepare(file: Path, database: Path, *, install_id: str = INSTALL, keys: dict[str, str] | None = None) -> backup.Restored:
    return backup.prepare(file, database, install_id=install_id, keys=KEYS if keys is None else keys, now=NOW + 100, chance=os.urandom)


async def names(store: SqliteStore) -> list[str]:
    return [one.name for one in await store.read(hosts.all_hosts)]


async def test_while_it_is_written_to_and_read_back(database: Path, tmp_path: Path) -> None:
    store = await opened(database)
    writing = True

    async def write() -> int:
        count = 0
        while writing:
            await add_host(store, f"h{count:05d}")
            count += 1
        return count

    task = asyncio.create_task(write())
    await asyncio.sleep(0.1)
    manifest = await asyncio.to_thread(make, database, tmp_path / "one.backup")
    await asyncio.sleep(0.05)
    writing = False
    written = await task
    await store.close()
    assert backup.read(tmp_path / "one.backup") == manifest
    assert manifest.schema_step == schema.newest()
    assert (manifest.install_id, manifest.keys) == (INSTALL, KEYS)
    prepare(tmp_path / "one.backup", database)
    kept = backup.put_in_place(database)
    assert kept is not None
    again = SqliteStore(database)
    found = await names(again)
    await again.close()
    # One moment: the first so many, without a gap.
    assert 0 < len(found) <= written
    assert found == [f"h{number:05d}" for number in range(len(found))]
    before = sqlite3.connect(kept)
    assert before.execute("SELECT count(*) FROM hosts").fetchone() == (written,)
    before.close()


async def test_the_file_is_private_and_leaves_nothing_beside_it(database: Path, tmp_path: Path) -> None:
    store = await opened(database)
    old = os.umask(0)
    try:
        make(database, tmp_path / "b")
    finally:
        os.umask(old)
    await store.close()
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "control"]
    with tarfile.open(tmp_path / "b") as archive:
        assert archive.getnames() == ["manifest.json", "atoll.db"]
        assert {entry.mode for entry in archive} == {0o600}


async def test_it_replaces_no_file(database: Path, tmp_path: Path) -> None:
    await (await opened(database)).close()
    (tmp_path / "b").write_text("precious")
    with pytest.raises(Refused) as refused:
        make(database, tmp_path / "b")
    assert refused.value.code is Code.INVALID_REQUEST
    assert (tmp_path / "b").read_text() == "precious"


async def test_no_database_is_no_backup(tmp_path: Path, database: Path) -> None:
    with pytest.raises(Refused):
        make(database, tmp_path / "b")
    with pytest.raises(Unavailable):
        make_into_nowhere = tmp_path / "nowhere" / "b"
        await (await opened(database)).close()
        make(database, make_into_nowhere)
    assert not (tmp_path / "b").exists()


def cut(file: Path) -> None:
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def repacked(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with tarfile.open(file) as archive:
            parts = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
        manifest = json.loads(parts["manifest.json"])
        change(manifest)
        parts["manifest.json"] = json.dumps(manifest).encode()
        with tarfile.open(file, "w") as archive:
            for name, content in parts.items():
                path = file.with_suffix(".tmp")
                path.write_bytes(content)
                archive.add(path, name)
                path.unlink()

    return damage


def alien(file: Path) -> None:
    file.write_bytes(b"not a backup at all" * 1000)


def swapped(file: Path) -> None:
    with tarfile.open(file) as archive:
        parts = [(entry.name, archive.extractfile(entry).read()) for entry in archive]  # type: ignore[union-attr]
    with tarfile.open(file, "w") as archive:
        for name, content in reversed(parts):
            path = file.with_suffix(".tmp")
            path.write_bytes(content)
            archive.add(path, name)
            path.unlink()


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (cut, Code.BACKUP_INVALID),
        (flip, Code.BACKUP_INVALID),
        (alien, Code.BACKUP_INVALID),
        (swapped, Code.BACKUP_INVALID),
        (Path.unlink, Code.BACKUP_INVALID),
        (repacked(lambda manifest: manifest.update(sha256="0" * 64)), Code.BACKUP_INVALID),
        (repacked(lambda manifest: manifest.update(size_bytes=1)), Code.BACKUP_INVALID),
        (repacked(lambda manifest: manifest.pop("install_id")), Code.BACKUP_INVALID),
        (repacked(lambda manifest: manifest.update(install_id="ins_other")), Code.BACKUP_MISMATCH),
        (repacked(lambda manifest: manifest.update(keys={**KEYS, "sealing.key": "0" * 16})), Code.BACKUP_MISMATCH),
        (repacked(lambda manifest: manifest.update(keys={**KEYS, "a.later.key": "0" * 16})), Code.BACKUP_MISMATCH),
        (repacked(lambda manifest: manifest.update(format=2)), Code.STORE_NEWER),
    ],
)  # fmt: skip
async def test_what_is_no_whole_backup_of_this_install_changes_nothing(
    database: Path, tmp_path: Path, damage: Callable[[Path], None], code: Code
) -> None:
    store = await opened(database)
    await add_host(store, "before")
    file = tmp_path / "b"
    make(database, file)
    await add_host(store, "after")
    damage(file)
    with pytest.raises(Refused) as refused:
        prepare(file, database)
    assert refused.value.code is code
    assert backup.put_in_place(database) is None
    assert await names(store) == ["after", "before"]
    await store.close()
    assert not [path for path in database.parent.iterdir() if "restore" in path.name]


async def test_one_that_a_later_release_made_is_refused(database: Path, tmp_path: Path) -> None:
    store = await opened(database)
    await store.write(lambda conn: conn.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'"))
    await store.close()
    make(database, tmp_path / "b")
    with pytest.raises(Refused) as refused:
        prepare(tmp_path / "b", database)
    assert refused.value.code is Code.STORE_NEWER


async def test_nobody_has_it_taken_away_while_it_is_open(database: Path, tmp_path: Path) -> None:
    store = await opened(database)
    make(database, tmp_path / "b")
    prepare(tmp_path / "b", database)
    with pytest.raises(Refused) as refused:
        backup.put_in_place(database)
    assert refused.value.code is Code.STORE_LOCKED
    await add_host(store, "still served")
    await store.close()
    assert backup.put_in_place(database) is not None


@pytest.mark.parametrize("step", range(8))
async def test_cut_off_at_any_step_it_is_the_old_one_or_the_new_one(
    database: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(database)
    await add_host(store, "before")
    make(database, tmp_path / "b")
    await add_host(store, "after")
    await store.close()
    # As kill -9 leaves it: with a log.
    connection = sqlite3.connect(database)
    connection.execute("UPDATE hosts SET region = 'log'")
    connection.commit()
    image = {suffix: Path(f"{database}{suffix}").read_bytes() for suffix in ("", "-wal", "-shm") if Path(f"{database}{suffix}").exists()}
    connection.close()
    for suffix, content in image.items():
        Path(f"{database}{suffix}").write_bytes(content)
    prepare(tmp_path / "b", database)
    moves = 0

    class Cut(Exception):
        pass

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def move(*arguments: object, **options: object) -> object:
            nonlocal moves
            if moves == step:
                raise Cut
            moves += 1
            return real(*arguments, **options)

        return move

    for name in ("rename", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    try:
        backup.put_in_place(database)
    except Cut:
        monkeypatch.undo()
        # Control, which starts again, goes on with it.
        assert backup.put_in_place(database) is not None
    monkeypatch.undo()
    again = SqliteStore(database)
    assert await names(again) == ["before"]
    assert {one.region for one in await again.read(hosts.all_hosts)} == {"local"}
    await again.close()


async def test_a_damaged_database_is_kept_and_replaced(database: Path, tmp_path: Path) -> None:
    store = await opened(database)
    await add_host(store, "before")
    make(database, tmp_path / "b")
    await store.close()
    database.write_bytes(b"\0" * 8192)
    taken = prepare(tmp_path / "b", database)
    assert taken.previous is None
    kept = backup.put_in_place(database)
    assert kept is not None
    assert kept.read_bytes() == b"\0" * 8192
    again = SqliteStore(database)
    assert await names(again) == ["before"]
    await again.close()


async def test_each_restore_is_another_life(database: Path, tmp_path: Path) -> None:
    store = await opened(database)
    make(database, tmp_path / "b")
    await store.close()
    seen = [backup.read(tmp_path / "b").incarnation]
    for _ in range(3):
        seen.append(prepare(tmp_path / "b", database).incarnation)
        backup.put_in_place(database)
        store = SqliteStore(database)
        assert await store.read(lambda conn: conn.execute(sa.select(DEPLOYMENT.c.incarnation)).scalar_one()) == seen[-1]
        await store.close()
    assert [int(one.partition(".")[0]) for one in seen] == [1, 2, 3, 4]
    assert len(set(seen)) == 4


@pytest.mark.parametrize(
    ("lives", "number"), [(("1.aa",), 2), (("1.aa", "7.bb"), 8), (("cafe",), 2), (("12", None), 2), ((None,), 2), (("x.1",), 2)]
)
def test_the_next_life_has_a_higher_number_than_any_before(lives: tuple[str | None, ...], number: int) -> None:
    assert restoring.after(*lives, chance=os.urandom).startswith(f"{number}.")


async def test_what_was_under_way_is_not_begun_again(database: Path) -> None:
    store = await opened(database)
    ours, machine = team(), host(epoch="epo_1", poll_seq=5, seen_at=NOW)
    waiting, starting, ready = (sandbox(team_id=ours.id, request_id=name, request_digest="d") for name in ("w", "s", "r"))

    def fill(conn: sa.Connection) -> None:
        tenancy.add_team(conn, ours, now=NOW)
        hosts.add(conn, machine, now=NOW)
        hosts.add_enrollment(conn, hosts.Enrollment("enr_1", "d1", "n", NOW, NOW + 3600))
        for one in (waiting, starting, ready):
            facts.accept(conn, one, payload=None, event_id=fresh(Prefix.EVENT))
        for one in (starting, ready):
            facts.reserve(conn, one.id, placement(one, host_id=machine.id), now=NOW, ids=lambda: fresh(Prefix.EVENT))
        conn.execute(sa.update(SANDBOXES).where(SANDBOXES.c.id == ready.id).values(state="ready", started_at=NOW, deadline_at=None))
        conn.execute(sa.update(PLACEMENTS).where(PLACEMENTS.c.sandbox_id == ready.id).values(holding="active", applied_revision=1))

    await store.write(fill)
    revisions = {one.id: (await store.read(lambda conn, one=one: facts.load(conn, one.id))).sandbox.revision for one in (starting, waiting)}  # type: ignore[misc,union-attr]
    await store.write(lambda conn: restoring.begin_anew(conn, incarnation="2.x", now=NOW + 50, chance=os.urandom))

    async def now(sandbox_id: str) -> facts.Facts:
        found = await store.read(lambda conn: facts.load(conn, sandbox_id))
        assert found is not None
        return found

    ended = (await now(waiting.id)).sandbox
    assert (ended.state, ended.reason, ended.released_at, ended.request_id) == (State.FAILED, "STORE_RESTORED", NOW + 50, None)
    assert (await store.read(lambda conn: sandboxes.events_of(conn, waiting, after=0, limit=9)))[-1]["type"] == "sandbox.failed"
    begun = await now(starting.id)
    assert begun.sandbox.state is State.PROVISIONING
    assert begun.sandbox.bootstrap_exposed
    assert begun.sandbox.deadline_at == NOW + 50 + restoring.HEARD_WITHIN_S
    assert begun.placement is not None
    assert begun.placement.applied_revision == begun.placement.desired_revision
    assert begun.sandbox.revision > revisions[starting.id]
    assert (await now(ready.id)).sandbox.state is State.READY
    assert (await store.read(lambda conn: facts.used(conn, machine.id))).slots == 2
    found = await store.read(lambda conn: hosts.by_id(conn, machine.id))
    assert found is not None
    assert (found.epoch, found.poll_seq, found.seen_at) == (None, 0, None)
    assert await store.read(lambda conn: conn.execute(sa.select(ENROLLMENTS.c.expires_at)).scalar_one()) == NOW + 50
    await store.close()
