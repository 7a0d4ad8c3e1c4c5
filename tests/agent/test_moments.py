"""The agent sends what is saved to the store, and begins from what another has saved, whatever kills it on the way."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.agent.moments import Stored
from atoll.base.errors import Code, Refused, Unavailable
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.drivers.port import MomentFacts, PackList, Power

A, B = "plc_aaaaaaaaaaaaaaaaaaaa", "plc_bbbbbbbbbbbbbbbbbbbb"


class Shelf:
    """The store, which outlives every run."""

    def __init__(self) -> None:
        self.moments: dict[str, MomentFacts] = {}
        self.sent: list[tuple[str, tuple[str, ...]]] = []
        self.cut: list[str] = []
        self.forgotten: list[str] = []
        self.errors: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.corrupt = False
        self.fetched: list[str] = []
        self.slow: asyncio.Event | None = None

    def of(self, fuse) -> Way:
        return Way(self, fuse)


class Way:
    """`MomentStore` of one run."""

    def __init__(self, shelf: Shelf, fuse) -> None:
        self.shelf, self.fuse = shelf, fuse

    async def upload(self, name: str, what: PackList, *, bases: Sequence[str] = ()) -> Stored:
        self.fuse.pass_("before upload")
        shelf = self.shelf
        shelf.sent.append((name, tuple(bases)))
        if shelf.errors:
            raise shelf.errors.pop(0)
        if shelf.gate is not None:
            try:
                await shelf.gate.wait()
            except asyncio.CancelledError:
                shelf.cut.append(name)
                raise
        digest = "sha256:" + hashlib.sha256(repr(what.facts).encode()).hexdigest()
        shelf.moments[digest] = what.facts
        self.fuse.pass_("after upload")
        return Stored(digest, 1000)

    async def facts(self, digest: str) -> MomentFacts:
        self.fuse.pass_("before facts")
        if self.shelf.errors:
            raise self.shelf.errors.pop(0)
        return self.shelf.moments[digest]

    async def fetch(self, digest: str, into: Path) -> None:
        del into
        self.fuse.pass_("before fetch")
        if self.shelf.slow is not None:
            await self.shelf.slow.wait()
        if self.shelf.corrupt:
            raise Refused(Code.MOMENT_CORRUPT, f"{digest} is another than it says")
        self.shelf.fetched.append(digest)
        self.fuse.pass_("after fetch")

    async def forget(self, name: str) -> None:
        self.shelf.forgotten.append(name)


@pytest.fixture
def shelf(world) -> Shelf:
    made = Shelf()
    world.moments, world.control.moments = made.of, True
    return made


async def suspended(world) -> None:
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    world.machine.things[A].memory = "counted to 7"
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await world.control.until(lambda: world.control.seen(A).observed is Observed.SAVED)


async def stored(world) -> str:
    await world.control.until(lambda: world.control.seen(A).moment is not None)
    return world.control.seen(A).moment


async def test_what_is_saved_is_sent_and_control_hears_of_it(world, shelf):
    await suspended(world)
    digest = await stored(world)
    seen = world.control.seen(A)
    assert (seen.observed, seen.moment_size, seen.moment_kind) == (Observed.SAVED, 1000, "machine/gvisor/x86_64")
    assert shelf.moments[digest].notes == (("memory", "counted to 7"),)
    await world.control.next_poll()
    assert world.control.polls[-1].health.moments == ["machine/gvisor/x86_64"]
    # A run that begins knows of it, and says it again.
    await world.kill()
    heard = len(world.control.heard)
    world.boot()
    await world.control.until(lambda: any(one.moment == digest for one in world.control.heard[heard:]))
    assert len(shelf.sent) == 1


async def test_nothing_is_sent_where_control_has_no_place_for_it(world, shelf):
    world.control.moments = False
    await suspended(world)
    await world.control.next_poll()
    await asyncio.sleep(0.05)
    assert shelf.sent == []
    world.control.moments = True
    await world.control.next_poll()
    await stored(world)


async def test_what_is_too_large_stays_where_it_is_with_nothing_sent(world, shelf, capsys):
    world.control.moment_bytes_max = 1
    await suspended(world)
    await world.control.next_poll()
    await asyncio.sleep(0.2)
    assert shelf.sent == []
    assert "MOMENT_TOO_LARGE" in capsys.readouterr().out
    assert (world.control.seen(A).observed, world.control.seen(A).moment) == (Observed.SAVED, None)
    # It is resumed where it is, and a later save is sent as soon as it may be.
    world.control.want(A)
    await world.control.until_ready(A)
    world.control.moment_bytes_max = 0
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    await stored(world)


async def test_a_resume_ends_the_sending_at_once_and_the_next_save_stands_on_the_last(world, shelf):
    await suspended(world)
    first = await stored(world)
    for _ in range(2):
        world.control.want(A)
        await world.control.until_ready(A)
        assert world.control.seen(A).moment is None, "what is used is no save"
        shelf.gate = asyncio.Event()
        world.machine.things[A].memory = "counted to 9"
        before = len(shelf.sent)
        world.control.want(A, Kind.ENSURE_SUSPENDED)
        await world.control.until(lambda: len(shelf.sent) > before and world.control.seen(A).observed is Observed.SAVED)  # noqa: B023 - now
        assert shelf.sent[-1] == (A, (first,))
        assert world.control.seen(A).moment is None, "the newest save counts, and it is not there yet"
        shelf.cut.clear()
        world.control.want(A)
        await world.control.until_ready(A)
        assert shelf.cut == [A]
        shelf.gate = None
        world.control.want(A, Kind.ENSURE_SUSPENDED)
        await world.control.until(lambda: world.control.seen(A).observed is Observed.SAVED)
        first = await stored(world)
        assert dict(shelf.moments[first].notes)["memory"] == "counted to 9"


async def test_a_delete_ends_the_sending_and_leaves_no_notes(world, shelf):
    shelf.gate = asyncio.Event()
    await suspended(world)
    await world.control.until(lambda: len(shelf.sent) == 1)
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert (shelf.cut, shelf.forgotten) == ([A], [A])
    assert A not in world.machine.things


async def test_a_store_that_is_away_is_asked_again(world, shelf):
    shelf.errors = [Unavailable(Code.MOMENT_UNAVAILABLE, "away"), Refused(Code.FORBIDDEN, "not on record yet")]
    await suspended(world)
    await stored(world)
    assert len(shelf.sent) == 3


def moment(shelf: Shelf, **changes) -> str:
    digest = "sha256:" + "5" * 64
    from atoll.domain.spec import Isolation, SaveMode

    facts = MomentFacts("machine", Isolation.GVISOR, "x86_64", SaveMode.FULL, "sha256:aa", notes=(("memory", "counted to 7"),))
    shelf.moments[digest] = replace(facts, **changes)
    return digest


def begin(world, digest: str) -> None:
    world.control.want(B)
    world.control.wants[B].moment = digest


async def test_a_guest_begins_from_what_another_host_has_saved(world, shelf):
    world.boot()
    begin(world, moment(shelf))
    await world.control.until_ready(B)
    thing = world.machine.things[B]
    assert (thing.memory, thing.saved, thing.power) == ("counted to 7", None, Power.RUNNING)
    assert world.machine.started == {}, "it is restored, not booted"
    assert world.machine.restored == {B: 1}
    # Its own next save stands on what it began from.
    world.control.want(B, Kind.ENSURE_SUSPENDED)
    await world.control.until(lambda: world.control.seen(B).moment is not None)
    assert shelf.sent == [(B, ("sha256:" + "5" * 64,))]


@pytest.mark.parametrize("why", [Code.MOMENT_UNSUITABLE, Code.MOMENT_CORRUPT, Code.MOMENT_UNAVAILABLE, Code.HOST_DISK_FULL])
async def test_what_cannot_be_gone_on_from_is_said_and_leaves_nothing(world, shelf, why):
    world.boot()
    digest = moment(shelf, **({"runtime": "another"} if why is Code.MOMENT_UNSUITABLE else {}))
    shelf.corrupt = why is Code.MOMENT_CORRUPT
    if why is Code.MOMENT_UNAVAILABLE:
        shelf.errors = [Unavailable(why, "away")]
    if why is Code.HOST_DISK_FULL:
        world.driver.fail["receive"] = [Refused(why, "full")]
    begin(world, digest)
    await world.control.until(lambda: (o := world.control.seen(B)) is not None and o.observed is Observed.ERROR)
    assert (world.control.seen(B).reason, world.control.seen(B).failed_revision) == (why, 1)
    assert world.machine.started == {}
    world.control.want(B, Kind.ENSURE_ABSENT)
    await world.control.until_absent(B)
    assert B not in world.machine.things


async def test_a_host_without_a_way_to_the_store_says_so(world):
    world.boot()
    world.control.want(B)
    world.control.wants[B].moment = "sha256:" + "5" * 64
    await world.control.until(lambda: (o := world.control.seen(B)) is not None and o.observed is Observed.ERROR)
    assert world.control.seen(B).reason == Code.NOT_SUPPORTED
    assert world.control.polls[-1].health.moments == []


@pytest.mark.parametrize("n", range(1, 40))
async def test_killed_at_any_step_of_a_fetch(world, shelf, n):
    digest = moment(shelf)
    begin(world, digest)
    world.boot(crash_at=n)
    with contextlib.suppress(TimeoutError):
        await world.control.until(lambda: world.fuse.blown or ((o := world.control.seen(B)) is not None and o.ready), within_s=3)
    await world.kill()
    world.boot()
    await world.control.until_ready(B)
    assert world.machine.started == {}, "it is never booted in place of what was saved"
    thing = world.machine.things[B]
    assert (thing.memory, thing.saved, thing.power) == ("counted to 7", None, Power.RUNNING)


@pytest.mark.parametrize("n", range(1, 26))
async def test_killed_at_any_step_of_sending(world, shelf, n):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    world.machine.things[A].memory = "counted to 7"
    await world.halt()
    world.control.want(A, Kind.ENSURE_SUSPENDED)
    world.boot(crash_at=n)
    with contextlib.suppress(TimeoutError):
        await world.control.until(lambda: world.fuse.blown or world.control.seen(A).moment is not None, within_s=3)
    await world.kill()
    world.boot()
    digest = await stored(world)
    assert dict(shelf.moments[digest].notes)["memory"] == "counted to 7"
    assert world.machine.things[A].power is Power.SAVED
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.control.seen(A).moment is None
