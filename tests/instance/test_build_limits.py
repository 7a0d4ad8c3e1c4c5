"""What a build may take, as the deployment document says: a step, a start command and a whole build that never end do end, and leave nothing."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from e2b import Template
from e2b.exceptions import BuildException

from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, look
from tests.instance.test_builds import ended, nothing_left, start, status, until_said

CLASSES = "version: 1\nclasses:\n  default:\n    or_stronger: true\n"
SPARE_S = 60
"""What a busy machine may take besides: a sandbox to begin and to end."""


@pytest.fixture
def name() -> str:
    return f"b-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def limited(instance: Instance, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Applies a document with these limits of builds, and these timeouts of sandboxes; afterwards there are none."""

    def apply(timeouts: Mapping[str, str] | None = None, **builds: str) -> None:
        document = tmp_path / "deployment.yaml"
        document.write_text(CLASSES + f"    timeouts: {written(timeouts or {})}\nbuilds: {written(builds)}\n")
        instance.run("config", "apply", str(document))

    yield apply
    apply()


def written(limits: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in limits.items()) + "}"


def test_a_start_command_that_never_gets_ready_ends_its_build(
    instance: Instance, client: Client, name: str, limited: Callable[..., None]
) -> None:
    limited(start="4s")
    build = start(client, name, ["true"], startCmd="echo i take for ever; sleep infinity", readyCmd="false")
    until(lambda: look(instance).guests and any(one.get("step") == "finalize" for one in status(client, build)["logEntries"]), within_s=90)
    began = time.monotonic()
    done = ended(client, build)
    assert time.monotonic() - began < 4 + SPARE_S
    assert done["status"] == "error", done
    assert done["reason"]["step"] == "finalize", done
    assert "the start command was not ready within 4 s" in done["reason"]["message"], done
    assert "i take for ever" in done["reason"]["message"], done
    assert any("START_COMMAND_FAILED" in line for line in done["logs"]), done
    assert client.http.post("/v1/sandboxes", json={"template": name}).status_code == 404
    nothing_left(instance)


def test_a_start_command_is_begun_once(instance: Instance, client: Client, name: str, limited: Callable[..., None]) -> None:
    """Each attempt takes as long as the first: a build would wait for three of them."""
    limited(start="3s")
    build = start(client, name, ["true"], startCmd="sleep infinity", readyCmd="false")
    placements: set[str] = set()

    def over() -> bool:
        if any(one.get("step") == "finalize" for one in status(client, build)["logEntries"]):
            placements.update(look(instance).placements)
        return status(client, build)["status"] != "building"

    until(over, within_s=120)
    assert len(placements) == 1, placements
    nothing_left(instance)


def test_a_build_whose_step_never_ends_is_over_at_its_limit(
    instance: Instance, client: Client, name: str, limited: Callable[..., None]
) -> None:
    limited(whole="15s")
    build = start(client, name, ["true", "echo begun; sleep infinity"])
    until_said(client, build, "begun")
    done = ended(client, build)
    assert done["status"] == "error", done
    assert done["reason"]["step"] == "2", done
    assert done["reason"]["message"] == "the build took longer than 15 s", done
    nothing_left(instance)
    limited(whole="5m")
    done = ended(client, start(client, name, ["true"]))
    assert done["status"] == "ready", done


def test_a_step_that_never_ends_is_over_at_its_limit(instance: Instance, client: Client, name: str, limited: Callable[..., None]) -> None:
    limited(step="3s")
    build = start(client, name, ["true", "echo begun; sleep infinity", "true"])
    done = ended(client, build)
    assert done["status"] == "error", done
    assert done["reason"]["step"] == "2", done
    assert "sleep infinity" in done["reason"]["message"], done
    assert "took longer than 3 s" in done["reason"]["message"], done
    nothing_left(instance)


def test_the_public_builder_says_which_limit_it_was(instance: Instance, client: Client, name: str, limited: Callable[..., None]) -> None:
    """As the unmodified SDK raises it: the message, and in the build's status the step."""
    limited(start="3s", step="10s")
    wanted = Template().from_template("base").run_cmd("true").set_start_cmd("echo not yet; sleep infinity", "false")
    options = {name: client.options[name] for name in ("api_key", "api_url", "domain")}
    with pytest.raises(BuildException, match=r"not ready within 3 s.*not yet"):
        Template.build(wanted, name, cpu_count=1, memory_mb=512, **options)
    (shown,) = client.http.get(f"/templates/{name}").json()["builds"]
    found = client.http.get(f"/templates/{name}/builds/{shown['buildID']}/status").json()
    assert (found["status"], found["reason"]["step"]) == ("error", "finalize"), json.dumps(found)
    nothing_left(instance)


SMALLER = "test $(sed -n 's/^MemTotal: *//p' /proc/meminfo | cut -d' ' -f1) -lt 700000"
"""Ready in a build of 512 MiB, and in no larger sandbox."""


@pytest.mark.parametrize(
    ("timeouts", "words"),
    [
        ({"start": "3s"}, "was not ready within 3 s"),
        # Control gives up long before the host does: as on a host that is so busy that its guest was late to answer.
        ({"start": "5m", "patience": "9s"}, "is not ready yet"),
    ],
    ids=["host", "control"],
)
def test_whoever_gives_up_first_the_create_says_what_its_start_command_said(
    instance: Instance, client: Client, name: str, limited: Callable[..., None], timeouts: Mapping[str, str], words: str
) -> None:
    limited()
    done = ended(client, start(client, name, ["true"], startCmd="echo waiting for less memory; sleep infinity", readyCmd=SMALLER))
    assert done["status"] == "ready", done
    limited(timeouts)
    refused = client.http.post("/v1/sandboxes", json={"template": name, "size": {"memoryMib": 1024}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "START_COMMAND_FAILED"), refused.text
    assert words in refused.json()["error"]["message"], refused.text
    assert "waiting for less memory" in refused.json()["error"]["message"], refused.text
    nothing_left(instance)


def test_a_file_for_which_there_is_no_memory_is_named_and_one_with_room_is_taken(instance: Instance, client: Client, name: str) -> None:
    """The runtime holds each file whole to hand it out; the kernel ends it where that does not fit, however often it is tried."""
    write = "head -c 200M /dev/urandom >/home/user/large"

    def build(memory_mib: int) -> dict[str, Any]:
        asked = client.http.post("/v3/templates", json={"name": name, "memoryMB": memory_mib}).raise_for_status().json()
        path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
        recipe = {"fromTemplate": "base", "steps": [{"type": "RUN", "args": ["true"]}, {"type": "RUN", "args": [write]}]}
        client.http.post(f"/v2{path}", json=recipe).raise_for_status()
        return ended(client, {"path": f"{path}/status", **asked})

    failed = build(128)
    assert (failed["status"], failed["reason"]["step"]) == ("error", "2"), failed
    assert "build it with more memory than its largest file has" in failed["reason"]["message"], failed
    assert not any("once more" in line for line in failed["logs"]), failed["logs"]
    nothing_left(instance)
    done = build(512)
    assert done["status"] == "ready", done
    nothing_left(instance)
