"""The agent brings guests to rest and back, whatever kills it on the way."""

from __future__ import annotations

import asyncio

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.drivers.port import Power

A = "plc_aaaaaaaaaaaaaaaaaaaa"


async def ready(world) -> None:
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)


async def rested(world, observed: Observed = Observed.FROZEN) -> None:
    revision = world.control.wants[A].revision
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and (o.observed, o.applied_revision) == (observed, revision))


async def test_pause_and_resume(world):
    await ready(world)
    world.control.want(A, Kind.ENSURE_PAUSED)
    await rested(world)
    assert world.machine.things[A].power is Power.FROZEN
    assert not world.control.seen(A).ready
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.machine.things[A].power is Power.RUNNING
    assert (world.machine.started[A], len(world.machine.things[A].inits)) == (1, 1), "it is the same guest"


async def test_what_cannot_be_frozen_is_ready_still(world):
    await ready(world)
    world.driver.fail["pause"] = [Refused(Code.PAUSE_FAILED, "no")]
    world.control.want(A, Kind.ENSURE_PAUSED)
    await world.control.until(lambda: world.control.seen(A).failed_revision == 2)
    seen = world.control.seen(A)
    assert (seen.observed, seen.ready, seen.reason, seen.applied_revision) == (Observed.RUNNING, True, Code.PAUSE_FAILED, 1)
    world.control.want(A)
    await world.control.until(lambda: world.control.seen(A).applied_revision == 3)
    assert world.verbs(A).count("pause") == 1


async def test_a_resume_that_fails_is_said_and_it_can_be_frozen_again(world):
    await ready(world)
    world.control.want(A, Kind.ENSURE_PAUSED)
    await rested(world)
    world.driver.fail["resume"] = [Refused(Code.RESUME_FAILED, "no")]
    world.control.want(A)
    await world.control.until(lambda: world.control.seen(A).failed_revision == 3)
    assert world.control.seen(A).reason == Code.RESUME_FAILED
    world.control.want(A, Kind.ENSURE_PAUSED)
    await rested(world)
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.machine.started[A] == 1


async def test_nothing_ends_that_is_at_rest_and_back_it_has_a_new_end(world):
    world.control.timeout_s = 100.0
    await ready(world)
    world.control.end(A, 100.0, revision=1)
    await world.control.until(lambda: world.control.end_revision(A) == 1)
    world.control.want(A, Kind.ENSURE_PAUSED)
    await rested(world)
    world.skip(150)
    await asyncio.sleep(0.1)
    assert world.machine.things[A].power is Power.FROZEN
    world.control.lease_s = 1e6
    world.control.want(A)
    await world.control.until_ready(A)
    world.skip(99)
    await asyncio.sleep(0.1)
    assert world.machine.things[A].power is Power.RUNNING
    world.skip(2)
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "end_at"


async def test_a_frozen_guest_is_removed_without_being_thawed(world):
    await ready(world)
    world.control.want(A, Kind.ENSURE_PAUSED)
    await rested(world)
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert "resume" not in world.verbs(A)


async def test_delete_does_not_wait_for_a_freeze(world):
    await ready(world)
    world.driver.gate["pause"] = asyncio.Event()
    world.control.want(A, Kind.ENSURE_PAUSED)
    await world.control.until(lambda: "pause" in world.verbs(A))
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert world.machine.things == {}


async def test_a_frozen_guest_that_dies_while_no_agent_runs(world):
    await ready(world)
    world.control.want(A, Kind.ENSURE_PAUSED)
    await rested(world)
    await world.kill()
    world.machine.things[A].power = Power.STOPPED
    world.boot()
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "exit"


async def _until_crash_or(world, done) -> bool:
    async with asyncio.timeout(10):
        while not world.task.done():
            if done():
                return False
            await asyncio.sleep(0)
    return True


def _is(world, observed: Observed, revision: int) -> bool:
    seen = world.control.seen(A)
    return seen is not None and seen.observed is observed and seen.applied_revision >= revision


WISHES = {
    "pause": [(Kind.ENSURE_PAUSED, Observed.FROZEN)],
    "resume": [(Kind.ENSURE_PAUSED, Observed.FROZEN), (Kind.ENSURE_RUNNING, Observed.RUNNING)],
    "delete": [(Kind.ENSURE_PAUSED, Observed.FROZEN), (Kind.ENSURE_ABSENT, Observed.ABSENT)],
    "back and forth": [
        (Kind.ENSURE_PAUSED, Observed.FROZEN),
        (Kind.ENSURE_RUNNING, Observed.RUNNING),
        (Kind.ENSURE_PAUSED, Observed.FROZEN),
    ],
}
POWERS = {Observed.FROZEN: Power.FROZEN, Observed.RUNNING: Power.RUNNING, Observed.ABSENT: None}


@pytest.mark.parametrize("wish", list(WISHES))
async def test_killed_at_every_boundary(tmp_path, world_factory, wish):
    """Crash at the n-th boundary, restart, and what is wanted comes about, on the guest that there was."""
    points = []
    for n in range(1, 300):
        world = world_factory(tmp_path / f"{wish.split()[0]}-{n}")
        if not await _scenario(world, wish, n):
            break
        points.append(world.fuse_name)
    else:
        pytest.fail("the scenario never got through")
    assert {"before pause", "after pause", "before commit", "after commit"} <= set(points)
    if wish in ("resume", "back and forth"):
        assert {"before resume", "after resume"} <= set(points)


async def _scenario(world, wish: str, n: int) -> bool:
    world.boot(crash_at=n)
    world.control.want(A)
    crashed = await _until_crash_or(world, lambda: (o := world.control.seen(A)) is not None and o.ready)
    for kind, observed in WISHES[wish]:
        if not crashed:
            world.control.want(A, kind)
            revision = world.control.wants[A].revision
            crashed = await _until_crash_or(world, lambda observed=observed, revision=revision: _is(world, observed, revision))
    world.fuse_name = world.fuse.name
    if not crashed:
        return False
    await world.kill()
    begun = world.control.wants[A].revision - 1
    world.boot()
    if begun == 0:
        await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.ready)
    for kind, observed in WISHES[wish][max(0, begun - 1) :]:
        if world.control.wants[A].kind is not kind:
            world.control.want(A, kind)
        revision = world.control.wants[A].revision
        await world.control.until(lambda observed=observed, revision=revision: _is(world, observed, revision))
    last = WISHES[wish][-1][1]
    thing = world.machine.things.get(A)
    assert (thing.power if thing is not None else None) is POWERS[last]
    assert world.machine.started.get(A, 0) <= 1, "no other guest was begun in its place"
    await world.kill()
    return True
