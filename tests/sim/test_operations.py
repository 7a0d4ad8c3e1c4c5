"""What operators see of a whole control: the audit, events that belong together, alerts that come and go, metrics, streams."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from atoll.control.loops import retention
from atoll.domain.host import LOST_AFTER_S
from atoll.planning.alerting import OVERDUE_S
from atoll.store import operations
from tests.sim.world import OPERATOR_KEY, Agent, Refusal, World, failing, silent

OPERATIONS = "/v1/operations"


async def get(world: World, path: str, *, key: str = OPERATOR_KEY) -> dict[str, Any]:
    answer = await world.call("GET", f"{OPERATIONS}/{path}", key=key)
    if answer.status_code != 200:
        raise Refusal(answer.status_code, answer.json()["error"])
    return answer.json()


async def entries(world: World, query: str = "") -> list[dict[str, Any]]:
    return (await get(world, f"audit?limit=1000&{query}"))["items"]


async def alerts(world: World) -> list[tuple[str, str]]:
    """What is wrong after a look, in order; without what this machine's disk may do just now."""
    await world.running.alerts.step()
    found = [(one["kind"], one["severity"]) for one in (await get(world, "alerts"))["items"]]
    return sorted(one for one in found if one[0] != "store.slow")


async def ready(world: World, agent: Agent, **body: Any) -> dict[str, Any]:
    async with agent.at_work():
        return await world.create(template="base", timeoutSeconds=3600, **body)


# The audit.


async def test_who_created_and_released_is_on_record_with_address_and_request(world: World, agent: Agent) -> None:
    made = await ready(world, agent)
    answer = await world.call("DELETE", f"/v1/sandboxes/{made['id']}", headers={"X-Forwarded-For": "203.0.113.9, 198.51.100.7"})
    created, released = await entries(world, f"subject={made['id']}")
    whoami = (await world.call("GET", "/v1/whoami")).json()
    assert (created["action"], created["result"], created["data"]) == ("sandbox.create", "done", {"template": "base", "class": "default"})
    assert (released["action"], released["data"]) == ("sandbox.release", {"reason": "RELEASE_REQUESTED"})
    for entry in (created, released):
        assert (entry["teamId"], entry["clientId"]) == (whoami["team"]["id"], whoami["client"]["id"])
    assert released["requestId"] == answer.headers["x-request-id"]
    assert released["address"] == "198.51.100.7", "the edge's word, not what a client claims"


async def test_every_word_of_an_operator_is_on_record(world: World, agent: Agent) -> None:
    key = (await world.call("POST", "/v1/keys", json={"name": "ci", "team": "others"})).json()
    mine = (await world.call("POST", "/v1/keys", json={"name": "mine"})).json()["key"]["id"]
    await world.call("DELETE", f"/v1/keys/{mine}")
    await world.call("POST", "/v1/enrollment-tokens", json={"hostName": "second"})
    for verb in ("drain", "activate", "disable"):
        await world.call("POST", f"/v1/hosts/local/{verb}")
    found = [(entry["action"], entry["subject"]) for entry in await entries(world)]
    assert found == [
        ("host.enroll", agent.host_id),
        ("key.create", key["key"]["id"]),
        ("key.create", mine),
        ("key.revoke", mine),
        ("enrollment_token.create", "second"),
        ("host.drain", agent.host_id),
        ("host.activate", agent.host_id),
        ("host.disable", agent.host_id),
    ]
    assert (await entries(world, "action=key.create"))[0]["data"] == {"name": "ci", "role": "member", "team": "others"}


async def test_an_effect_that_did_not_happen_leaves_no_entry_of_it(world: World, agent: Agent) -> None:
    with pytest.raises(Refusal):
        await world.create(template="base", timeoutSeconds=10**6)
    assert await entries(world, "action=sandbox.create") == []


async def test_who_was_refused_is_on_record_too(world: World, agent: Agent) -> None:
    key = await world.team("others")
    assert (await world.call("POST", "/v1/hosts/local/disable", key=key)).status_code == 403
    assert (await world.call("POST", "/v1/enrollment-tokens", key=key, json={"hostName": "x"})).status_code == 403
    assert (await world.call("DELETE", "/v1/keys/cli_nobodynobodynobody00", key=key)).status_code == 404
    refused = [(entry["action"], entry["subject"], entry["result"]) for entry in await entries(world) if entry["result"] != "done"]
    assert refused == [
        ("host.disable", "local", "FORBIDDEN"),
        ("enrollment_token.create", "", "FORBIDDEN"),
        ("key.revoke", "cli_nobodynobodynobody00", "KEY_NOT_FOUND"),
    ]


async def test_asking_in_vain_does_not_fill_the_database(world: World, agent: Agent) -> None:
    key = await world.team("others")
    for _ in range(120):
        assert (await world.call("POST", "/v1/hosts/local/drain", key=key)).status_code == 403
    assert 40 <= len(await entries(world, "result=FORBIDDEN")) < 100


async def test_only_operators_see_records(world: World, agent: Agent) -> None:
    key = await world.team("others")
    for path in ("audit", "alerts", "events", "events/stream", "metrics"):
        with pytest.raises(Refusal) as refused:
            await get(world, path, key=key)
        assert refused.value.code == "FORBIDDEN"
    assert (await world.call("GET", "/metrics", key=key)).status_code == 403
    assert (await world.call("GET", "/metrics", key="nobody")).status_code == 401


# Events.


async def test_a_request_a_command_and_a_placement_are_found_from_each_other(world: World, agent: Agent) -> None:
    async with agent.at_work():
        answer = await world.call("POST", "/v1/sandboxes", json={"template": "base", "timeoutSeconds": 3600})
    made, request_id = answer.json(), answer.headers["x-request-id"]
    by_request = (await get(world, f"events?request={request_id}"))["items"]
    assert [event["type"] for event in by_request] == ["sandbox.accepted", "sandbox.placed"]
    placed = by_request[1]
    assert placed["placementId"] == made["placement"]["id"]
    assert placed["commandId"] == f"{placed['placementId']}:1:1" == agent.commands[0].id
    assert placed["hostId"] == agent.host_id
    released = await world.call("DELETE", f"/v1/sandboxes/{made['id']}")
    (event,) = (await get(world, f"events?request={released.headers['x-request-id']}"))["items"]
    assert (event["type"], event["commandId"]) == ("sandbox.releasing", f"{placed['placementId']}:1:2")
    of_sandbox = (await world.call("GET", f"/v1/sandboxes/{made['id']}/events")).json()["items"]
    assert [(one["type"], one["requestId"]) for one in of_sandbox] == [
        ("sandbox.accepted", request_id),
        ("sandbox.placed", request_id),
        ("sandbox.ready", None),
        ("sandbox.releasing", released.headers["x-request-id"]),
    ]


async def test_hosts_and_alerts_stand_among_the_deployments_events(world: World, agent: Agent) -> None:
    await world.call("POST", "/v1/hosts/local/drain")
    assert await alerts(world) == [("deployment.no_host", "critical")]
    await world.call("POST", "/v1/hosts/local/activate")
    assert await alerts(world) == []
    found = [(one["type"], one["sandboxId"], one["hostId"]) for one in (await get(world, "events"))["items"]]
    assert found == [
        ("host.enrolled", None, agent.host_id),
        ("host.drained", None, agent.host_id),
        ("alert.raised", None, None),
        ("host.activated", None, agent.host_id),
        ("alert.cleared", None, None),
    ]
    assert [one["type"] for one in (await get(world, "events?type=host.drained"))["items"]] == ["host.drained"]
    assert [one["type"] for one in (await get(world, "events?newest=true&limit=2"))["items"]] == ["host.activated", "alert.cleared"]


class Stream:
    """An open stream of lines, read as they come."""

    def __init__(self, world: World, path: str, key: str = OPERATOR_KEY) -> None:
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._gone = asyncio.Event()
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": [(b"x-api-key", key.encode())], "client": ("127.0.0.1", 1),
        }  # fmt: skip
        self.task = world.spawn(world.running.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            for line in message.get("body", b"").decode().splitlines():
                if line:
                    self._lines.put_nowait(line)

    async def next(self, timeout_s: float = 5.0) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            return json.loads(await self._lines.get())

    def empty(self) -> bool:
        return self._lines.empty()

    async def leave(self) -> None:
        self._gone.set()
        async with asyncio.timeout(5):
            await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def opened(world: World) -> AsyncIterator[Any]:
    streams: list[Stream] = []

    def follow(path: str, key: str = OPERATOR_KEY) -> Stream:
        streams.append(Stream(world, path, key))
        return streams[-1]

    yield follow
    for stream in streams:
        await stream.leave()


async def test_a_stream_gives_what_comes_and_leaves_nothing_behind(world: World, agent: Agent, opened: Any) -> None:
    before = await ready(world, agent)
    stream = opened(f"{OPERATIONS}/events/stream")
    while world.running.operations.streams == 0:
        await asyncio.sleep(0.01)
    made = await ready(world, agent)
    types = [await stream.next() for _ in range(3)]
    assert [one["type"] for one in types] == ["sandbox.accepted", "sandbox.placed", "sandbox.ready"]
    assert {one["sandboxId"] for one in types} == {made["id"]} != {before["id"]}
    await world.call("POST", "/v1/hosts/local/drain")
    assert (await stream.next())["type"] == "host.drained"
    await stream.leave()
    assert world.running.operations.streams == 0


async def test_a_stream_goes_on_where_it_was_told_to(world: World, agent: Agent, opened: Any) -> None:
    made = await ready(world, agent)
    all_of_it = (await get(world, "events"))["items"]
    stream = opened(f"{OPERATIONS}/events/stream?after={all_of_it[1]['seq']}&sandbox={made['id']}")
    assert [(await stream.next())["seq"] for _ in range(2)] == [one["seq"] for one in all_of_it[2:]]
    await asyncio.sleep(0.1)
    assert stream.empty()


async def test_a_sandboxs_stream_ends_with_it(world: World, agent: Agent, opened: Any) -> None:
    made = await ready(world, agent)
    stream = opened(f"/v1/sandboxes/{made['id']}/events/stream")
    assert [(await stream.next())["type"] for _ in range(3)] == ["sandbox.accepted", "sandbox.placed", "sandbox.ready"]
    async with agent.at_work():
        await world.release(made["id"])
        assert [(await stream.next())["type"] for _ in range(3)] == ["sandbox.releasing", "placement.gone", "sandbox.released"]
        async with asyncio.timeout(5):
            await stream.task


async def test_streams_have_a_number(world: World, agent: Agent, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.control.records.STREAMS_MAX", 2)
    for _ in range(2):
        opened(f"{OPERATIONS}/events/stream")
    while world.running.operations.streams < 2:
        await asyncio.sleep(0.01)
    with pytest.raises(Refusal) as refused:
        await get(world, "events/stream")
    assert refused.value.code == "RATE_LIMITED"


async def test_a_revoked_key_follows_nothing(world: World, agent: Agent, opened: Any) -> None:
    made = await ready(world, agent)
    new = (await world.call("POST", "/v1/keys", json={"name": "other", "role": "operator"})).json()
    streams = [opened(path, new["secret"]) for path in (f"{OPERATIONS}/events/stream?after=0", f"/v1/sandboxes/{made['id']}/events/stream")]
    for stream in streams:
        await stream.next()
    await world.call("DELETE", f"/v1/keys/{new['key']['id']}")
    async with agent.at_work(), asyncio.timeout(10):
        await world.release(made["id"])
        await asyncio.gather(*(stream.task for stream in streams))


async def test_a_stream_does_not_read_again_what_it_does_not_want(
    world: World, agent: Agent, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    real = operations.events

    def events(conn: Any, wanted: Any, *, after: int, **how: Any) -> Any:
        looked.append(after)
        return real(conn, wanted, after=after, **how)

    monkeypatch.setattr(operations, "events", events)
    opened(f"{OPERATIONS}/events/stream?after=0&type=host.disabled")
    await ready(world, agent)
    newest = await world.store.read(operations.last_seq)
    async with asyncio.timeout(5):
        while not looked or looked[-1] < newest:
            await world.call("POST", "/v1/hosts/local/drain")
            await world.call("POST", "/v1/hosts/local/activate")
            await asyncio.sleep(0.05)


# Alerts.


async def test_a_lost_host_is_one_alert_until_it_is_heard_of(world: World, agent: Agent) -> None:
    await ready(world, agent)
    assert await alerts(world) == []
    world.clock.pass_s(LOST_AFTER_S + 1)
    for _ in range(3):
        assert await alerts(world) == [("deployment.no_host", "critical"), ("host.lost", "critical")]
    (lost,) = [one for one in (await get(world, "alerts"))["items"] if one["kind"] == "host.lost"]
    assert (lost["subject"], lost["runbook"]) == (agent.host_id, "docs/RUNBOOK.md#hostlost")
    await agent.poll()
    assert await alerts(world) == []
    cleared = (await get(world, "alerts?state=cleared"))["items"]
    assert {one["kind"] for one in cleared} - {"store.slow"} == {"host.lost", "deployment.no_host"}
    assert all(one["clearedAt"] for one in cleared)


async def test_alerts_outlive_control_and_are_cleared_by_the_next_one(world: World, agent: Agent) -> None:
    world.clock.pass_s(LOST_AFTER_S + 1)
    raised = await alerts(world)
    await world.restart()
    assert await alerts(world) == raised
    assert len((await get(world, "alerts?state=all&kind=host.lost"))["items"]) == 1
    await world.restart()
    await agent.poll()
    assert await alerts(world) == []


async def test_no_host_has_room_for_a_class(world: World, agent: Agent) -> None:
    waiting = await world.accept(template="base", timeoutSeconds=60, requireHost="hst_none")
    async with asyncio.timeout(5):
        while ("sandbox.no_eligible_host", "warning") not in await alerts(world):
            await asyncio.sleep(0.05)
    await world.release(waiting)
    assert await alerts(world) == []


async def test_a_removal_that_does_not_come_to_its_end(world: World, agent: Agent) -> None:
    made = await ready(world, agent)
    agent.script = silent
    await world.release(made["id"])
    await agent.poll()
    assert await alerts(world) == []
    world.clock.pass_s(61)
    await agent.poll()
    world.look_at_deadlines()
    async with asyncio.timeout(5):
        while await alerts(world) != [("sandbox.cleanup_pending", "warning")]:
            await asyncio.sleep(0.05)
    world.clock.pass_s(OVERDUE_S)
    await agent.poll()
    assert await alerts(world) == [("release.overdue", "critical")]


async def test_a_fenced_host_and_what_it_reports(world: World, agent: Agent) -> None:
    agent.quarantined = ["plc_unknown"]
    await agent.poll()
    assert ("host.quarantine", "warning") in await alerts(world)
    await world.call("POST", "/v1/hosts/local/disable", json={"off": True})
    assert await alerts(world) == [("host.disabled", "info")]


async def test_a_full_database_is_told_although_it_cannot_be_written_down(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.base.errors import Code, Unavailable

    def full() -> None:
        raise Unavailable(Code.STORE_FULL, "the disk of the database is full")

    class Full:
        """A store that can be read, and takes nothing."""

        read = staticmethod(world.store.read)
        require_room = staticmethod(full)

        async def write(self, _work: Any, **_: Any) -> None:
            full()

    with monkeypatch.context() as broken:
        broken.setattr(world.running.alerts, "store", Full())
        with pytest.raises(Unavailable):
            await world.running.alerts.step()
        shown = (await get(world, "alerts"))["items"]
        assert [(one["id"], one["kind"]) for one in shown if one["id"] is None] == [(None, "store.full")]
    assert await alerts(world) == []


# Metrics.


async def page(world: World) -> dict[str, float]:
    world.running.operations._census_after = 0.0  # a page that is read twice in a moment counts once
    answer = await world.call("GET", "/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in answer.text.splitlines() if line[0] != "#")}


async def test_the_page_follows_what_happens(world: World, agent: Agent) -> None:
    made = await ready(world, agent)
    await agent.catch_up()
    found = await page(world)
    assert found['atoll_sandboxes{class="default",state="ready"}'] == 1
    assert found['atoll_sandboxes_accepted_total{class="default"}'] == 1
    assert found['atoll_create_phase_seconds_count{phase="total"}'] == 1
    assert found['atoll_hosts{admin="active",health="healthy"}'] == 1
    assert found['atoll_used{resource="memory_mib"}'] == 512
    assert found['atoll_http_requests_total{method="POST",route="/v1/sandboxes",status="2xx"}'] == 1
    assert found['atoll_agent_calls_total{call="poll",status="2xx"}'] >= 1
    assert found["atoll_store_commits_total"] > 3
    assert found['atoll_queue_length{queue="creates"}'] == 0
    ended = 'atoll_sandboxes_ended_total{reason="RELEASE_REQUESTED",result="released"}'
    async with agent.at_work(), asyncio.timeout(10):
        await world.release(made["id"])
        await world.until(made["id"], "released")
        # Counted after the commit, which is what others may see first; the agent's call must not end in between.
        while ended not in (found := await page(world)):
            await asyncio.sleep(0.01)
    assert found[ended] == 1
    assert 'atoll_sandboxes{class="default",state="ready"}' not in found


async def test_two_that_scrape_at_once_see_the_same(world: World, agent: Agent) -> None:
    await world.call("POST", "/v1/hosts/local/disable")
    assert await alerts(world)
    pages = await asyncio.gather(*(page(world) for _ in range(8)))
    seen = [{name: value for name, value in one.items() if name.startswith(("atoll_alerts", "atoll_hosts{"))} for one in pages]
    assert seen[0]
    assert all(one == seen[0] for one in seen)


async def test_failures_are_counted_by_their_reasons(world: World, agent: Agent) -> None:
    agent.script = failing("START_FAILED")
    async with agent.at_work():
        with pytest.raises(Refusal):
            await world.create(template="base", timeoutSeconds=60)
    with pytest.raises(Refusal):
        await world.create(template="base", timeoutSeconds=60, requireHost="hst_none", **{"class": "impatient"})
    found = await page(world)
    assert found['atoll_creates_refused_total{code="START_FAILED"}'] == 1
    assert found['atoll_creates_refused_total{code="NO_CAPACITY"}'] == 1
    assert found['atoll_placement_refusals_total{filter="OTHER_HOST_REQUIRED"}'] >= 1
    assert found['atoll_placements_replaced_total{code="PLACEMENT_LOST"}'] == 2


async def test_no_word_of_a_client_becomes_a_label(world: World, agent: Agent) -> None:
    made = await ready(world, agent, metadata={"who": "canary-label"})
    for path in (
        f"/v1/sandboxes/{made['id']}",
        "/canary-label",
        "/v1/canary-label",
        "/v1/sandboxes/canary-label",
        "/sandboxes/canary-label",
    ):
        await world.call("GET", path)
    async with world._client() as client:
        await client.request("CANARY-LABEL", "/v1/sandboxes", headers={"X-API-KEY": OPERATOR_KEY})
        await client.post("/agent/v1/canary-label")
    text = (await world.call("GET", "/metrics")).text
    assert "canary" not in text.lower()
    assert made["id"] not in text
    assert agent.host_id not in text
    assert 'route="other"' in text
    assert 'route="/v1/sandboxes/{sandbox_id}"' in text


# Every team's sandboxes.


async def test_operators_see_and_end_every_teams_sandboxes(world: World, agent: Agent) -> None:
    theirs = await world.team("others")
    made = await ready(world, agent)
    other = await ready(world, agent, key=theirs)

    async def listed(query: str, key: str = OPERATOR_KEY) -> list[str]:
        answer = await world.call("GET", f"/v1/sandboxes?{query}", key=key)
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()["items"]]

    assert await listed("") == [made["id"]]
    assert await listed("team=*") == [other["id"], made["id"]]
    assert await listed("team=others") == [other["id"]]
    assert await listed("", key=theirs) == await listed("team=others", key=theirs) == [other["id"]]
    for query in ("team=*", "team=default"):
        assert (await world.call("GET", f"/v1/sandboxes?{query}", key=theirs)).status_code == 403
    assert (await world.call("GET", "/v1/sandboxes?team=nobody")).status_code == 400
    seen = await world.show(other["id"])
    assert (seen["accessToken"], other["accessToken"] is not None) == (None, True), "another team's tokens are not for operators"
    await world.release(other["id"])
    assert (await entries(world, f"subject={other['id']}&action=sandbox.release"))[0]["teamId"] != other["teamId"]


# Revisions.


async def test_a_write_that_insists_on_a_revision(world: World, agent: Agent) -> None:
    made = await ready(world, agent)
    path = f"/v1/sandboxes/{made['id']}"
    tag = (await world.call("GET", path)).headers["etag"]
    assert tag == f'"{made["revision"]}"'

    async def end(tag: str) -> int:
        return (await world.call("POST", f"{path}/end", headers={"If-Match": tag}, json={"timeoutSeconds": 600})).status_code

    assert await end(tag) == 200
    stale = await world.call("POST", f"{path}/end", headers={"If-Match": tag}, json={"timeoutSeconds": 700})
    assert (stale.status_code, stale.json()["error"]["code"]) == (412, "REVISION_MISMATCH")
    async with agent.at_work():
        assert await end("*") == 200
    assert await end("banana") == 400
    assert (await world.call("DELETE", path, headers={"If-Match": tag})).status_code == 412
    assert (await world.show(made["id"]))["state"] == "ready"
    now = (await world.call("GET", path)).headers["etag"]
    assert (await world.call("DELETE", path, headers={"If-Match": now})).status_code == 200


async def test_two_that_saw_the_same_revision_do_not_both_win(world: World, agent: Agent) -> None:
    made = await ready(world, agent)
    headers = {"If-Match": f'"{made["revision"]}"'}
    answers = await asyncio.gather(
        *(
            world.call("POST", f"/v1/sandboxes/{made['id']}/end", headers=headers, json={"timeoutSeconds": 600 + number})
            for number in range(10)
        )
    )
    assert sorted(answer.status_code for answer in answers) == [200, *[412] * 9]


async def test_a_hosts_revision_too(world: World, agent: Agent) -> None:
    seen = await world.call("GET", "/v1/hosts/local")
    assert seen.headers["etag"] == f'"{seen.json()["revision"]}"'
    drained = await world.call("POST", "/v1/hosts/local/drain", headers={"If-Match": seen.headers["etag"]})
    assert (drained.status_code, drained.headers["etag"] != seen.headers["etag"]) == (200, True)
    stale = await world.call("POST", "/v1/hosts/local/activate", headers={"If-Match": seen.headers["etag"]})
    assert (stale.status_code, stale.json()["error"]["code"]) == (412, "REVISION_MISMATCH")


# Retention.


async def test_nothing_is_looked_at_before_the_oldest_is_due(world: World, agent: Agent) -> None:
    kept = retention.Kept(records_s=1000.0, audit_s=5000.0, alerts_s=100.0, events_s=2000.0)
    begun = world.clock.now()
    assert await retention.step(world.store, world.clock, kept) == pytest.approx(100.0)  # nothing of it is there, or due, before
    world.clock.pass_s(2000.0)
    assert await retention.step(world.store, world.clock, kept) == retention._BUSY_S
    assert (await get(world, "events"))["items"] == []
    assert len(await entries(world)) == 1
    world.clock.pass_s(3001.0)
    assert await retention.step(world.store, world.clock, kept) == retention._BUSY_S
    assert await entries(world) == []
    assert world.clock.now() > begun


# No secret.

CANARIES = {
    "env": "canary-env-" + "a1b2c3d4e5f6a7b8",
    "metadata-free": "canary-body-" + "b1b2c3d4e5f6a7b8",
}


def forms(secret: str) -> list[bytes]:
    raw = secret.encode()
    return [raw, base64.b64encode(raw).rstrip(b"="), raw.hex().encode(), base64.b64encode(gzip.compress(raw, mtime=0))]


async def test_no_secret_is_in_any_record_page_or_table(world: World, agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    """Environment values, keys, tokens of every kind, and bodies that were refused: nowhere in clear, and nowhere encoded."""
    made = await ready(world, agent, env={"SECRET": CANARIES["env"]})
    key = (await world.call("POST", "/v1/keys", json={"name": "ci"})).json()["secret"]
    token = (await world.call("POST", "/v1/enrollment-tokens", json={"hostName": "second"})).json()["token"]
    await world.call("POST", "/v1/sandboxes", json={"template": "base", "timeoutSeconds": 10**9, "env": {"X": CANARIES["metadata-free"]}})
    await world.call("POST", "/v1/sandboxes", content=b'{"env": {"X": "' + CANARIES["metadata-free"].encode() + b'"')
    await world.call("GET", "/v1/whoami", key="e2b_" + "5" * 40)
    await alerts(world)
    secrets = [*CANARIES.values(), key, token, OPERATOR_KEY, agent.credential, made["accessToken"], "e2b_" + "5" * 40]
    secrets += [payload.access_token or "" for payload in agent.payloads.values()]
    secrets += [command.guest_token or "" for command in agent.commands]
    pages = [
        (await world.call("GET", path)).content
        for path in (
            f"{OPERATIONS}/events?limit=1000", f"{OPERATIONS}/audit?limit=1000", f"{OPERATIONS}/alerts?state=all", "/metrics", "/v1/hosts",
            "/v1/sandboxes?scope=all&team=*", "/v1/status", "/v1/keys",
        )
    ]  # fmt: skip
    tables = [path.read_bytes() for path in world.path.glob("atoll.db*")]
    shown = capfd.readouterr()
    places = [*pages, *tables, shown.out.encode(), shown.err.encode()]
    for secret in filter(None, secrets):
        for form in forms(secret):
            assert not any(form in place for place in places), f"{form!r} was found"
    assert re.search(rb"sandbox\.create", b"".join(pages)), "the pages were not empty"
