"""Builds of templates against a whole control: its API, its records and its builder, on benches that only pretend to have files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import Code
from atoll.control.builds import builds as module
from atoll.domain.deployment import BuildLimits
from tests.sim.shop import Shop
from tests.sim.world import Agent, World


@pytest.fixture
async def shop() -> Shop:
    return Shop()


@pytest.fixture
async def world(tmp_path: Path, shop: Shop) -> AsyncIterator[World]:
    made = World(tmp_path, changes={"workshop": shop, "images": tmp_path / "images"})
    await made.start()
    yield made
    await made.stop()


def run(command: str, **more: Any) -> dict[str, Any]:
    return {"type": "RUN", "args": [command], **more}


async def request(world: World, name: str = "mine", **body: Any) -> dict[str, Any]:
    answer = await world.call("POST", "/v3/templates", json={"name": name, **body})
    assert answer.status_code == 202, answer.text
    return answer.json()


async def begin(world: World, asked: Mapping[str, Any], *steps: Mapping[str, Any], **body: Any) -> None:
    source = {} if {"fromImage", "fromStage"} & body.keys() else {"fromTemplate": "base"}
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    answer = await world.call("POST", path, json={"steps": list(steps), **source, **body})
    assert answer.status_code == 202, answer.text
    assert answer.content == b""


async def status(world: World, asked: Mapping[str, Any], **query: Any) -> dict[str, Any]:
    path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}/status"
    answer = await world.call("GET", path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ended(world: World, asked: Mapping[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (now := await status(world, asked))["status"] in ("waiting", "building"):
            await asyncio.sleep(0.02)
    return now


async def code_of(world: World, asked: Mapping[str, Any]) -> str | None:
    """Why a build failed, by its stable code."""
    build = await world.store.read(lambda conn: module.stored.get(conn, asked["buildID"]))
    assert build is not None
    return None if build.code is None else str(build.code)


async def built(world: World, *steps: Mapping[str, Any], name: str = "mine", **body: Any) -> dict[str, Any]:
    asked = await request(world, name)
    await begin(world, asked, *steps, **body)
    return {**asked, **await ended(world, asked)}


async def image_of(world: World, name: str) -> str:
    answer = await world.call("GET", f"/v1/templates/{name}")
    assert answer.status_code == 200, answer.text
    return str(answer.json()["image"])


async def test_a_build_becomes_the_template_of_its_name(world: World, shop: Shop, agent: Agent) -> None:
    asked = await request(world, "mine", cpuCount=2, memoryMB=256)
    assert asked["names"] == asked["aliases"] == ["mine"]
    assert asked["tags"] == ["default"]
    waiting = await status(world, asked)
    assert (waiting["status"], waiting["logEntries"]) == ("waiting", [])
    listed = {one["templateID"]: one for one in (await world.call("GET", "/v2/templates")).json()}
    assert listed[asked["templateID"]]["buildStatus"] == "waiting"

    await begin(world, asked, run("echo one"), {"type": "ENV", "args": ["WORD", "two", "MORE", "$WORD-${WORD}"]}, run("echo two"))
    done = await ended(world, asked)
    assert done["status"] == "ready", done
    assert shop.ran == ["echo one", "echo two"]
    assert "user@None: echo two two" in done["logs"]
    assert {entry["step"] for entry in done["logEntries"]} == {"base", "1", "2", "3", "finalize"}

    async with agent.at_work():
        made = await world.create(template="mine")
        shown = await world.until(made["id"], "ready")
    assert shown["size"]["cpuMillis"] == 2000
    assert (await world.facts(made["id"])).sandbox.spec.image in shop.images
    env = next(iter(agent.payloads.values())).env
    assert (env["WORD"], env["MORE"]) == ("two", "two-two")


async def test_nothing_is_made_of_a_template_without_a_build(world: World) -> None:
    asked = await request(world)
    answer = await world.call("POST", "/sandboxes", json={"templateID": asked["templateID"]})
    assert answer.status_code == 404
    assert "no build that is ready" in answer.json()["message"]


async def test_the_same_steps_are_not_taken_twice(world: World, shop: Shop) -> None:
    first = await built(world, run("a"), run("b"), run("c"))
    image = await image_of(world, "mine")
    again = await built(world, run("a"), run("b"), run("c"))
    assert shop.ran == ["a", "b", "c"]
    assert await image_of(world, "mine") == image
    assert first["buildID"] != again["buildID"]
    assert sum("CACHED" in line for line in again["logs"]) == 3

    await built(world, run("a"), run("B"), run("c"))
    assert shop.ran == ["a", "b", "c", "B", "c"]
    assert await image_of(world, "mine") != image


async def test_force_takes_a_step_and_all_after_it_again(world: World, shop: Shop) -> None:
    await built(world, run("a"), run("b"), run("c"))
    await built(world, run("a"), run("b", force=True), run("c"))
    assert shop.ran == ["a", "b", "c", "b", "c"]
    await built(world, run("a"), run("b"), run("c"), force=True)
    assert shop.ran[5:] == ["a", "b", "c"]


async def test_a_step_whose_image_is_lost_is_taken_again(world: World, shop: Shop) -> None:
    await built(world, run("a"))
    shop.images.clear()
    await built(world, run("a"))
    assert shop.ran == ["a", "a"]


async def test_a_step_whose_bench_goes_while_its_files_are_handed_out_is_taken_once_more(world: World, shop: Shop) -> None:
    """As when its host's agent is killed in that moment; what happens twice is no accident, and another failure is none either."""
    shop.losses = 1
    done = await built(world, run("one"))
    assert done["status"] == "ready", done
    assert shop.ran == ["one", "one"]
    assert any("once more" in line for line in done["logs"])
    assert shop.open == 0
    shop.losses = 2
    assert (await built(world, run("two")))["status"] == "error"
    assert shop.ran.count("two") == 2
    shop.losses, shop.lost_by = 1, Code.HOST_DISK_FULL
    assert (await built(world, run("three")))["status"] == "error"
    assert shop.ran.count("three") == 1


async def test_another_team_takes_its_steps_itself(world: World, shop: Shop) -> None:
    await built(world, run("a"))
    key = await world.team("others")
    asked = (await world.call("POST", "/v3/templates", key=key, json={"name": "mine"})).json()
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    assert (await world.call("POST", path, key=key, json={"steps": [run("a")], "fromTemplate": "base"})).status_code == 202
    async with asyncio.timeout(20):
        while shop.ran != ["a", "a"]:
            await asyncio.sleep(0.02)
    mine = (await world.call("GET", f"/templates/{asked['templateID']}/builds/{asked['buildID']}/status")).status_code
    assert mine == 404, "a build of another team's was shown"


async def test_a_failed_step_is_named_with_what_it_wrote(world: World) -> None:
    failed = await built(world, run("a"), run("false"), run("c"))
    assert failed["status"] == "error"
    assert failed["reason"]["step"] == "2"
    assert failed["reason"]["message"] == "failed to run command 'false': exit status 1"
    assert await code_of(world, failed) == "BUILD_FAILED"
    assert failed["reason"]["logEntries"][-1]["message"] == failed["reason"]["message"]
    answer = await world.call("POST", "/sandboxes", json={"templateID": "mine"})
    assert answer.status_code == 404


async def test_who_is_not_there_runs_nothing(world: World) -> None:
    failed = await built(world, {"type": "USER", "args": ["nobody-here"]}, run("whoami"))
    expected = "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'nobody-here'"
    assert failed["reason"]["message"] == expected


async def test_a_failed_build_leaves_the_template_as_it_was(world: World) -> None:
    await built(world, run("a"))
    image = await image_of(world, "mine")
    assert (await built(world, run("false")))["status"] == "error"
    assert await image_of(world, "mine") == image
    shown = (await world.call("GET", "/templates/mine")).json()
    assert [one["status"] for one in shown["builds"]] == ["error", "ready"]


async def test_logs_are_read_on_from_an_offset(world: World) -> None:
    done = await built(world, *[run(f"echo {n}") for n in range(5)])
    everything = done["logEntries"]
    page = await status(world, done, logsOffset=3, limit=4)
    assert page["logEntries"] == everything[3:7]
    assert (await status(world, done, logsOffset=len(everything)))["logEntries"] == []
    path = f"/templates/{done['templateID']}/builds/{done['buildID']}/logs"
    backward = (await world.call("GET", path, params={"direction": "backward", "limit": 2})).json()["logs"]
    assert backward == everything[-2:][::-1]


async def test_a_start_command_is_tried_out_and_kept(world: World, shop: Shop) -> None:
    await built(world, run("a"), startCmd="serve", readyCmd="curl localhost")
    assert shop.tried[0].command[-1] == "serve"
    assert shop.tried[0].ready_command[-1] == "curl localhost"
    assert shop.tried[0].command_user == "user"
    failed = await built(world, run("a"), startCmd="broken", name="other")
    assert (failed["status"], failed["reason"]["step"]) == ("error", "finalize")
    # What stands on it has it, too, until it says otherwise.
    await built(world, run("z"), name="child", fromTemplate="mine")
    assert shop.tried[-1].command[-1] == "serve"


async def test_an_image_is_where_it_begins(world: World, shop: Shop) -> None:
    body = {"fromImage": "localhost:5000/x:1", "fromImageRegistry": {"type": "registry", "username": "me", "password": "secret"}}
    done = await built(world, run("a"), **body)
    assert done["status"] == "ready"
    assert shop.pulled == [("registry:localhost:5000/x:1", {"username": "me", "password": "secret"})]
    failed = await built(world, run("a"), fromImage="missing")
    assert (failed["status"], failed["reason"]["step"]) == ("error", "base")
    assert "secret" not in str(failed)


async def test_credentials_are_sealed_and_gone_at_the_end(world: World, shop: Shop) -> None:
    asked = await request(world)
    body = {"fromImage": "x", "fromImageRegistry": {"type": "registry", "username": "me", "password": "very-secret-word"}}
    await begin(world, asked, run("hang"), **body)
    await shop.hanging.wait()
    assert b"very-secret-word" not in b"".join(path.read_bytes() for path in world.path.glob("atoll.db*"))
    sealed = await world.store.read(lambda conn: module.stored.sealed(conn, asked["buildID"]))
    assert sealed is not None
    shop.let_go.set()
    await ended(world, asked)
    assert await world.store.read(lambda conn: module.stored.sealed(conn, asked["buildID"])) is None


async def test_e2bs_default_image_is_our_base(world: World, shop: Shop) -> None:
    assert (await built(world, run("a"), fromImage="e2bdev/base"))["status"] == "ready"
    assert shop.pulled == []


async def test_a_newer_build_cancels_the_older_of_the_same_tag(world: World, shop: Shop) -> None:
    older, tagged = await request(world), await request(world, "mine:v1")
    await begin(world, older, run("hang"))
    await begin(world, tagged, run("hang"))
    await shop.hanging.wait()
    done = await built(world, run("a"))
    assert done["status"] == "ready"
    cancelled = await ended(world, older)
    assert cancelled["status"] == "error"
    assert done["buildID"] in cancelled["reason"]["message"]
    assert await code_of(world, older) == "BUILD_CANCELLED"
    assert (await status(world, tagged))["status"] == "building"
    shop.let_go.set()
    assert (await ended(world, tagged))["status"] == "ready"
    assert shop.open == 0
    await asyncio.gather(*world.control.builds.tasks.values())
    assert shop.tidied == 3, "however a build ends, what its pulls have left goes"


async def test_a_build_is_begun_once(world: World) -> None:
    done = await built(world, run("a"))
    path = f"/v2/templates/{done['templateID']}/builds/{done['buildID']}"
    again = await world.call("POST", path, json={"steps": [], "fromTemplate": "base"})
    assert again.status_code == 400


async def test_a_killed_control_goes_on_from_what_was_done(world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = await request(world)
    await begin(world, asked, run("a"), run("hang"), run("c"))
    await shop.hanging.wait()
    # Nothing is told, as when it is killed: its row still says who had it.
    monkeypatch.setattr(module.Builds, "_let_go", lambda _self, _build: asyncio.sleep(0))
    shop.hanging.clear()
    await world.restart()
    await shop.hanging.wait()
    shop.let_go.set()
    done = await ended(world, asked)
    assert done["status"] == "ready", done
    assert shop.ran.count("a") == 1, "a step was taken again whose image was there"
    assert any("going on" in line for line in done["logs"])


async def test_a_build_that_always_ends_control_is_given_up(world: World, shop: Shop) -> None:
    asked = await request(world)
    await begin(world, asked, run("hang"))
    for _ in range(module.ATTEMPTS_MAX):
        await shop.hanging.wait()
        shop.hanging.clear()
        await world.restart()
    failed = await ended(world, asked)
    assert failed["status"] == "error"
    assert "stopped" in failed["reason"]["message"]
    assert await code_of(world, asked) == "BUILD_INTERRUPTED"


async def test_only_one_owner_ends_a_build(world: World, shop: Shop) -> None:
    asked = await request(world)
    await begin(world, asked, run("hang"))
    await shop.hanging.wait()
    # Another process takes it over; what this one finds out afterwards counts for nothing.
    world.clock.pass_s(module.ABANDONED_S + 1)

    def steal(conn: Any) -> None:
        build = module.stored.get(conn, asked["buildID"])
        assert build is not None
        assert module.stored.commit(conn, module.replace(build, owner="rep_other", beat_at=world.clock.now())) is not None

    await world.store.write(steal)
    shop.let_go.set()
    await asyncio.sleep(0.3)
    assert (await status(world, asked))["status"] == "building"
    assert (await world.call("GET", "/v1/templates/mine")).json()["image"] == ""


async def test_a_build_takes_no_longer_than_it_may(world: World, shop: Shop) -> None:
    assert world.control is not None
    world.control.builds.limits = lambda: BuildLimits(whole_s=0.3)
    failed = await built(world, run("hang"))
    assert failed["status"] == "error"
    assert (failed["reason"]["step"], shop.open) == ("1", 0)
    assert await code_of(world, failed) == "BUILD_TIMEOUT"


async def test_a_team_has_so_many_builds_at_once(world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEAM_BUILDS_MAX", 1)
    await begin(world, await request(world, "one"), run("hang"))
    await shop.hanging.wait()
    refused = await world.call("POST", "/v3/templates", json={"name": "two"})
    assert refused.status_code == 429
    assert refused.headers["should-retry"] == "false"
    assert refused.json()["error_code"] == "BUILD_QUOTA"
    key = await world.team("others")
    assert (await world.call("POST", "/v3/templates", key=key, json={"name": "two"})).status_code == 202


async def test_a_log_has_an_end(world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.control.builds.journal.LINES_MAX", 3)
    done = await built(world, *[run(f"echo {n}") for n in range(10)])
    assert done["status"] == "ready"
    assert sum("user@None" in line for line in done["logs"]) == 3
    assert sum("the log is full" in line for line in done["logs"]) == 1
    assert done["logs"][-1].startswith("the template is ready")


async def test_tags_name_versions(world: World, agent: Agent) -> None:
    first = await built(world, run("one"), name="mine:v1")
    image = (await status(world, first))["logs"][-1].rpartition(" ")[2]
    assert (await world.call("POST", "/sandboxes", json={"templateID": "mine"})).status_code == 404
    assigned = await world.call("POST", "/templates/tags", json={"target": "mine:v1", "tags": ["default", "stable"]})
    assert (assigned.status_code, assigned.json()) == (201, {"tags": ["default", "stable"], "buildID": first["buildID"]})
    assert await image_of(world, "mine") == image
    second = await built(world, run("two"))
    tags = {one["tag"]: one["buildID"] for one in (await world.call("GET", "/templates/mine/tags")).json()}
    assert tags == {"default": second["buildID"], "stable": first["buildID"], "v1": first["buildID"]}
    async with agent.at_work():
        made = await world.create(template="mine:stable")
        await world.until(made["id"], "ready")
    assert (await world.facts(made["id"])).sandbox.spec.image == image
    assert (await world.call("DELETE", "/templates/tags", json={"name": "mine", "tags": ["default"]})).status_code == 400
    assert (await world.call("DELETE", "/templates/tags", json={"name": "mine", "tags": ["stable"]})).status_code == 204
    assert (await world.call("POST", "/sandboxes", json={"templateID": "mine:stable"})).status_code == 404


async def test_names_are_a_teams_own(world: World) -> None:
    await built(world, run("a"))
    key = await world.team("others")
    assert (await world.call("GET", "/templates/aliases/mine", key=key)).status_code == 404
    assert (await world.call("GET", "/templates/aliases/mine")).status_code == 200
    ready_made = await world.call("POST", "/v3/templates", json={"name": "base"})
    assert ready_made.status_code == 403
    assert (await world.call("POST", "/v3/templates", json={"name": "strangers/mine"})).status_code == 403
    assert (await world.call("POST", "/v3/templates", json={"name": "Not A Name"})).status_code == 400


async def test_a_deleted_template_takes_its_builds_with_it(world: World, shop: Shop) -> None:
    asked = await request(world)
    await begin(world, asked, run("hang"))
    await shop.hanging.wait()
    assert (await world.call("DELETE", "/templates/mine")).status_code == 204
    async with asyncio.timeout(5):
        while shop.open:
            await asyncio.sleep(0.02)
    path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}/status"
    assert (await world.call("GET", path)).status_code == 404
    assert (await world.call("GET", "/templates/aliases/mine")).status_code == 404


async def test_a_build_is_found_with_its_own_template_only(world: World) -> None:
    one, other = await request(world, "one"), await request(world, "other")
    path = f"/templates/{one['templateID']}/builds/{other['buildID']}/status"
    answer = await world.call("GET", path)
    assert (answer.status_code, answer.json()["error_code"]) == (404, "BUILD_NOT_FOUND")


async def test_files_are_sent_by_a_link(world: World, shop: Shop) -> None:
    asked = await request(world)
    content = b"an archive"
    digest = hashlib.sha256(content).hexdigest()
    link = (await world.call("GET", f"/templates/{asked['templateID']}/files/{digest}")).json()
    assert link["present"] is False
    assert link["url"].startswith("http://control.test/template-files/")
    path = link["url"].removeprefix("http://control.test")
    for wrong in (path[:-1] + ("0" if path[-1] != "0" else "1"), path.replace(digest, "0" * 64)):
        assert (await world.call("PUT", wrong, content=content)).status_code == 403
    assert (await world.call("PUT", path, key="nobody", content=content)).status_code == 200
    assert (await world.call("GET", f"/templates/{asked['templateID']}/files/{digest}")).json()["present"] is True
    step = {"type": "COPY", "args": ["a.txt", "into/", "", ""], "filesHash": digest}
    await begin(world, asked, step)
    assert (await ended(world, asked))["status"] == "ready"
    assert shop.ran == ["script a.txt /home/user/into/ user "]
    world.clock.pass_s(3601)
    assert (await world.call("PUT", path, content=content)).status_code == 403


async def test_files_that_were_not_sent_are_missed(world: World) -> None:
    failed = await built(world, {"type": "COPY", "args": ["a", "b"], "filesHash": "0" * 64})
    assert "not uploaded" in failed["reason"]["message"]


@pytest.mark.parametrize(
    ("steps", "word"),
    [
        ([{"type": "RUN", "args": []}], "command"),
        ([{"type": "FLY", "args": []}], "FLY"),
        ([{"type": "ENV", "args": ["A"]}], "pairs"),
        ([{"type": "COPY", "args": ["../x", "/y"], "filesHash": "0" * 64}], "below"),
        ([{"type": "COPY", "args": ["x", "/y"], "filesHash": "../../etc"}], "filesHash"),
        ([{"type": "COPY", "args": ["x", "/y", "a; rm -rf /"], "filesHash": "0" * 64}], "user"),
        ([{"type": "COPY", "args": ["x", "/y", "", "u+x"], "filesHash": "0" * 64}], "mode"),
    ],
)
async def test_what_cannot_be_followed_is_refused_before_anything_is_done(world: World, steps: list[Any], word: str) -> None:
    asked = await request(world)
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    answer = await world.call("POST", path, json={"steps": steps, "fromTemplate": "base"})
    assert answer.status_code == 400
    assert word in answer.json()["message"]
    assert (await status(world, asked))["status"] == "waiting"


async def test_it_begins_with_one_thing(world: World) -> None:
    asked = await request(world)
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    assert (await world.call("POST", path, json={"steps": []})).status_code == 400
    both = {"steps": [], "fromTemplate": "base", "fromImage": "x"}
    assert (await world.call("POST", path, json=both)).status_code == 400


async def test_steps_that_never_come_are_not_waited_for(world: World) -> None:
    asked = await request(world)
    world.clock.pass_s(module.WAITING_S + 1)
    assert world.control is not None
    await world.control.builds._tidy()
    assert (await status(world, asked))["status"] == "error"


async def test_what_changes_nothing_makes_no_layer(world: World, shop: Shop) -> None:
    await built(world, run("a"))
    image = await image_of(world, "mine")
    await built(world, run("a"), run("true"))
    assert await image_of(world, "mine") == image
