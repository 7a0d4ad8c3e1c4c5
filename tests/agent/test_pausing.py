"""The agent brings guests to rest and back, whatever kills it on the way."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import pytest

from atoll.agent import resting
from atoll.base.errors import Code, Refused
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.spec import OnEnd, OnLeaseExpiry
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


async def test_suspend_and_restore(world):
    await ready(world)
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await rested(world, Observed.SAVED)
    assert (world.control.seen(A).save_mode, world.control.seen(A).unresponsive, world.control.seen(A).ready) == ("full", False, False)
    assert world.machine.things[A].power is Power.SAVED
    world.control.want(A)
    await world.control.until_ready(A)
    thing = world.machine.things[A]
    assert (world.machine.started[A], world.machine.restored[A], len(thing.inits)) == (1, 1, 2), "it is told anew who it is"
    assert thing.saved is None


async def test_a_save_is_told_of_while_it_lasts_and_a_quick_one_when_it_is_there(world, monkeypatch):
    await ready(world)
    for lasts in (False, True):
        if lasts:
            monkeypatch.setattr(resting, "SLOW_S", 0.01)
            world.driver.gate["save"] = asyncio.Event()
        count = len(world.control.heard)
        world.control.want(A, Kind.ENSURE_SUSPENDED)
        if lasts:
            await world.control.until(lambda: world.control.seen(A).observed is Observed.SAVING)
            assert not world.control.seen(A).ready
            world.driver.gate["save"].set()
        await rested(world, Observed.SAVED)
        told = {seen.observed for seen in world.control.heard[count:]}
        assert told == ({Observed.SAVING, Observed.SAVED} if lasts else {Observed.SAVED})
        world.control.want(A)
        await world.control.until_ready(A)


async def test_what_cannot_be_saved_serves_as_before(world):
    await ready(world)
    world.driver.fail["save"] = [Refused(Code.HOST_DISK_FULL, "no")]
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await world.control.until(lambda: world.control.seen(A).failed_revision == 2)
    assert (world.control.seen(A).observed, world.control.seen(A).reason) == (Observed.RUNNING, Code.HOST_DISK_FULL)
    thing = world.machine.things[A]
    assert (thing.initialised, thing.power) == (True, Power.RUNNING)
    world.control.want(A)
    await world.control.until_ready(A)
    assert (world.machine.started[A], len(thing.inits)) == (1, 1)


async def test_a_guest_that_does_not_answer_is_saved_and_said_to_be_so(world):
    await ready(world)
    world.guests.deaf = True
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await rested(world, Observed.SAVED)
    assert world.control.seen(A).unresponsive
    world.control.want(A)
    await world.control.until_ready(A)
    assert len(world.machine.things[A].inits) == 2, "its settings were those of before"


async def test_a_restore_that_fails_leaves_what_was_saved(world):
    await ready(world)
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await rested(world, Observed.SAVED)
    for _ in range(2):
        world.driver.fail["restore"] = [Refused(Code.RESUME_FAILED, "no")]
        world.control.want(A)
        revision = world.control.wants[A].revision
        await world.control.until(lambda revision=revision: world.control.seen(A).failed_revision == revision)
        world.control.want(A, Kind.ENSURE_SUSPENDED)
        await rested(world, Observed.SAVED)
    world.control.want(A)
    await world.control.until_ready(A)
    assert (world.machine.started[A], world.machine.restored[A]) == (1, 1)


async def test_a_restored_guest_that_never_answers_is_the_saved_one_again(world):
    await ready(world)
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await rested(world, Observed.SAVED)
    world.guests.error = Refused(Code.GUEST_BOOT_TIMEOUT, "nothing answers")
    world.control.want(A)
    await world.control.until(lambda: world.control.seen(A).failed_revision == 3)
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await rested(world, Observed.SAVED)
    world.guests.error = None
    world.control.want(A)
    await world.control.until_ready(A)
    assert (world.machine.started[A], world.machine.restored[A]) == (1, 2)


async def test_what_is_saved_outlives_the_kernel(world):
    await ready(world)
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await rested(world, Observed.SAVED)
    await world.kill()
    world.facts = world.facts.model_copy(update={"boot_id": "boot-2"})
    world.boot()
    await world.control.next_poll()
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.machine.restored[A] == 1


async def test_at_its_end_it_is_saved_though_control_is_away(world):
    world.control.timeout_s = 100.0
    world.control.spec = replace(world.control.spec, on_end=OnEnd.SUSPEND)
    await ready(world)
    world.control.end(A, 100.0, revision=1, action=OnEnd.SUSPEND)
    await world.control.until(lambda: world.control.end_revision(A) == 1)
    world.control.down = True
    world.skip(101)
    await world.control.until(lambda: world.machine.things[A].power is Power.SAVED)
    assert not world.machine.things[A].initialised, "it was told to sleep, without control's help"
    world.control.down = False
    await world.control.until(lambda: world.control.seen(A).observed is Observed.SAVED)
    seen = world.control.seen(A)
    assert (seen.reason, seen.ended_by, seen.applied_revision) == (Code.END_REACHED, None, 1)
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await rested(world, Observed.SAVED)
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.machine.started[A] == 1


async def test_at_its_end_what_cannot_be_saved_is_frozen(world):
    await ready(world)
    world.driver.fail["save"] = [Refused(Code.HOST_DISK_FULL, "no")]
    world.control.end(A, 100.0, revision=1, action=OnEnd.SUSPEND)
    await world.control.until(lambda: world.control.end_revision(A) == 1)
    world.skip(101)
    await world.control.until(lambda: world.control.seen(A).observed is Observed.FROZEN)
    assert world.control.seen(A).reason == Code.END_REACHED
    assert "HOST_DISK_FULL" in world.control.seen(A).detail


async def test_a_lease_that_runs_out_saves_what_says_so(world):
    await ready(world)
    world.control.end(A, 1e6, revision=1, on_lease_expiry=OnLeaseExpiry.SUSPEND)
    await world.control.until(lambda: world.control.end_revision(A) == 1)
    world.control.down = True
    world.skip(400)
    await world.control.until(lambda: world.machine.things[A].power is Power.SAVED)
    world.control.down = False
    await world.control.until(lambda: world.control.seen(A).reason == Code.LEASE_EXPIRED)
    assert world.control.seen(A).observed is Observed.SAVED


async def test_one_that_was_never_ready_ends_at_its_end(world):
    world.boot()
    world.guests.gate = asyncio.Event()
    world.control.want(A)
    await world.control.until(lambda: A in world.machine.started)
    world.control.end(A, 100.0, revision=1, action=OnEnd.SUSPEND)
    await world.control.until(lambda: world.control.end_revision(A) == 1)
    world.skip(101)
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "end_at"


async def test_no_other_guest_is_begun_where_one_was_ready(world):
    """Its guest is gone and nobody has said so: a save that fails is no reason to begin another one in its place."""
    await ready(world)
    world.machine.things[A].power = Power.STOPPED
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await world.control.until(lambda: world.control.seen(A).failed_revision == 2)
    world.control.want(A)
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "exit"
    assert world.machine.started[A] == 1


async def test_at_its_end_a_guest_that_is_gone_is_gone(world):
    await ready(world)
    world.control.end(A, 100.0, revision=1, action=OnEnd.SUSPEND)
    await world.control.until(lambda: world.control.end_revision(A) == 1)
    world.machine.things[A].power = Power.STOPPED
    world.skip(101)
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


SUSPEND = (Kind.ENSURE_SUSPENDED, Observed.SAVED)
WISHES = {
    "suspend": [SUSPEND],
    "suspend and restore": [SUSPEND, (Kind.ENSURE_RUNNING, Observed.RUNNING)],
    "suspend and delete": [SUSPEND, (Kind.ENSURE_ABSENT, Observed.ABSENT)],
    "pause and suspend": [(Kind.ENSURE_PAUSED, Observed.FROZEN), SUSPEND],
    "suspend twice": [SUSPEND, (Kind.ENSURE_RUNNING, Observed.RUNNING), SUSPEND],
    "pause": [(Kind.ENSURE_PAUSED, Observed.FROZEN)],
    "resume": [(Kind.ENSURE_PAUSED, Observed.FROZEN), (Kind.ENSURE_RUNNING, Observed.RUNNING)],
    "delete": [(Kind.ENSURE_PAUSED, Observed.FROZEN), (Kind.ENSURE_ABSENT, Observed.ABSENT)],
    "back and forth": [
        (Kind.ENSURE_PAUSED, Observed.FROZEN),
        (Kind.ENSURE_RUNNING, Observed.RUNNING),
        (Kind.ENSURE_PAUSED, Observed.FROZEN),
    ],
}
POWERS = {Observed.SAVED: Power.SAVED, Observed.FROZEN: Power.FROZEN, Observed.RUNNING: Power.RUNNING, Observed.ABSENT: None}


@pytest.mark.parametrize("wish", list(WISHES))
async def test_killed_at_every_boundary(tmp_path, world_factory, wish):
    """Crash at the n-th boundary, restart, and what is wanted comes about, on the guest that there was."""
    points = []
    for n in range(1, 300):
        place = tmp_path / f"{wish.replace(' ', '-')}-{n}"
        world = world_factory(place)
        if not await _scenario(world, wish, n):
            break
        points.append(world.fuse_name)
        shutil.rmtree(place, ignore_errors=True)  # a journal is megabytes, and there are hundreds
    else:
        pytest.fail("the scenario never got through")
    assert {"before commit", "after commit"} <= set(points)
    if wish in ("pause", "resume", "delete", "back and forth", "pause and suspend"):
        assert {"before pause", "after pause"} <= set(points)
    if wish in ("resume", "back and forth"):
        assert {"before resume", "after resume"} <= set(points)
    if "suspend" in wish:
        assert {"before lull", "after lull", "before save", "after naming the save", "after save"} <= set(points)
    if wish in ("suspend and restore", "suspend twice"):
        assert {"before restore", "after restore", "before discard", "after discard", "before init", "after init"} <= set(points)


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
