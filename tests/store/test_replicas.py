"""Two replicas on one database: what one commits, the other's parked polls, waiting requests and edges learn of at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.base.units import ZERO
from atoll.control.sandboxes import sandboxes
from atoll.domain.deployment import ClientLimits, Rate
from atoll.domain.placement import Observed
from atoll.planning import reconcile
from atoll.store import sandboxes as sandboxes_stored
from atoll.store.tables import HOSTS, PLACEMENTS, REPLICAS, SANDBOXES
from tests.sim.test_routes import Stream
from tests.sim.world import OPERATOR_KEY, Agent, World
from tests.store.server import Server

SOON_S = 1.0
"""Far below every wait that would end by itself: a poll is parked for 5 s here, a lost word is looked for after 2 s, an alarm after 30 s."""


@dataclass
class Pair:
    """Replicas A and B, and a host whose agent is enrolled."""

    a: World
    b: World
    agent: Agent

    def at(self, world: World) -> Agent:
        """The agent, talking to this replica from now on."""
        self.agent.world = world
        return self.agent


@contextlib.asynccontextmanager
async def pair_on(server: Server, path: Path) -> AsyncIterator[Pair]:
    a = World(path)
    a.write_files()
    (path / "secrets" / "database.url").write_text(await server.database())
    b = World(path, install_id=a.install_id)
    await a.start()
    await b.start()
    try:
        agent = await a.agent()
        await knows(b, agent)
        yield Pair(a, b, agent)
    finally:
        await b.stop()
        await a.stop()


@pytest.fixture
async def pair(server: Server, tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair_on(server, tmp_path) as made:
        yield made


async def knows(world: World, agent: Agent) -> None:
    """This replica has heard of the host."""
    async with asyncio.timeout(SOON_S):
        while (known := world.running.reconciler.directory.host(agent.host_id)) is None or known.epoch != agent.epoch:
            await asyncio.sleep(0.01)


async def test_a_create_here_wakes_a_poll_that_is_parked_there(pair: Pair) -> None:
    async with pair.at(pair.b).at_work():
        await asyncio.sleep(0.3)
        for _ in range(3):
            began = time.monotonic()
            made = await pair.a.create(template="base")
            assert made["state"] == "ready"
            assert time.monotonic() - began < SOON_S


async def test_a_request_here_hears_what_the_agent_says_there(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting create is at A, the observation that makes it ready comes to B."""
    monkeypatch.setattr(sandboxes, "_LOOK_AGAIN_S", 60.0)
    there = pair.at(pair.b)
    waiting = asyncio.create_task(pair.a.create(template="base"))
    command = await there.wanted()
    there.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
    await there.observe()
    async with asyncio.timeout(SOON_S):
        assert (await waiting)["state"] == "ready"


async def test_a_release_there_of_what_was_created_here(pair: Pair) -> None:
    async with pair.at(pair.b).at_work():
        made = await pair.a.create(template="base")
        began = time.monotonic()
        await pair.b.release(made["id"])
        await pair.a.until(made["id"], "released", timeout_s=SOON_S)
        assert time.monotonic() - began < SOON_S
        second = await pair.b.create(template="base")
        await pair.a.release(second["id"])
        await pair.b.until(second["id"], "released", timeout_s=SOON_S)
    assert await pair.a.held(pair.agent.host_id) == 0


async def test_an_edge_there_follows_what_is_committed_here(pair: Pair) -> None:
    stream = Stream(pair.b)
    try:
        assert (await stream.line())["routes"] == []
        async with pair.at(pair.a).at_work():
            made = await pair.a.create(template="base")
            async with asyncio.timeout(SOON_S):
                line = await stream.line()
                assert (line["type"], line["route"]["sandbox_id"]) == ("route", made["id"])
            at_least = (await pair.a.facts(made["id"])).sandbox.revision
            await pair.a.release(made["id"])
            async with asyncio.timeout(SOON_S):
                while (line := await stream.line())["type"] != "gone":
                    assert line["route"]["sandbox_id"] == made["id"]
            assert line["sandbox_id"] == made["id"]
            assert line["revision"] > at_least
    finally:
        await stream.hang_up()


async def test_a_deadline_set_here_is_met_there(pair: Pair) -> None:
    """A sandbox waits for room, and A, which had it, dies. B has heard of its deadline and looks again long before its own idle look."""
    await pair.a.call("POST", f"/v1/hosts/{pair.agent.host_id}/drain")
    sandbox_id = await pair.a.accept(template="base")
    assert (await pair.a.facts(sandbox_id)).sandbox.state == "pending"
    await pair.a.stop()
    await pair.b.call("POST", f"/v1/hosts/{pair.agent.host_id}/activate")
    await pair.at(pair.b).poll()
    await pair.b.until(sandbox_id, "provisioning", timeout_s=8.0)


async def test_room_that_is_freed_there_goes_to_who_waits_here(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest gets it, whichever replica has it; who comes second finds it given, and nobody is refused."""
    monkeypatch.setattr(reconcile, "BACKOFF_S", (60.0,))
    agent = pair.at(pair.b)
    held = [await pair.a.accept(template="base")]
    while (await pair.a.facts(held[-1])).sandbox.state == "provisioning":
        held.append(await pair.a.accept(template="base"))
    waiting = [held.pop()]
    for world in (pair.b, pair.a, pair.b):
        waiting.append(await world.accept(template="base"))
    async with asyncio.timeout(SOON_S):
        while any(len(world.running.reconciler.waiting) < 4 for world in (pair.a, pair.b)):
            await asyncio.sleep(0.01)
    for number, world in enumerate((pair.a, pair.b)):
        await world.release(held[number])
        async with asyncio.timeout(5), agent.at_work():
            while (await pair.a.facts(waiting[number])).placement is None:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.4)
        there = [(await pair.a.facts(one)).placement is not None for one in waiting]
        assert there == [at <= number for at in range(4)]
    for one in waiting:
        assert "sandbox.host_refused" not in await pair.a.history(one)


async def test_together_they_admit_what_one_would(pair: Pair) -> None:
    """Half of each rate is each replica's; who is left alone has all of it."""
    limited = ClientLimits(requests=Rate(0.5, 20))
    for world in (pair.a, pair.b):
        await world.running._replicas.beat()  # type: ignore[union-attr]
        configuration = world.running.configuration
        configuration.current = replace(configuration.current, client=limited)

    async def passed(*worlds: World) -> int:
        answers = [(await world.call("GET", "/v1/sandboxes")).status_code for _ in range(30) for world in worlds]
        assert set(answers) == {200, 429}
        return answers.count(200)

    assert 20 <= await passed(pair.a, pair.b) <= 22, "and what time has brought"
    await pair.b.stop()
    replicas = pair.a.running._replicas
    assert replicas is not None
    await replicas.beat()
    assert replicas.heard == 1
    pair.a.clock.pass_s(0)
    await asyncio.sleep(2.5)
    assert 1 <= await passed(pair.a) <= 2, "one in two seconds, no longer one in four"


async def test_a_longer_life_near_its_end_is_confirmed_by_the_agent_there(pair: Pair) -> None:
    async with pair.at(pair.b).at_work():
        made = await pair.a.create(template="base", timeoutSeconds=20)
        await asyncio.sleep(0.2)
        began = time.monotonic()
        answer = await pair.a.call("POST", f"/v1/sandboxes/{made['id']}/end", json={"timeoutSeconds": 300})
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - began < SOON_S


async def test_no_wake_up_is_lost_between_reading_and_parking(pair: Pair) -> None:
    """Sandboxes are made at A at every moment of B's polls; each is started without waiting for a poll's end."""
    async with pair.at(pair.b).at_work():
        slowest = 0.0
        for _ in range(12):
            began = time.monotonic()
            made = await asyncio.gather(*(pair.a.create(template="base") for _ in range(4)))
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.gather(*(pair.b.release(one["id"]) for one in made))
            for one in made:
                await pair.a.until(one["id"], "released", timeout_s=SOON_S * 2)
        assert slowest < SOON_S * 2


async def test_keys_and_hosts_are_known_everywhere(pair: Pair) -> None:
    key = await pair.a.team("theirs")
    assert (await pair.b.call("GET", "/v1/sandboxes", key=key)).status_code == 200
    answer = await pair.a.call("POST", f"/v1/hosts/{pair.agent.host_id}/drain", key=OPERATOR_KEY)
    assert answer.status_code == 200
    async with asyncio.timeout(SOON_S):
        while pair.b.running.reconciler.directory.host(pair.agent.host_id).admin != "draining":  # type: ignore[union-attr]
            await asyncio.sleep(0.01)


# Loops: each runs in every replica, and what one has done the other finds done.


async def told(world: World, sandbox_id: str) -> list[str]:
    return await world.history(sandbox_id)


async def test_a_deadline_is_met_once(pair: Pair) -> None:
    sandbox_id = await pair.a.accept(template="base")
    await pair.at(pair.b).wanted()

    async def until_all_have_looked(condition: str) -> None:
        """The deadline has passed, both replicas look, and what follows from it is on record; then both look once more."""
        past = pair.a.running._clock.now() - 1
        await pair.a.store.write(lambda conn: conn.execute(sa.update(SANDBOXES).values(deadline_at=past)))
        async with asyncio.timeout(20):
            while condition not in await told(pair.a, sandbox_id):
                for world in (pair.a, pair.b):
                    world.look_at_deadlines()
                await asyncio.sleep(0.05)
        await asyncio.gather(*(world.running.reconciler.settle(sandbox_id) for world in (pair.a, pair.b)))

    await until_all_have_looked("sandbox.deadline_missed")
    await until_all_have_looked("sandbox.cleanup_pending")
    history = await told(pair.b, sandbox_id)
    assert history.count("sandbox.deadline_missed") == 1
    assert history.count("sandbox.cleanup_pending") == 1


async def test_a_lost_host_is_told_once_and_found_again_once(pair: Pair) -> None:
    async with pair.at(pair.b).at_work():
        made = await pair.a.create(template="base")
    both = (pair.a, pair.b)
    await pair.a.store.write(lambda conn: conn.execute(sa.update(HOSTS).values(seen_at=HOSTS.c.seen_at - 1000)))
    for world in both:
        await world.store.read(world.running.reconciler.directory.load)
    await asyncio.gather(*(world.running.watch.step() for world in both for _ in range(3)))
    await pair.at(pair.b).poll()
    for world in both:
        await world.store.read(world.running.reconciler.directory.load)
    await asyncio.gather(*(world.running.watch.step() for world in both for _ in range(3)))
    history = await told(pair.a, made["id"])
    assert history.count("sandbox.unreachable") == 1
    assert history.count("sandbox.reachable") == 1


async def test_a_host_that_another_replica_hears_is_not_lost(pair: Pair) -> None:
    async with pair.at(pair.b).at_work():
        made = await pair.a.create(template="base")
    directory = pair.a.running.reconciler.directory
    known = directory.host(pair.agent.host_id)
    assert known is not None
    directory.put(replace(known, seen_at=known.seen_at - 1000))  # type: ignore[operator]
    await pair.a.running.watch.step()
    assert "sandbox.unreachable" not in await told(pair.a, made["id"])


async def test_a_fence_frees_once(pair: Pair) -> None:
    async with pair.at(pair.b).at_work():
        made = await pair.a.create(template="base")
    await pair.a.call("POST", f"/v1/hosts/{pair.agent.host_id}/disable", json={"off": True})
    async with asyncio.timeout(SOON_S):
        while pair.b.running.reconciler.directory.host(pair.agent.host_id).admin != "disabled":  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
    await asyncio.gather(*(world.running.fencing.step() for world in (pair.a, pair.b) for _ in range(3)))
    ended = await pair.a.until(made["id"], "failed", timeout_s=SOON_S)
    assert ended["reason"] == "PLACEMENT_LOST"
    history = await told(pair.b, made["id"])
    assert history.count("placement.gone") == 1
    assert history.count("sandbox.failed") == 1
    assert await pair.a.used(pair.agent.host_id) == ZERO


async def test_both_replicas_forget_old_records(pair: Pair) -> None:
    async with pair.at(pair.b).at_work():
        for _ in range(6):
            made = await pair.a.create(template="base")
            await pair.b.release(made["id"])
            await pair.a.until(made["id"], "released", timeout_s=SOON_S)
    stores = [pair.a.store, pair.b.store] * 4
    future = pair.a.running._clock.now() + 1
    gone = await asyncio.gather(
        *(store.write(lambda conn: sandboxes_stored.prune(conn, released_before=future, limit=2)) for store in stores)
    )
    assert sum(gone) == 6
    assert await pair.a.store.read(lambda conn: conn.execute(sa.select(sa.func.count()).select_from(PLACEMENTS)).scalar_one()) == 0


# Who they are.


async def test_each_is_listed_with_its_address(server: Server, tmp_path: Path) -> None:
    a = World(tmp_path, changes={"address": "http://10.0.0.1:3001", "machine": "one"})
    a.write_files()
    (tmp_path / "secrets" / "database.url").write_text(await server.database())
    b = World(tmp_path, install_id=a.install_id, changes={"address": "http://10.0.0.2:3001", "machine": "two"})
    await a.start()
    await b.start()
    try:
        await a.running._replicas.beat()  # type: ignore[union-attr]
        for world, own in ((a, "http://10.0.0.1:3001"), (b, "http://10.0.0.2:3001")):
            status = (await world.call("GET", "/v1/status")).json()
            listed = {one["address"]: one for one in status["replicas"]}
            assert set(listed) == {"http://10.0.0.1:3001", "http://10.0.0.2:3001"}
            assert all(one["healthy"] for one in listed.values())
            assert [address for address, one in listed.items() if one["answering"]] == [own]
        await b.stop()
        await a.running._replicas.beat()  # type: ignore[union-attr]
        assert [one["machine"] for one in (await a.call("GET", "/v1/status")).json()["replicas"]] == ["one"]
    finally:
        await b.stop()
        await a.stop()


async def test_one_that_died_is_silent_and_whatever_was_waited_for_is_looked_at(pair: Pair) -> None:
    replicas = pair.a.running._replicas
    dead = pair.b.running._replicas
    assert replicas is not None
    assert dead is not None
    following = pair.a.running._following
    assert following is not None
    pair.b.running.kill()
    await pair.a.store.write(
        lambda conn: conn.execute(sa.update(REPLICAS).where(REPLICAS.c.id == dead.me.id).values(seen_at=1.0 + replicas.clock.now() - 20))
    )
    heard = []
    replicas.on_lost = lambda: heard.append(True)
    await replicas.beat()
    await replicas.beat()
    assert heard == [True]
    assert [(one.id, well) for one, well in replicas.everyone() if one.id == dead.me.id] == [(dead.me.id, False)]
    await pair.a.store.write(
        lambda conn: conn.execute(sa.update(REPLICAS).where(REPLICAS.c.id == dead.me.id).values(seen_at=replicas.clock.now() - 700))
    )
    await replicas.beat()
    assert [one.id for one, _ in replicas.everyone()] == [replicas.me.id]


async def test_a_wrong_clock_of_one_replica_ends_nothing(server: Server, tmp_path: Path) -> None:
    """B's machine is an hour ahead. All count by the database's clock, so B takes no deadline of A's for missed, no host for lost."""
    a = World(tmp_path)
    a.write_files()
    (tmp_path / "secrets" / "database.url").write_text(await server.database())
    b = World(tmp_path, install_id=a.install_id)
    b.clock.step_s(3600.0)
    await a.start()
    await b.start()
    try:
        agent = await a.agent()
        sandbox_id = await a.accept(template="base")
        command = await agent.wanted()
        b.look_at_deadlines()
        await b.store.read(b.running.reconciler.directory.load)
        await b.running.watch.step()
        await asyncio.sleep(0.2)
        assert (await a.facts(sandbox_id)).sandbox.state == "provisioning"
        agent.see(command.placement_id, observed=Observed.RUNNING, ready=True, address="10.64.0.2")
        await agent.observe()
        assert (await b.show(sandbox_id))["state"] == "ready"
        assert await told(b, sandbox_id) == ["sandbox.accepted", "sandbox.placed", "sandbox.ready"]
    finally:
        await b.stop()
        await a.stop()


async def test_many_begin_at_once_on_an_empty_database(server: Server, tmp_path: Path) -> None:
    """Schema, first key and templates are made once."""
    first = World(tmp_path)
    first.write_files()
    (tmp_path / "secrets" / "database.url").write_text(await server.database())
    worlds = [first, *(World(tmp_path, install_id=first.install_id) for _ in range(3))]
    try:
        await asyncio.gather(*(world.start() for world in worlds))
        for world in worlds:
            assert len((await world.call("GET", "/v1/templates")).json()["items"]) == 1
            assert len((await world.call("GET", "/v1/keys")).json()["items"]) == 1
    finally:
        await asyncio.gather(*(world.stop() for world in worlds))


async def test_a_revoked_key_ends_everywhere(pair: Pair) -> None:
    key = await pair.a.team("theirs")
    assert (await pair.b.call("GET", "/v1/whoami", key=key)).status_code == 200
    client_id = (await pair.b.call("GET", "/v1/whoami", key=key)).json()["client"]["id"]
    assert (await pair.a.call("DELETE", f"/v1/keys/{client_id}", key=key)).status_code == 200
    async with asyncio.timeout(SOON_S):
        while (await pair.b.call("GET", "/v1/whoami", key=key)).status_code != 401:
            await asyncio.sleep(0.02)
