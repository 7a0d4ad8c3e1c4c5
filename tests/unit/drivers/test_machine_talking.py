"""What is said to a machine's monitor and to its guest: by deep paths, past events and old answers, within bounds."""

import contextlib
import json
import os
import socket
import threading
import time

import pytest

from atoll.base.errors import Code, Refused
from atoll.drivers.machines import line
from atoll.drivers.qemu import qmp
from atoll.drivers.qemu.options import LINE_SOCKET
from atoll.drivers.sockets import connect
from atoll.wire.guest import PlacementFile


def by(directory):
    return lambda timeout_s: connect(directory, LINE_SOCKET, timeout_s=timeout_s)


class Peer:
    """Answers connections on a socket, each line by `answer(line)`: bytes to send, or None to hang up."""

    def __init__(self, directory, name, answer, greeting=b""):
        self.heard = []
        self._answer, self._greeting = answer, greeting
        self._server = socket.socket(socket.AF_UNIX)
        place = os.open(directory, os.O_PATH)
        self._server.bind(f"/proc/self/fd/{place}/{name}")
        os.close(place)
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), peer, peer.makefile("rb") as file:
                peer.sendall(self._greeting)
                for text in file:
                    self.heard.append(json.loads(text))
                    said = self._answer(self.heard[-1])
                    if said is None:
                        break
                    peer.sendall(said)

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()


@pytest.fixture
def place(tmp_path):
    """A directory whose path no socket's address could hold."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    return deep


@pytest.fixture
def peer(place):
    made = []

    def make(name, answer, greeting=b""):
        made.append(Peer(place, name, answer, greeting))
        return made[-1]

    yield make
    for each in made:
        each.close()


def said(**message):
    return json.dumps(message).encode() + b"\n"


def monitor(peer, answer):
    def carry_out(message):
        return said(**{"return": {}}) if message["execute"] == "qmp_capabilities" else answer(message)

    return peer(qmp.SOCKET, carry_out, said(QMP={"version": {}}))


def test_events_are_passed_over(place, peer):
    monitor(peer, lambda message: said(event="STOP") + said(event="RESUME") + said(**{"return": {"status": message["execute"]}}))
    with qmp.Qmp(place, code=Code.SAVE_FAILED) as machine:
        assert machine.status() == "query-status"
        assert machine.ask("stop", live=True) == {"status": "stop"}


def test_a_refusal_has_qemus_words_and_the_conversations_code(place, peer):
    monitor(peer, lambda _: said(error={"class": "GenericError", "desc": "no such device"}))
    with qmp.Qmp(place, code=Code.RESUME_FAILED) as machine, pytest.raises(Refused, match="cont: no such device") as refused:
        machine.ask("cont")
    assert refused.value.code is Code.RESUME_FAILED


@pytest.mark.parametrize("answer", [None, b"nonsense\n", b"[]\n"])
def test_a_monitor_that_breaks_off_is_refused(place, peer, answer):
    monitor(peer, lambda _: answer)
    with qmp.Qmp(place, code=Code.SAVE_FAILED) as machine, pytest.raises(Refused):
        machine.ask("stop")


def test_what_only_leads_to_a_socket_is_not_followed(place, peer, tmp_path):
    """QEMU may write where its socket is: somebody who has taken it over leads nobody elsewhere."""
    monitor(peer, lambda _: said(**{"return": {}}))
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / qmp.SOCKET).symlink_to(place / qmp.SOCKET)
    (trap / LINE_SOCKET).write_text("no socket")
    with pytest.raises(Refused):
        qmp.Qmp(trap, code=Code.SAVE_FAILED)
    assert not line.rest(by(trap), sync=False, timeout_s=0.1)


def test_nobody_there_is_refused(place):
    with pytest.raises(Refused):
        qmp.Qmp(place, code=Code.SAVE_FAILED)


def test_a_monitor_is_there_when_it_greets(place, peer):
    assert not qmp.wait_until_there(place, os.getpid(), timeout_s=0.05)
    monitor(peer, lambda _: None)
    assert qmp.wait_until_there(place, os.getpid(), timeout_s=5.0)


def test_a_process_that_ended_is_not_waited_for(place):
    began = time.monotonic()
    assert not qmp.wait_until_there(place, 2**22 + 1, timeout_s=30.0)
    assert time.monotonic() - began < 5.0


def test_the_guest_is_asked_and_old_answers_are_passed_over(place, peer):
    guest = peer(LINE_SOCKET, lambda q: said(id=1, ok=False) + b"noise\n[]\n" + said(id=q["id"], ok=True))
    assert line.rest(by(place), sync=True, timeout_s=5.0)
    assert line.wake(by(place), timeout_s=5.0)
    assert line.wake(by(place), timeout_s=5.0)
    rest, first, second = guest.heard
    assert (rest["do"], rest["sync"]) == ("rest", True)
    assert first["do"] == "wake"
    assert abs(int(first["time_unix_ns"]) / 1e9 - time.time()) < 60
    assert first["entropy"] != second["entropy"], "no two draw the same"


def test_a_clone_is_told_whose_it_is(place, peer):
    guest = peer(LINE_SOCKET, lambda q: said(id=q["id"], ok=True))
    who = PlacementFile(sandbox_id="i1", placement_id="plc_1", generation=3, nonce="n")
    assert line.wake(by(place), timeout_s=5.0, placement=who)
    assert line.wake(by(place), timeout_s=5.0)
    told, plain = guest.heard
    assert told["placement"] == {"sandbox_id": "i1", "placement_id": "plc_1", "generation": 3, "nonce": "n"}
    assert "placement" not in plain


def test_a_restored_guest_is_told_that_its_connections_are_cut(place, peer):
    guest = peer(LINE_SOCKET, lambda q: said(id=q["id"], ok=True))
    assert line.wake(by(place), timeout_s=5.0, cut=True)
    assert line.wake(by(place), timeout_s=5.0)
    restored, stayed = guest.heard
    assert restored["cut"] is True
    assert "cut" not in stayed, "one that was never away keeps what it has"


def test_what_the_guest_refuses_is_told(place, peer):
    peer(LINE_SOCKET, lambda q: said(id=q["id"], error="the processes of users do not come to a halt"))
    with pytest.raises(Refused, match="halt") as refused:
        line.rest(by(place), sync=False, timeout_s=5.0)
    assert refused.value.code is Code.SAVE_FAILED


@pytest.mark.parametrize("answer", [None, b"", b"x" * 70_000])
def test_a_guest_that_says_nothing_of_use_is_not_waited_for(place, peer, answer):
    peer(LINE_SOCKET, lambda _: answer)
    began = time.monotonic()
    assert not line.rest(by(place), sync=False, timeout_s=0.3)
    assert time.monotonic() - began < 5.0


def test_no_guest_is_no_answer(place):
    assert not line.rest(by(place), sync=False, timeout_s=0.1)
    assert not line.end(by(place), timeout_s=0.1)
