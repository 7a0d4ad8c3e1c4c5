"""A suspended sandbox comes back on another machine, whatever becomes of the one that saved it: real guests on two machines."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from atoll.programs import instance
from tests.hosts.guests import BINARIES, Guest, counting, resumed
from tests.hosts.rig import Machine, Program, Rig, free_ports, run, until


def test_it_goes_on_where_its_machine_was_cut_off(two: Rig) -> None:
    first, second = two.machines
    guest, digest = counting(two, first)
    generation, before = guest.view["generation"], guest.count()
    guest.suspend()
    guest.stored()
    # Its machine is gone for good, with everything on it, and with the copy that it still had.
    first.power_off()
    until(lambda: two.hosts()[first.name]["health"] == "lost", within_s=150, what=two.last_words)
    back = resumed(guest)
    assert (back["id"], guest.view["accessToken"] or guest.token) == (guest.id, guest.token)
    assert guest.machine is second
    assert guest.view["generation"] == generation + 1
    there = guest.count()
    assert there >= before, "its memory counts on"
    time.sleep(0.3)
    assert guest.count() > there
    assert guest.sh("sha256sum kept") == digest
    # Back again, its machine gives up what it still has, and the sandbox has ended once that was seen. Both machines share one kernel's control
    # groups: what the other one held must be gone before, or this one would take it for a stranger's.
    two.call("DELETE", f"/v1/sandboxes/{guest.id}")
    until(lambda: not list((second.home / "sandboxes").glob("plc_*")), within_s=60, what=two.last_words)
    first.power_on()
    first.start_agent()
    until(lambda: guest.view["state"] == "released", within_s=90, what=two.last_words)
    until(lambda: two.healthy() == len(two.machines), within_s=60, what=two.last_words)
    assert not list((first.home / "sandboxes").glob("plc_*"))


@pytest.mark.parametrize("when", ["uploading", "fetching"])
def test_an_agent_that_is_killed_on_the_way_loses_nothing(two: Rig, when: str) -> None:
    first, second = two.machines
    guest, digest = counting(two, first)
    before = guest.count()
    guest.suspend()
    if when == "uploading":
        first.kill_agent()
        _end_programs("moment")
        first.start_agent()
    guest.stored()
    two.call("POST", f"/v1/hosts/{two.hosts()[first.name]['id']}/drain")
    until(lambda: guest.view["placement"] is None, within_s=90, what=two.last_words)
    if when == "fetching":
        import threading

        resuming = threading.Thread(target=lambda: resumed(guest))
        resuming.start()
        until(lambda: any((second.home / "sandboxes").glob(".inbox/*")) or guest.view["state"] == "ready", within_s=30)
        second.kill_agent()
        _end_programs("moment")
        second.start_agent()
        resuming.join(timeout=170)
        until(lambda: guest.view["state"] == "ready", within_s=60, what=two.last_words)
    else:
        resumed(guest)
    assert guest.machine is second
    assert guest.count() >= before
    assert guest.sh("sha256sum kept") == digest
    guest.delete()
    two.call("POST", f"/v1/hosts/{two.hosts()[first.name]['id']}/activate")


def _end_programs(word: str) -> None:
    """Those of the rig's machines alone: they are known by their work."""
    found = run("pgrep", "-f", f"atoll-io {word}", check=False).stdout.split()
    for pid in found:
        if str(BINARIES).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)


def test_a_store_that_lost_it_says_so_and_it_can_still_be_deleted(two: Rig) -> None:
    first, _ = two.machines
    guest, _ = counting(two, first)
    guest.suspend()
    guest.stored()
    two.call("POST", f"/v1/hosts/{two.hosts()[first.name]['id']}/drain")
    until(lambda: guest.view["placement"] is None, within_s=90, what=two.last_words)
    packs = two.replicas[0].layout.blobs / "packs"
    packs.rename(packs.with_name("packs.away"))
    with pytest.raises(httpx.HTTPStatusError) as told:
        guest.resume()
    assert "MOMENT_UNAVAILABLE" in told.value.response.text
    assert guest.view["state"] == "suspended", "it can be acted upon"
    packs.with_name("packs.away").rename(packs)
    for path in (packs / "sha256").iterdir():
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    with pytest.raises(httpx.HTTPStatusError) as told:
        guest.resume()
    assert "MOMENT_CORRUPT" in told.value.response.text
    assert guest.view["state"] == "suspended"
    guest.delete()
    two.call("POST", f"/v1/hosts/{two.hosts()[first.name]['id']}/activate")


class Edge:
    """An edge on a machine, where that machine's guests are; control's own listener is brought there by a relay."""

    def __init__(self, rig: Rig, on: Machine, path: Path) -> None:
        control = rig.replicas[0]
        self.port, self.on, self.domain = free_ports(3), on, instance.load(control.layout).domain
        self.relay = Relay((rig.address, self.port + 2), ("127.0.0.1", control.port + 1))
        config = {
            "listen": f"{on.address}:{self.port}",
            "admin": f"127.0.0.1:{self.port + 1}",
            "control": f"http://{rig.address}:{self.port + 2}",
            "token_file": str(control.layout.secrets / "edge.token"),
            "domain": self.domain,
            "edge_id": "edge-elsewhere",
            "registry": str(path / "nobody.sock"),
        }
        (path / "edge.json").write_text(json.dumps(config))
        command = on.command(BINARIES / "atoll-io", "edge", "--config", path / "edge.json")
        self.program = Program(command, rig.environment(), path / "edge.log")
        self.program.start()
        until(lambda: self.ask("ix" + "0" * 19, 80).status_code != 0, within_s=20, what=self.program.last_words)

    def ask(self, sandbox_id: str, port: int) -> httpx.Response:
        try:
            headers = {"Host": f"{port}-{sandbox_id}.{self.domain}"}
            return httpx.get(f"http://{self.on.address}:{self.port}/kept", headers=headers, timeout=60, trust_env=False)
        except httpx.TransportError as error:
            return httpx.Response(0, text=repr(error))

    def close(self) -> None:
        self.program.kill()
        self.relay.close()


class Relay:
    """Brings what connects here to there, byte by byte."""

    def __init__(self, here: tuple[str, int], there: tuple[str, int]) -> None:
        self.there, self.open = there, [socket.create_server(here)]
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self.open[0].accept()
                other = socket.create_connection(self.there)
                self.open += [one, other]
                for source, target in ((one, other), (other, one)):
                    self.threads.append(threading.Thread(target=self._carry, args=(source, target), daemon=True))
                    self.threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self.open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(timeout=10)
        for one in self.open:
            one.close()


def test_traffic_brings_it_back_on_the_other_machine_once_for_all_of_it(two: Rig, tmp_path: Path) -> None:
    guest = Guest.woken_by_traffic(two)
    first = guest.machine
    assert first is not None
    second = next(one for one in two.machines if one is not first)
    guest.sh("echo of the moment >kept; (python3 -m http.server 8000 >/dev/null 2>&1 &); sleep 1")
    guest.suspend()
    guest.stored()
    edge = Edge(two, second, tmp_path)
    try:
        first.power_off()
        until(lambda: two.hosts()[first.name]["health"] == "lost", within_s=150, what=two.last_words)
        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda _: edge.ask(guest.id, 8000), range(200)))
        assert {(answer.status_code, answer.text) for answer in answers} == {(200, "of the moment\n")}, edge.program.last_words()
        assert guest.machine is second
        with two.api() as api:
            events = api.get(f"/v1/sandboxes/{guest.id}/events").json()["items"]
        assert [one["type"] for one in events].count("sandbox.resuming") == 1
    finally:
        edge.close()
        two.call("DELETE", f"/v1/sandboxes/{guest.id}")
        until(lambda: not list((second.home / "sandboxes").glob("plc_*")), within_s=60, what=two.last_words)
        first.power_on()
        first.start_agent()
        until(lambda: two.healthy() == len(two.machines), within_s=90, what=two.last_words)
    until(lambda: guest.view["state"] == "released", within_s=90, what=two.last_words)
