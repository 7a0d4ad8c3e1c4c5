"""What is left of an end, a deadline or a lease is left of it after the clock was set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from atoll.domain.host import Host
from atoll.domain.sandbox import Sandbox, State
from atoll.store import hosts, sandboxes, schema, timeline
from atoll.store.engine import Store
from tests.builders import NOW, host

Put = Callable[..., Awaitable[Sandbox]]


@pytest.fixture
async def begun(store: Store) -> Store:
    """The database of a process that began when it was NOW by the wall at boot."""
    await store.write(lambda conn: schema.deployment(conn, install_id="ins_one", incarnation="first", now=NOW))
    assert await carry(store, 0.0) == 0.0
    return store


async def carry(store: Store, shift_s: float, *, boot_id: str = "boot") -> float:
    return await store.write(lambda conn: timeline.carry_over(conn, boot_id=boot_id, zero_at=NOW + shift_s))


async def times(store: Store, of: Sandbox) -> tuple[float, float | None, float | None]:
    found = await store.read(lambda conn: sandboxes.get(conn, of.id))
    assert found is not None
    return found.created_at - NOW, found.end_at and found.end_at - NOW, found.deadline_at and found.deadline_at - NOW


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_step_moves_what_waits_and_no_history(begun: Store, put: Put, step_s: float) -> None:
    ready = await put(state=State.READY, end_at=NOW + 300, started_at=NOW + 1)
    pending = await put(state=State.PENDING, deadline_at=NOW + 5, waiting_since=NOW + 2)
    ended = await put(state=State.RELEASED, end_at=NOW + 300, released_at=NOW + 20)
    leased: Host = host(lease_until=NOW + 290, seen_at=NOW - 10)
    await begun.write(lambda conn: hosts.add(conn, leased, now=NOW))
    assert await carry(begun, step_s) == pytest.approx(step_s)
    assert await times(begun, ready) == (0, 300 + step_s, None)
    assert await times(begun, pending) == (step_s, None, 5 + step_s)
    waiting = await begun.read(lambda conn: sandboxes.get(conn, pending.id))
    assert waiting is not None
    assert waiting.waiting_since == NOW + 2 + step_s
    assert await times(begun, ended) == (0, 300, None)
    found = await begun.read(lambda conn: hosts.by_id(conn, leased.id))
    assert found is not None
    assert (found.lease_until, found.seen_at) == (NOW + 290 + step_s, NOW - 10 + step_s)


async def test_a_step_is_carried_over_once(begun: Store, put: Put) -> None:
    ready = await put(state=State.READY, end_at=NOW + 300)
    assert await carry(begun, 60.0) == pytest.approx(60.0)
    assert await carry(begun, 60.0) == 0.0
    assert (await times(begun, ready))[1] == pytest.approx(360)


async def test_a_clock_that_is_turned_slowly_is_no_step(begun: Store, put: Put) -> None:
    ready = await put(state=State.READY, end_at=NOW + 300)
    for tenths in range(1, 30):
        assert await carry(begun, tenths / 10) == 0.0
    assert (await times(begun, ready))[1] == 300


async def test_after_another_boot_nothing_can_be_compared(begun: Store, put: Put) -> None:
    ready = await put(state=State.READY, end_at=NOW + 300)
    assert await carry(begun, 86_400.0, boot_id="another") == 0.0
    assert await carry(begun, 86_400.0, boot_id="another") == 0.0
    assert (await times(begun, ready))[1] == 300
