"""Two control replicas, with a bucket in common, build templates with real guests on one machine: kill -9 of the one that builds, and both at once.

Steps need an edge, which the rig has not: these builds begin a start command, and have none.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.hosts.guests import Guest, missing
from tests.hosts.rig import Rig, opened, until
from tests.objects.server import S3Server
from tests.store.server import Server


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if lack := missing():
        pytest.skip(f"needs {lack}")
    server = Server.start(tmp_path_factory.mktemp("postgres"))
    try:
        with opened(replicas=2, machines=1, database_url=asyncio.run(server.database()), driver="oci") as rig:
            bucket = S3Server(tmp_path_factory.mktemp("s3"), address=rig.address)
            bucket.start()
            try:
                for replica in rig.replicas:
                    bucket.keep_credentials(replica.layout.secrets / "bucket.json")
                    with replica.layout.control_config.open("a") as file:
                        file.write("\n" + bucket.toml("secrets/bucket.json"))
                    replica.program.kill()
                    replica.start()
                    until(replica.well, within_s=60, what=rig.last_words)
                rig.enrol_all()
                yield rig
            finally:
                bucket.stop()
    finally:
        server.stop()


@pytest.fixture
def name(both: Rig) -> Iterator[str]:
    name = f"two-{uuid.uuid4().hex[:10]}"
    yield name
    for one in both.living():
        both.call("DELETE", f"/v1/sandboxes/{one}")
    with both.api(both._living()) as api:
        until(lambda: api.delete(f"/templates/{name}").status_code in (204, 404), within_s=60, what=both.last_words)


class Building:
    """One build, begun at a replica."""

    def __init__(self, rig: Rig, at: int, name: str, tags: Sequence[str] = (), **body: Any) -> None:
        self.rig = rig
        with rig.api(at) as api:
            asked = (
                api.post("/v3/templates", json={"name": name, "tags": list(tags), "memoryMB": 512, "cpuCount": 1}).raise_for_status().json()
            )
            self.path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
            api.post(f"/v2{self.path}", json={"fromTemplate": "base", **body}).raise_for_status()

    def status(self) -> dict[str, Any]:
        with self.rig.api(self.rig._living()) as api:
            return dict(api.get(f"{self.path}/status").raise_for_status().json())

    def said(self, word: str) -> bool:
        return any(word in line for line in self.status()["logs"])

    def ended(self, *, within_s: float = 180) -> dict[str, Any]:
        def over() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return self.status()["status"] in ("ready", "error")
            return False

        until(over, within_s=within_s, what=self.rig.last_words)
        return self.status()


def created(rig: Rig, template: str) -> Guest:
    made = rig.call("POST", "/v1/sandboxes", template=template, timeoutSeconds=600)
    guest = Guest.__new__(Guest)
    guest.rig, guest.id, guest.token = rig, made["id"], made["accessToken"]
    return guest


def nothing_left(rig: Rig) -> None:
    """No sandbox of a build is on record or on the machine."""
    (machine,) = rig.machines

    def gone() -> bool:
        return not list((machine.home / "sandboxes").glob("plc_*")) and not machine.inside("pgrep", "-f", "atoll-guest", check=False).stdout

    until(gone, within_s=90, what=rig.last_words)
    until(lambda: rig.hosts()[machine.name]["used"]["slots"] == 0, within_s=60, what=rig.last_words)


def back(rig: Rig, number: int) -> None:
    rig.replicas[number].start()
    until(rig.replicas[number].well, within_s=60, what=rig.last_words)
    until(lambda: rig.healthy() == len(rig.machines), within_s=60, what=rig.last_words)


START = "sleep 8; echo up >/home/user/up; sleep 600"


def test_the_other_replica_ends_what_a_killed_one_was_building(both: Rig, name: str) -> None:
    """In its last phase, in which a real guest is begun and awaited; the earlier ones are shown against a workshop (`tests/sim`)."""
    build = Building(both, 0, name, startCmd=START, readyCmd="test -e /home/user/up")
    (machine,) = both.machines
    until(lambda: build.said("starting: ") and list((machine.home / "sandboxes").glob("plc_*")), within_s=120, what=both.last_words)
    both.replicas[0].program.kill()
    try:
        began = time.monotonic()
        done = build.ended()
        print(f"ended {time.monotonic() - began:.1f} s after the kill: {done['status']}")
        assert done["status"] == "ready", done
        guest = created(both, name)
        assert guest.sh("cat /home/user/up") == "up\n"
        guest.delete()
    finally:
        back(both, 0)
    nothing_left(both)


def test_both_build_one_template_under_two_tags_at_once(both: Rig, name: str) -> None:
    builds = [Building(both, at, name, tags=[tag], startCmd=START, readyCmd="test -e /home/user/up") for at, tag in ((0, "a"), (1, "b"))]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ended = list(pool.map(Building.ended, builds))
    assert [one["status"] for one in ended] == ["ready", "ready"], ended
    for tag in ("a", "b"):
        guest = created(both, f"{name}:{tag}")
        assert guest.sh("cat /home/user/up") == "up\n"
        guest.delete()
    nothing_left(both)
