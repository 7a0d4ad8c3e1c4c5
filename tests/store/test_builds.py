"""Builds on record: who may change them, what their tags name, what is kept for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.base.ids import TemplateId
from atoll.domain.building import Build, Line, Recipe, Result, State, Step, StepKind
from atoll.store import builds, tenancy
from atoll.store.engine import Store
from tests.builders import NOW, team

IMAGE = "sha256:" + "1" * 64
RECIPE = Recipe(from_template="base", steps=(Step(StepKind.RUN, ("a", "ü"), None, force=True),), start_command="s")
RESULT = Result(IMAGE, (("A", "b"),), "joe", "/w", ("sh", "-c", "s"), "joe", ("true",))


@pytest.fixture
async def team_a(store: Store) -> str:
    ours = team()
    await store.write(lambda conn: tenancy.add_team(conn, ours, now=NOW))
    return str(ours.id)


def build(team_id: str, **changes: object) -> Build:
    plain = Build("b-1", 1, TemplateId("tpl"), team_id, "mine", ("default",), State.WAITING, 1000, 512, 2048, NOW)  # type: ignore[arg-type]
    return replace(plain, **changes)  # type: ignore[arg-type]


async def on_record(store: Store, one: Build) -> Build:
    await store.write(lambda conn: builds.add(conn, one))
    found = await store.read(lambda conn: builds.get(conn, one.id))
    assert found is not None
    return found


async def test_all_of_a_build_is_kept(store: Store, team_a: str) -> None:
    whole = build(
        team_a, state=State.READY, recipe=RECIPE, owner="rep_1", beat_at=NOW, attempts=2, started_at=NOW, finished_at=NOW + 1, result=RESULT,
        code="C", message="m", failed_step="1", tags=("a", "b"),
    )  # fmt: skip
    assert await on_record(store, whole) == whole
    assert await on_record(store, build(team_a, id="b-2")) == build(team_a, id="b-2")


async def test_of_two_who_have_read_one_revision_one_commits(store: Store, team_a: str) -> None:
    read = await on_record(store, build(team_a, state=State.BUILDING, owner="rep_1"))
    first = await store.write(lambda conn: builds.commit(conn, replace(read, owner="rep_2")))
    assert first is not None
    assert first.revision == read.revision + 1
    assert await store.write(lambda conn: builds.commit(conn, replace(read, state=State.READY, result=RESULT))) is None
    assert not await store.write(lambda conn: builds.beat(conn, read.id, owner="rep_1", now=NOW))
    assert await store.write(lambda conn: builds.beat(conn, read.id, owner="rep_2", now=NOW + 5))
    now = await store.read(lambda conn: builds.get(conn, read.id))
    assert now is not None
    assert (now.owner, now.beat_at, now.revision) == ("rep_2", NOW + 5, first.revision)


async def test_a_log_is_read_in_parts(store: Store, team_a: str) -> None:
    one = await on_record(store, build(team_a))
    lines = [Line(NOW + n, "warn" if n % 3 == 0 else "info", f"line {n}", str(n % 2)) for n in range(10)]
    for part in (lines[:4], lines[4:]):
        await store.write(lambda conn, part=part: builds.say(conn, one.id, part))  # type: ignore[misc]
    assert list(await store.read(lambda conn: builds.lines(conn, one.id))) == lines
    assert list(await store.read(lambda conn: builds.lines(conn, one.id, offset=3, limit=4))) == lines[3:7]
    warnings = [line for line in lines if line.level == "warn"]
    assert list(await store.read(lambda conn: builds.lines(conn, one.id, levels=("warn",), offset=1))) == warnings[1:]
    last = await store.read(lambda conn: builds.last_lines(conn, one.id, "0", levels=("warn",), limit=1))
    assert list(last) == [lines[6]]
    await store.write(lambda conn: builds.say(conn, "b-gone", lines))
    assert list(await store.read(lambda conn: builds.lines(conn, "b-gone"))) == []


async def test_a_tag_names_one_build_at_a_time(store: Store, team_a: str) -> None:
    await on_record(store, build(team_a))
    await on_record(store, build(team_a, id="b-2", result=RESULT, state=State.READY))
    for build_id in ("b-1", "b-2", "b-2"):
        await store.write(lambda conn, build_id=build_id: builds.tag(conn, "tpl", "v1", build_id, now=NOW))  # type: ignore[misc]
    (tag,) = await store.read(lambda conn: builds.tags(conn, "tpl"))
    assert (tag.name, tag.build_id) == ("v1", "b-2")
    tagged = await store.read(lambda conn: builds.tagged(conn, "tpl", "v1"))
    assert tagged is not None
    assert tagged.id == "b-2"
    assert await store.write(lambda conn: builds.untag(conn, "tpl", ["v1", "v2"])) == 1
    assert await store.read(lambda conn: builds.tagged(conn, "tpl", "v1")) is None


async def test_what_builds_and_steps_stand_for_is_kept_until_they_are_forgotten(store: Store, team_a: str) -> None:
    step = "sha256:" + "2" * 64
    await on_record(store, build(team_a, state=State.READY, result=RESULT, finished_at=NOW))
    await store.write(lambda conn: builds.keep_step(conn, team_a, "key", step, now=NOW))
    await store.write(lambda conn: builds.tag(conn, "tpl", "v1", "b-1", now=NOW))
    assert await store.read(builds.images_wanted) == {IMAGE, step}
    assert await store.read(lambda conn: builds.step(conn, team_a, "key")) == step
    assert await store.read(lambda conn: builds.step(conn, "tea_other", "key")) is None
    assert await store.write(lambda conn: builds.forget_steps(conn, before=NOW + 1)) == 1
    assert await store.write(lambda conn: builds.forget(conn, before=NOW + 1)) == 0, "a tag names it"
    assert await store.read(builds.images_wanted) == {IMAGE}
    await store.write(lambda conn: builds.untag(conn, "tpl", ["v1"]))
    assert await store.write(lambda conn: builds.forget(conn, before=NOW + 1)) == 1
    assert await store.read(builds.images_wanted) == set()
