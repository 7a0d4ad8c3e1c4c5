"""The deployment document over a whole control: applied by compare-and-set, followed without a restart, and never felt by what exists."""

from __future__ import annotations

import asyncio
import sqlite3

from atoll.wire import normal_form
from tests.sim.world import OPERATOR_KEY, Agent, Refusal, World

SMALL = """version: 1
default_class: small
classes:
  small:
    size: {memory: {max: 512MiB, default: 256MiB}}
    lifetime: {default: 1m, max: 2m}
  default: {}
"""


async def apply(world: World, text: str, revision: int, *, key: str = OPERATOR_KEY) -> dict[str, object]:
    answer = await world.call("PUT", "/v1/config", key=key, json={"document": text, "revision": revision})
    if answer.status_code != 200:
        raise Refusal(answer.status_code, answer.json()["error"])
    return dict(answer.json())


async def refusal_of(work: object) -> str:
    try:
        await work  # type: ignore[misc]
    except Refusal as refused:
        return str(refused.code)
    raise AssertionError("was not refused")


async def test_until_a_document_is_applied_the_built_in_one_applies(world: World) -> None:
    shown = (await world.call("GET", "/v1/config")).json()
    assert (shown["revision"], shown["appliedAt"], shown["appliedBy"]) == (0, None, None)
    assert "class" in shown["document"]
    assert await apply(world, normal_form.BUILT_IN, 0)


async def test_a_changed_class_is_felt_by_new_sandboxes_only(world: World, agent: Agent) -> None:
    async with agent.at_work():
        before = await world.create()
        await apply(world, SMALL, 0)
        after = await world.create()
        assert (before["size"]["memoryMib"], after["size"]["memoryMib"]) == (512, 256)
        assert (after["class"], after["timeoutSeconds"]) == ("small", 60)
        # What was made before keeps its own longest lifetime, what came after has the new one.
        longer = {"timeoutSeconds": 3600}
        assert (await world.call("POST", f"/v1/sandboxes/{before['id']}/end", json=longer)).status_code == 200
        refused = await world.call("POST", f"/v1/sandboxes/{after['id']}/end", json=longer)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "CLASS_LIMIT")


async def test_a_sandbox_outlives_its_class(world: World, agent: Agent) -> None:
    async with agent.at_work():
        made = await world.create(**{"class": "brisk"})
        await apply(world, SMALL, 0)
        assert await refusal_of(world.create(**{"class": "brisk"})) == "INVALID_REQUEST"
        assert (await world.call("POST", f"/v1/sandboxes/{made['id']}/end", json={"timeoutSeconds": 60})).status_code == 200
        await world.release(made["id"])
        await world.until(made["id"], "released")


async def test_who_applied_what_is_on_record_once(world: World) -> None:
    for _ in range(2):
        await apply(world, SMALL, 0)
    assert await refusal_of(apply(world, SMALL.replace("512MiB", "1GiB"), 0)) == "CONFIG_CONFLICT"
    done, refused = (await world.call("GET", "/v1/operations/audit?action=config.apply")).json()["items"]
    whoami = (await world.call("GET", "/v1/whoami")).json()
    assert (done["result"], done["clientId"], done["data"]["revision"]) == ("done", whoami["client"]["id"], 1)
    assert refused["result"] == "CONFIG_CONFLICT"


async def test_another_document_meanwhile_is_a_conflict_and_the_same_one_is_not(world: World) -> None:
    first = await apply(world, SMALL, 0)
    assert first["revision"] == 1
    assert await apply(world, SMALL, 0) == first, "a lost answer is given again"
    other = SMALL.replace("512MiB", "1GiB")
    assert await refusal_of(apply(world, other, 0)) == "CONFIG_CONFLICT"
    assert await refusal_of(apply(world, other, 7)) == "CONFIG_CONFLICT"
    assert (await apply(world, other, 1))["revision"] == 2


async def test_of_many_that_apply_at_once_one_is_first(world: World) -> None:
    texts = [SMALL.replace("512MiB", f"{512 + n}MiB") for n in range(10)]
    outcomes = await asyncio.gather(*(apply(world, text, 0) for text in texts), return_exceptions=True)
    assert sum(isinstance(one, dict) for one in outcomes) == 1
    assert {one.code for one in outcomes if isinstance(one, Refusal)} == {"CONFIG_CONFLICT"}


async def test_a_bad_document_changes_nothing_and_says_its_lines(world: World) -> None:
    bad = SMALL.replace("512MiB", "512MB")
    answer = await world.call("PUT", "/v1/config", json={"document": bad, "revision": 0})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "CONFIG_INVALID")
    assert "line 5: classes.small.size.memory.max" in answer.json()["error"]["message"]
    checked = (await world.call("POST", "/v1/config/check", json={"document": bad})).json()
    assert (checked["valid"], [one["line"] for one in checked["problems"]], checked["changes"]) == (False, [5], [])
    assert (await world.call("GET", "/v1/config")).json()["revision"] == 0


async def test_a_check_says_what_would_change_and_changes_nothing(world: World) -> None:
    await apply(world, SMALL, 0)
    checked = (await world.call("POST", "/v1/config/check", json={"document": SMALL.replace("2m", "3m")})).json()
    assert checked == {
        "valid": True,
        "revision": 1,
        "problems": [],
        "changes": [{"path": "classes.small.lifetime.max", "before": "2m", "after": "3m"}],
    }
    assert (await world.call("GET", "/v1/config")).json()["document"] == SMALL


async def test_every_revision_is_kept(world: World) -> None:
    texts = [SMALL.replace("2m", f"{n}m") for n in (2, 3, 4)]
    for revision, text in enumerate(texts):
        await apply(world, text, revision)
    page = (await world.call("GET", "/v1/config/revisions?limit=2")).json()
    assert [one["revision"] for one in page["items"]] == [3, 2]
    rest = (await world.call("GET", f"/v1/config/revisions?before={page['nextBefore']}")).json()
    assert ([one["revision"] for one in rest["items"]], rest["nextBefore"]) == ([1], None)
    assert (await world.call("GET", "/v1/config/revisions/1")).json()["document"] == texts[0]
    assert (await world.call("GET", "/v1/config/revisions/0")).json()["document"]
    missing = await world.call("GET", "/v1/config/revisions/9")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "CONFIG_NOT_FOUND")


async def test_the_document_is_the_operators(world: World) -> None:
    key = await world.team("others")
    for method, path, body in (
        ("GET", "/v1/config", None),
        ("GET", "/v1/config/revisions", None),
        ("GET", "/v1/config/revisions/0", None),
        ("POST", "/v1/config/check", {"document": SMALL}),
        ("PUT", "/v1/config", {"document": SMALL, "revision": 0}),
    ):
        answer = await world.call(method, path, key=key, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN"), path


async def test_it_applies_after_a_restart(world: World) -> None:
    await apply(world, SMALL, 0)
    await world.restart()
    assert world.running.configuration.revision == 1
    assert (await world.create(wait=False))["class"] == "small"


async def test_a_replica_follows_what_another_has_applied(world: World) -> None:
    """As another control process would leave it in the database."""
    await apply(world, SMALL, 0)
    with sqlite3.connect(world.database) as other:
        other.execute(
            "insert into configurations select 2, document, digest, replace(settings, '\"timeout_s_default\": 60', '\"timeout_s_default\": 61'), "
            "applied_at, client_id from configurations where revision = 1"
        )
    other.close()
    assert (await world.create(wait=False))["timeoutSeconds"] == 60
    assert await world.running.configuration.follow()
    assert (await world.create(wait=False))["timeoutSeconds"] == 61
    assert not await world.running.configuration.follow(), "nothing is newer"


async def test_limits_of_a_document_count_at_once(world: World) -> None:
    key = await world.team("small")
    await world.create(key=key, wait=False)
    await apply(world, SMALL + "teams: {small: {sandboxes: 1}}\n", 0)
    assert await refusal_of(world.create(key=key, wait=False)) == "TEAM_SANDBOX_QUOTA"
    limits = (await world.call("GET", "/v1/whoami", key=key)).json()["team"]["limits"]
    assert limits == {"maxSandboxes": 1, "maxRecords": 100_000, "requestsPerSecond": 2000.0}
    assert await world.create(wait=False), "another team has its own"
