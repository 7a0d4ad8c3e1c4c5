"""The agent ends at any boundary between two effects, and the next run goes on."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from atoll.agent.session import Exit
from atoll.base.errors import Code, Refused
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.drivers.port import Held, Power, Probe

A, B = "plc_aaaaaaaaaaaaaaaaaaaa", "plc_bbbbbbbbbbbbbbbbbbbb"


async def test_guests_go_on_and_are_adopted(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    await world.kill()
    world.boot()
    await world.control.until(lambda: ("adopt", A) in world.machine.history)
    first = await world.control.next_poll()
    assert first.holds == {A: 1}
    assert world.machine.started[A] == 1
    assert len(world.machine.things[A].inits) == 1
    assert world.control.seen(A).ready
    world.machine.things[A].power = Power.STOPPED
    await world.driver.on_exit(A, "signal 9")
    await world.control.until_absent(A)


async def test_a_new_run_shows_the_one_before_it(world):
    world.boot()
    await world.control.until(lambda: len(world.control.polls) >= 1)
    first = world.agent.epoch
    await world.halt()
    world.boot()
    await world.control.until(lambda: world.control.current_epoch == world.agent.epoch)
    assert world.agent.epoch != first
    assert world.control.polls[-1].previous_epoch == first
    begun = [poll for poll in world.control.polls if poll.epoch == world.agent.epoch]
    assert begun[0].park_s == 0


async def test_runs_that_control_never_heard_of_do_not_break_the_chain(world):
    world.boot()
    await world.control.until(lambda: len(world.control.polls) >= 1)
    first = world.agent.epoch
    await world.halt()
    world.control.down = True
    for _ in range(3):
        world.boot()
        await asyncio.sleep(0.05)
        await world.kill()
    world.control.down = False
    world.boot()
    await world.control.until(lambda: world.control.current_epoch == world.agent.epoch)
    assert world.control.polls[-1].previous_epoch == first


async def test_a_newer_run_elsewhere_ends_this_one_without_touching_guests(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    world.control.refuse.append(Refused(Code.STALE_AGENT_EPOCH, "a newer run"))
    world.control.news.set()
    async with asyncio.timeout(5):
        assert await world.task is Exit.SUPERSEDED
    assert world.machine.things[A].power is Power.RUNNING


async def test_a_revoked_credential_fences_the_host(world):
    world.boot()
    world.control.want(A)
    world.control.want(B)
    await world.control.until_ready(A, B)
    world.machine.kept.add("snp_" + "s" * 20)
    world.control.refuse.append(Refused(Code.CREDENTIAL_REVOKED, "disabled"))
    world.control.news.set()
    await world.control.until(lambda: world.machine.things == {})
    await world.control.until(lambda: not world.machine.kept)
    await world.control.until_absent(A, B)
    assert {world.control.seen(i).ended_by for i in (A, B)} == {"fence"}
    assert not world.task.done()


async def test_only_one_run_at_a_time(world):
    world.boot()
    await world.control.until(lambda: len(world.control.polls) >= 1)
    first = world.task
    world.boot()
    with pytest.raises(Refused) as refused:
        await world.task
    assert refused.value.code is Code.AGENT_LOCKED
    world.task = first


async def test_what_nobody_can_explain_is_reported_and_kept(world):
    stranger = Held("plc_zzzzzzzzzzzzzzzzzzzz", None, None, ("cgroup x",))
    world.machine.stray.append(stranger)
    world.boot()
    await world.control.until(lambda: len(world.control.polls) >= 1)
    health = world.control.polls[-1].health
    assert health.quarantined == [stranger.placement_id]
    assert [(c.ok, c.fatal) for c in health.checks if c.id == "host.quarantine"] == [(False, True)]
    world.control.want(A)
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.observed is Observed.ERROR)
    assert world.control.seen(A).reason == Code.HOST_QUARANTINED
    assert world.machine.stray == [stranger]
    assert world.machine.things == {}
    world.control.want(stranger.placement_id, Kind.ENSURE_ABSENT)
    await world.control.until_absent(stranger.placement_id)
    assert world.machine.stray == []
    await world.control.next_poll()
    assert (await world.control.next_poll()).health.quarantined == []


async def test_another_generation_on_the_machine_is_no_match(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    await world.halt()
    order = world.machine.things[A].order
    world.machine.stray.append(Held(A, order.sandbox_id, 7, ("process 9",)))
    world.boot()
    await world.control.until(lambda: len(world.control.polls) >= 2 and world.control.polls[-1].health.quarantined == [A])
    assert A in world.machine.things


async def test_control_without_a_row_means_quarantine_and_no_removal(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    world.control.unknown = [A]
    world.control.news.set()
    await world.control.until(lambda: world.control.polls[-1].health.quarantined == [A])
    assert world.machine.things[A].power is Power.RUNNING
    world.control.unknown = []
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert world.machine.things == {}


async def test_a_guest_that_died_while_no_agent_ran(world):
    world.boot()
    world.control.want(A)
    world.control.want(B)
    await world.control.until_ready(A, B)
    await world.kill()
    world.machine.things[A].power = Power.STOPPED
    del world.machine.things[B]
    world.boot()
    await world.control.until_absent(A, B)
    assert (world.control.seen(A).reason, world.control.seen(A).ended_by) == (Code.GUEST_EXITED, "exit")
    assert (world.control.seen(B).reason, world.control.seen(B).ended_by) == (Code.PLACEMENT_LOST, "exit")


async def test_after_a_reboot_every_guest_is_lost(world):
    world.boot()
    world.control.want(A)
    world.control.end(A, 100.0, revision=1)
    await world.control.until_ready(A)
    await world.kill()
    world.machine.things[A].power = Power.STOPPED
    world.facts = world.facts.model_copy(update={"boot_id": "boot-2"})
    world.boot()
    await world.control.until_absent(A)
    assert world.control.seen(A).reason == Code.PLACEMENT_LOST
    assert world.machine.things == {}


async def test_a_lost_payload_is_fetched_again(world):
    world.boot()
    world.guests.gate = asyncio.Event()
    world.control.want(A, env={"K": "v"})
    await world.control.until(lambda: A in world.machine.started)
    await world.kill()
    world.boot()
    await world.control.until_ready(A)
    assert world.machine.started[A] == 1
    assert "adopt" in world.verbs(A)
    assert [p.env for p in world.machine.things[A].inits] == [{"K": "v"}]


async def test_a_failed_start_is_not_tried_again_by_the_next_run(world):
    world.boot()
    world.driver.fail["start"] = [Refused(Code.START_FAILED, "no")]
    world.control.want(A)
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.observed is Observed.ERROR)
    await world.kill()
    world.boot()
    await world.control.until(lambda: world.control.current_epoch == world.agent.epoch)
    await world.control.next_poll()
    assert world.verbs(A).count("start") == 1
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)


async def test_a_guest_that_dies_before_its_init_and_while_no_agent_ran(world):
    world.boot()
    world.guests.gate = asyncio.Event()
    world.control.want(A)
    await world.control.until(lambda: A in world.machine.started)
    await world.kill()
    world.machine.things[A].power = Power.STOPPED
    world.boot()
    await world.control.until_absent(A)
    assert (world.control.seen(A).reason, world.control.seen(A).ended_by) == (Code.GUEST_EXITED, "exit")
    assert world.machine.started == {A: 1}


async def test_what_worked_before_need_not_be_waited_for(world):
    world.boot()
    await world.control.until(lambda: len(world.control.polls) >= 1)
    assert world.control.polls[-1].health.isolations == ["gvisor"]
    await world.halt()
    world.boot()
    gate = asyncio.Event()

    async def slow_probe():
        await gate.wait()
        return [Probe("machine.start", False, "broken meanwhile")]

    world.driver.probe = slow_probe
    await world.control.until(lambda: world.control.current_epoch == world.agent.epoch)
    assert world.control.polls[-1].health.isolations == ["gvisor"]
    gate.set()
    await world.control.until(lambda: not world.agent._session._host.health._isolations())
    await world.control.next_poll()
    health = (await world.control.next_poll()).health
    assert health.isolations == []
    assert [(c.id, c.ok, c.fatal) for c in health.checks if c.id == "machine.start"] == [("machine.start", False, True)]


async def test_observations_go_on_where_they_stopped(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    seq = world.control.seen(A).seq
    await world.kill()
    world.boot()
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert world.control.seen(A).seq > seq


async def run_until_crash_or(world, done):
    """Wait until the run has crashed or `done` says that all is well; whether it crashed."""
    async with asyncio.timeout(10):
        while not world.task.done():
            if done():
                return False
            await asyncio.sleep(0)
    return True


def settled_absent(world):
    return world.machine.things == {} and (o := world.control.seen(A)) is not None and o.observed is Observed.ABSENT


@pytest.mark.parametrize("wish", ["running", "absent", "end"])
async def test_killed_at_every_boundary(tmp_path, world_factory, wish):
    """Crash at the n-th boundary, restart, and look: for every n until a run passes without a crash."""
    points = []
    for n in range(1, 200):
        world = world_factory(tmp_path / f"{wish}-{n}")
        crashed = await scenario(world, wish, n)
        if not crashed:
            break
        points.append(world.crash_name)
    else:
        pytest.fail("the scenario never got through")
    assert len(points) > 8
    names = set(points)
    assert {"before commit", "after commit", "before prepare", "after start", "before init", "after init"} <= names
    if wish != "running":
        assert {"before stop", "after stop", "before remove", "after remove", "before inspect"} <= names


async def scenario(world, wish, n):
    world.boot(crash_at=n)
    world.control.want(A, env={"K": "v"})
    if wish == "end":
        world.control.end(A, 100.0, revision=1)
    crashed = await run_until_crash_or(world, lambda: (o := world.control.seen(A)) is not None and o.ready)
    if not crashed and wish == "absent":
        world.control.want(A, Kind.ENSURE_ABSENT)
        crashed = await run_until_crash_or(world, lambda: settled_absent(world))
    if not crashed and wish == "end":
        crashed = await run_until_crash_or(world, lambda: world.control.end_revision(A) == 1)
        if not crashed:
            world.skip(101)
            crashed = await run_until_crash_or(world, lambda: settled_absent(world))
    world.crash_name = world.fuse.name
    await world.kill()
    await look_after_restart(world, wish)
    return crashed


async def look_after_restart(world, wish):
    world.boot()
    if wish == "absent" and world.control.wants[A].kind is not Kind.ENSURE_ABSENT:
        world.control.want(A, Kind.ENSURE_ABSENT)
    if wish == "end" and not settled_absent(world):
        await world.control.until(lambda: settled_absent(world) or world.control.end_revision(A) == 1)
        world.skip(101)
    if wish == "running":
        await world.control.until_ready(A)
        thing = world.machine.things[A]
        assert thing.power is Power.RUNNING
        assert world.machine.started == {A: 1}
        assert [p.env for p in thing.inits] == [{"K": "v"}]
    else:
        await world.control.until(lambda: settled_absent(world))
        assert world.machine.started.get(A, 0) <= 1
    await world.kill()


@pytest.mark.parametrize("where", ["before init", "after init"])
async def test_killed_between_delivery_and_receipt(world, where):
    """A guest that has its payload is taken over; one that has not gets no second delivery, and its start fails."""
    world.control.deliver_payloads = False
    for crash_at in range(1, 60):
        placement = f"plc_{where[0]}{crash_at:019d}"
        world.control.once = {}
        world.control.want(placement, env={"KEY": "worth something"})
        world.boot(crash_at=crash_at)
        with contextlib.suppress(TimeoutError):
            await world.control.until(lambda: world.fuse.blown, within_s=0.5)
        blown = world.fuse.name
        await world.kill()
        if blown == where:
            break
        world.control.want(placement, Kind.ENSURE_ABSENT)
        world.boot()
        await world.control.until_absent(placement)
        await world.halt()
    assert blown == where
    world.boot()
    await world.control.until(lambda: (o := world.control.seen(placement)) is not None and (o.ready or o.reason is not None))
    seen, guest = world.control.seen(placement), world.machine.things[placement]
    if where == "after init":
        assert (seen.ready, len(guest.inits)) == (True, 1)
    else:
        assert (seen.observed, seen.reason, guest.inits) == (Observed.ERROR, Code.BOOTSTRAP_DELIVERED, [])
