"""Hosts, epochs, enrolment tokens, and what an agent is told to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from atoll.base.errors import Unavailable
from atoll.base.ids import EpochId, Prefix
from atoll.domain.host import Admin, Host
from atoll.domain.placement import Observed, Report
from atoll.domain.sandbox import Sandbox
from atoll.planning.stimuli import EndMoved, Heard, ReleaseRequested
from atoll.store import facts, hosts, operations
from atoll.store.engine import Stale, Store
from tests.builders import NOW, fresh, host, placement

Put = Callable[..., Awaitable[Sandbox]]


def ids() -> str:
    return fresh(Prefix.EVENT)


async def place(store: Store, of: Sandbox, on: Host) -> str:
    asked = placement(of, host_id=on.id)
    await store.write(lambda conn: facts.reserve(conn, of.id, asked, now=NOW, ids=ids))
    return asked.id


async def test_a_host_is_found_by_id_name_and_credential(store: Store) -> None:
    made = host(credential_digest="digest", labels={"disk": "ssd"}, problems=("a", "b"), facts={"kernel": "6"}, epoch=EpochId("epo_1"))
    await store.write(lambda conn: hosts.add(conn, made, now=NOW))
    for find in (
        lambda conn: hosts.by_id(conn, made.id),
        lambda conn: hosts.by_name(conn, made.name),
        lambda conn: hosts.by_credential(conn, "digest"),
    ):
        assert await store.read(find) == made
    assert await store.read(lambda conn: hosts.by_credential(conn, "other")) is None
    assert await store.read(hosts.all_hosts) == [made]


async def test_names_and_credentials_are_unique(store: Store, machine: Host) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        await store.write(lambda conn: hosts.add(conn, host(name=machine.name), now=NOW))


async def test_a_host_is_saved_only_at_the_revision_that_was_read(store: Store, machine: Host) -> None:
    await store.write(lambda conn: hosts.save(conn, replace(machine, region="eu"), read=machine))
    with pytest.raises((Stale, Unavailable)):
        await store.write(lambda conn: hosts.save(conn, replace(machine, region="us"), read=machine))
    found = await store.read(lambda conn: hosts.by_id(conn, machine.id))
    assert found is not None
    assert (found.region, found.revision) == ("eu", 2)


@pytest.fixture
async def held(store: Store) -> Host:
    """A host that an agent run holds."""
    made = host(epoch=EpochId("epo_1"), poll_seq=3)
    await store.write(lambda conn: hosts.add(conn, made, now=NOW))
    return made


async def test_a_poll_renews_the_lease_without_a_new_revision(store: Store, held: Host) -> None:
    machine = held
    await store.write(lambda conn: hosts.polled(conn, machine, poll_seq=7, seen_at=NOW + 5, lease_until=NOW + 305))
    found = await store.read(lambda conn: hosts.by_id(conn, machine.id))
    assert found is not None
    assert (found.poll_seq, found.seen_at, found.lease_until, found.revision) == (7, NOW + 5, NOW + 305, 1)


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"epoch": EpochId("epo_2"), "poll_seq": 0},
        {"admin": Admin.DISABLED, "credential_digest": None, "credential_version": 2},
        {"poll_seq": 9},
    ],
    ids=["taken over", "fenced", "a newer poll"],
)
async def test_a_lease_is_not_renewed_for_a_session_that_is_no_more(store: Store, held: Host, meanwhile: dict[str, Any]) -> None:
    """The write of a replica that stood still between its read and this: it applies to nothing."""
    await store.write(lambda conn: hosts.save(conn, replace(held, **meanwhile), read=held))
    with pytest.raises((Stale, Unavailable)):
        await store.write(lambda conn: hosts.polled(conn, held, poll_seq=4, seen_at=NOW + 5, lease_until=NOW + 305))
    found = await store.read(lambda conn: hosts.by_id(conn, held.id))
    assert found is not None
    assert (found.lease_until, found.seen_at) == (held.lease_until, held.seen_at)


async def test_a_save_writes_only_what_it_decided(store: Store, held: Host) -> None:
    """Between its read and its write, another replica heard a poll."""
    await store.write(lambda conn: hosts.polled(conn, held, poll_seq=7, seen_at=NOW + 5, lease_until=NOW + 305))
    await store.write(lambda conn: hosts.save(conn, replace(held, region="eu", admin=Admin.DRAINING), read=held))
    found = await store.read(lambda conn: hosts.by_id(conn, held.id))
    assert found is not None
    assert (found.region, found.admin, found.revision) == ("eu", Admin.DRAINING, held.revision + 1)
    assert (found.poll_seq, found.seen_at, found.lease_until) == (7, NOW + 5, NOW + 305)
    assert (found.capacity, found.epoch, found.labels) == (held.capacity, held.epoch, held.labels)


async def test_who_takes_over_or_fences_decides_over_what_polls_write(store: Store, held: Host) -> None:
    """By the row as it is until the commit, with its lock: a poll that comes meanwhile finds another session."""
    await store.write(lambda conn: hosts.polled(conn, held, poll_seq=7, seen_at=NOW + 5, lease_until=NOW + 305))

    def take_over(conn: sa.Connection) -> None:
        now = hosts.locked(conn, held.id)
        assert now is not None
        hosts.save(conn, replace(now, epoch=EpochId("epo_2"), poll_seq=0, lease_until=None), read=now)

    await store.write(take_over)
    found = await store.read(lambda conn: hosts.by_id(conn, held.id))
    assert found is not None
    assert (found.epoch, found.poll_seq, found.lease_until, found.seen_at) == ("epo_2", 0, None, NOW + 5)


async def test_a_token_is_used_once(store: Store, machine: Host) -> None:
    record = hosts.Enrollment("enr_1", "digest", "name", NOW, NOW + 60)
    await store.write(lambda conn: hosts.add_enrollment(conn, record))
    await store.write(lambda conn: hosts.use_enrollment(conn, "enr_1", host_id=machine.id, form_digest="form", now=NOW))
    with pytest.raises((Stale, Unavailable)):
        await store.write(lambda conn: hosts.use_enrollment(conn, "enr_1", host_id="hst_other", form_digest="form", now=NOW))
    found = await store.read(lambda conn: hosts.enrollment_by_digest(conn, "digest"))
    assert found is not None
    assert found.host_id == machine.id


async def test_an_ended_epoch_stays_ended(store: Store, machine: Host) -> None:
    assert not await store.read(lambda conn: hosts.epoch_ended(conn, machine.id, "epo_1"))
    for _ in range(2):
        await store.write(lambda conn: hosts.end_epoch(conn, machine.id, "epo_1", now=NOW))
    assert await store.read(lambda conn: hosts.epoch_ended(conn, machine.id, "epo_1"))
    assert not await store.read(lambda conn: hosts.epoch_ended(conn, machine.id, "epo_2"))


async def test_a_token_is_recorded_once_and_used_once(store: Store) -> None:
    token = hosts.Enrollment("enr_1", "digest", "local", NOW, NOW + 60)
    assert await store.write(lambda conn: hosts.add_enrollment(conn, token))
    assert not await store.write(lambda conn: hosts.add_enrollment(conn, replace(token, id="enr_2")))
    await store.write(lambda conn: hosts.use_enrollment(conn, "enr_1", host_id="hst_1", form_digest="form", now=NOW + 1))
    found = await store.read(lambda conn: hosts.enrollment_by_digest(conn, "digest"))
    assert found == replace(token, used_at=NOW + 1, host_id="hst_1", form_digest="form")


async def test_only_tokens_that_expired_before_then_are_forgotten(store: Store) -> None:
    for number, expires_at in enumerate((NOW - 1, NOW, NOW + 1)):
        token = hosts.Enrollment(f"enr_{number}", f"digest-{number}", "local", NOW - 100, expires_at)
        await store.write(lambda conn, token=token: hosts.add_enrollment(conn, token))
    await store.write(lambda conn: hosts.use_enrollment(conn, "enr_0", host_id="hst_1", form_digest="form", now=NOW - 2))
    long_ago = NOW - 1e6
    assert (
        await store.write(
            lambda conn: operations.prune(conn, audit_before=long_ago, alerts_before=long_ago, events_before=long_ago, tokens_before=NOW)
        )
        == 1
    )
    left = [await store.read(lambda conn, n=n: hosts.enrollment_by_digest(conn, f"digest-{n}")) for n in range(3)]
    assert [one is not None for one in left] == [False, True, True]


async def test_what_is_wanted_follows_every_change(store: Store, put: Put, machine: Host) -> None:
    made = await put()
    placed = await place(store, made, machine)

    async def wanted() -> list[tuple[str, int, int]]:
        found = await store.read(lambda conn: hosts.wanted(conn, machine.id))
        return [(w.placement_id, w.desired_revision, w.end_revision) for w in found]

    assert await wanted() == [(placed, 1, 1)]
    await store.write(lambda conn: facts.advance_sandbox(conn, made.id, EndMoved(NOW + 60), now=NOW, ids=ids))
    assert await wanted() == [(placed, 1, 2)]
    await store.write(lambda conn: facts.advance_sandbox(conn, made.id, ReleaseRequested(), now=NOW, ids=ids))
    assert await wanted() == [(placed, 2, 2)]
    absent = Heard(Report(1, Observed.ABSENT, 1))
    await store.write(lambda conn: facts.advance_sandbox(conn, made.id, absent, now=NOW, ids=ids))
    assert await wanted() == []
    assert await store.read(lambda conn: hosts.placements_held(conn, machine.id)) == 0


async def test_a_host_is_told_of_its_own_placements_only(store: Store, put: Put, machine: Host) -> None:
    other = host()
    await store.write(lambda conn: hosts.add(conn, other, now=NOW))
    mine, theirs = await place(store, await put(), machine), await place(store, await put(), other)
    assert [w.placement_id for w in await store.read(lambda conn: hosts.wanted(conn, machine.id))] == [mine]
    assert [w.placement_id for w in await store.read(lambda conn: hosts.wanted(conn, other.id))] == [theirs]


async def test_gone_unknown_and_held_are_told_apart(store: Store, put: Put, machine: Host) -> None:
    other = host()
    await store.write(lambda conn: hosts.add(conn, other, now=NOW))
    held = await place(store, await put(), machine)
    ended = await put()
    gone = await place(store, ended, machine)
    await store.write(lambda conn: facts.advance_sandbox(conn, ended.id, Heard(Report(1, Observed.ABSENT, 1), "exit"), now=NOW, ids=ids))
    elsewhere = await place(store, await put(), other)
    asked = [held, gone, elsewhere, "plc_never"]
    assert await store.read(lambda conn: hosts.gone_or_unknown(conn, machine.id, asked)) == ({gone: 1}, {elsewhere, "plc_never"})
    assert await store.read(lambda conn: hosts.gone_or_unknown(conn, machine.id, [])) == ({}, set())


async def test_placements_are_loaded_in_the_order_asked(store: Store, put: Put, machine: Host) -> None:
    sandboxes = [await put() for _ in range(3)]
    placed = [await place(store, made, machine) for made in sandboxes]
    loaded = await store.read(lambda conn: hosts.load_many(conn, [placed[2], "plc_never", placed[0]]))
    assert [(p.id, s.id) for p, s in loaded] == [(placed[2], sandboxes[2].id), (placed[0], sandboxes[0].id)]
    assert await store.read(lambda conn: hosts.load_many(conn, [])) == []
