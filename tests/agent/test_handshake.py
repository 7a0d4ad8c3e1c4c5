"""The handshake against something that really listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from dataclasses import replace

import pytest

from atoll.agent.guestline import GuestLine, LineBroken
from atoll.agent.handshake import Meeting, TcpGuests, init_of
from atoll.agent.record import Blueprint, Record
from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.domain.spec import Isolation, Spec
from atoll.domain.warmth import OWN_TEAM
from atoll.wire.agent import InitPayload

SPEC = Spec("default", "tpl_x", "sha256:aa", "base", Isolation.GVISOR, 1000, 128, 256, 64, 300, default_user="joe", default_workdir="/w")
RECORD = Record("plc_1", "i1", "tea", 1, Kind.ENSURE_RUNNING, 1, "c", "d", "boot", Blueprint(SPEC, "nonce", "key", "host", ready_s=1.0))
HELLO = {
    "sandbox_id": "i1",
    "placement_id": "plc_1",
    "generation": 1,
    "nonce": "nonce",
    "guest_version": "9",
    "envd_version": "0.6.13",
    "initialised": False,
}


class Clock:
    def now(self):
        return 1_800_000_000.5

    def boot(self):
        return asyncio.get_running_loop().time()


class Guest:
    """A small HTTP server that says what it is told to."""

    def __init__(self, hello=HELLO, hello_status=200, init_statuses=(204,), raw=None):
        self.hello, self.hello_status, self.init_statuses, self.raw = hello, hello_status, list(init_statuses), raw
        self.requests: list[tuple[str, str, bytes]] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()
        for writer in self.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve(self, reader, writer):
        self.connections += 1
        self.writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((lines[0].rsplit(" ", 1)[0], headers["authorization"], body))
                if self.raw is not None:
                    writer.write(self.raw)
                elif lines[0].startswith("GET"):
                    content = json.dumps(self.hello).encode()
                    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (self.hello_status, len(content), content))
                else:
                    status = self.init_statuses.pop(0) if len(self.init_statuses) > 1 else self.init_statuses[0]
                    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def meet(port, *, record=RECORD, payload=None, clock=None, said=None):
    async def token():
        return Secret("t0ken")

    async def init(_hello):
        return init_of(record, payload or InitPayload(), clock=Clock(), dice=os.urandom)

    async def waiting(words):
        (said if said is not None else []).append(words)

    return await TcpGuests(clock or Clock(), port=port).meet(record, "127.0.0.1", Meeting(token, init, waiting))


async def test_hello_then_init_on_one_connection():
    async with Guest() as guest:
        payload = InitPayload(env={"A": "b"}, access_token="acc", files=[{"path": "/x", "content": "y", "mode": "0600"}])
        hello = await meet(guest.port, payload=payload)
    assert hello.guest_version == "9"
    assert [r[0] for r in guest.requests] == ["GET /atoll/hello", "POST /atoll/init"]
    assert {r[1] for r in guest.requests} == {"Bearer t0ken"}
    assert guest.connections == 1
    init = json.loads(guest.requests[1][2])
    assert (init["env"], init["access_token"], init["default_user"], init["default_workdir"]) == ({"A": "b"}, "acc", "joe", "/w")
    assert (init["hostname"], init["time_unix_ns"]) == ("host", "1800000000500000000")
    assert init["files"] == [{"path": "/x", "content": "y", "mode": "0600"}]
    assert len(init["entropy"]) == 44


async def test_an_initialised_guest_is_left_as_it_is():
    async with Guest(hello={**HELLO, "initialised": True}) as guest:
        await meet(guest.port)
    assert [r[0] for r in guest.requests] == ["GET /atoll/hello"]


@pytest.mark.parametrize("wrong", [{"sandbox_id": "i2"}, {"placement_id": "plc_2"}, {"generation": 2}, {"nonce": "other"}])
async def test_every_part_of_the_identity_counts(wrong):
    async with Guest(hello={**HELLO, **wrong}) as guest:
        with pytest.raises(Refused) as refused:
            await meet(guest.port)
    assert refused.value.code is Code.GUEST_IDENTITY_MISMATCH
    assert len(guest.requests) == 1, "nothing secret is sent to it, and waiting would not help"


@pytest.mark.parametrize(
    "guest", [Guest(hello_status=401), Guest(hello_status=404), Guest(hello={"x": 1}), Guest(hello=[])], ids=["401", "404", "other", "list"]
)
async def test_what_is_no_guest_of_ours(guest):
    async with guest:
        with pytest.raises(Refused) as refused:
            await meet(guest.port)
    assert refused.value.code is Code.GUEST_IDENTITY_MISMATCH


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n" + b"x" * 999_999,
        b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["ssh", "flood", "503"],
)
async def test_what_makes_no_sense_is_a_timeout_with_the_reason(raw):
    record = replace(RECORD, blueprint=replace(RECORD.blueprint, ready_s=0.3))
    async with Guest(raw=raw) as guest:
        with pytest.raises(Refused) as refused:
            await meet(guest.port, record=record)
    assert refused.value.code is Code.GUEST_BOOT_TIMEOUT
    assert guest.connections > 1


async def test_a_refused_init_is_final_and_says_so():
    async with Guest(init_statuses=(400,)) as guest:
        with pytest.raises(Refused) as refused:
            await meet(guest.port)
    assert refused.value.code is Code.START_FAILED
    assert len(guest.requests) == 2


async def test_an_init_that_fails_for_now_is_repeated():
    async with Guest(init_statuses=(500, 503, 204)) as guest:
        await meet(guest.port)
    assert [r[0] for r in guest.requests].count("POST /atoll/init") == 3


async def test_a_guest_that_is_not_up_yet_is_met_soon_after_it_is():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = asyncio.create_task(meet(port))
    await asyncio.sleep(0.15)
    loop = asyncio.get_running_loop()
    guest = Guest()
    guest.server = await asyncio.start_server(guest._serve, "127.0.0.1", port)
    began = loop.time()
    await meeting
    assert loop.time() - began < 0.05
    await guest.__aexit__()


async def test_nobody_there():
    record = replace(RECORD, blueprint=replace(RECORD.blueprint, ready_s=0.2))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(Refused) as refused:
        await meet(port, record=record)
    assert refused.value.code is Code.GUEST_BOOT_TIMEOUT
    assert "refused" in refused.value.message.lower()


async def test_a_silent_listener_does_not_hold_the_line():
    closed = asyncio.Event()

    async def silent(reader, writer):
        await reader.read()
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    line = await GuestLine.open("127.0.0.1", server.sockets[0].getsockname()[1], within_s=1)
    with pytest.raises(LineBroken):
        await line.call("GET", "/atoll/hello", token=Secret("t"), within_s=0.05)
    await closed.wait()
    server.close()


STARTS = replace(RECORD, blueprint=replace(RECORD.blueprint, ready_s=5.0, spec=replace(SPEC, command=("serve",), start_s=0.4)))


async def test_a_start_command_is_waited_for():
    async with Guest(hello={**HELLO, "start": "starting", "start_detail": "not yet"}) as guest:
        meeting = asyncio.ensure_future(meet(guest.port, record=STARTS))
        await asyncio.sleep(0.15)
        assert not meeting.done()
        guest.hello = {**guest.hello, "start": "ready"}
        assert (await meeting).start == "ready"


@pytest.mark.parametrize(("start", "word"), [("failed", "exit status 4"), ("starting", "not ready within 0.4 s: exit status 4")])
async def test_a_start_command_that_does_not_get_ready_is_told_with_its_words(start, word):
    async with Guest(hello={**HELLO, "start": start, "start_detail": "exit status 4"}) as guest:
        with pytest.raises(Refused) as refused:
            await meet(guest.port, record=STARTS)
    assert refused.value.code is Code.START_COMMAND_FAILED
    assert word in refused.value.message


async def test_a_guest_that_is_slow_to_answer_has_no_less_time_for_its_start_command():
    spec = replace(STARTS.blueprint.spec, guest_ready_s=1.0, start_s=0.8)
    record = replace(STARTS, blueprint=replace(STARTS.blueprint, ready_s=spec.ready_s, spec=spec))
    async with Guest(hello={**HELLO, "start": "starting"}, hello_status=503) as guest:
        meeting = asyncio.ensure_future(meet(guest.port, record=record))
        await asyncio.sleep(0.7)
        guest.hello_status = 200
        await asyncio.sleep(0.5)
        assert not meeting.done(), "what the guest took to answer was taken from its start command"
        guest.hello = {**guest.hello, "start": "ready"}
        assert (await meeting).start == "ready"


class Hasty(Clock):
    """An hour passes in a second or so."""

    def boot(self):
        return super().boot() * 3600


async def test_what_a_start_command_says_that_is_not_ready_soon_is_told_once():
    said = []
    async with Guest(hello={**HELLO, "start": "starting", "start_detail": "one"}) as guest:
        record = replace(STARTS, blueprint=replace(STARTS.blueprint, spec=replace(STARTS.blueprint.spec, start_s=5.0)))
        meeting = asyncio.ensure_future(meet(guest.port, record=record, clock=Hasty(), said=said))
        await asyncio.sleep(0.3)
        guest.hello = {**guest.hello, "start_detail": "two"}
        await asyncio.sleep(0.5)
        guest.hello = {**guest.hello, "start": "ready"}
        await meeting
    assert said == ["one", "two"]


async def test_a_start_command_that_is_ready_soon_is_not_spoken_of():
    said = []
    async with Guest(hello={**HELLO, "start": "starting", "start_detail": "one"}) as guest:
        meeting = asyncio.ensure_future(meet(guest.port, record=STARTS, said=said))
        await asyncio.sleep(0.15)
        guest.hello = {**guest.hello, "start": "ready"}
        await meeting
    assert said == []


async def test_without_a_start_command_nothing_is_waited_for():
    async with Guest(hello={**HELLO, "start": "starting"}) as guest:
        await meet(guest.port)


AHEAD = replace(RECORD, team_id=OWN_TEAM)
CLAIMED = replace(
    RECORD, team_id="tea_mine", ready=True, observed=Observed.RUNNING, applied_revision=1, desired_revision=2,
    blueprint=replace(RECORD.blueprint, claimed=True),
)  # fmt: skip


async def hand_over(guests, record, env):
    async def token():
        return Secret("t0ken")

    async def init(_hello):
        return init_of(record, InitPayload(env=env), clock=Clock(), dice=os.urandom)

    async def waiting(_words):
        raise AssertionError("it has no start command")

    return await guests.meet(record, "127.0.0.1", Meeting(token, init, waiting))


async def test_a_guest_made_ahead_is_handed_over_on_the_line_on_which_it_has_proved_itself():
    async with Guest() as guest:
        guests = TcpGuests(Clock(), port=guest.port)
        await hand_over(guests, AHEAD, {})
        assert (await hand_over(guests, CLAIMED, {"MINE": "1"})).guest_version == "9"
        assert [r[0] for r in guest.requests] == ["GET /atoll/hello", "POST /atoll/init", "POST /atoll/init"]
        assert guest.connections == 1
        given = json.loads(guest.requests[2][2])
        assert (given["env"], given["revision"]) == ({"MINE": "1"}, 2)
        # It is somebody's now: nothing is kept open to it.
        await hand_over(guests, CLAIMED, {"MINE": "1"})
        assert guest.connections == 2
        guests.close()


async def test_a_line_that_broke_meanwhile_is_made_anew_and_the_guest_is_asked():
    async with Guest() as guest:
        guests = TcpGuests(Clock(), port=guest.port)
        await hand_over(guests, AHEAD, {})
        for writer in guest.writers:
            writer.close()
        await hand_over(guests, CLAIMED, {"MINE": "1"})
        assert [r[0] for r in guest.requests][2:] == ["GET /atoll/hello", "POST /atoll/init"]
        guest.hello = {**HELLO, "initialised": True, "init_revision": 2}
        await hand_over(guests, CLAIMED, {"MINE": "1"})
        assert [r[0] for r in guest.requests][4:] == ["GET /atoll/hello"], "it has what was sent before"
        guests.close()


async def test_lines_are_kept_to_so_many_guests_and_for_so_long(monkeypatch):
    monkeypatch.setattr("atoll.agent.handshake.KEPT_MAX", 2)
    monkeypatch.setattr("atoll.agent.handshake.KEPT_S", 0.2)
    async with Guest() as guest:
        guests = TcpGuests(Clock(), port=guest.port)
        for n in range(4):
            guest.hello = {**HELLO, "placement_id": f"plc_{n}"}
            await hand_over(guests, replace(AHEAD, placement_id=f"plc_{n}"), {})
        assert list(guests._kept) == ["plc_2", "plc_3"]
        await asyncio.sleep(0.3)
        assert not guests._kept
