"""The registry's tokens, as control gives them: to whom, for what, how often, and what is kept of it."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import httpx
import jwt
import pytest

from atoll.base.ids import TeamId, TemplateId
from atoll.control.api.registry import UNKNOWN
from atoll.store import tenancy
from atoll.wire import registry
from tests.sim.world import OPERATOR_KEY, Agent, World

DOCUMENT = """
version: 1
limits: {team: {registry: 100MiB}}
teams: {red: {registry: unlimited}}
registry: {public: [red/app, red/tools/*]}
classes: {default: {}}
"""


@pytest.fixture(autouse=True)
async def _document(world: World, agent: Agent) -> None:
    applied = await world.call("PUT", "/v1/config", json={"document": DOCUMENT, "revision": 0})
    assert applied.status_code in (200, 201), applied.text


async def ask(world: World, *scopes: str, key: str | None = None, address: str = "198.51.100.7") -> httpx.Response:
    headers = {"X-Forwarded-For": address}
    if key is not None:
        headers["Authorization"] = "Basic " + base64.b64encode(f"any:{key}".encode()).decode()
    query = "&".join(f"scope={scope}" for scope in scopes)
    async with world._client() as client:
        return await client.get(f"{registry.TOKEN_PATH}?{query}", headers=headers)


def said(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = jwt.decode(answer.json()["token"], options={"verify_signature": False})
    return content


def opened(answer: httpx.Response) -> list[tuple[str, list[str]]]:
    return [(one["name"], one["actions"]) for one in said(answer)["access"]]


async def entries(world: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await world.call("GET", "/v1/operations/audit?limit=1000&action=registry.token")).json()["items"]
    return found


async def test_anybody_may_pull_what_the_operator_has_made_public(world: World) -> None:
    assert opened(await ask(world, "repository:red/app:pull,push")) == [("red/app", ["pull"])]
    key = await world.team("blue")
    assert opened(await ask(world, "repository:red/tools/one:pull", "repository:blue/x:push", key=key)) == [
        ("red/tools/one", ["pull"]),
        ("blue/x", ["push"]),
    ]
    refused = await ask(world, "repository:red/secret:pull")
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Basic realm="Atoll"')
    assert (await ask(world)).status_code == 401


async def test_a_token_says_what_its_team_may_keep(world: World) -> None:
    assert said(await ask(world, key=await world.team("blue")))["atoll"] == {"team": "blue", "storage_bytes": 100 << 20}
    assert said(await ask(world, key=await world.team("red")))["atoll"] == {"team": "red", "storage_bytes": None}
    assert "atoll" not in said(await ask(world, "repository:red/app:pull"))


async def test_guessing_keys_is_slow_and_stops_nobody_else(world: World) -> None:
    tries = 0
    while (last := await ask(world, key="e2b_" + "f" * 40, address="203.0.113.9")).status_code == 401:
        tries += 1
        assert tries < 50 * UNKNOWN.at_once, "nobody is stopped"
    assert tries >= UNKNOWN.at_once
    assert (last.status_code, last.json()["errors"][0]["code"]) == (429, "TOOMANYREQUESTS")
    assert int(last.headers["retry-after"]) >= 1
    # Neither who knows a key, from there, nor who comes from elsewhere.
    assert (await ask(world, key=OPERATOR_KEY, address="203.0.113.9")).status_code == 200
    assert (await ask(world, "repository:red/app:pull")).status_code == 200


async def test_who_may_change_what_is_on_record_once_for_each_token_time(world: World) -> None:
    key = await world.team("blue")
    for _ in range(3):
        await ask(world, "repository:blue/app:pull,push", "repository:blue/other:pull", key=key)
    await ask(world, "repository:red/app:push", key=key)
    found = await entries(world)
    assert [(one["subject"], one["result"], one["data"]) for one in found] == [
        ("blue/app", "done", {"actions": "pull,push"}),
        ("red/app", "FORBIDDEN", {"actions": "push"}),
    ]
    assert {one["address"] for one in found} == {"198.51.100.7"}


async def test_a_template_of_the_team_opens_its_repository_under_e2bs_name(world: World) -> None:
    key = await world.team("blue")
    team = (await world.call("GET", "/v1/whoami", key=key)).json()["team"]["id"]
    base = next(one for one in await world.store.read(lambda conn: tenancy.templates_for(conn, team)) if one.name == "base")
    mine = replace(base, id=TemplateId("mine0"), team_id=TeamId(team), name="mine", aliases=("mine",))
    await world.store.write(lambda conn: tenancy.put_template(conn, mine))
    name = "e2b/custom-envs/mine0"
    assert opened(await ask(world, f"repository:{name}:pull,push", key=key)) == [(name, ["pull", "push"])]
    assert opened(await ask(world, f"repository:{name}:pull,push", key=OPERATOR_KEY)) == []
