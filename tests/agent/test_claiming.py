"""The agent hands over a guest that was made ahead, whatever kills it on the way."""

from __future__ import annotations

import contextlib

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.drivers.port import Power

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
