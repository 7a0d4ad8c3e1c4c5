"""Moments between hosts and control's store, a folder or a bucket: by the program that hosts send and fetch with, over control's own routes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from atoll.agent.moments import CarriedMoments
from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.base.ids import HostId, PlacementId, Prefix
from atoll.control import asgi
from atoll.control.artifacts.moments import FRESH_S, SURE_S, Moments
from atoll.control.sessions.agents import PREFIX
from atoll.domain.placement import Holding
from atoll.domain.sandbox import State
from atoll.domain.snapshot import Purpose, Snapshot
from atoll.domain.snapshot import State as SnapshotState
from atoll.domain.spec import Isolation, SaveMode
from atoll.drivers.port import MomentFacts, PackList
from atoll.images.artifacts import Artifacts, Folder, Info
from atoll.images.bucket import Bucket
from atoll.images.moments import MomentCarrier
from atoll.store import facts, hosts, rows, schema, snapshots, tenancy
from atoll.store.engine import SqliteStore
from atoll.store.tables import PLACEMENTS, SANDBOXES
from tests.builders import NOW, fresh, host, placement, sandbox, team
from tests.objects.server import S3Server

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "bin" / "atoll-io"
FACTS = MomentFacts(
    "oci", Isolation.GVISOR, "x86_64", SaveMode.FULL, "sha256:" + "0" * 64, runtime="runsc 1", cpu=("avx2",), notes=(("named", "1"),)
)


class Aging:
    """A store whose objects grow old when a test says so."""

    def __init__(self, artifacts: Artifacts) -> None:
        self.artifacts, self.local = artifacts, artifacts.local
        self.aged: dict[str, tuple[float, float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.artifacts, name)

    def _old(self, info: Info) -> Info:
        was, by = self.aged.get(info.key, (0.0, 0.0))
        # One that was written again is young.
        return replace(info, changed_at=info.changed_at - by) if info.changed_at == was else info

    async def head(self, key: str) -> Info | None:
        found = await self.artifacts.head(key)
        return None if found is None else self._old(found)

    async def list(self, prefix: str) -> AsyncIterator[Info]:
        async for info in self.artifacts.list(prefix):
            yield self._old(info)

    async def age(self, by_s: float) -> None:
        for kind in ("moments", "packs", "receipts"):
            async for info in self.artifacts.list(kind):
                was, before = self.aged.get(info.key, (info.changed_at, 0.0))
                self.aged[info.key] = (info.changed_at, by_s + (before if was == info.changed_at else 0.0))


@dataclass
class Stand:
    """Control's routes for two hosts, known by their names in place of credentials, and a database with what they hold."""

    path: Path
    store: SqliteStore
    artifacts: Aging
    moments: Moments
    port: int = 0
    puts: list[str] = field(default_factory=list)
    slow: asyncio.Event | None = None
    """Packs are taken once this is set."""

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "PUT" and "/packs/" in scope["path"]:
            self.puts.append(scope["path"].rpartition("/")[2])
            if self.slow is not None and len(self.puts) > 1:
                await self.slow.wait()
        name = asgi.bearer(scope)
        found = await self.store.read(lambda conn: next(one for one in hosts.all_hosts(conn) if one.name == name))
        await asgi.guarded(send, self.moments.serve(found, scope, receive, send, scope["path"].removeprefix(f"{PREFIX}moments/")))

    def of(self, name: str) -> CarriedMoments:
        """The way of a host."""
        url = f"http://127.0.0.1:{self.port}"
        carrier = MomentCarrier(PROGRAM, lambda: {"control": {"urls": [url], "credential": name}})
        return CarriedMoments(carrier, self.path / name / "moments")

    def small(self, disk: Path) -> CarriedMoments:
        """The way of a host that keeps more of its disk free than there is."""
        return CarriedMoments(self.of("there").carrier, disk, spare_bytes=40 << 20)

    async def placed(self, on: str, *, moment: str | None = None, holding: Holding = Holding.SAVED) -> PlacementId:
        """A placement that a host holds, told to begin from this moment."""
        ours = team()
        made = sandbox(team_id=ours.id, state=State.SUSPENDED)
        one = placement(made, host_id=HostId(await self.host_id(on)), holding=holding, moment=moment)

        def write(conn: Any) -> None:
            tenancy.add_team(conn, ours, now=NOW)
            facts.accept(conn, made, payload=None, event_id=fresh(Prefix.EVENT))
            conn.execute(PLACEMENTS.insert().values(**rows.new_placement_values(one)))

        await self.store.write(write)
        return one.id

    async def host_id(self, name: str) -> str:
        return await self.store.read(lambda conn: next(one.id for one in hosts.all_hosts(conn) if one.name == name))

    async def gone(self, placement_id: str) -> None:
        await self.store.write(lambda conn: conn.execute(PLACEMENTS.update().where(PLACEMENTS.c.id == placement_id).values(holding="none")))

    async def rests_there(self, placement_id: str, digest: str | None) -> None:
        """Control has heard of the moment, and its sandbox stands on it."""

        def write(conn: Any) -> None:
            of = PLACEMENTS.select().where(PLACEMENTS.c.id == placement_id)
            sandbox_id = conn.execute(of).mappings().one()["sandbox_id"]
            conn.execute(SANDBOXES.update().where(SANDBOXES.c.id == sandbox_id).values(moment=digest))

        await self.store.write(write)

    def saved(self, name: str, *, mib: int = 40, seed: bytes = b"") -> PackList:
        """Files as a driver has them."""
        directory = self.path / "saved" / name
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "pages.img").open("wb") as file:
            for number in range(mib):
                file.write(hashlib.shake_256(b"%d" % number + seed).digest(1 << 20))
            file.truncate((mib + 64) << 20)
        (directory / "checkpoint.img").write_bytes(b"state")
        return PackList(FACTS, directory, ("checkpoint.img", "pages.img"), 1 << 20)

    async def keys(self) -> set[str]:
        return {info.key for kind in ("moments", "packs", "receipts") async for info in self.artifacts.list(kind)}


@pytest.fixture(params=["folder", "bucket"])
async def stand(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stand]:
    if not PROGRAM.exists():
        pytest.skip(f"not built: {PROGRAM}; `make build` builds it")
    if request.param == "folder":
        artifacts: Artifacts = Folder(tmp_path / "store")
    else:
        server: S3Server = request.getfixturevalue("server")
        artifacts = Bucket(server.settings(prefix=tmp_path.name))
    store = SqliteStore(tmp_path / "atoll.db")
    await store.write(schema.migrate)
    for name in ("here", "there"):
        made = host(name=name)
        await store.write(lambda conn, made=made: hosts.add(conn, made, now=NOW))
    aging = Aging(artifacts)
    stand = Stand(tmp_path, store, aging, Moments(store, aging, time.time))  # type: ignore[arg-type]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        stand.port = listening.getsockname()[1]
        server_ = uvicorn.Server(uvicorn.Config(stand.app, log_level="error", lifespan="off", interface="asgi3"))
        serving = asyncio.create_task(server_.serve(sockets=[listening]))
        try:
            yield stand
        finally:
            server_.should_exit = True
            await serving
    await store.close()


async def code_of(work: Any) -> Code:
    with pytest.raises(AtollError) as told:
        await work
    return told.value.code


async def test_what_one_host_sends_another_has_where_it_was_told_to(stand: Stand) -> None:
    mine = await stand.placed("here")
    what = stand.saved(mine)
    sent = await stand.of("here").upload(mine, what)
    assert sent.size < 41 << 20, "holes are not stored"
    assert await code_of(stand.of("there").facts(sent.digest)) is Code.FORBIDDEN, "nobody has told it"
    await stand.placed("there", moment=sent.digest, holding=Holding.RESERVED)
    assert await stand.of("there").facts(sent.digest) == FACTS
    target = stand.path / "fetched"
    await stand.of("there").fetch(sent.digest, target)
    for name in what.files:
        assert (target / name).read_bytes() == (what.directory / name).read_bytes()
    again = await stand.of("here").upload(mine, what)
    assert again == sent
    assert len(set(stand.puts)) == len(stand.puts), "nothing was sent twice"


async def test_a_host_sends_what_is_its_own(stand: Stand) -> None:
    mine, gone = await stand.placed("here"), await stand.placed("here", holding=Holding.NONE)
    what = stand.saved(mine, mib=1)
    for name, of in ((mine, "there"), (gone, "here"), ("plc_" + "0" * 20, "here")):
        assert await code_of(stand.of(of).upload(name, what)) is Code.FORBIDDEN
    assert await stand.keys() == set()
    kept = Snapshot(
        "snp_" + "1" * 20, 1, team().id, "cli_one", sandbox().id, mine, HostId(await stand.host_id("here")), SnapshotState.READY, Purpose.KEPT,
        SaveMode.FULL, sandbox().spec, NOW,
    )  # type: ignore[arg-type]  # fmt: skip
    ours = team(id=kept.team_id)
    await stand.store.write(lambda conn: (tenancy.add_team(conn, ours, now=NOW), snapshots.add(conn, kept)))
    await stand.of("here").upload(kept.id, what)
    assert await code_of(stand.of("there").upload(kept.id, what)) is Code.FORBIDDEN


async def test_what_is_no_pack_or_manifest_is_not_taken(stand: Stand) -> None:
    mine = await stand.placed("here")
    with pytest.raises(Refused) as told:
        await stand.moments.take(mine, "sha256:" + "0" * 64, b"{}")
    assert told.value.code is Code.MOMENT_CORRUPT
    for content in (
        b"[]",
        b"{",
        b'{"version":1,"packs":[{"sha256":"../x","size":1}]}',
        b'{"version":3,"packs":[]}',
        b'{"version":1,"packs":[{"sha256":"' + b"0" * 64 + b'","size":0}]}',
    ):
        with pytest.raises(Refused) as told:
            await stand.moments.take(mine, f"sha256:{hashlib.sha256(content).hexdigest()}", content)
        assert told.value.code is Code.MOMENT_CORRUPT
    name = hashlib.sha256(b"pack").hexdigest()
    content = json.dumps({"version": 2, "packs": [{"sha256": name, "size": 4}]}).encode()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with pytest.raises(Refused) as told:
        await stand.moments.take(mine, digest, content)
    assert told.value.code is Code.MOMENT_INCOMPLETE, "its pack is not there"
    # As by a link, which takes anything.
    await stand.artifacts.write(f"packs/sha256/{name}", b"another")
    with pytest.raises(Refused) as told:
        await stand.moments.take(mine, digest, content)
    assert told.value.code is Code.MOMENT_INCOMPLETE
    assert await stand.keys() == set(), "what has another size is nobody's"
    await stand.artifacts.write(f"packs/sha256/{name}", b"pack")
    stand.moments.bytes_max = lambda: 3
    with pytest.raises(Refused) as told:
        await stand.moments.take(mine, digest, content)
    assert told.value.code is Code.MOMENT_TOO_LARGE
    stand.moments.bytes_max = lambda: 4
    await stand.moments.take(mine, digest, content)


async def test_a_program_that_is_killed_at_any_pack_goes_on_with_the_next(stand: Stand) -> None:
    if stand.artifacts.local is None:
        pytest.skip("packs go to a bucket without this process")
    mine = await stand.placed("here")
    what = stand.saved(mine, mib=60)
    stand.slow = asyncio.Event()
    sending = asyncio.create_task(stand.of("here").upload(mine, what))
    async with asyncio.timeout(60):
        while len(stand.puts) < 2 or await stand.artifacts.head(f"packs/sha256/{stand.puts[0]}") is None:
            await asyncio.sleep(0.02)
    began = time.monotonic()
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    assert time.monotonic() - began < 2.0, "whoever wants the sandbox back does not wait"
    assert not _children("moment"), "and its program is gone"
    stand.slow.set()
    first = set(stand.puts[:1])
    stand.puts.clear()
    sent = await stand.of("here").upload(mine, what)
    assert not first & set(stand.puts), "what was there was not sent again"
    await stand.placed("there", moment=sent.digest)
    target = stand.path / "fetched"
    await stand.of("there").fetch(sent.digest, target)
    assert (target / "pages.img").read_bytes() == (what.directory / "pages.img").read_bytes()


def _children(word: str) -> list[int]:
    mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in mine if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_a_fetch_that_is_killed_leaves_nothing_to_begin_from(stand: Stand) -> None:
    mine = await stand.placed("here")
    what = stand.saved(mine, mib=100)
    sent = await stand.of("here").upload(mine, what)
    await stand.placed("there", moment=sent.digest)
    target = stand.path / "fetched"
    fetching = asyncio.create_task(stand.of("there").fetch(sent.digest, target))
    async with asyncio.timeout(30):
        while not list(target.parent.glob("fetched.partial-*/pages.img")):
            await asyncio.sleep(0.005)
    for pid in _children("moment"):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable):
        await fetching
    assert not target.exists()
    await stand.of("there").fetch(sent.digest, target)
    assert (target / "pages.img").read_bytes() == (what.directory / "pages.img").read_bytes()
    assert not list(target.parent.glob("fetched.partial-*"))


async def test_a_disk_that_fills_up_while_it_comes_is_said_so_and_left_as_it_was(stand: Stand) -> None:
    if os.geteuid() != 0:
        pytest.skip("a disk of its own is mounted for it, which needs root")
    mine = await stand.placed("here")
    what = stand.saved(mine, mib=60)
    sent = await stand.of("here").upload(mine, what)
    await stand.placed("there", moment=sent.digest)
    disk = stand.path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(disk)], check=True)
    try:
        assert await code_of(stand.small(disk).fetch(sent.digest, disk / "fetched")) is Code.HOST_DISK_FULL, "looked at first"
        fetching = asyncio.create_task(stand.of("there").fetch(sent.digest, disk / "fetched"))
        async with asyncio.timeout(30):
            while not list(disk.glob("fetched.partial-*/pages.img")):
                await asyncio.sleep(0.002)
        with contextlib.suppress(OSError), (disk / "other").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        with pytest.raises(Refused) as told:
            await fetching
        assert told.value.code is Code.HOST_DISK_FULL
        assert [path.name for path in disk.iterdir()] == ["other"]
        (disk / "other").unlink()
        await stand.of("there").fetch(sent.digest, disk / "fetched")
        assert (disk / "fetched" / "pages.img").read_bytes() == (what.directory / "pages.img").read_bytes()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


async def test_a_store_that_has_lost_or_damaged_something_is_told_apart(stand: Stand) -> None:
    mine = await stand.placed("here")
    sent = await stand.of("here").upload(mine, stand.saved(mine, mib=1))
    await stand.placed("there", moment=sent.digest)
    [pack] = [key for key in await stand.keys() if key.startswith("packs/")]
    content = await stand.artifacts.read(pack, bytes_max=32 << 20)
    await stand.artifacts.write(pack, content[:-9] + bytes(9))
    target = stand.path / "fetched"
    assert await code_of(stand.of("there").fetch(sent.digest, target)) is Code.MOMENT_CORRUPT
    await stand.artifacts.write(f"moments/sha256/{sent.digest[7:]}", b"{}")
    stand.moments._known.clear()
    assert await code_of(stand.of("there").facts(sent.digest)) is Code.MOMENT_CORRUPT
    await stand.artifacts.delete(f"moments/sha256/{sent.digest[7:]}")
    assert await code_of(stand.of("there").facts(sent.digest)) is Code.MOMENT_UNAVAILABLE
    assert not target.exists()


async def test_a_second_save_shares_what_the_first_has(stand: Stand) -> None:
    mine = await stand.placed("here")
    one = stand.saved(mine)
    first = await stand.of("here").upload(mine, one)
    packs = {key for key in await stand.keys() if key.startswith("packs/")}
    with (one.directory / "pages.img").open("r+b") as file:
        file.seek(70 << 20)
        file.write(b"changed")
    # Long after: what the first has sent stays as long as its host may send more of it.
    await stand.artifacts.age(2 * FRESH_S)
    await stand.moments.collect()
    assert packs <= await stand.keys()
    second = await stand.of("here").upload(mine, one)
    more = {key for key in await stand.keys() if key.startswith("packs/")} - packs
    assert second.digest != first.digest
    assert len(more) == 1, "what is new is in one pack"
    assert sum([info.size async for info in stand.artifacts.list("packs") if info.key in more]) < 4096
    await stand.moments.collect()
    assert f"moments/sha256/{first.digest[7:]}" not in await stand.keys(), "the newest save counts"
    assert packs <= await stand.keys(), "and stands on what is left of the first"


async def test_what_nobody_needs_goes_and_what_somebody_may_need_stays(stand: Stand) -> None:
    mine, other = await stand.placed("here"), await stand.placed("here")
    sent = await stand.of("here").upload(mine, stand.saved(mine, mib=2))
    await stand.of("here").upload(other, stand.saved(other, mib=2, seed=b"other"))
    every = await stand.keys()
    await stand.gone(other)
    assert (await stand.moments.collect()).keys == (), "what is young may be about to be recorded"
    await stand.artifacts.age(FRESH_S + 60)
    # Its host still holds it, and control has heard of no moment yet: its word may be on its way.
    would = await stand.moments.collect(dry_run=True)
    assert await stand.keys() == every
    went = await stand.moments.collect()
    assert went == would
    left = await stand.keys()
    assert len(went.keys) == 3, "manifest, pack and receipt"
    assert left | set(went.keys) == every
    await stand.rests_there(mine, sent.digest)
    await stand.gone(mine)
    await stand.moments.collect()
    assert f"moments/sha256/{sent.digest[7:]}" in await stand.keys(), "it rests in the store alone"
    await stand.placed("there", moment=sent.digest)
    await stand.of("there").fetch(sent.digest, stand.path / "fetched")
    await stand.rests_there(mine, None)
    assert f"moments/sha256/{sent.digest[7:]}" not in (await stand.moments.collect()).keys, "somebody was told to fetch it"


async def test_what_comes_while_the_store_is_listed_keeps_what_it_stands_on(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = await stand.placed("here")
    what = stand.saved(mine, mib=2)
    await stand.of("here").upload(mine, what)
    await stand.artifacts.age(2 * FRESH_S)
    with (what.directory / "pages.img").open("r+b") as file:
        file.write(b"changed")
    second: list[str] = []
    listing = stand.artifacts.list

    async def listed(prefix: str) -> AsyncIterator[Info]:
        for info in [info async for info in listing(prefix)]:
            yield info
        if prefix.startswith("moments") and not second:
            # In between the next save of the same sandbox arrives, and stands on the packs of the first.
            second.append((await stand.of("here").upload(mine, what)).digest)

    monkeypatch.setattr(stand.artifacts, "list", listed)
    await stand.moments.collect()
    monkeypatch.undo()
    await stand.placed("there", moment=second[0])
    await stand.of("there").fetch(second[0], stand.path / "fetched")
    assert (stand.path / "fetched" / "pages.img").read_bytes() == (what.directory / "pages.img").read_bytes()


async def test_a_manifest_that_cannot_be_read_keeps_every_pack(stand: Stand) -> None:
    mine, other = await stand.placed("here"), await stand.placed("here")
    sent = await stand.of("here").upload(mine, stand.saved(mine, mib=1))
    await stand.of("here").upload(other, stand.saved(other, mib=1, seed=b"other"))
    await stand.rests_there(mine, sent.digest)
    await stand.gone(other)
    await stand.artifacts.write(f"moments/sha256/{sent.digest[7:]}", b"damaged")
    stand.moments._known.clear()
    await stand.artifacts.age(2 * FRESH_S)
    every = await stand.keys()
    await stand.moments.collect()
    assert await stand.keys() == every


async def test_packs_that_may_go_are_sent_again(stand: Stand) -> None:
    mine, other = await stand.placed("here"), await stand.placed("here")
    first = await stand.of("here").upload(other, stand.saved(other, mib=2))
    await stand.gone(other)
    # Nobody needs the first any more, and it is not collected yet: nothing may come to stand on it as it is.
    await stand.artifacts.age(SURE_S + 60)
    content = await stand.artifacts.read(f"moments/sha256/{first.digest[7:]}")
    with pytest.raises(Refused) as told:
        await stand.moments.take(mine, first.digest, content)
    assert told.value.code is Code.MOMENT_INCOMPLETE
    stand.puts.clear()
    # A bucket tells times in seconds.
    await asyncio.sleep(1.1)
    again = await stand.of("here").upload(mine, stand.saved(mine, mib=2))
    assert again.digest == first.digest
    assert stand.puts or stand.artifacts.local is None, "it was sent anew, though it was there"
    await stand.artifacts.age(SURE_S)
    await stand.moments.collect()
    await stand.placed("there", moment=again.digest)
    await stand.of("there").fetch(again.digest, stand.path / "fetched")


async def test_a_store_that_is_away_is_said_so(stand: Stand) -> None:
    mine = await stand.placed("here")
    what = stand.saved(mine, mib=1)
    url = stand.of("here").carrier.objects()["control"]["urls"][0]
    assert url.startswith("http://")
    nobody = MomentCarrier(PROGRAM, lambda: {"control": {"urls": ["http://127.0.0.1:9"], "credential": "here"}})
    away = CarriedMoments(nobody, stand.path / "away")
    with pytest.raises(Unavailable) as told:
        await away.upload(mine, what)
    assert told.value.code is Code.MOMENT_UNAVAILABLE
    assert "here" not in str(told.value.detail), "no credential is said"
