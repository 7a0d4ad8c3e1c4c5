"""A guest that was to begin from a moment which its host does not have whole: booted where that is a head start, refused where it is not."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from atoll.agent import origins
from atoll.base.errors import Code, Refused, Unavailable
from atoll.domain.placement import Observed
from atoll.domain.spec import Origin, SaveMode
from atoll.drivers.port import MomentFacts, Power
from atoll.wire.agent import SnapshotState
from tests.agent.conftest import SPEC
from tests.agent.test_moments import Shelf

A, B, C = ("plc_" + letter * 20 for letter in "abc")
DIGEST = "sha256:" + "5" * 64
ORIGIN = Origin("snp_" + "s" * 20, SaveMode.FULL, or_boot=True)


@pytest.mark.parametrize("verb", ["prepare", "start"])
@pytest.mark.parametrize("code", [Code.SNAPSHOT_UNAVAILABLE, Code.START_FAILED, Code.RESUME_FAILED])
async def test_a_head_start_that_cannot_be_had_is_booted_and_told(world, verb, code):
    world.control.spec = replace(SPEC, origin=ORIGIN)
    world.boot()
    world.driver.fail[verb] = [Refused(code, "it is not as long as it was")]
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.machine.started[A] == 1
    assert [name for name, _ in world.machine.history if name in ("prepare", "start")][-2:] == ["prepare", "start"]
    seen = world.control.seen(A)
    assert (seen.observed, seen.reason) == (Observed.RUNNING, Code.SNAPSHOT_UNAVAILABLE)
    assert seen.detail == f"{code}: it is not as long as it was"


@pytest.mark.parametrize(
    ("origin", "code"),
    [(replace(ORIGIN, or_boot=False), Code.SNAPSHOT_UNAVAILABLE), (ORIGIN, Code.HOST_DISK_FULL), (None, Code.START_FAILED)],
    ids=["a snapshot", "another reason", "none"],
)
async def test_what_is_no_head_start_or_fails_for_another_reason_is_refused(world, origin, code):
    world.control.spec = replace(SPEC, origin=origin)
    world.boot()
    world.driver.fail["start"] = [Refused(code, "no")]
    world.control.want(A)
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.observed is Observed.ERROR)
    assert world.control.seen(A).reason == code
    assert A not in world.machine.started


async def test_one_that_begins_with_it_says_nothing(world):
    world.control.spec = replace(SPEC, origin=ORIGIN)
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    assert (world.control.seen(A).reason, world.control.seen(A).detail) == (None, None)


# On a host that has it not, and may have it from the store.

FETCHED = replace(ORIGIN, moment=DIGEST, kind="machine/gvisor/x86_64")


def moment(driver: str = "machine") -> MomentFacts:
    return MomentFacts(driver, "gvisor", "x86_64", SaveMode.FULL, SPEC.image, notes=(("memory", "serves"),))


@pytest.fixture
def shelf(world) -> Shelf:
    made = Shelf()
    made.moments[DIGEST] = moment()
    world.moments, world.control.moments = made.of, True
    world.control.spec = replace(SPEC, origin=FETCHED)
    return made


async def test_a_head_start_of_another_host_is_fetched_once_and_gone_on_from(world, shelf):
    world.boot()
    for placement in (A, B):
        world.control.want(placement)
        await world.control.until_ready(placement)
        assert world.control.seen(placement).reason is None
        assert world.machine.things[placement].order.spec.origin == FETCHED
    assert world.machine.kept == {ORIGIN.snapshot_id}
    assert shelf.fetched == [DIGEST], "the second found it"
    assert shelf.sent == [], "what came from the store is not sent there"


@pytest.mark.parametrize(
    ("spoil", "reason", "said"),
    [
        (lambda shelf: shelf.moments.update({DIGEST: moment("another")}), Code.MOMENT_UNSUITABLE, "it is another/gvisor/x86_64's"),
        (lambda shelf: setattr(shelf, "corrupt", True), Code.MOMENT_CORRUPT, ""),
        (lambda shelf: shelf.errors.append(Refused(Code.MOMENT_UNAVAILABLE, "no packs")), Code.MOMENT_UNAVAILABLE, "no packs"),
        (
            lambda shelf: shelf.errors.append(Unavailable(Code.CONTROL_UNAVAILABLE, "no answer")),
            Code.SNAPSHOT_UNAVAILABLE,
            "CONTROL_UNAVAILABLE: no answer",
        ),
        (lambda shelf: shelf.errors.append(Refused(Code.HOST_DISK_FULL, "no space")), Code.HOST_DISK_FULL, "no space"),
        (lambda shelf: shelf.errors.append(OSError("the pipe broke")), Code.SNAPSHOT_UNAVAILABLE, "the pipe broke"),
    ],
    ids=["does not fit", "corrupt", "gone", "store away", "disk full", "machine"],
)
async def test_one_that_cannot_be_fetched_is_booted_in_the_same_create_and_told(world, shelf, spoil, reason, said):
    spoil(shelf)
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    seen = world.control.seen(A)
    assert (world.machine.started[A], seen.reason) == (1, reason)
    assert world.machine.things[A].order.spec.origin is None
    assert said in seen.detail
    assert world.machine.kept == set()


@pytest.mark.parametrize("origin", [FETCHED, ORIGIN], ids=["in the store", "not named"])
async def test_one_of_another_kind_of_host_is_told_as_that_and_not_asked_for(world, shelf, origin):
    """Control names no moment to a host of another kind, which it asks where no other has room."""
    world.control.spec = replace(SPEC, origin=replace(origin, kind="another/gvisor/x86_64"))
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    seen = world.control.seen(A)
    assert seen.reason == Code.MOMENT_UNSUITABLE
    assert seen.detail == "it was saved by another/gvisor/x86_64, and this host goes on from machine/gvisor/x86_64"
    assert world.machine.things[A].order.spec.origin is None
    assert shelf.fetched == []


async def test_one_that_is_kept_here_is_begun_from_whatever_its_kind_is_called(world, shelf):
    world.control.spec = replace(SPEC, origin=replace(ORIGIN, kind="another/gvisor/x86_64"))
    world.machine.kept.add(ORIGIN.snapshot_id)
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.control.seen(A).reason is None
    assert world.machine.things[A].order.spec.origin is not None


async def test_a_snapshot_that_cannot_be_fetched_is_refused(world, shelf):
    world.control.spec = replace(SPEC, origin=replace(FETCHED, or_boot=False))
    shelf.corrupt = True
    world.boot()
    world.control.want(A)
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.observed is Observed.ERROR)
    assert world.control.seen(A).reason == Code.MOMENT_CORRUPT


async def test_one_that_takes_long_is_waited_for_no_longer_and_there_for_the_next(world, shelf):
    world.head_start_wait_s = 0.05
    shelf.slow = asyncio.Event()
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    assert "it is not here yet" in world.control.seen(A).detail
    assert world.machine.kept == set()
    began = asyncio.get_running_loop().time()
    world.control.want(C)
    await world.control.until_ready(C)
    assert asyncio.get_running_loop().time() - began < 0.05 + 1, "nobody waits for it a second time"
    assert "it is not here yet" in world.control.seen(C).detail
    shelf.slow.set()
    await world.control.until(lambda: ORIGIN.snapshot_id in world.machine.kept)
    world.control.want(B)
    await world.control.until_ready(B)
    assert world.control.seen(B).reason is None
    assert world.machine.things[B].order.spec.origin == FETCHED
    assert shelf.fetched == [DIGEST]


async def test_one_that_failed_is_not_asked_for_again_at_once(world, shelf):
    shelf.errors += [Refused(Code.MOMENT_UNAVAILABLE, "no packs"), Refused(Code.MOMENT_CORRUPT, "spoilt")]
    world.boot()
    for placement in (A, B):
        world.control.want(placement)
        await world.control.until_ready(placement)
        assert world.control.seen(placement).reason == Code.MOMENT_UNAVAILABLE
        assert world.control.seen(placement).detail.startswith("no packs")
    assert len(shelf.errors) == 1, "it was asked for once"
    shelf.errors.clear()
    world.clock.skipped += origins.AGAIN_S + 1
    world.control.want(C)
    await world.control.until_ready(C)
    assert world.control.seen(C).reason is None
    assert shelf.fetched == [DIGEST]


# A copy counts in its host's disk until the host has said that there is nothing (adr/0045): so then there must be nothing, and nothing to come.


async def dropped(world):
    world.control.drop(ORIGIN.snapshot_id)
    await world.control.until(lambda: world.control.snapshots_seen)
    (seen,) = world.control.snapshots_seen
    assert (seen.id, seen.state) == (ORIGIN.snapshot_id, SnapshotState.ABSENT)


async def test_a_copy_that_was_fetched_goes_when_control_wants_it_gone(world, shelf):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.machine.kept == {ORIGIN.snapshot_id}
    await dropped(world)
    assert world.machine.kept == set()
    assert world.machine.things[A].power is Power.RUNNING, "who has begun from it goes on"


async def test_a_copy_on_its_way_here_is_given_up_before_it_is_said_to_be_gone(world, shelf):
    world.head_start_wait_s = 0.05
    shelf.slow = asyncio.Event()
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    await dropped(world)
    shelf.slow.set()
    await asyncio.sleep(0.1)
    assert world.machine.kept == set(), "it would count on nobody's disk"
    assert shelf.fetched == []


async def test_a_copy_that_is_just_taken_in_is_here_whole_and_then_gone(world, shelf, monkeypatch):
    """What a thread is at goes on, whoever stops waiting for it."""
    world.head_start_wait_s = 0.05
    begun, go_on = asyncio.Event(), threading.Event()
    world.boot()

    async def receive(_order, _facts, _directory, *, snapshot_id):
        begun.set()
        await asyncio.to_thread(lambda: (go_on.wait(10.0), world.machine.kept.add(snapshot_id)))

    monkeypatch.setattr(world.driver, "receive", receive)
    world.control.want(A)
    await world.control.until_ready(A)
    await begun.wait()
    world.control.drop(ORIGIN.snapshot_id)
    await asyncio.sleep(0.1)
    assert world.control.snapshots_seen == [], "nobody knows yet"
    go_on.set()
    await world.control.until(lambda: world.control.snapshots_seen)
    assert world.control.snapshots_seen[0].state is SnapshotState.ABSENT
    assert world.machine.kept == set()


async def test_a_guest_that_waits_for_a_copy_which_is_given_up_hears_so(world, shelf):
    world.control.spec = replace(SPEC, origin=replace(FETCHED, or_boot=False))
    shelf.slow = asyncio.Event()
    world.boot()
    world.control.want(A)
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.observed is Observed.PREPARING)
    await dropped(world)
    await world.control.until(lambda: world.control.seen(A).observed is Observed.ERROR)
    assert world.control.seen(A).reason == Code.SNAPSHOT_UNAVAILABLE
    assert A not in world.machine.started
