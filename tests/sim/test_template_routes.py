"""Templates' less travelled routes: images that clients push themselves, ready-made templates, counts of tags; and the audit of all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from tests.sim.shop import Shop
from tests.sim.test_builds import built, ended, run
from tests.sim.world import World

DOCKERFILE = "FROM debian\nRUN true\n"


@pytest.fixture
async def shop() -> Shop:
    return Shop()


@pytest.fixture
async def world(tmp_path: Path, shop: Shop) -> AsyncIterator[World]:
    made = World(tmp_path, changes={"workshop": shop, "images": tmp_path / "images"})
    await made.start()
    yield made
    await made.stop()


async def audited(world: World) -> list[tuple[str, dict[str, Any]]]:
    found = (await world.call("GET", "/v1/operations/audit?limit=1000")).json()["items"]
    return [(one["action"], one["data"]) for one in found if one["action"].startswith("template.")]


async def test_an_image_that_the_client_pushes_becomes_a_template(world: World, shop: Shop) -> None:
    asked = await world.call(
        "POST",
        "/templates",
        json={"alias": "mine", "dockerfile": DOCKERFILE, "cpuCount": 2, "memoryMB": 512, "startCmd": "serve", "readyCmd": "curl localhost"},
    )
    assert asked.status_code == 202, asked.text
    one = asked.json()
    assert one["aliases"] == ["mine"]
    assert (one["cpuCount"], one["memoryMB"]) == (2, 512)
    begun = await world.call("POST", f"/templates/{one['templateID']}/builds/{one['buildID']}")
    assert begun.status_code == 202, begun.text
    assert (await ended(world, one))["status"] == "ready"
    source, _ = shop.pulled[0]
    assert source.endswith(f"/e2b/custom-envs/{one['templateID']}:{one['buildID']}")
    assert shop.tried[0].command[-1] == "serve"
    # Again, by its id: the same template, another build.
    again = await world.call("POST", f"/templates/{one['templateID']}", json={"dockerfile": DOCKERFILE})
    assert again.status_code == 202, again.text
    assert again.json()["templateID"] == one["templateID"]
    assert again.json()["buildID"] != one["buildID"]
    twice = await world.call("POST", f"/templates/{one['templateID']}/builds/{one['buildID']}")
    assert twice.status_code == 400


async def test_who_pushes_what_is_not_its_own_is_refused(world: World) -> None:
    mine = (await world.call("POST", "/templates", json={"alias": "mine", "dockerfile": ""})).json()
    key = await world.team("others")
    for path, body in (
        (f"/templates/{mine['templateID']}", {"dockerfile": ""}),
        (f"/templates/{mine['templateID']}/builds/{mine['buildID']}", None),
        ("/templates", {"dockerfile": ""}),
        ("/templates", {"alias": "one", "dockerfile": "", "teamID": "tea_nobody"}),
        ("/templates/base", {"dockerfile": ""}),
    ):
        answer = await world.call("POST", path, key=key, json=body)
        assert answer.status_code in (400, 403, 404), (path, answer.text)
    # Where steps are still to come, there is nothing to start.
    waiting = (await world.call("POST", "/v3/templates", json={"name": "steps"})).json()
    refused = await world.call("POST", f"/templates/{waiting['templateID']}/builds/{waiting['buildID']}")
    assert refused.status_code == 400
    assert "waits for its steps" in refused.json()["message"]


async def test_a_pull_of_what_was_pushed_needs_no_credentials(world: World) -> None:
    mine = (await world.call("POST", "/templates", json={"alias": "mine", "dockerfile": ""})).json()
    team = (await world.call("GET", "/v1/whoami")).json()["team"]
    imports = world.running.imports
    assert imports.own is not None
    source = "registry:" + imports.own.pushed(mine["templateID"], mine["buildID"])
    given = await imports.login(team["id"], team["name"], source)
    said = jwt.decode(given["token"], options={"verify_signature": False})
    assert said["access"] == [{"type": "repository", "name": f"e2b/custom-envs/{mine['templateID']}", "actions": ["pull"]}]
    assert await imports.login("tea_other", "other", source) == {}


async def test_ready_made_templates_and_counts_of_tags(world: World) -> None:
    one = await built(world, run("true"))
    shown = (await world.call("GET", "/default-templates")).json()
    assert [template["aliases"] for template in shown] == [["base"]]
    path = f"/templates/{one['templateID']}/tags"
    assert (await world.call("POST", "/templates/tags", json={"target": "mine", "tags": ["v1"]})).status_code == 201
    assert (await world.call("GET", f"{path}/count")).json() == {"total": 2}
    assert (await world.call("GET", f"{path}/exists?tag=V1")).json() == {"exists": True, "normalizedTag": "v1"}
    assert (await world.call("GET", f"{path}/exists?tag=v2")).json()["exists"] is False
    assert (await world.call("GET", f"{path}/exists")).status_code == 400


async def test_all_that_becomes_of_a_template_is_on_record(world: World) -> None:
    one = await built(world, run("true"))
    await world.call("POST", "/templates/tags", json={"target": "mine", "tags": ["v1", "v2"]})
    await world.call("DELETE", "/templates/tags", json={"name": "mine", "tags": ["v2"]})
    for public in (True, False):
        assert (await world.call("PATCH", f"/v2/templates/{one['templateID']}", json={"public": public})).status_code == 200
    await built(world, run("false"))
    assert (await world.call("DELETE", f"/templates/{one['templateID']}")).status_code == 204
    found = await audited(world)
    assert [action for action, _ in found] == [
        "template.create",
        "template.build",
        "template.tag",
        "template.untag",
        "template.publish",
        "template.unpublish",
        "template.build",
        "template.delete",
    ]
    assert {data["name"] for _, data in found} == {"mine"}
    assert found[1][1] == {"name": "mine", "build": one["buildID"], "tags": "default"}
    assert found[2][1]["tags"] == "v1,v2"


async def test_what_did_not_happen_to_a_template_is_not_on_record(world: World) -> None:
    one = await built(world, run("true"))
    before = await audited(world)
    key = await world.team("others")
    assert (await world.call("PATCH", f"/v2/templates/{one['templateID']}", key=key, json={"public": True})).status_code in (403, 404)
    assert (await world.call("POST", "/templates/tags", json={"target": "mine:none", "tags": ["v1"]})).status_code == 404
    assert (await world.call("DELETE", "/templates/nothere")).status_code == 404
    assert await audited(world) == before
