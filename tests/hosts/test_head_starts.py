"""A template's start command that one machine has kept as it runs is gone on from on another: real guests on two machines."""

from __future__ import annotations

import base64
import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.agent import origins
from tests.hosts.rig import Machine, Rig, opened, run, until
from tests.hosts.test_moving import Guest, _missing

SERVER = """
import http.server, time
born, keep = time.time_ns(), __import__("os").urandom(40 << 20)
time.sleep(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(born).encode())
    def log_message(self, *_): ...
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
"""Says when it was begun, after three seconds of getting ready."""
ASK = "curl -fsS http://127.0.0.1:8000/"


@pytest.fixture(scope="module")
def two() -> Iterator[Rig]:
    if lack := _missing():
        pytest.skip(f"needs {lack}")
    with opened(replicas=1, machines=2, driver="oci") as rig:
        rig.enrol_all()
        yield rig


class Served:
    """A template whose start command is kept on the first machine, and in the store."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.name = rig, f"h-{uuid.uuid4().hex[:12]}"
        turn(rig, rig.machines[1], "drain")
        with rig.api() as api:
            made = api.post("/v3/templates", json={"name": self.name, "memoryMB": 512, "cpuCount": 1}).raise_for_status().json()
            path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
            code = base64.b64encode(SERVER.encode()).decode()
            start = f"echo {code} | base64 -d >/home/user/server.py; exec python3 /home/user/server.py"
            api.post(f"/v2{path}", json={"fromTemplate": "base", "startCmd": start, "readyCmd": ASK}).raise_for_status()
            until(lambda: api.get(f"{path}/status").json()["status"] in ("ready", "error"), within_s=120, what=rig.last_words)
            answer = api.get(f"{path}/status").json()
            assert answer["status"] == "ready", answer
        turn(rig, rig.machines[1], "activate")
        until(lambda: len(kept(rig.machines[0])) == 1, within_s=30)
        (self.moment,) = kept(rig.machines[0])
        until(lambda: self.moment in stored(rig.machines[0]), within_s=60, what=rig.last_words)

    def create(self, on: Machine, **body: Any) -> tuple[Guest, float]:
        """A sandbox of it there, and how long its create took. *Units*: seconds."""
        guest, began = Guest.__new__(Guest), time.monotonic()
        made = self.rig.call("POST", "/v1/sandboxes", template=self.name, timeoutSeconds=600, preferHost=on.name, **body)
        took = time.monotonic() - began
        guest.rig, guest.id, guest.token = self.rig, made["id"], made["accessToken"]
        assert guest.machine is on
        return guest, took

    def remove(self) -> None:
        for one in self.rig.living():
            with contextlib.suppress(Exception):
                self.rig.call("DELETE", f"/v1/sandboxes/{one}")
        with self.rig.api() as api:
            until(lambda: api.delete(f"/templates/{self.name}").status_code in (204, 404), within_s=60, what=self.rig.last_words)


@pytest.fixture
def served(two: Rig) -> Iterator[Served]:
    made = Served(two)
    yield made
    made.remove()


def turn(rig: Rig, machine: Machine, verb: str) -> None:
    rig.call("POST", f"/v1/hosts/{rig.hosts()[machine.name]['id']}/{verb}")


def kept(machine: Machine) -> list[str]:
    place = machine.home / "sandboxes" / ".snapshots"
    return sorted(path.name for path in place.iterdir()) if place.is_dir() else []


def stored(machine: Machine) -> str:
    """What its agent has said of moments that control knows to be in the store."""
    assert machine.agent is not None
    return "".join(line for line in machine.agent.log.read_text().splitlines() if "moment.stored" in line)


def failed(machine: Machine) -> str:
    """What its agent has said of head starts that it could not have."""
    assert machine.agent is not None
    return "".join(line for line in machine.agent.log.read_text().splitlines() if "head_start.failed" in line)


def told(guest: Guest, event: str) -> dict[str, Any]:
    items = guest.rig.call("GET", f"/v1/sandboxes/{guest.id}/events")["items"]
    return dict(next(one["data"] for one in items if one["type"] == event))


def test_the_other_machine_fetches_it_once_and_goes_on_from_it(two: Rig, served: Served) -> None:
    first, second = two.machines
    here, _ = served.create(first)
    born = here.sh(ASK)
    first_one, fetched_s = served.create(second)
    assert told(first_one, "sandbox.accepted")["head_start"] == served.moment
    if first_one.sh(ASK) != born:
        # The machine is busy: then the first one boots, says so, and the next one has it.
        assert "it is not here yet" in told(first_one, "sandbox.ready")["detail"]
    until(lambda: kept(second) == [served.moment], within_s=60, what=two.last_words)
    there, again_s = served.create(second)
    assert there.sh(ASK) == born, "the same server, begun once, on another machine"
    assert "reason" not in told(there, "sandbox.ready")
    again, _ = served.create(second)
    assert again.sh(ASK) == born
    other, booted_s = served.create(second, size={"memoryMib": 768})
    assert other.sh(ASK) != born
    chance = {one.sh("cat /proc/sys/kernel/random/uuid") for one in (here, there, again)}
    assert len(chance) == 3
    mine, _ = served.create(second, env={"MINE": "1"})
    assert (mine.sh(ASK), mine.sh("echo $MINE")) == (born, "1\n")
    print(f"fetched in {fetched_s:.2f} s, there already {again_s:.2f} s, booted {booted_s:.2f} s")
    assert again_s < booted_s
    assert fetched_s < booted_s + origins.FETCH_S + 3, "who is the first waits no longer than it may"


def _without_packs(rig: Rig) -> Callable[[], None]:
    packs = rig.replicas[0].layout.blobs / "packs"
    away = packs.with_name("packs.away")
    packs.rename(away)
    packs.mkdir()

    def mend() -> None:
        shutil.rmtree(packs)
        away.rename(packs)

    return mend


def _corrupt(rig: Rig) -> Callable[[], None]:
    packs = rig.replicas[0].layout.blobs / "packs" / "sha256"
    whole = {path: path.read_bytes() for path in packs.iterdir()}
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))

    def mend() -> None:
        for path, content in whole.items():
            path.write_bytes(content)

    return mend


def _full(rig: Rig) -> Callable[[], None]:
    inbox = rig.machines[1].home / "sandboxes" / ".inbox"
    inbox.mkdir(exist_ok=True)
    rig.machines[1].inside("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", inbox)
    return lambda: run(*rig.machines[1].command("umount", inbox)).check_returncode()


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(_without_packs, "MOMENT_UNAVAILABLE"), (_corrupt, "MOMENT_CORRUPT"), (_full, "HOST_DISK_FULL")],
    ids=["packs gone", "packs corrupt", "disk full"],
)
def test_what_cannot_be_fetched_is_booted_in_the_same_create(
    two: Rig, served: Served, spoil: Callable[[Rig], Callable[[], None]], code: str
) -> None:
    first, second = two.machines
    born = served.create(first)[0].sh(ASK)
    mend = spoil(two)
    try:
        guest, took = served.create(second)
        next_one, next_s = served.create(second)
        print(f"booted in its place in {took:.2f} s, the next one in {next_s:.2f} s")
        assert next_one.sh(ASK) != born
        assert guest.sh(ASK) != born
        said = told(guest, "sandbox.ready")
        assert said["reason"] == "SNAPSHOT_UNAVAILABLE"
        # The program that fetches may try for longer than anybody waits.
        assert code in said["detail"] or "it is not here yet" in said["detail"], said
        until(lambda: code in failed(second), within_s=60, what=lambda: failed(second))
        assert guest.view["generation"] == 1, "it is the same create's guest"
        assert served.moment not in kept(second)
        assert not _left(second), "nothing of it stays"
    finally:
        mend()
    if spoil is _full:
        time.sleep(origins.AGAIN_S)
        mended, _ = served.create(second)
        assert mended.sh(ASK) == born, "later ones have it"


def _left(machine: Machine) -> list[Path]:
    inbox = machine.home / "sandboxes" / ".inbox"
    return [path for path in inbox.rglob("*") if path.is_file()] if inbox.is_dir() else []


def test_it_outlives_its_machine_and_goes_with_its_template(two: Rig, served: Served) -> None:
    first, second = two.machines
    here, _ = served.create(first)
    born = here.sh(ASK)
    here.delete()
    first.power_off()
    until(lambda: two.hosts()[first.name]["health"] != "healthy", within_s=60, what=two.last_words)

    def goes_on() -> bool:
        """The first create there boots where the machine is busy."""
        there, _ = served.create(second)
        same = there.sh(ASK) == born
        there.delete()
        return same

    until(goes_on, within_s=90, what=two.last_words)
    served.remove()
    first.power_on()
    first.start_agent()
    # Machines that begin say what they have, and are told what nobody needs.
    second.kill_agent()
    second.start_agent()
    until(lambda: not kept(first) and not kept(second), within_s=90, what=two.last_words)
    until(lambda: two.healthy() == len(two.machines), within_s=60, what=two.last_words)
