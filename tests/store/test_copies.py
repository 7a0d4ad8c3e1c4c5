"""Copies of snapshots that hosts have fetched: what they hold of a disk, from the grant until they are seen gone. On both stores."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from atoll.base.units import Vector
from atoll.domain.host import Host
from atoll.domain.placement import Holding, Placement
from atoll.domain.sandbox import Sandbox
from atoll.domain.snapshot import Copy, Purpose, Snapshot
from atoll.domain.snapshot import State as Kept
from atoll.domain.spec import Origin, SaveMode, Spec
from atoll.domain.tenancy import Team
from atoll.planning.relieving import LocalCopy
from atoll.store import copies, facts, snapshots
from atoll.store.engine import Store
from tests.builders import NOW, placement, sandbox, spec
from tests.store.test_moments import KIND, held, ids, kept, machine, moment

ROOM = Vector(8000, 16384, 9000, 64)
NEED = Vector(1000, 512, 2048, 1)


def begins(snapshot: Snapshot, *, or_boot: bool = False) -> Spec:
    digest = snapshot.moment.digest if snapshot.moment is not None else None
    return spec(origin=Origin(snapshot.id, SaveMode.FULL, moment=digest, kind=KIND, or_boot=or_boot))


async def wanting(store: Store, ours: Team, snapshot: Snapshot, **more: Any) -> tuple[Sandbox, Spec]:
    sought = begins(snapshot, **more)
    one = sandbox(team_id=ours.id, spec=sought)
    await store.write(lambda conn: facts.accept(conn, one, payload=None, event_id=ids()))
    return one, sought


def reserving(one: Sandbox, there: Host, sought: Spec, *, now: float = NOW) -> Any:
    place: Placement = replace(
        placement(one, host_id=there.id, holding=Holding.RESERVED, vector=NEED),
        origin_moment=sought.origin.moment if sought.origin else None,
    )
    return lambda conn: facts.reserve(conn, one.id, place, now=now, ids=ids, sought=sought)


async def used(store: Store, there: Host) -> int:
    one = await store.read(lambda conn: facts.used(conn, there.id))
    all_of_them = await store.read(facts.used_by_host)
    assert all_of_them.get(there.id, Vector()) == one, "both ways of summing"
    return one.disk_mib


async def origin(store: Store, ours: Team, home: Host, **changes: Any) -> Snapshot:
    one = kept(ours, home, 1, **{"size_bytes": (3 << 30) - 1, **changes})
    await store.write(lambda conn: snapshots.add(conn, one))
    return one


async def test_a_copy_holds_disk_from_the_grant_until_it_is_seen_gone(store: Store, ours: Team) -> None:
    home, there = await machine(store, capacity=ROOM), await machine(store, capacity=ROOM)
    snapshot = await origin(store, ours, home)
    for number in range(2):
        one, sought = await wanting(store, ours, snapshot)
        done = await store.write(reserving(one, there, sought, now=NOW + number))
        assert done.used.disk_mib == await used(store, there) == (number + 1) * NEED.disk_mib + 3072, "it is fetched once"
    assert not await store.write(lambda conn: copies.leave(conn, there.id, snapshot.id)), "two begin from it"
    assert not await store.write(lambda conn: copies.gone(conn, there.id, snapshot.id)), "nobody has ordered it away"
    assert await store.read(lambda conn: copies.idle(conn, there.id)) == []
    third, sought = await wanting(store, ours, snapshot)
    refused = await store.write(reserving(third, there, sought))
    assert refused.refused_by.used.disk_mib == await used(store, there) == 2 * NEED.disk_mib + 3072
    assert refused.sandbox.tried_hosts == (there.id,)


async def test_its_own_host_need_not_fetch_it(store: Store, ours: Team) -> None:
    home = await machine(store, capacity=ROOM)
    snapshot = await origin(store, ours, home)
    one, sought = await wanting(store, ours, snapshot)
    await store.write(reserving(one, home, sought))
    assert await used(store, home) == NEED.disk_mib + 3072, "what is kept there"
    assert not await store.read(lambda conn: copies.any_on(conn, home.id))
    # It gives its copy up before the guest has begun: it fetches one.
    left = await store.write(lambda conn: snapshots.commit(conn, replace(snapshot, copy=Copy.NONE)))
    assert await used(store, home) == NEED.disk_mib
    await store.write(lambda conn: copies.still_used(conn, left, now=NOW))
    assert await used(store, home) == NEED.disk_mib + 3072


async def test_the_last_room_is_given_once_however_many_want_it(store: Store, ours: Team) -> None:
    home, there = await machine(store, capacity=ROOM), await machine(store, capacity=replace(ROOM, disk_mib=2 * NEED.disk_mib + 3072))
    snapshot = await origin(store, ours, home)
    wishes = [await wanting(store, ours, snapshot) for _ in range(6)]
    done = await asyncio.gather(*(store.write(reserving(one, there, sought)) for one, sought in wishes))
    assert [one.refused_by is None for one in done].count(True) == 2
    assert await used(store, there) == 2 * NEED.disk_mib + 3072


async def test_a_head_start_without_room_is_done_without(store: Store, ours: Team) -> None:
    home, there = await machine(store, capacity=ROOM), await machine(store, capacity=replace(ROOM, disk_mib=NEED.disk_mib + 3071))
    snapshot = await origin(store, ours, home, purpose=Purpose.TEMPLATE)
    one, sought = await wanting(store, ours, snapshot, or_boot=True)
    done = await store.write(reserving(one, there, sought))
    assert (done.refused_by, done.placement.origin_moment) == (None, None)
    assert await used(store, there) == NEED.disk_mib
    other, strict = await wanting(store, ours, snapshot)
    refused = await store.write(reserving(other, there, strict))
    assert refused.refused_by is not None, "who must begin from it goes elsewhere"


async def test_what_goes_and_when_its_room_comes_back(store: Store, ours: Team) -> None:
    home, there = await machine(store, capacity=ROOM), await machine(store, capacity=ROOM)
    plain = await origin(store, ours, home)
    ahead = await origin(store, ours, home, purpose=Purpose.TEMPLATE, moment=moment(2))
    ended = await origin(store, ours, home, state=Kept.DELETED, moment=moment(3), ended_at=NOW)
    busy = await origin(store, ours, home, moment=moment(4))
    for number, one in enumerate((plain, ahead, ended, busy)):
        await store.write(lambda conn, one=one, n=number: copies.take(conn, there.id, one.id, disk_mib=100, now=NOW + n))  # type: ignore[misc]
    user, _ = await wanting(store, ours, busy)
    await held(store, user, there, origin_moment=moment(4).digest)

    async def unwanted(since: float) -> set[str]:
        return {name for _, name in await store.read(lambda conn: copies.unwanted(conn, unused_since=since))}

    assert await unwanted(NOW) == {plain.id, ended.id}
    assert await unwanted(NOW + 1) == {plain.id, ahead.id, ended.id}, "nothing has begun from it since"
    idle = await store.read(lambda conn: copies.idle(conn, there.id))
    assert idle == [LocalCopy(True, one.id, 100, NOW + n, fetched=True) for n, one in enumerate((plain, ahead, ended))]
    assert await store.read(copies.idle_by_host) == {there.id: idle}
    assert await store.write(lambda conn: copies.leave(conn, there.id, ahead.id))
    assert not await store.write(lambda conn: copies.leave(conn, there.id, ahead.id)), "it is going"
    (order,) = await store.read(lambda conn: copies.ordered_away(conn, there.id))
    assert (order.id, order.state) == (ahead.id, "deleting")
    before = await used(store, there)
    # Something begins from it before its host has answered: what that says is of before.
    await store.write(lambda conn: copies.take(conn, there.id, ahead.id, disk_mib=7, now=NOW + 9))
    assert not await store.write(lambda conn: copies.gone(conn, there.id, ahead.id))
    assert await used(store, there) == before, "one that is there keeps its size"
    assert await store.write(lambda conn: copies.leave(conn, there.id, ahead.id))
    assert await store.write(lambda conn: copies.gone(conn, there.id, ahead.id))
    assert await used(store, there) == before - 100


async def test_what_nobody_has_counted(store: Store, ours: Team) -> None:
    home, there = await machine(store), await machine(store)
    known, new = await origin(store, ours, home), await origin(store, ours, home, moment=moment(2))
    await store.write(lambda conn: copies.take(conn, there.id, known.id, disk_mib=1, now=NOW))
    has = [known.id, new.id, "snp_nobodys"]
    assert [one.id for one in await store.read(lambda conn: copies.unrecorded(conn, there.id, has))] == [new.id]
    assert await store.read(lambda conn: copies.unrecorded(conn, home.id, has)) == [], "its own"
    await store.write(lambda conn: copies.lost(conn, there.id))
    assert not await store.read(lambda conn: copies.any_on(conn, there.id))


async def test_a_snapshot_is_on_record_as_long_as_a_copy_of_it(store: Store, ours: Team) -> None:
    home, there = await machine(store), await machine(store)
    ended = await origin(store, ours, home, state=Kept.DELETED, ended_at=NOW)
    await store.write(lambda conn: copies.take(conn, there.id, ended.id, disk_mib=1, now=NOW))
    assert await store.write(lambda conn: snapshots.prune(conn, ended_before=NOW + 1)) == 0
    await store.write(lambda conn: copies.lost(conn, there.id))
    assert await store.write(lambda conn: snapshots.prune(conn, ended_before=NOW + 1)) == 1
