"""What the agent enforces alone: ends and the lease, whatever control and the wall clock do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from atoll.agent.leases import HEAR_S
from atoll.base.errors import Code
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.spec import OnLeaseExpiry

A, B, C = "plc_aaaaaaaaaaaaaaaaaaaa", "plc_bbbbbbbbbbbbbbbbbbbb", "plc_cccccccccccccccccccc"


async def started(world, *placement_ids, **end):
    world.boot()
    for placement_id in placement_ids:
        world.control.want(placement_id)
        if end:
            world.control.end(placement_id, revision=1, **end)
    await world.control.until_ready(*placement_ids)
    if end:
        await world.control.until(lambda: all(world.control.polls[-1].end_revisions.get(i) == 1 for i in placement_ids))


async def test_the_end_is_enforced(world):
    await started(world, A, remaining_s=100.0)
    world.skip(99.5)
    await asyncio.sleep(0.05)
    assert A in world.machine.things
    world.skip(0.6)
    await world.control.until_absent(A)
    seen = world.control.seen(A)
    assert (seen.ended_by, seen.reason, seen.end_revision, seen.ready) == ("end_at", Code.END_REACHED, 1, False)
    assert world.machine.things == {}


async def test_the_end_is_enforced_while_control_is_down(world):
    await started(world, A, remaining_s=100.0)
    world.control.down = True
    world.control.news.set()
    world.skip(101)
    await world.control.until(lambda: world.machine.things == {})
    world.control.down = False
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "end_at"


async def test_a_short_end_comes_by_its_own_timer(world):
    await started(world, A, remaining_s=0.4)
    began = asyncio.get_running_loop().time()
    await world.control.until(lambda: world.machine.things == {}, within_s=2)
    assert asyncio.get_running_loop().time() - began < 1.0


async def test_the_newest_end_wins_and_an_older_one_is_ignored(world):
    world.control.lease_s = 10_000.0
    await started(world, A, remaining_s=100.0)
    world.control.end(A, 1000.0, revision=3)
    await world.control.until(lambda: world.control.polls[-1].end_revisions.get(A) == 3)
    record = world.agent._session._host.ledger.get(A)
    late = replace_end(world, A, 1.0, revision=2)
    assert await world.agent._session._take_ends([late], world.clock.boot()) is False
    assert world.agent._session._host.ledger.get(A).end == record.end
    world.skip(500)
    await asyncio.sleep(0.05)
    assert A in world.machine.things
    world.skip(501)
    await world.control.until(lambda: world.machine.things == {})


def replace_end(world, placement_id, remaining_s, *, revision):
    return world.control.ends[placement_id].model_copy(update={"remaining_s": remaining_s, "revision": revision})


async def test_a_shorter_end_comes_sooner(world):
    await started(world, A, remaining_s=1000.0)
    world.control.end(A, 10.0, revision=2)
    await world.control.until(lambda: world.control.polls[-1].end_revisions.get(A) == 2)
    world.skip(11)
    await world.control.until(lambda: world.machine.things == {})


async def test_the_end_is_counted_from_when_the_request_was_sent(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    await world.control.until(lambda: world.control.parked)
    # The poll has been parked since before this; what it answers now counts from its sending.
    world.skip(60)
    world.control.end(A, 61.0, revision=1)
    await world.control.until(lambda: world.control.polls[-1].end_revisions.get(A) == 1)
    world.skip(1.2)
    await world.control.until(lambda: world.machine.things == {})


async def test_an_end_reached_during_a_start_cancels_it(world):
    world.boot()
    world.driver.gate["start"] = asyncio.Event()
    world.control.want(A)
    world.control.end(A, 50.0, revision=1)
    await world.control.until(lambda: ("start", A) in world.machine.history)
    await world.control.until(lambda: world.control.polls[-1].end_revisions.get(A) == 1)
    world.skip(51)
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "end_at"
    assert world.machine.started == {}


async def test_steps_of_the_wall_clock_move_nothing(world):
    await started(world, A, remaining_s=100.0)
    for step in (10**9, -(10**9)):
        world.clock.wall += step
        world.skip(0)
        await asyncio.sleep(0.03)
        assert A in world.machine.things
    world.skip(101)
    await world.control.until(lambda: world.machine.things == {})


async def test_the_lease_ends_what_its_spec_says(world):
    world.boot()
    for placement_id, expiry in ((A, OnLeaseExpiry.END), (B, OnLeaseExpiry.KEEP), (C, OnLeaseExpiry.SUSPEND)):
        world.control.want(placement_id)
        world.control.end(placement_id, 10_000.0, revision=1, on_lease_expiry=expiry)
    await world.control.until_ready(A, B, C)
    await world.control.until(lambda: len(world.control.polls[-1].end_revisions) == 3)
    world.control.down = True
    world.control.news.set()
    world.skip(250)
    await asyncio.sleep(0.05)
    assert set(world.machine.things) == {A, B, C}
    world.skip(51)
    await world.control.until(lambda: set(world.machine.things) == {B, C})
    world.control.down = False
    await world.control.until_absent(A)
    assert (world.control.seen(A).ended_by, world.control.seen(A).reason) == ("lease", Code.LEASE_EXPIRED)
    assert world.control.seen(B).observed is Observed.RUNNING
    await world.control.until(lambda: world.control.seen(C).observed is Observed.SAVED)
    assert (world.control.seen(C).ended_by, world.control.seen(C).reason) == (None, Code.LEASE_EXPIRED)


async def test_nothing_is_begun_after_the_lease_has_run_out(world):
    world.boot()
    world.driver.gate["prepare"] = asyncio.Event()
    world.control.want(A)
    await world.control.until(lambda: ("prepare", A) in world.machine.history)
    world.control.down = True
    world.control.news.set()
    world.clock.skipped += 301  # the machine was suspended: the sleeper has not rung yet when the step goes on
    world.driver.gate["prepare"].set()
    await world.control.until(lambda: (r := world.agent._session._host.ledger.get(A)) is not None and r.reason is not None)
    assert ("start", A) not in world.machine.history
    assert world.agent._session._host.ledger.get(A).reason == Code.LEASE_EXPIRED
    world.skip(0)
    await world.control.until(lambda: world.machine.things == {})


async def test_a_poll_renews_the_lease(world):
    await started(world, A)
    for _ in range(4):
        world.skip(200)
        await world.control.next_poll()
        await world.control.next_poll()
    assert A in world.machine.things


@pytest.mark.parametrize("expiry", [OnLeaseExpiry.END, OnLeaseExpiry.KEEP])
async def test_without_an_end_the_spec_decides_at_lease_expiry(world, expiry):
    await started(world, A)
    ledger = world.agent._session._host.ledger
    record = ledger.get(A)
    spec = replace(record.blueprint.spec, on_lease_expiry=expiry)
    await ledger.change(A, lambda r: replace(r, blueprint=replace(r.blueprint, spec=spec)))
    world.control.down = True
    world.control.news.set()
    world.skip(301)
    await asyncio.sleep(0.1)
    assert (A in world.machine.things) == (expiry is OnLeaseExpiry.KEEP)


async def test_the_end_is_enforced_by_the_next_run_though_control_is_down(world):
    await started(world, A, remaining_s=100.0)
    await world.kill()
    world.control.down = True
    world.skip(50)
    world.boot()
    await world.control.until(lambda: ("adopt", A) in world.machine.history)
    await asyncio.sleep(0.05)
    assert A in world.machine.things
    world.skip(51)
    await world.control.until(lambda: world.machine.things == {})


async def test_an_end_that_passed_while_no_agent_ran(world):
    await started(world, A, remaining_s=100.0)
    await world.kill()
    world.skip(200)
    world.control.down = True
    world.boot()
    await world.control.until(lambda: ("adopt", A) in world.machine.history)
    await asyncio.sleep(0.05)
    assert A in world.machine.things, "control was not given time to say that it has moved the end"
    world.skip(HEAR_S)
    await world.control.until(lambda: world.machine.things == {})


async def test_an_end_that_was_moved_while_no_agent_ran(world):
    """Whoever moved it was told so: the agent hears control before it enforces what it knows."""
    await started(world, A, remaining_s=100.0)
    await world.kill()
    world.skip(200)
    world.control.end(A, revision=2, remaining_s=500.0)
    world.boot()
    await world.control.until(lambda: world.control.end_revision(A) == 2)
    await asyncio.sleep(0.05)
    assert A in world.machine.things
    world.skip(501)
    await world.control.until(lambda: world.machine.things == {})


async def test_an_end_that_passed_while_no_agent_ran_waits_for_no_more_than_one_answer(world):
    await started(world, A, remaining_s=100.0)
    await world.kill()
    world.skip(200)
    world.boot()
    await world.control.until(lambda: world.machine.things == {})


@pytest.mark.parametrize("moved", [True, False])
async def test_an_end_that_came_due_while_the_agent_was_stopped(world, moved):
    """The answer to the poll that was out may have come meanwhile."""
    await started(world, A, remaining_s=100.0)
    world.control.down = True
    if moved:
        world.control.end(A, revision=2, remaining_s=500.0)
    world.skip(200)
    await asyncio.sleep(0.05)
    assert A in world.machine.things
    world.control.down = False
    if moved:
        await world.control.until(lambda: world.control.end_revision(A) == 2)
        await asyncio.sleep(0.05)
        assert A in world.machine.things
    else:
        world.skip(HEAR_S)
        await world.control.until(lambda: world.machine.things == {})


async def test_the_lease_outlives_the_run(world):
    await started(world, A)
    await world.kill()
    world.control.down = True
    world.skip(250)
    world.boot()
    await world.control.until(lambda: ("adopt", A) in world.machine.history)
    await asyncio.sleep(0.05)
    assert A in world.machine.things
    world.skip(51)
    await world.control.until(lambda: world.machine.things == {})
    world.control.down = False
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "lease"


async def test_removal_that_control_wants_is_not_called_an_end(world):
    await started(world, A, remaining_s=100.0)
    world.driver.gate["stop"] = asyncio.Event()
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until(lambda: ("stop", A) in world.machine.history)
    world.skip(101)
    await asyncio.sleep(0.05)
    world.driver.gate["stop"].set()
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "command"


async def test_a_guest_s_own_end_is_on_disk_before_anybody_hears_that_it_is_ready(world):
    world.control.timeout_s = 100.0
    world.boot()
    world.control.want(A)
    await world.control.until(lambda: A in world.machine.things and world.machine.things[A].initialised)
    # Nothing of the agent's is heard from here on, and nothing is heard by it.
    world.control.down = True
    await world.control.until(lambda: (record := world.agent.ledger.get(A)) is not None and record.ready)
    await world.kill()
    world.skip(99.0)
    world.boot()
    await world.control.until(lambda: world.agent.deadlines is not None)
    await asyncio.sleep(0.05)
    assert A in world.machine.things
    world.skip(1.1)
    await world.control.until(lambda: world.machine.things == {})
    world.control.down = False
    await world.control.until_absent(A)
    assert (world.control.seen(A).ended_by, world.control.seen(A).reason) == ("end_at", Code.END_REACHED)


async def test_control_s_word_takes_the_place_of_a_guest_s_own_end(world):
    world.control.timeout_s = 100.0
    world.control.lease_s = 10_000.0
    world.boot()
    world.control.want(A)
    world.control.end(A, 160.0, revision=1)
    await world.control.until_ready(A)
    assert world.agent.ledger.get(A).end.at_boot == pytest.approx(world.clock.boot() + 100.0, abs=2.0)
    world.control.end(A, 1000.0, revision=2)
    await world.control.until(lambda: world.control.polls[-1].end_revisions.get(A) == 2)
    world.skip(500)
    await asyncio.sleep(0.05)
    assert A in world.machine.things
    world.skip(501)
    await world.control.until(lambda: world.machine.things == {})


async def test_a_guest_of_a_run_that_could_not_write_that_it_was_ready_ends_in_time(world):
    world.control.timeout_s = 100.0
    world.boot()
    world.guests.gate = asyncio.Event()
    world.control.want(A)
    world.control.end(A, 160.0, revision=1)
    await world.control.until(lambda: world.control.polls != [] and world.control.end_revision(A) == 1 and A in world.machine.started)
    world.control.down = True
    await world.kill()
    world.boot()
    await world.control.until(lambda: world.agent.ledger is not None)
    await world.control.until(lambda: world.agent.ledger.get(A).end.at_boot < world.clock.boot() + 101)
    world.skip(101)
    await world.control.until(lambda: world.machine.things == {})


async def test_a_guest_that_is_taken_over_has_its_end_from_control(world):
    world.control.timeout_s = 10.0
    world.control.lease_s = 10_000.0
    await started(world, A, remaining_s=1000.0)
    await world.halt()
    for path in (world.directory / "agent").glob("agent.db*"):
        path.unlink()
    world.control.current_epoch = None
    world.control.wants[A].observed = world.control.seen(A).model_copy(update={"seq": 0, "ready": False})
    world.boot()
    await world.control.until_ready(A)
    world.skip(500)
    await asyncio.sleep(0.05)
    assert A in world.machine.things
