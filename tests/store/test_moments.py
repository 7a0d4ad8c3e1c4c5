"""What of the artifact store is needed, which copies hosts keep of it, and resumes of what rests there: on both stores."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from atoll.base.errors import Code, Unavailable
from atoll.base.ids import ClientId, HostId, Prefix
from atoll.base.units import ZERO, Vector
from atoll.domain.command import Kind
from atoll.domain.host import UNSETTLED, Host
from atoll.domain.moment import Moment
from atoll.domain.placement import Holding, Observed
from atoll.domain.sandbox import Condition, Sandbox, State
from atoll.domain.snapshot import Copy, Purpose, Snapshot
from atoll.domain.snapshot import State as Kept
from atoll.domain.spec import SaveMode
from atoll.domain.tenancy import Team
from atoll.planning import storing
from atoll.planning.relieving import LocalCopy
from atoll.planning.stimuli import CopyUnwanted, ResumeRequested
from atoll.store import facts, hosts, moments, restoring, snapshots
from atoll.store.engine import Store
from tests.builders import NOW, fresh, host, placement, sandbox, spec

KIND = "oci/gvisor/x86_64"


def ids() -> str:
    return fresh(Prefix.EVENT)


def moment(number: int) -> Moment:
    return Moment(f"sha256:{number:064x}", 1 << 20, KIND)


async def rests(store: Store, ours: Team, saved: Moment | None, **changes: Any) -> Sandbox:
    one = sandbox(
        team_id=ours.id, state=State.SUSPENDED, started_at=NOW, moment=saved, saved_on=HostId("hst_x"), save_mode=SaveMode.FULL, **changes
    )
    await store.write(lambda conn: facts.accept(conn, one, payload=None, event_id=ids()))
    return one


async def machine(store: Store, **changes: Any) -> Host:
    made = host(moments=frozenset({KIND}), **changes)
    await store.write(lambda conn: hosts.add(conn, made, now=NOW))
    return made


async def held(store: Store, one: Sandbox, there: Host, **changes: Any) -> None:
    place = placement(one, host_id=there.id, **changes)

    def work(conn: sa.Connection) -> None:
        found = facts.load(conn, one.id)
        assert found is not None
        after = replace(found.sandbox, placement_id=place.id, host_id=there.id)
        facts.commit(conn, found, facts.Outcome(after, place, ()), now=NOW, ids=ids)

    await store.write(work)


def kept(ours: Team, there: Host, number: int, **changes: Any) -> Snapshot:
    values: dict[str, Any] = {
        "id": fresh(Prefix.SNAPSHOT),
        "revision": 1,
        "team_id": ours.id,
        "client_id": ClientId("cli_ours"),
        "sandbox_id": "ix",
        "placement_id": "plc_x",
        "host_id": there.id,
        "state": Kept.READY,
        "purpose": Purpose.KEPT,
        "mode": SaveMode.FULL,
        "spec": spec(),
        "created_at": NOW + number,
        "size_bytes": 5 << 20,
        "moment": moment(number),
    }
    return Snapshot(**{**values, **changes})


async def test_what_is_written_is_read(store: Store, ours: Team) -> None:
    there = await machine(store)
    one = await rests(store, ours, moment(1))
    found = await store.read(lambda conn: facts.load(conn, one.id))
    assert found is not None
    assert (found.sandbox.moment, found.sandbox.saved_on, found.sandbox.rests_in_store) == (moment(1), "hst_x", True)
    left = kept(ours, there, 2, copy=Copy.NONE)
    await store.write(lambda conn: snapshots.add(conn, left))
    read = await store.read(lambda conn: snapshots.get(conn, left.id))
    assert (read.moment, read.copy) == (moment(2), Copy.NONE)
    assert await store.read(lambda conn: facts.used(conn, there.id)) == ZERO, "what its host has no copy of holds nothing there"
    assert (await store.read(lambda conn: hosts.by_id(conn, there.id))).moments == {KIND}


async def test_what_is_needed_and_what_a_host_may_fetch(store: Store, ours: Team) -> None:
    there, other = await machine(store), await machine(store)
    await rests(store, ours, moment(1))
    ended = await rests(store, ours, moment(2))
    await store.write(
        lambda conn: conn.execute(sa.update(facts.SANDBOXES).where(facts.SANDBOXES.c.id == ended.id).values(state="released"))
    )
    for number, state in ((3, Kept.READY), (4, Kept.DELETED)):
        one = kept(ours, there, number, state=state)
        await store.write(lambda conn, one=one: snapshots.add(conn, one))  # type: ignore[misc]
    coming = await rests(store, ours, None)
    await held(store, coming, other, moment=moment(5).digest, origin_moment=moment(6).digest)
    needed = await store.read(moments.needed)
    assert needed == {moment(number).digest for number in (1, 3, 5, 6)}
    assert await store.read(lambda conn: moments.fetchable(conn, other.id)) == {moment(5).digest, moment(6).digest}
    assert await store.read(lambda conn: moments.fetchable(conn, there.id)) == set()


async def test_the_copies_of_a_host(store: Store, ours: Team) -> None:
    there = await machine(store)
    one = await rests(store, ours, moment(1))
    await held(store, one, there, holding=Holding.SAVED, observed=Observed.SAVED)
    alone = await rests(store, ours, None)
    await held(store, alone, there, holding=Holding.SAVED, observed=Observed.SAVED)
    first, going = kept(ours, there, 2), kept(ours, there, 3, copy=Copy.LEAVING)
    for snapshot in (first, going, kept(ours, there, 4, moment=None)):
        await store.write(lambda conn, one=snapshot: snapshots.add(conn, one))  # type: ignore[misc]
    found = await store.read(lambda conn: moments.kept_locally(conn, there.id))
    assert found == [LocalCopy(False, one.id, 2048, NOW), LocalCopy(True, first.id, 5, NOW + 2)]
    wanted = await store.read(lambda conn: snapshots.wanted(conn, there.id))
    assert [each.id for each in wanted] == [going.id], "what is leaving is ordered away"


def taking(one: Sandbox, there: Host, **more: Any) -> Any:
    wish = ResumeRequested(100.0, placement=placement(one, host_id=there.id))
    return lambda conn: facts.take_up(conn, one.id, wish, sought=storing.sought(one), now=NOW + 5, ids=ids, **more)


async def test_a_resume_takes_what_a_host_has(store: Store, ours: Team) -> None:
    there = await machine(store)
    one = await rests(store, ours, moment(1))
    done = await store.write(taking(one, there))
    assert done is not None
    assert (done.changed, done.sandbox.state, done.sandbox.generation, done.used) == (True, State.RESUMING, 2, Vector(1000, 512, 2048, 1))
    found = await store.read(lambda conn: facts.load(conn, one.id))
    assert found is not None
    assert found.placement is not None
    assert (found.placement.moment, found.placement.generation, found.placement.host_id) == (moment(1).digest, 2, there.id)


@pytest.mark.parametrize("full", [{"capacity": Vector(1000, 511, 4096, 4)}, {"problems": ("disk.space",)}], ids=["no room", "unsuitable"])
async def test_a_host_that_has_no_room_changes_nothing(store: Store, ours: Team, full: dict[str, Any]) -> None:
    there = await machine(store, **full)
    one = await rests(store, ours, moment(1))
    done = await store.write(taking(one, there))
    assert done is not None
    assert (done.changed, done.sandbox) == (False, one)
    assert done.refused_by is not None
    assert done.refused_by.host.id == there.id


async def test_of_many_resumes_one_is_granted(store: Store, ours: Team) -> None:
    machines = [await machine(store) for _ in range(3)]
    one = await rests(store, ours, moment(1))
    racing = (store.write(taking(one, machines[number % 3])) for number in range(12))
    done = await asyncio.gather(*racing)
    assert sum(each is not None and each.changed for each in done) == 1
    used = [await store.read(lambda conn, there=there: facts.used(conn, there.id)) for there in machines]  # type: ignore[misc]
    assert sorted(amount.slots for amount in used) == [0, 0, 1]


async def test_a_copy_goes_once_every_host_has_settled(store: Store, ours: Team) -> None:
    there, silent = await machine(store), await machine(store)
    one = await rests(store, ours, moment(1))
    at_rest: dict[str, Any] = {
        "holding": Holding.SAVED,
        "observed": Observed.SAVED,
        "desired": Kind.ENSURE_SUSPENDED,
        "applied_revision": 1,
    }
    await held(store, one, there, **at_rest)
    await store.write(lambda conn: restoring.next_life(conn, now=NOW, chance=lambda count: b"x" * count))

    async def unwanted(seen: tuple[Host, ...]) -> facts.Committed | None:
        def work(conn: sa.Connection) -> facts.Committed | None:
            for host_id in [each.id for each in seen]:
                conn.execute(sa.update(facts.HOSTS).where(facts.HOSTS.c.id == host_id).values(seen_at=NOW))
            return facts.advance_sandbox(conn, one.id, CopyUnwanted(), now=NOW, ids=ids)

        return await store.write(work)

    early = await unwanted((there,))
    assert early is not None
    assert not early.changed
    done = await unwanted((silent,))
    assert done is not None
    assert (done.sandbox.rests_in_store, done.sandbox.conditions, done.sandbox.unseen) == (True, frozenset(), 1)


async def test_after_a_restore_every_host_has_to_have_said_what_it_has(store: Store, ours: Team) -> None:
    there, silent = await machine(store), await machine(store)
    one = await rests(store, ours, moment(1))
    await store.write(lambda conn: restoring.next_life(conn, now=NOW, chance=lambda count: b"x" * count))
    found = await store.read(lambda conn: facts.load(conn, one.id))
    assert found is not None
    assert found.sandbox.conditions == {Condition.HOSTS_UNSETTLED}

    async def heard(of: Host, problems: tuple[str, ...]) -> None:
        def work(conn: sa.Connection) -> None:
            now = hosts.by_id(conn, of.id)
            assert now is not None
            hosts.save(conn, replace(now, problems=problems), read=now)
            conn.execute(sa.update(facts.HOSTS).where(facts.HOSTS.c.id == of.id).values(seen_at=NOW))

        await store.write(work)

    await heard(there, ())
    for problems in (None, (UNSETTLED,)):
        if problems is not None:
            await heard(silent, problems)
        with pytest.raises(Unavailable) as refused:
            await store.write(taking(found.sandbox, there))
        assert refused.value.code is Code.STORE_RESTORED
        assert silent.name in refused.value.message
    await heard(silent, ())
    done = await store.write(taking(found.sandbox, there))
    assert done is not None
    assert (done.changed, done.sandbox.conditions) == (True, frozenset())
