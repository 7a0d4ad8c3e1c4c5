"""The agent hands over a guest that was made ahead, whatever kills it on the way."""

from __future__ import annotations

import contextlib

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.drivers.port import Power
from tests.agent.test_memory import lose_the_database

A = "plc_aaaaaaaaaaaaaaaaaaaa"


async def made_ahead(world) -> None:
    world.boot()
    world.control.want(A, env={"AHEAD": "1"})
    await world.control.until_ready(A)


async def handed_over(world) -> None:
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.ready and o.applied_revision == 2)


async def test_a_guest_is_handed_over_with_what_its_create_brings(world):
    await made_ahead(world)
    world.control.timeout_s = 100.0
    world.control.claim(A, env={"MINE": "1"})
    await handed_over(world)
    thing = world.machine.things[A]
    assert [one.env for one in thing.inits] == [{"AHEAD": "1"}, {"MINE": "1"}], (
        "the environment is another, and nothing is left of the first"
    )
    assert (world.machine.started[A], world.verbs(A).count("start")) == (1, 1), "and it is the same guest"
    world.skip(101)
    await world.control.until_absent(A)
    assert world.control.seen(A).ended_by == "end_at", "its life counts from when it was handed over"


async def test_what_a_guest_was_made_with_is_never_taken_for_what_a_create_brings(world):
    """Also where the claim brings no payload beside it, because that gives power outside."""
    world.control.deliver_payloads = False
    await made_ahead(world)
    world.control.claim(A, env={"SECRET": "mine"})
    await handed_over(world)
    assert world.machine.things[A].inits[-1].env == {"SECRET": "mine"}


async def test_a_handover_that_fails_is_told(world):
    await made_ahead(world)
    world.guests.error = Refused(Code.GUEST_IDENTITY_MISMATCH, "another guest answered")
    world.control.claim(A, env={})
    await world.control.until(lambda: world.control.seen(A).failed_revision == 2)
    seen = world.control.seen(A)
    assert (seen.observed, seen.ready, seen.reason) == (Observed.ERROR, False, Code.GUEST_IDENTITY_MISMATCH)
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)


async def test_killed_between_every_two_steps_of_a_handover(tmp_path, world_factory):
    """Crash at the n-th boundary, restart, and look: it is handed over once more, and its guest has what the create brought last."""
    points = []
    for n in range(1, 100):
        world = world_factory(tmp_path / str(n))
        world.boot(crash_at=n)
        world.control.want(A, env={"AHEAD": "1"})
        with contextlib.suppress(TimeoutError):
            await world.control.until(
                lambda world=world: world.fuse.blown or ((o := world.control.seen(A)) is not None and o.ready), within_s=5
            )
        if not world.fuse.blown:
            world.control.claim(A, env={"MINE": "1"})
            await world.control.until(lambda world=world: world.fuse.blown or world.control.seen(A).applied_revision == 2, within_s=5)
            blown = world.fuse.blown
            if blown:
                points.append(world.fuse.name)
            await world.kill()
            world.boot()
            await handed_over(world)
            thing = world.machine.things[A]
            assert thing.power is Power.RUNNING
            assert thing.inits[-1].env == {"MINE": "1"}
            assert world.machine.started == {A: 1}
            if not blown:
                await world.kill()
                break
        await world.kill()
    else:
        pytest.fail("it was never handed over without a crash")
    assert {"before commit", "after commit", "before init", "after init"} <= set(points), points


async def begun_again(world_factory, directory, *, crash_at, says_revision=True):
    """A handover of something that gives power outside, an end of the agent at this boundary of it, and the next run. None: it came through."""
    world = world_factory(directory)
    world.control.deliver_payloads, world.control.once = False, {}
    await made_ahead(world)
    await world.kill()
    world.boot(crash_at=crash_at)
    world.guests.says_revision = says_revision
    world.control.claim(A, env={"KEY": "worth something"})
    with contextlib.suppress(TimeoutError):
        await world.control.until(lambda: world.fuse.blown or world.control.seen(A).applied_revision == 2, within_s=5)
    blown = world.fuse.name if world.fuse.blown else None
    await world.kill()
    world.boot()
    world.guests.says_revision = says_revision
    return world, blown


async def test_what_a_create_brings_reaches_its_guest_once_whatever_kills_the_agent(tmp_path, world_factory):
    """Control gives it to one run. The next one hears from the guest itself whether it came: it is neither lost nor given twice."""
    points = set()
    for n in range(1, 100):
        world, blown = await begun_again(world_factory, tmp_path / str(n), crash_at=n)
        await handed_over(world)
        thing = world.machine.things[A]
        assert [one.env for one in thing.inits[1:]] == [{"KEY": "worth something"}], blown
        assert world.machine.started == {A: 1}
        await world.kill()
        points.add(blown)
        if blown is None:
            break
    else:
        pytest.fail("it was never handed over without a crash")
    assert {"before commit", "after commit", "before init", "after init"} <= points


@pytest.mark.parametrize("where", ["before init", "after init"])
async def test_a_guest_that_does_not_say_what_it_has_is_given_nothing_twice(tmp_path, world_factory, where):
    """One that was made ahead by an earlier version: whether it has the payload is not known, and its create fails."""
    for n in range(1, 100):
        world, blown = await begun_again(world_factory, tmp_path / str(n), crash_at=n, says_revision=False)
        if blown == where:
            break
        await world.kill()
    await world.control.until(lambda: world.control.seen(A).failed_revision == 2)
    assert world.control.seen(A).reason == Code.BOOTSTRAP_DELIVERED
    assert len(world.machine.things[A].inits) == (1 if where == "before init" else 2)
    await world.kill()


@pytest.mark.parametrize("says_revision", [True, False])
async def test_what_was_handed_over_is_left_as_it_is_when_the_agent_has_lost_its_memory(world, says_revision):
    """It is somebody's and in use, whatever its guest can say of itself."""
    world.control.deliver_payloads, world.control.once = False, {}
    await made_ahead(world)
    world.control.claim(A, env={"KEY": "worth something"})
    await handed_over(world)
    await lose_the_database(world)
    before = len(world.control.heard)
    world.boot()
    world.guests.says_revision = says_revision
    await world.control.until(lambda: any(one.ready for one in world.control.heard[before:]))
    assert world.control.seen(A).reason is None
    assert [one.env for one in world.machine.things[A].inits[1:]] == [{"KEY": "worth something"}]
    assert world.machine.started == {A: 1}
