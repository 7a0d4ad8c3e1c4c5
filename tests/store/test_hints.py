"""Hints between processes on one database: what is told, that it is told after the commit, and that no gap goes unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

import asyncpg
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.ids import Prefix
from atoll.domain.host import Host
from atoll.domain.tenancy import Team
from atoll.planning.stimuli import ReleaseRequested
from atoll.store import facts, hints, hosts, schema, tenancy
from atoll.store.hints import EVERYTHING, Hints
from atoll.store.postgres import PostgresStore
from tests.builders import NOW, fresh, host, sandbox, team
from tests.store.server import Server

IDS = st.frozensets(st.from_regex(r"[a-z0-9_:]{1,24}", fullmatch=True), max_size=150)


@given(st.booleans(), IDS, IDS, IDS)
def test_a_message_says_all_of_it_or_everything(
    everything: bool, sandboxes: frozenset[str], machines: frozenset[str], ends: frozenset[str]
) -> None:
    what = Hints(everything, sandboxes, machines, ends)
    message = hints.write("me", what)
    assert len(message.encode()) <= hints.MESSAGE_BYTES_MAX
    sender, heard = hints.read(message)
    assert sender == "me"
    assert heard == (what if not heard.everything else EVERYTHING)
    assert heard.everything or not everything


def test_a_word_of_a_later_release_is_everything() -> None:
    assert hints.read("other zsomething") == ("other", EVERYTHING)
    assert hints.read("other *") == ("other", EVERYTHING)


def test_everything_absorbs() -> None:
    assert (EVERYTHING | Hints(sandboxes=frozenset("a"))) is EVERYTHING
    assert Hints(sandboxes=frozenset("a")) | Hints(hosts=frozenset("b")) == Hints(False, frozenset("a"), frozenset("b"))
    assert not Hints()


class Replica:
    """A store and what it has heard of others."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.heard: list[Hints] = []
        self._news = asyncio.Event()
        self.task = asyncio.create_task(store.follow(self._hear))

    def _hear(self, what: Hints) -> None:
        self.heard.append(what)
        self._news.set()

    async def until(self, about: Callable[[Hints], bool], *, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not any(map(about, self.heard)):
                self._news.clear()
                await self._news.wait()


@contextlib.asynccontextmanager
async def replica(url: str) -> AsyncIterator[Replica]:
    made = Replica(PostgresStore(url, dice=os.urandom))
    try:
        await made.until(lambda what: what.everything)
        made.heard.clear()
        yield made
    finally:
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)
        await made.store.close()


@pytest.fixture
async def url(server: Server) -> str:
    named = await server.database()
    store = PostgresStore(named, dice=os.urandom)
    await store.write(schema.migrate)
    await store.close()
    return named


async def filled(store: PostgresStore) -> tuple[Team, Host, str]:
    ours, machine = team(), host(epoch="epo_1")
    made = sandbox(team_id=ours.id)

    def work(conn: sa.Connection) -> None:
        tenancy.add_team(conn, ours, now=NOW)
        hosts.add(conn, machine, now=NOW)
        facts.accept(conn, made, payload=None, event_id=fresh(Prefix.EVENT))

    await store.write(work)
    return ours, machine, made.id


async def test_a_commit_is_told_to_others_and_not_to_oneself(url: str) -> None:
    async with replica(url) as a, replica(url) as b:
        _, machine, sandbox_id = await filled(a.store)
        await b.until(lambda what: machine.id in what.hosts)
        await a.store.write(
            lambda conn: facts.advance_sandbox(conn, sandbox_id, ReleaseRequested(), now=NOW, ids=lambda: fresh(Prefix.EVENT))
        )
        await b.until(lambda what: sandbox_id in what.sandboxes)
        assert not any(what.everything for what in b.heard)
        assert a.heard == []


async def test_what_is_told_can_be_read(url: str) -> None:
    """A hint that came before its commit could be followed by a read of the old row, and nobody would look again."""
    async with replica(url) as a, replica(url) as b:
        _, _, _ = await filled(a.store)
        for number in range(50):
            machine = host(name=f"h{number}")
            told = asyncio.create_task(b.until(lambda what, machine=machine: machine.id in what.hosts))  # type: ignore[misc]
            await a.store.write(lambda conn, machine=machine: hosts.add(conn, machine, now=NOW))  # type: ignore[misc]
            await told
            assert await b.store.read(lambda conn, machine=machine: hosts.by_id(conn, machine.id)) == machine  # type: ignore[misc]


async def test_what_was_rolled_back_is_not_told(url: str) -> None:
    async with replica(url) as a, replica(url) as b:
        ghost, real = host(), host()

        def fails(conn: sa.Connection) -> None:
            hosts.add(conn, ghost, now=NOW)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await a.store.write(fails)
        await a.store.write(lambda conn: hosts.add(conn, real, now=NOW))
        await b.until(lambda what: real.id in what.hosts)
        assert not any(ghost.id in what.hosts for what in b.heard)


async def test_reads_and_idle_commits_tell_nothing(url: str) -> None:
    async with replica(url) as a, replica(url) as b:
        _, machine, _ = await filled(a.store)
        await b.until(lambda what: machine.id in what.hosts)
        b.heard.clear()
        await a.store.read(hosts.all_hosts)
        await a.store.write(lambda conn: hosts.polled(conn, machine, poll_seq=1, seen_at=NOW, lease_until=NOW + 300))
        last = host()
        await a.store.write(lambda conn: hosts.add(conn, last, now=NOW))
        await b.until(lambda what: last.id in what.hosts)
        assert b.heard == [Hints(hosts=frozenset({last.id}))]


async def test_a_crowd_is_everything(url: str) -> None:
    async with replica(url) as a, replica(url) as b:
        a.store.tell(Hints(sandboxes=frozenset(fresh(Prefix.SANDBOX) for _ in range(400))))
        await b.until(lambda what: what.everything)


async def cut(url: str) -> int:
    """End every connection that listens or tells, as a restart of the server or of a proxy does."""
    address = sa.make_url(url)
    connection = await asyncpg.connect(host=address.query["host"], user=address.username, database=address.database)
    try:
        rows = await connection.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND (query ILIKE 'LISTEN%' OR query ILIKE '%pg_notify%' OR query ILIKE 'SET synchronous_commit%')"
        )
        return len(rows)
    finally:
        await connection.close()


async def test_after_a_break_everybody_looks_again(url: str) -> None:
    async with replica(url) as a, replica(url) as b:
        assert await cut(url) >= 2
        await asyncio.gather(a.until(lambda what: what.everything), b.until(lambda what: what.everything))
        a.heard.clear()
        b.heard.clear()
        _, machine, _ = await filled(a.store)
        await b.until(lambda what: machine.id in what.hosts or what.everything)


async def test_what_could_not_be_told_is_told_as_everything(url: str) -> None:
    """A replica whose connections broke while others' did not: what it committed meanwhile reaches them."""
    async with replica(url) as b:
        lonely = PostgresStore(url, dice=os.urandom)
        try:
            # Nobody runs its line yet: as if it could not connect.
            await filled(lonely)
            assert b.heard == []
            task = asyncio.create_task(lonely.follow(lambda _what: None))
            await b.until(lambda what: bool(what.hosts) or what.everything)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            await lonely.close()
