"""A template's start command that one machine has kept as it runs is gone on from on another: real guests on two machines."""

from __future__ import annotations

import base64
import contextlib
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.agent import origins
from atoll.drivers.oci.config import Names
from atoll.drivers.oci.programs import PROGRAMS as COPIES
from tests.hosts.guests import BINARIES, Guest, missing
from tests.hosts.rig import Machine, Rig, opened, run, until

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
    if lack := missing():
        pytest.skip(f"needs {lack}")
    with opened(replicas=1, machines=2, driver="oci") as rig:
        # However busy this machine is: what may be had is waited for.
        rig.enrol_all(head_start_wait_s=40)
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


def told(guest: Guest, event: str) -> dict[str, Any]:
    items = guest.rig.call("GET", f"/v1/sandboxes/{guest.id}/events")["items"]
    return dict(next(one["data"] for one in items if one["type"] == event))


def test_the_other_machine_fetches_it_once_and_goes_on_from_it(two: Rig, served: Served) -> None:
    first, second = two.machines
    here, _ = served.create(first)
    born = here.sh(ASK)
    there, fetched_s = served.create(second)
    assert told(there, "sandbox.accepted")["head_start"] == served.moment
    assert there.sh(ASK) == born, "the same server, begun once, on another machine"
    assert "reason" not in told(there, "sandbox.ready")
    assert kept(second) == [served.moment]
    again, again_s = served.create(second)
    assert again.sh(ASK) == born
    other, booted_s = served.create(second, size={"memoryMib": 768})
    assert other.sh(ASK) != born
    chance = {one.sh("cat /proc/sys/kernel/random/uuid") for one in (here, there, again)}
    assert len(chance) == 3
    mine, _ = served.create(second, env={"MINE": "1"})
    assert (mine.sh(ASK), mine.sh("echo $MINE")) == (born, "1\n")
    print(f"fetched in {fetched_s:.2f} s, there already {again_s:.2f} s, booted {booted_s:.2f} s")
    assert again_s < booted_s


def test_a_create_waits_no_longer_than_its_host_says_and_the_next_one_has_it(two: Rig, served: Served) -> None:
    first, second = two.machines
    born = served.create(first)[0].sh(ASK)
    with anew(two, second, head_start_wait_s=0):
        guest, _ = served.create(second)
        said = told(guest, "sandbox.ready")
        assert said["reason"] == "SNAPSHOT_UNAVAILABLE"
        assert said["detail"].startswith("it is not here yet: "), said
        assert guest.sh(ASK) != born
        assert guest.view["generation"] == 1, "it is the same create's guest"
        until(lambda: kept(second) == [served.moment], within_s=60, what=two.last_words)
        later, _ = served.create(second)
        assert "reason" not in told(later, "sandbox.ready")
        assert later.sh(ASK) == born


def empty(rig: Rig) -> None:
    """End every sandbox, until nothing of them is on a machine."""
    for one in rig.living():
        rig.call("DELETE", f"/v1/sandboxes/{one}")
    until(lambda: not rig.living(), within_s=60, what=rig.last_words)
    until(lambda: not [one for each in rig.machines for one in (each.home / "sandboxes").glob("plc_*")], within_s=60, what=rig.last_words)


@contextlib.contextmanager
def anew(rig: Rig, machine: Machine, *, head_start_wait_s: float = 40, binaries: Path | None = None) -> Iterator[None]:
    """With another agent's run on this machine, of these settings; afterwards with one like before. No sandbox outlives either."""

    def run_with(wait_s: float, programs: Path | None) -> None:
        # The rig's machines have one tree of control groups: an agent that begins would take another's guests for strangers.
        empty(rig)
        machine.kill_agent()
        machine.configure("head_start_wait_s", wait_s)
        machine.binaries = programs
        others = programs is not None
        # One that has had another version goes on from that, too.
        for copy in (machine.home / "sandboxes" / COPIES).glob("runsc-*"):
            copy.unlink()
        machine.start_agent()
        until(lambda: another_kind(rig, machine) == others and rig.healthy() == len(rig.machines), within_s=60, what=rig.last_words)
        seen = rig.hosts()[machine.name]["seenAt"]
        until(lambda: rig.hosts()[machine.name]["seenAt"] != seen, within_s=60, what=rig.last_words)

    run_with(head_start_wait_s, binaries)
    try:
        yield
    finally:
        run_with(40, None)


def healthy(rig: Rig, machine: Machine) -> bool:
    return bool(rig.hosts()[machine.name]["health"] == "healthy")


def quiet(rig: Rig) -> bool:
    """Whether no machine has had a guest for two seconds."""
    group = Names(rig.install_id.removeprefix("ins_")[:8]).cgroup
    for _ in range(4):
        if list(Path("/sys/fs/cgroup").glob(f"memory/{group}/*/")) + list(Path("/sys/fs/cgroup").glob(f"{group}/*/")):
            return False
        time.sleep(0.5)
    return True


def another_kind(rig: Rig, machine: Machine) -> bool:
    """Whether what this machine goes on from is what `other_runsc` makes of it."""
    return any(kind.endswith("/runsc another") for kind in rig.hosts()[machine.name]["goesOnFrom"])


def other_runsc(place: Path) -> Path:
    """The same programs, but for a runsc that says to be of another version: what it saves, or others have, is not of its kind."""
    place.mkdir()
    for program in BINARIES.iterdir():
        (place / program.name).symlink_to(program)
    (place / "runsc").unlink()
    (place / "runsc").write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "runsc version another"; exit; fi\nexec {BINARIES / "runsc"} "$@"\n'
    )
    (place / "runsc").chmod(0o755)
    return place


def test_a_machine_of_another_kind_boots_it_and_says_that_it_does_not_suit(two: Rig, served: Served, tmp_path: Path) -> None:
    first, second = two.machines
    born = served.create(first)[0].sh(ASK)
    tmp_path.chmod(0o755)
    with anew(two, second, binaries=other_runsc(tmp_path / "bin")):
        # Hosts of its kind come first, whoever is preferred.
        made = two.call("POST", "/v1/sandboxes", template=served.name, timeoutSeconds=600, preferHost=second.name)
        assert two.get(made["id"])["placement"]["hostId"] == two.hosts()[first.name]["id"]
        turn(two, first, "drain")
        try:
            guest, _ = served.create(second)
        finally:
            turn(two, first, "activate")
        said = told(guest, "sandbox.ready")
        assert said["reason"] == "MOMENT_UNSUITABLE", said
        assert re.fullmatch(
            r"it was saved by \S+/gvisor/\S+/runsc .+, and this host goes on from \S+/gvisor/\S+/runsc another", said["detail"]
        ), said
        assert guest.sh(ASK) != born
        assert guest.view["generation"] == 1, "it is the same create's guest"
        assert kept(second) == [], "nothing was fetched"


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
        for one in (guest, next_one):
            assert one.sh(ASK) != born
            assert told(one, "sandbox.ready")["reason"] == code, told(one, "sandbox.ready")
        assert " s ago)" in told(next_one, "sandbox.ready")["detail"], "nobody waits for it a second time"
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

    there, _ = served.create(second)
    assert there.sh(ASK) == born
    assert "reason" not in told(there, "sandbox.ready")
    there.delete()
    served.remove()
    # Machines that begin say what they have, and are told what nobody needs. One after the other: each begins a guest to see whether it can.
    second.kill_agent()
    second.start_agent()
    until(lambda: healthy(two, second), within_s=60, what=two.last_words)
    until(lambda: quiet(two), within_s=60, what=two.last_words)
    first.power_on()
    first.start_agent()
    until(lambda: not kept(first) and not kept(second), within_s=90, what=two.last_words)
    until(lambda: two.healthy() == len(two.machines), within_s=60, what=two.last_words)
