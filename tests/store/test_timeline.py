"""What is left of an end, a deadline or a lease is left of it after the clock was set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import sqlalchemy as sa

from atoll.base.ids import PlacementId, TemplateId
from atoll.domain.building import Build
from atoll.domain.building import State as Stage
from atoll.domain.host import Host
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.snapshot import Purpose, Snapshot
from atoll.domain.snapshot import State as Kept
from atoll.domain.spec import SaveMode
from atoll.store import builds, hosts, sandboxes, schema, snapshots, timeline
from atoll.store.engine import Store
from atoll.store.tables import METADATA
from tests.builders import NOW, host

Put = Callable[..., Awaitable[Sandbox]]
HISTORY = frozenset({
    "alerts.raised_at", "alerts.seen_at", "alerts.cleared_at", "audit.at", "clients.created_at", "clients.revoked_at",
    "configurations.applied_at", "deployment.clock_zero_at", "deployment.created_at", "deployment.restored_at", "enrollments.created_at",
    "enrollments.used_at", "events.at", "host_epochs.ended_at", "hosts.created_at", "placements.created_at", "placements.gone_at",
    "replicas.seen_at", "replicas.started_at", "sandboxes.released_at", "sandboxes.started_at", "snapshots.created_at", "snapshots.ended_at",
    "snapshots.taken_at", "teams.created_at", "template_build_lines.at", "template_builds.created_at", "template_builds.finished_at",
    "template_builds.started_at", "template_imports.created_at", "template_imports.finished_at", "template_steps.used_at",
    "template_tags.assigned_at", "templates.created_at", "templates.last_spawned_at", "templates.updated_at",
    "warm_policies.updated_at",
})  # fmt: skip
"""Times that are told and compared with nothing that must still come, or, of replicas, by the database's own clock."""


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


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_step_moves_deadlines_of_snapshots_and_the_beats_of_builders(begun: Store, put: Put, step_s: float) -> None:
    of = await put(state=State.READY)
    where = host()
    kept = Snapshot(
        "snp_kept", 1, of.team_id, of.client_id, of.id, PlacementId("plc_x"), where.id, Kept.READY, Purpose.FORK, SaveMode.FULL, of.spec, NOW,
        deadline_at=NOW + 60,
    )  # fmt: skip
    gone = replace(kept, id="snp_gone", state=Kept.FAILED, ended_at=NOW)
    lives = Build("b-1", 1, TemplateId("tpl"), of.team_id, "mine", (), Stage.BUILDING, 1, 1, 1, NOW, owner="one", beat_at=NOW - 1)
    over = replace(lives, id="b-2", state=Stage.READY, owner=None)

    def keep(conn: sa.Connection) -> None:
        hosts.add(conn, where, now=NOW)
        snapshots.add(conn, kept)
        snapshots.add(conn, gone)
        builds.add(conn, lives)
        builds.add(conn, over)

    await begun.write(keep)
    await carry(begun, step_s)
    seen = await begun.read(lambda conn: [snapshots.get(conn, one.id) for one in (kept, gone)])
    assert [one and one.deadline_at for one in seen] == [NOW + 60 + step_s, NOW + 60]
    beats = await begun.read(lambda conn: [builds.get(conn, one.id) for one in (lives, over)])
    assert [one and one.beat_at for one in beats] == [NOW - 1 + step_s, NOW - 1]


def test_of_every_time_in_the_schema_it_is_known_whether_somebody_waits_for_it() -> None:
    times = {
        f"{table.name}.{column.name}"
        for table in METADATA.sorted_tables
        for column in table.columns
        if isinstance(column.type, sa.Float) and column.name != "life_s"
    }
    moved = {f"{table.name}.{name}" for table, names, _ in timeline.MOVED for name in names}
    assert moved & HISTORY == set()
    assert times - moved - HISTORY == set()
    assert (moved | HISTORY) - times == set()
