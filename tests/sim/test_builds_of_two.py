"""Two control replicas that build the same template: the newest build of a tag is the one that stands, whoever took which."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.base.errors import Code, Unavailable
from atoll.control.builds import builder
from atoll.control.builds import builds as module
from tests.sim.duo import Duo, duo
from tests.sim.shop import Shop
from tests.sim.test_builds import begin, code_of, ended, image_of, request, run, status


@pytest.fixture
async def shop() -> Shop:
    return Shop()


@pytest.fixture
async def world(tmp_path: Path, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Duo]:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    monkeypatch.setattr(module, "ABANDONED_S", 0.6)
    monkeypatch.setattr(builder, "ABANDONED_S", 0.6)
    monkeypatch.setattr(builder, "LOOK_S", 0.02)
    async with duo(tmp_path, changes={"workshop": shop, "images": tmp_path / "images"}) as (made, _):
        yield made


async def test_a_newer_build_at_another_replica_ends_the_older_one(world: Duo, shop: Shop) -> None:
    with world.through(0):
        older = await request(world)
        await begin(world, older, run("hang"))
        await asyncio.wait_for(shop.hanging.wait(), 10)
        task = world.running.builds.tasks[older["buildID"]]
    with world.through(1):
        newer = await request(world)
        assert newer["templateID"] == older["templateID"]
        await begin(world, newer, run("echo newer"))
        assert (await ended(world, newer))["status"] == "ready"
        assert (await status(world, older))["status"] == "error"
        assert await code_of(world, older) == "BUILD_CANCELLED"
    # Its owner hears of it by its next beat, and gives up what it has on hosts.
    await asyncio.wait([task], timeout=10)
    assert task.done()
    assert shop.open == 0
    with world.through(0):
        image = await image_of(world, "mine")
    shop.let_go.set()
    await asyncio.sleep(0.2)
    with world.through(0):
        assert await image_of(world, "mine") == image, "the older one has put itself in the newer's place"


async def test_both_build_one_template_at_once_under_two_tags(world: Duo) -> None:
    async def build(at: int) -> str:
        with world.through(at):
            asked = await request(world, "mine", tags=[f"v{at}"])
            await begin(world, asked, run("echo shared"), run(f"echo {at}"))
        while (now := await status(world, asked))["status"] == "building":
            await asyncio.sleep(0.02)
        assert now["status"] == "ready", now
        return str(asked["templateID"])

    first, second = await asyncio.gather(build(0), build(1))
    assert first == second
    shown = await world.call("GET", f"/templates/{first}/tags")
    assert {one["tag"] for one in shown.json()} >= {"v0", "v1"}


async def test_a_step_is_taken_once_whichever_replica_builds(world: Duo, shop: Shop) -> None:
    async def begun(at: int, *steps: str) -> dict[str, str]:
        with world.through(at):
            asked = await request(world, f"mine-{at}")
            await begin(world, asked, *(run(step) for step in steps))
        return asked

    first = await begun(0, "hang", "echo 0")
    await asyncio.wait_for(shop.hanging.wait(), 10)
    second = await begun(1, "hang", "echo 1")
    with world.through(1):
        async with asyncio.timeout(10):
            while not any("waiting for" in line for line in (await status(world, second))["logs"]):
                await asyncio.sleep(0.02)
    shop.let_go.set()
    for at, one in ((0, first), (1, second)):
        with world.through(at):
            done = await ended(world, one)
        assert done["status"] == "ready", done
    assert sorted(shop.ran) == ["echo 0", "echo 1", "hang"]
    assert any(line.startswith("CACHED [1/2] RUN hang") for line in done["logs"])


async def test_a_replica_that_goes_away_has_its_build_taken_over_by_the_other(world: Duo, shop: Shop) -> None:
    with world.through(0):
        asked = await request(world)
        await begin(world, asked, run("echo once"), run("hang"))
        await asyncio.wait_for(shop.hanging.wait(), 10)
        control = world.running
        # As after a kill: nobody lets go of it in order.
        for task in list(control.builds.tasks.values()):
            task.get_coro().close()  # type: ignore[union-attr]
            control.builds.tasks.clear()
    shop.let_go.set()
    with world.through(1):
        done = await ended(world, asked)
    assert done["status"] == "ready", done
    assert shop.ran.count("echo once") == 1


async def test_a_cache_of_runs_is_every_replicas_where_they_share_a_bucket(world: Duo, shop: Shop) -> None:
    mount = {"kind": "cache", "id": "pip", "target": "/root/.cache", "owner": "0:0", "mode": "755"}

    async def build(at: int, name: str) -> list[str]:
        shop.put.clear()
        with world.through(at):
            asked = await request(world, f"mine-{name}")
            await begin(world, asked, run(f"echo {name}", mounts=[mount]))
            done = await ended(world, asked)
        assert done["status"] == "ready", done
        return [str(line) for line in done["logs"]]

    await build(0, "alone")
    await build(1, "elsewhere")
    assert not shop.put, "without a bucket each replica has its own"
    shop.has_bucket = True
    await build(0, "one")
    (kept,) = shop.bucket.values()
    await build(1, "two")
    assert shop.put == [("/.atoll/copy.tar", kept)], "what the other replica has kept, and not its own older one"
    shop.bucket_lost = Unavailable(Code.ARTIFACTS_UNAVAILABLE, "the store does not answer")
    said = await build(1, "three")
    assert len(shop.put) == 1, "its own stays"
    assert any("may be an older one: the store does not answer" in line for line in said), said
