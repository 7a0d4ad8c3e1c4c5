"""The agent's messages over real HTTP, and what control's answers mean."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from atoll.agent.config import Identity, load_identity, save_identity
from atoll.agent.transport import HttpTransport, refusal
from atoll.base.errors import Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.secret import Secret
from atoll.wire.agent import MESSAGE_BYTES_MAX, HostFacts, HostHealth, Observe, Poll

FACTS = HostFacts(arch="x86_64", cpu_count=2, memory_mib=1024, disk_mib=10, boot_id="b")
POLL = Poll(host_id="hst_1", epoch="epo_1", poll_seq=1, agent_version="1", facts=FACTS, health=HostHealth(), park_s=0)


class Control:
    """Answers as it is told, and remembers."""

    def __init__(self):
        self.answer = (200, {"lease_s": 300, "incarnation": "1"})
        self.seen = []
        self.headers = {}

    async def handle(self, request):
        self.seen.append((request.path, dict(request.headers), await request.json()))
        status, body = self.answer
        return web.Response(status=status, body=body if isinstance(body, bytes) else json.dumps(body).encode(), headers=self.headers)


@pytest.fixture
async def control():
    it = Control()
    app = web.Application()
    app.router.add_post("/agent/v1/{call}", it.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    it.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    it.transport = HttpTransport(it.url, Secret("cr3d"))
    yield it
    await it.transport.close()
    await runner.cleanup()


async def test_a_poll_goes_out_with_the_credential(control):
    answer = await control.transport.poll(POLL)
    assert answer.lease_s == 300
    path, headers, body = control.seen[0]
    assert (path, headers["Authorization"], body["host_id"], body["protocol"]) == ("/agent/v1/poll", "Bearer cr3d", "hst_1", 1)


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (409, {"code": "STALE_AGENT_EPOCH", "message": "m"}, Refused, Code.STALE_AGENT_EPOCH),
        (401, {"code": "CREDENTIAL_REVOKED", "message": "m"}, Refused, Code.CREDENTIAL_REVOKED),
        (401, b"who are you", Refused, Code.UNAUTHENTICATED),
        (413, {"code": "BODY_TOO_LARGE", "message": "m"}, Refused, Code.BODY_TOO_LARGE),
        (413, b"", Refused, Code.BODY_TOO_LARGE),
        (429, {"code": "RATE_LIMITED", "message": "m"}, Unavailable, Code.RATE_LIMITED),
        (503, {"code": "STORE_FULL", "message": "m"}, Unavailable, Code.STORE_FULL),
        (502, b"<html>", Unavailable, Code.CONTROL_UNAVAILABLE),
        (400, {"code": "A_CODE_OF_A_LATER_VERSION", "message": "m"}, Refused, Code.INVALID_REQUEST),
        (200, b"no json", OutcomeUnknown, Code.OUTCOME_UNKNOWN),
        (200, {"lease_s": "x"}, OutcomeUnknown, Code.OUTCOME_UNKNOWN),
        (200, b"x" * (MESSAGE_BYTES_MAX + 1), OutcomeUnknown, Code.OUTCOME_UNKNOWN),
    ],
)
async def test_answers_become_errors_by_code(control, status, body, kind, code):
    control.answer = (status, body)
    with pytest.raises(kind) as raised:
        await control.transport.poll(POLL)
    assert raised.value.code is code


def test_how_long_to_wait_is_bounded():
    body = b'{"code": "RATE_LIMITED", "message": "m"}'
    assert refusal(429, body, "7").retry_after_s == 7
    assert refusal(429, body, "1e9").retry_after_s == 60
    assert refusal(429, body, "soon").retry_after_s == 1


async def test_secrets_of_a_bad_answer_are_not_quoted(control):
    control.answer = (200, {"lease_s": 1, "incarnation": "1", "commands": [{"guest_token": "s3cret"}]})
    with pytest.raises(OutcomeUnknown) as raised:
        await control.transport.poll(POLL)
    assert "s3cret" not in str(raised.value)
    assert "commands" in str(raised.value)


async def test_more_commands_than_allowed_are_refused(control):
    one = {
        "id": "a",
        "kind": "ensure_absent",
        "placement_id": "p",
        "sandbox_id": "i",
        "team_id": "t",
        "generation": 1,
        "desired_revision": 1,
    }
    control.answer = (200, {"lease_s": 1, "incarnation": "1", "commands": [{**one, "digest": "d", "epoch": "e"}] * 17})
    with pytest.raises(OutcomeUnknown):
        await control.transport.poll(POLL)


async def test_nobody_listens():
    transport = HttpTransport("http://127.0.0.1:1", Secret("x"))
    with pytest.raises(Unavailable) as raised:
        await transport.observe(Observe(host_id="h", epoch="e", observations=[]))
    assert raised.value.code is Code.CONTROL_UNAVAILABLE
    await transport.close()


def test_a_damaged_credential_file(tmp_path):
    assert load_identity(tmp_path / "credential") is None
    (tmp_path / "credential").write_text('{"host_id": "s3cret"')
    with pytest.raises(Refused) as raised:
        load_identity(tmp_path / "credential")
    assert raised.value.code is Code.SETUP_FAILED
    assert "s3cret" not in str(raised.value)


def test_a_saved_identity_replaces_the_old_one(tmp_path):
    path = tmp_path / "credential"
    save_identity(path, Identity("a", "b", Secret("c"), 1))
    save_identity(path, Identity("a", "b", Secret("d"), 2))
    assert load_identity(path).credential == Secret("d")
    assert [p.name for p in tmp_path.iterdir()] == ["credential"]
