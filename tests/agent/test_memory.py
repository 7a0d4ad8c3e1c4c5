"""An agent whose database is gone, on a machine that has everything still, or nothing: guests are got back, or said to be lost."""

from __future__ import annotations

import asyncio

from atoll.base.errors import Code
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.drivers.port import Held, Power

A, B = "plc_aaaaaaaaaaaaaaaaaaaa", "plc_bbbbbbbbbbbbbbbbbbbb"


async def lose_the_database(world):
    """The run ends, and with it all that it had written; control starts to count its words anew."""
    await world.kill()
    for path in (world.directory / "agent").glob("agent.db*"):
        path.unlink()
    world.control.current_epoch = None
    for want in world.control.wants.values():
        if want.observed is not None:
            want.observed = want.observed.model_copy(update={"seq": 0})


async def one_ready(world, *placement_ids):
    world.boot()
    for placement_id in placement_ids:
        world.control.want(placement_id, env={"K": placement_id})
        world.control.end(placement_id, 1000.0, revision=1)
    await world.control.until_ready(*placement_ids)


async def test_guests_are_taken_over_by_what_control_remembers(world):
    await one_ready(world, A, B)
    await lose_the_database(world)
    world.boot()
    await world.control.until(lambda: len(world.control.polls[-1].holds) == 2 and world.control.polls[-1].health.quarantined == [])
    await world.control.until_ready(A, B)
    assert world.machine.started == {A: 1, B: 1}, "a guest was begun again"
    assert [len(world.machine.things[i].inits) for i in (A, B)] == [1, 1], "a guest was initialised twice"
    await world.control.until(lambda: world.control.end_revision(A) == 1)
    world.skip(1001)
    await world.control.until(lambda: world.machine.things == {})


async def test_after_that_new_work_is_taken_again(world):
    await one_ready(world, A)
    await lose_the_database(world)
    world.boot()
    await world.control.until(lambda: world.control.polls[-1].holds == {A: 1})
    world.control.want(B)
    await world.control.until_ready(B)


async def test_a_guest_of_which_nothing_is_left_is_lost_and_not_begun_anew(world):
    await one_ready(world, A)
    await lose_the_database(world)
    world.machine.things.clear()
    world.boot()
    await world.control.until_absent(A)
    seen = world.control.seen(A)
    assert (seen.reason, seen.ended_by) == (Code.PLACEMENT_LOST, "exit")
    assert world.machine.started == {A: 1}


async def test_a_guest_that_has_ended_meanwhile_is_not_begun_anew(world):
    await one_ready(world, A)
    await lose_the_database(world)
    world.machine.things[A].power = Power.STOPPED
    world.boot()
    await world.control.until_absent(A)
    assert world.control.seen(A).reason == Code.GUEST_EXITED
    assert world.machine.started == {A: 1}
    assert world.machine.things == {}


async def test_a_start_that_was_under_way_goes_on(world):
    world.boot()
    world.guests.gate = asyncio.Event()
    world.control.want(A, env={"K": "v"})
    await world.control.until(lambda: A in world.machine.started)
    await lose_the_database(world)
    world.boot()
    await world.control.until_ready(A)
    assert world.machine.started == {A: 1}
    assert [p.env for p in world.machine.things[A].inits] == [{"K": "v"}]


async def test_another_generation_is_no_match(world):
    await one_ready(world, A)
    await lose_the_database(world)
    order = world.machine.things.pop(A).order
    world.machine.stray.append(Held(A, order.sandbox_id, order.generation + 1, ("process 9",)))
    world.boot()
    await world.control.until_absent(A)
    assert world.control.seen(A).reason == Code.PLACEMENT_LOST


async def test_parts_that_do_not_say_whose_they_are_are_no_match(world):
    await one_ready(world, A)
    await lose_the_database(world)
    world.machine.things.clear()
    world.machine.stray.append(Held(A, None, None, ("slot 4",)))
    world.boot()
    await world.control.until_absent(A)
    assert world.control.seen(A).reason == Code.PLACEMENT_LOST
    assert world.machine.stray == []


async def test_what_control_does_not_explain_stays_in_quarantine(world):
    await one_ready(world, A, B)
    await lose_the_database(world)
    del world.control.wants[B]
    world.boot()
    await world.control.until(lambda: world.control.polls[-1].holds == {A: 1})
    assert (await world.control.next_poll()).health.quarantined == [B]
    assert B in world.machine.things
    world.control.want("plc_cccccccccccccccccccc")
    await world.control.until(lambda: (o := world.control.seen("plc_cccccccccccccccccccc")) is not None and o.observed is Observed.ERROR)


async def test_a_crash_between_the_word_and_the_adoption(tmp_path, world_factory):
    """At every boundary of the run that gets its guest back."""
    for n in range(1, 60):
        world = world_factory(tmp_path / str(n))
        await one_ready(world, A)
        await lose_the_database(world)
        world.boot(crash_at=n)
        async with asyncio.timeout(10):
            while not world.task.done() and not ((o := world.control.seen(A)).seq > 0 and o.ready):
                await asyncio.sleep(0)
        crashed = world.task.done()
        await world.kill()
        if crashed and world.control.current_epoch is None:
            for want in world.control.wants.values():
                want.observed = want.observed.model_copy(update={"seq": 0})
        world.boot()
        await world.control.until(
            lambda world=world: world.control.current_epoch == world.agent.epoch and world.control.polls[-1].holds == {A: 1}
        )
        assert world.machine.started == {A: 1}
        assert len(world.machine.things[A].inits) == 1
        await world.kill()
        if not crashed:
            return
    raise AssertionError("the run never got through")


async def test_removal_is_served_for_what_is_in_quarantine(world):
    await one_ready(world, A)
    await lose_the_database(world)
    world.control.want(A, Kind.ENSURE_ABSENT)
    world.boot()
    await world.control.until_absent(A)
    assert world.machine.things == {}
