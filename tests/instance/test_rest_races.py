"""A breaker at rest and its ways: verbs at once, deletions in the midst, crowds at the door, an agent killed in a handover. What is left can be acted on."""

from __future__ import annotations

import concurrent.futures
import random
import time
from typing import Any

import httpx
import pytest

from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, kill

CROWD = 100
WAYS = ("pause", "suspend", "resume", "snapshots", "forks")
REFUSED = {"ILLEGAL_STATE", "SANDBOX_NOT_FOUND", "PLACEMENT_LOST", "SANDBOX_RELEASING"}
"""What a verb may be answered that has met another one: say it again, or it is gone."""


def ask(client: Client, sandbox_id: str, verb: str) -> httpx.Response:
    body: dict[str, Any] = {"count": 2} if verb == "forks" else {}
    return client.http.post(f"/v1/sandboxes/{sandbox_id}/{verb}", json=body)


def at_once(client: Client, sandbox_id: str, verbs: list[str]) -> list[httpx.Response]:
    with concurrent.futures.ThreadPoolExecutor(len(verbs)) as pool:
        return list(pool.map(lambda verb: ask(client, sandbox_id, verb), verbs))


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def swept(instance: Instance, client: Client) -> None:
    """Everything that lives can be deleted, and snapshots too; the machine holds nothing then."""
    for sandbox_id in client.living():
        assert client.http.delete(f"/v1/sandboxes/{sandbox_id}").status_code in (200, 202, 404)
    until(lambda: not client.living(), within_s=60, what=lambda: f"{client.living()}\n{instance.last_words()}")
    for one in client.http.get("/v1/snapshots").json()["items"]:
        assert client.http.delete(f"/v1/snapshots/{one['id']}").status_code == 200, one
    until(lambda: client.host()["used"]["slots"] == 0, within_s=30, what=instance.last_words)
    until(lambda: not list(instance.layout.sandboxes.glob("plc_*")), within_s=30, what=instance.last_words)
    snapshots = instance.layout.sandboxes / ".snapshots"
    until(lambda: not snapshots.exists() or not any(snapshots.iterdir()), within_s=30, what=instance.last_words)


def types(client: Client, sandbox_id: str) -> list[str]:
    return [one["type"] for one in client.http.get(f"/v1/sandboxes/{sandbox_id}/events").json()["items"]]


@pytest.mark.parametrize("rest", ["pause", "suspend"])
def test_of_many_resumes_one_brings_it_back(instance: Instance, client: Client, rest: str) -> None:
    sandbox = client.create()
    sandbox.files.write("/home/user/kept", "kept")
    assert ask(client, sandbox.sandbox_id, rest).status_code == 200
    answers = at_once(client, sandbox.sandbox_id, ["resume"] * 20)
    assert {(answer.status_code, answer.json()["state"]) for answer in answers} == {(200, "ready")}, [answer.text for answer in answers]
    assert types(client, sandbox.sandbox_id).count("sandbox.resuming") == 1
    assert client.connect(sandbox.sandbox_id).files.read("/home/user/kept") == "kept"
    swept(instance, client)


@pytest.mark.parametrize("seed", range(3))
def test_all_verbs_at_once_leave_a_sandbox_that_goes_on(instance: Instance, client: Client, seed: int) -> None:
    """Whoever comes too late is told; in the end it is in one state, and comes back from there with what it had."""
    sandbox = client.create()
    sandbox.files.write("/home/user/kept", "kept")
    verbs = list(WAYS) * 2
    random.Random(seed).shuffle(verbs)
    answers = at_once(client, sandbox.sandbox_id, verbs)
    for verb, answer in zip(verbs, answers, strict=True):
        assert answer.status_code in (200, 201) or code_of(answer) in REFUSED, f"{verb}: {answer.text}"
    until(lambda: client.state(sandbox.sandbox_id) in ("ready", "paused", "suspended"), what=instance.last_words)
    if client.state(sandbox.sandbox_id) != "ready":
        assert ask(client, sandbox.sandbox_id, "resume").status_code == 200
    assert client.connect(sandbox.sandbox_id).files.read("/home/user/kept") == "kept"
    swept(instance, client)


@pytest.mark.parametrize("verb", WAYS)
def test_a_delete_in_the_midst_ends_it_at_once(instance: Instance, client: Client, verb: str) -> None:
    """And whoever waits for the verb is answered, and nothing comes back of it."""
    for after_s in (0.0, 0.03, 0.1, 0.25):
        sandbox_id = client.create().sandbox_id
        if verb == "resume":
            assert ask(client, sandbox_id, "suspend").status_code == 200
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, client, sandbox_id, verb)
            time.sleep(after_s)
            assert client.http.delete(f"/v1/sandboxes/{sandbox_id}").status_code in (200, 202)
            answer = asked.result(timeout=30)
        assert answer.status_code in (200, 201) or code_of(answer) in REFUSED | {"SAVE_FAILED"}, f"{verb} after {after_s} s: {answer.text}"
        until(lambda sandbox_id=sandbox_id: client.state(sandbox_id) == "released", within_s=20, what=instance.last_words)  # type: ignore[misc]
    swept(instance, client)


def test_a_crowd_at_the_door_of_a_resting_sandbox_is_let_in(instance: Instance, client: Client) -> None:
    sandbox = client.create(timeout=120, lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.files.write("/home/user/kept", "kept")
    sandbox.commands.run("cd /home/user && python3 -m http.server 8000", background=True)
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
    address = client.options["sandbox_url"]

    def knock(_: int) -> tuple[int, str]:
        with httpx.Client(timeout=60, trust_env=False) as http:
            answer = http.get(f"{address}/kept", headers={**headers, "X-Access-Token": sandbox._envd_access_token or ""})
            return answer.status_code, answer.text

    until(lambda: knock(0)[0] == 200, what=instance.last_words)
    for number in range(1, 3):
        assert sandbox.pause()
        with concurrent.futures.ThreadPoolExecutor(CROWD) as pool:
            answers = list(pool.map(knock, range(CROWD)))
        assert set(answers) == {(200, "kept")}, f"round {number}"
        assert types(client, sandbox.sandbox_id).count("sandbox.resuming") == number
    swept(instance, client)


def test_a_delete_while_a_crowd_wakes_it_answers_all_of_them(instance: Instance, client: Client) -> None:
    sandbox = client.create(timeout=120, lifecycle={"on_timeout": "pause", "auto_resume": True})
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": sandbox._envd_access_token or ""}
    assert sandbox.pause()

    def knock(_: int) -> int:
        with httpx.Client(timeout=60, trust_env=False) as http:
            return http.get(f"{client.options['sandbox_url']}/health", headers=headers).status_code

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        crowd = [pool.submit(knock, number) for number in range(40)]
        time.sleep(0.1)
        assert client.http.delete(f"/v1/sandboxes/{sandbox.sandbox_id}").status_code in (200, 202)
        answers = {one.result(timeout=60) for one in crowd}
    assert answers <= {200, 204, 404, 410, 502, 503}, answers
    assert time.monotonic() - began < 30.0, "nobody is held for ever"
    until(lambda: client.state(sandbox.sandbox_id) == "released", within_s=20, what=instance.last_words)
    swept(instance, client)


def test_an_agent_that_is_killed_in_a_handover_loses_no_create(instance: Instance, client: Client) -> None:
    """A guest made ahead is somebody's once, with what its create brought, or the create begins anew; nobody gets two, or another's."""
    count = 3
    assert client.http.put("/v1/templates/base/warm", json={"count": count}).status_code == 200
    try:
        for after_s in (0.0, 0.004, 0.01, 0.02):
            until(lambda: client.host()["warm"] >= count, within_s=120, what=instance.last_words)
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                creating = [pool.submit(client.create, envs={"MINE": f"{after_s}/{number}"}) for number in range(count)]
                time.sleep(after_s)
                kill(instance, "agent")
                made = [one.result(timeout=90) for one in creating]
            assert len({one.sandbox_id for one in made}) == count
            for number, one in enumerate(made):
                assert one.commands.run("echo $MINE").stdout == f"{after_s}/{number}\n"
            for one in made:
                assert client.kill(one.sandbox_id)
    finally:
        client.http.put("/v1/templates/base/warm", json={"count": 0})
    until(lambda: client.host()["warm"] == 0, within_s=60, what=instance.last_words)
    swept(instance, client)
