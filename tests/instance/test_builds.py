"""kill -9 in the middle of a template's build: it goes on from what was done, or ends with a clear reason, and leaves nothing."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, kill, look

STEPS = ["date +%s%N >/home/user/first", "echo second-begins; sleep 6; echo two >/home/user/second", "echo three >/home/user/third"]


def start(client: Client, name: str, steps: list[str], **body: Any) -> dict[str, Any]:
    asked = client.http.post("/v3/templates", json={"name": name})
    assert asked.status_code == 202, asked.text
    build = asked.json()
    path = f"/v2/templates/{build['templateID']}/builds/{build['buildID']}"
    recipe = {"fromTemplate": "base", "steps": [{"type": "RUN", "args": [command]} for command in steps], **body}
    begun = client.http.post(path, json=recipe)
    assert begun.status_code == 202, begun.text
    return {"path": f"/templates/{build['templateID']}/builds/{build['buildID']}/status", **build}


def status(client: Client, build: dict[str, Any]) -> dict[str, Any]:
    answer = client.http.get(build["path"])
    answer.raise_for_status()
    return dict(answer.json())


def until_said(client: Client, build: dict[str, Any], word: str) -> None:
    # The step's name, which has the word as well, is said before its sandbox is there.
    until(lambda: any(word in line and not line.startswith("[") for line in status(client, build)["logs"]), within_s=90)


def ended(client: Client, build: dict[str, Any]) -> dict[str, Any]:
    def over() -> bool:
        try:
            return status(client, build)["status"] in ("ready", "error")
        except Exception:
            return False

    until(over, within_s=150)
    return status(client, build)


def nothing_left(instance: Instance) -> None:
    until(lambda: not look(instance).placements, within_s=60, what=lambda: str(look(instance).placements))
    partial = instance.layout.blobs / "partial"
    assert not partial.is_dir() or not list(partial.iterdir())


@pytest.mark.parametrize("programs", [("control",), ("agent",), ("edge",), ("control", "agent", "edge")], ids="+".join)
@pytest.mark.parametrize("moment", ["step", "capture"])
def test_a_build_outlives_what_is_killed(instance: Instance, programs: tuple[str, ...], moment: str) -> None:
    name = f"b-{uuid.uuid4().hex[:12]}"
    with Client(instance) as client:
        steps = STEPS if moment == "step" else [STEPS[0], "head -c 300M /dev/urandom >/home/user/large; echo second-begins", STEPS[2]]
        build = start(client, name, steps)
        until_said(client, build, "second-begins")
        kill(instance, *programs)
        instance.until_well()
        done = ended(client, build)
        if "edge" in programs and done["status"] == "error":
            # Whoever carried the step's words is gone: nobody knows how it ended, and that is said.
            assert done["reason"]["step"] == "2", done
            build = start(client, name, steps)
            done = ended(client, build)
        if "agent" in programs and moment == "capture" and done["status"] == "error":
            raise AssertionError(done)
        assert done["status"] == "ready", done
        assert sum(line.startswith("[1/3]") for line in done["logs"]) <= 1
        sandbox = client.create(template=name)
        assert sandbox.commands.run("cat /home/user/third").stdout == "three\n"
        sandbox.kill()
    nothing_left(instance)
    client.http.close()


def test_a_build_that_control_cannot_finish_says_so(instance: Instance) -> None:
    name = f"b-{uuid.uuid4().hex[:12]}"
    with Client(instance) as client:
        build = start(client, name, ["echo begun; sleep 60"])
        until_said(client, build, "begun")
        for times in range(3):
            until(lambda times=times: sum("going on" in line for line in status(client, build)["logs"]) == times, within_s=90)
            kill(instance, "control")
            instance.until_well()
        failed = ended(client, build)
        assert failed["status"] == "error"
        assert "stopped 3 times" in failed["reason"]["message"]
    nothing_left(instance)


@pytest.mark.parametrize("how", ["cancelled", "deleted"])
def test_what_is_given_up_leaves_nothing(instance: Instance, how: str) -> None:
    name = f"b-{uuid.uuid4().hex[:12]}"
    with Client(instance) as client:
        build = start(client, name, ["echo begun; sleep 60"])
        until_said(client, build, "begun")
        if how == "deleted":
            assert client.http.delete(f"/templates/{name}").status_code == 204
        else:
            newer = start(client, name, ["true"])
            assert status(client, build)["status"] == "error"
            assert ended(client, newer)["status"] == "ready"
    nothing_left(instance)
