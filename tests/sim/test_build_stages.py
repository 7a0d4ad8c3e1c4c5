"""Builds in stages against a whole control: what each is made of, what is shared, what goes on at once, and how a failure ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from atoll.control.builds.steps import PASSING
from tests.sim.shop import Shop
from tests.sim.test_builds import begin, built, ended, image_of, request, run, shop, status, world
from tests.sim.world import World

__all__ = ["shop", "world"]


def copy(source: str, target: str, stage: int, *rest: str) -> dict[str, Any]:
    return {"type": "COPY", "args": [source, target, *rest], "fromStage": stage}


def stage(name: str, *steps: Mapping[str, Any], **begins: Any) -> dict[str, Any]:
    return {"name": name, "steps": list(steps), **(begins or {"fromTemplate": "base"})}


async def test_files_come_from_another_stage(world: World, shop: Shop) -> None:
    stages = [stage("build", {"type": "ENV", "args": ["WORD", "x"]}, run("make")), stage("img", fromImage="busybox:1")]
    steps = [copy("/out/../out/app", "bin/", 0, "app:app", "755"), copy("bin/busybox", "/b", 1), run("end")]
    done = await built(world, *steps, stages=stages)
    assert done["status"] == "ready", done
    exported = [text for text in shop.ran if text.startswith("script ")]
    assert [text.removeprefix("script ") for text in exported] == [
        "out/app",
        "out/app /home/user/bin/ app:app 755",
        "bin/busybox",
        # Whoever's they are there.
        "bin/busybox /b  ",
    ]
    assert any(line.startswith("[build 2/2] RUN make") for line in done["logs"])
    assert {"build:base", "build:1", "build:2", "img:base", "base", "1", "2", "3", "finalize"} == {
        one["step"] for one in done["logEntries"]
    }
    assert shop.pulled == [("registry:busybox:1", {})]
    assert len(shop.passed) == 2
    assert not any(path.exists() for path in shop.passed), "what was on its way is still there"


async def test_a_stage_is_known_again_by_itself(world: World, shop: Shop) -> None:
    stages = [stage("one", run("a")), stage("two", run("b"))]
    steps = [copy("a", "/a", 0), copy("b", "/b", 1)]
    await built(world, *steps, stages=stages)
    first, taken = await image_of(world, "mine"), len(shop.ran)
    again = await built(world, *steps, stages=stages)
    assert sum("CACHED" in line for line in again["logs"]) == 4
    assert len(shop.ran) == taken
    assert await image_of(world, "mine") == first
    # Of a changed stage follows what copies from it, and nothing else.
    changed = await built(world, *steps, stages=[stages[0], stage("two", run("c"))])
    assert [line for line in changed["logs"] if line.startswith("CACHED")] == ["CACHED [one 1/1] RUN a", "CACHED [1/2] COPY a /a"]
    # The same steps in a build without stages are the same, too.
    alone = await built(world, run("a"), name="alone")
    assert "CACHED [1/1] RUN a" in alone["logs"]


async def test_a_stage_goes_on_where_another_ended(world: World, shop: Shop) -> None:
    first = stage("one", {"type": "USER", "args": ["app"]}, {"type": "ENV", "args": ["WORD", "said"]}, run("a"))
    done = await built(world, run("b"), stages=[first], fromStage=0)
    assert "app@None: b said" in done["logs"]


async def begin_in_stages(world: World, *steps: Mapping[str, Any], stages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    asked = await request(world)
    await begin(world, asked, *steps, stages=stages, **body)
    return asked


async def test_stages_that_do_not_need_each_other_go_on_at_once(world: World, shop: Shop) -> None:
    stages = [stage(f"s{number}", run(f"echo {number}"), run("hang")) for number in range(2)]
    stages[1]["steps"][1] = run("true")
    asked = await begin_in_stages(world, copy("a", "/a", 0), copy("b", "/b", 1), stages=stages)
    await asyncio.wait_for(shop.hanging.wait(), 10)
    async with asyncio.timeout(10):
        while "true" not in shop.ran:
            await asyncio.sleep(0.02)
    assert not any(text.startswith("script") for text in shop.ran), "the last stage went on without the first"
    shop.let_go.set()
    assert (await ended(world, asked))["status"] == "ready"


async def test_only_so_many_benches_are_open_at_once(world: World, shop: Shop) -> None:
    stages = [stage(f"s{number}", run(f"linger {number}")) for number in range(12)]
    done = await built(world, *(copy("a", f"/a{number}", number) for number in range(12)), stages=stages)
    assert done["status"] == "ready", done
    assert 1 < shop.most <= 3


async def test_the_first_failure_ends_all_stages(world: World, shop: Shop) -> None:
    stages = [stage("good", run("hang")), stage("bad", run("sleep"), run("false"))]
    asked = await begin_in_stages(world, copy("a", "/a", 0), copy("b", "/b", 1), stages=stages)
    done = await ended(world, asked)
    assert done["status"] == "error"
    assert done["reason"]["step"] == "bad:2", done
    assert "exit status 1" in done["reason"]["message"]
    assert done["logEntries"][-1]["step"] == "bad:2"
    assert shop.open == 0


async def test_an_image_of_a_stage_that_is_missing_is_named(world: World) -> None:
    done = await built(world, copy("a", "/a", 0), stages=[stage("tool", fromImage="missing:1")])
    assert (done["status"], done["reason"]["step"]) == ("error", "tool:base")
    assert "missing:1 is not there" in done["reason"]["message"]


async def test_what_a_run_mounts_is_there_for_it_alone(world: World, shop: Shop) -> None:
    mounts = [
        {"target": "/root/.cache", "owner": "0:0", "mode": "755"},
        {"target": "in", "source": "out", "fromStage": 0},
    ]
    done = await built(world, run("make", mounts=mounts), stages=[stage("build", run("x"))])
    assert done["status"] == "ready", done
    assert [text.removeprefix("script ").strip() for text in shop.ran[1:]] == [
        "out",
        "0 /root/.cache .  0:0 755",
        "1 /home/user/in out -p",
        "make",
        "1 /home/user/in",
        "0 /root/.cache",
    ]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"stages": [stage("one", fromStage=0)]}, "stage one: there is no stage 0 before this one"),
        ({"stages": [stage("one", run("x"))], "steps": [copy("a", "/b", 1)]}, "no stage 1"),
        ({"stages": [stage("one", copy("a", "/b", 0))]}, "stage one: step 1 (COPY): there is no stage 0"),
        ({"stages": [stage("a b", run("x"))]}, "no name of a stage"),
        ({"stages": [stage("one", fromStage=-1)]}, "no stage -1"),
        ({"stages": [{"name": "one"}]}, "stage one: a build begins with"),
        ({"stages": [stage("s", run("x"))] * 65}, "64 stages"),
        ({"fromStage": 0}, "not with both"),
        ({"steps": [run("x", mounts=[{"target": "/proc/x"}])]}, "nothing is mounted at"),
        ({"steps": [run("x", mounts=[{"target": "/"}])]}, "nothing is mounted at"),
        ({"steps": [run("x", mounts=[{"target": "/x", "source": "../y", "filesHash": "0" * 64}])]}, "not below"),
        ({"steps": [run("x", mounts=[{"target": "/x", "source": "y"}])]}, "filesHash"),
        ({"steps": [run("x", mounts=[{"target": f"/{n}"} for n in range(17)])]}, "at most 16 mounts"),
        ({"steps": [run("x", fromStage=0)], "stages": [stage("one", run("y"))]}, "only files"),
        ({"steps": [run("x", mounts=[{"target": "/x", "secret": "y"}])]}, "secret"),
    ],
)
async def test_what_cannot_be_built_is_refused_before_anything_is_done(world: World, body: dict[str, Any], word: str) -> None:
    asked = await request(world)
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    answer = await world.call("POST", path, json={"fromTemplate": "base", **body})
    assert answer.status_code in (400, 501), answer.text
    assert word in answer.json()["message"]
    assert (await status(world, asked))["status"] == "waiting"


async def test_a_killed_control_leaves_nothing_on_its_way(world: World, shop: Shop) -> None:
    asked = await begin_in_stages(world, copy("a", "/a", 0), run("hang"), stages=[stage("one", run("x"))])
    await asyncio.wait_for(shop.hanging.wait(), 10)
    folder = shop.passed[0].parent
    left = folder / f"{PASSING}{asked['buildID']}-cut"
    left.write_bytes(b"half of it")
    other = folder / f"{PASSING}another-build"
    other.write_bytes(b"not ours")
    await world.restart()
    shop.let_go.set()
    assert (await ended(world, asked))["status"] == "ready"
    assert not left.exists()
    assert other.exists()
