"""Who takes a step: one build at a time, for as long as its owner is heard of; and what a holder that was passed over may still do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from atoll.domain.building import State
from atoll.store import builds, step_locks
from atoll.store.engine import Store
from atoll.store.step_locks import Held
from tests.builders import NOW
from tests.store.test_builds import IMAGE, build, on_record, team_a

__all__ = ["team_a"]

KEY = "k" * 64


@pytest.fixture
async def two(store: Store, team_a: str) -> str:
    for name, owner in (("b-1", "rep_1"), ("b-2", "rep_2")):
        await on_record(store, build(team_a, id=name, state=State.BUILDING, owner=owner, beat_at=NOW))
    return team_a


async def take(store: Store, team: str, number: int, *, owner: str = "", now: float = NOW) -> Held | None:
    who = owner or f"rep_{number}"
    return await store.write(lambda conn: step_locks.take(conn, team, KEY, build_id=f"b-{number}", owner=who, silent_before=now - 30))


async def test_a_step_is_one_builds(store: Store, two: str) -> None:
    held = await take(store, two, 1)
    assert held is not None
    assert await take(store, two, 2) is None
    assert await store.write(lambda conn: step_locks.keep(conn, held, IMAGE, now=NOW))
    assert await store.read(lambda conn: builds.step(conn, two, KEY)) == IMAGE
    assert await take(store, two, 2) is not None


async def test_of_many_that_ask_at_once_one_has_it(store: Store, two: str) -> None:
    found = await asyncio.gather(*(take(store, two, 1 + number % 2) for number in range(2)))
    assert sum(one is not None for one in found) == 1


async def test_who_is_silent_holds_nothing_and_keeps_nothing(store: Store, two: str) -> None:
    held = await take(store, two, 1)
    assert held is not None
    await store.write(lambda conn: builds.beat(conn, "b-2", owner="rep_2", now=NOW + 31))
    other = await take(store, two, 2, now=NOW + 31)
    assert other is not None
    assert other.fence == held.fence + 1
    assert not await store.write(lambda conn: step_locks.keep(conn, held, "sha256:" + "2" * 64, now=NOW))
    assert await store.read(lambda conn: builds.step(conn, two, KEY)) is None
    assert not await store.write(lambda conn: step_locks.release(conn, held))
    assert await take(store, two, 1, now=NOW + 31) is None, "a holder that was passed over has let go of the other's"


async def test_a_build_that_was_taken_over_or_has_ended_holds_nothing(store: Store, two: str) -> None:
    held = await take(store, two, 1)
    one = await store.read(lambda conn: builds.get(conn, "b-1"))
    assert held is not None
    assert one is not None
    await store.write(lambda conn: builds.commit(conn, replace(one, owner="rep_3")))
    again = await take(store, two, 1, owner="rep_3")
    assert again is not None
    assert not await store.write(lambda conn: step_locks.keep(conn, held, IMAGE, now=NOW))
    assert await store.write(step_locks.sweep) == 0
    ended = await store.read(lambda conn: builds.get(conn, "b-1"))
    assert ended is not None
    await store.write(lambda conn: builds.commit(conn, replace(ended, state=State.FAILED)))
    assert await take(store, two, 2) is not None
    assert await store.write(step_locks.sweep) == 0
    two_ = await store.read(lambda conn: builds.get(conn, "b-2"))
    assert two_ is not None
    await store.write(lambda conn: builds.commit(conn, replace(two_, state=State.READY)))
    assert await store.write(step_locks.sweep) == 1
