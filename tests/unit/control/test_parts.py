"""The small parts of control, each by itself."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.base.errors import AtollError, Bug, Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.units import Vector
from atoll.control import asgi
from atoll.control.hosts.directory import Directory
from atoll.control.replicas.hub import Hub
from atoll.control.sandboxes.ends import Ends
from atoll.control.sessions import consoles as module
from atoll.control.sessions.consoles import Consoles
from atoll.control.tokens import Tokens
from atoll.wire import agent as wire
from tests.builders import host, placement, sandbox, seeded

# Tokens.

TOKENS = Tokens(root=b"r" * 32, signing=Ed25519PrivateKey.from_private_bytes(b"s" * 32))


def test_access_tokens_are_a_sandbox_s_own_and_always_the_same() -> None:
    again = Tokens(root=b"r" * 32, signing=Ed25519PrivateKey.generate())
    assert TOKENS.access("i1") == again.access("i1")
    assert len({TOKENS.access("i1"), TOKENS.access("i2"), TOKENS.traffic("i1"), TOKENS.traffic("i2")}) == 4
    assert TOKENS.access("i1") != Tokens(root=b"x" * 32, signing=Ed25519PrivateKey.generate()).access("i1")


def test_the_derivation_is_fixed() -> None:
    """Running guests hold these tokens over upgrades of control. Reference made with openssl."""
    assert TOKENS.access("i0123456789abcdefghij") == "ea_d41df78d5deaad20efe13ed8749ca9684cdd7629"


def test_a_guest_token_is_of_one_placement_and_one_scope() -> None:
    place = placement(sandbox(), nonce="n1")
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(TOKENS.guest_public_key))
    claims = jwt.decode(TOKENS.guest(place, "control"), key, algorithms=["EdDSA"])
    assert claims == {"sub": place.sandbox_id, "plc": place.id, "gen": 1, "non": "n1", "scp": ["control"]}
    assert TOKENS.guest(place, "control") == TOKENS.guest(place, "control")
    others = {TOKENS.guest(replace(place, nonce="n2"), "control"), TOKENS.guest(place, "connect"), TOKENS.guest(place, "control")}
    assert len(others) == 3


# Hub.


async def test_who_watches_is_told_and_nobody_else() -> None:
    hub, one, two = Hub(), sandbox(), sandbox()
    with hub.watch(one.id) as ours, hub.watch(one.id) as also, hub.watch(two.id) as theirs, hub.work_for("hst_a") as work:
        hub.changed(one)
        assert (ours.is_set(), also.is_set(), theirs.is_set(), work.is_set()) == (True, True, False, False)
        hub.wake_host("hst_a")
        hub.wake_host("hst_b")
        assert work.is_set()


async def test_nothing_is_kept_of_who_has_gone() -> None:
    hub, one = Hub(), sandbox()
    with hub.watch(one.id):
        pass
    with pytest.raises(ValueError, match="on the way"), hub.work_for("hst_a"):
        raise ValueError("on the way")
    hub.changed(one)
    hub.wake_host("hst_a")
    assert not hub._waiting
    assert not hub._hosts


# Ends.


async def test_an_end_counts_when_its_agent_says_so() -> None:
    ends = Ends()
    ends.heard("hst_a", {"plc_1": 2}, known={"plc_1": 2})
    assert await ends.told("plc_1", 2, timeout_s=0)
    assert not await ends.told("plc_1", 3, timeout_s=0.01)
    waiting = asyncio.create_task(ends.told("plc_1", 3, timeout_s=5))
    await asyncio.sleep(0)
    ends.heard("hst_b", {"plc_2": 9}, known={"plc_2": 9})
    ends.heard("hst_a", {"plc_1": 4}, known={"plc_1": 4})
    assert await waiting
    assert not ends._waiting


# Directory.


def test_what_is_used_of_a_host_survives_a_new_row() -> None:
    directory, one = Directory(), host()
    directory.put(one)
    directory.use(one.id, Vector(1, 2, 3, 4))
    directory.put(replace(one, region="eu"))
    (advert,) = directory.adverts()
    assert (advert.host.region, advert.used) == ("eu", Vector(1, 2, 3, 4))
    directory.use("hst_unknown", Vector(1, 1, 1, 1))
    assert len(list(directory.adverts())) == 1


# Consoles.


async def test_a_console_s_wish_is_sent_once_and_answered() -> None:
    consoles = Consoles(hub=Hub(), dice=seeded(1))
    reading = asyncio.create_task(consoles.read(host_id="hst_a", placement_id="plc_1"))
    await asyncio.sleep(0)
    (wish,) = consoles.wishes.wanted("hst_a", "e", 9)
    assert consoles.wishes.wanted("hst_a", "e", 9) == []
    assert consoles.wishes.wanted("hst_b", "e", 9) == []
    assert consoles.wishes.wanted("hst_a", "f", 9) == [wish], "a later run of its agent knows nothing of it"
    answer = wire.Collected(
        host_id="hst_a", epoch="e", id=wish.id, placement_id="plc_1", console_base64=base64.b64encode(b"words").decode()
    )
    consoles.collected("hst_b", answer)
    assert not reading.done(), "another host cannot answer for it"
    consoles.collected("hst_a", answer)
    assert await reading == b"words"
    consoles.collected("hst_a", answer)  # nobody waits any more


async def test_a_console_that_a_host_does_not_have() -> None:
    consoles = Consoles(hub=Hub(), dice=seeded(1))
    reading = asyncio.create_task(consoles.read(host_id="hst_a", placement_id="plc_1"))
    await asyncio.sleep(0)
    (wish,) = consoles.wishes.wanted("hst_a", "e", 9)
    consoles.collected("hst_a", wire.Collected(host_id="hst_a", epoch="e", id=wish.id, placement_id="plc_1", code="SOMETHING_NEW"))
    with pytest.raises(Refused) as refused:
        await reading
    assert refused.value.code is Code.SANDBOX_NOT_FOUND


async def test_a_reader_that_left_leaves_no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    consoles = Consoles(hub=Hub(), dice=seeded(1))
    with pytest.raises(OutcomeUnknown):
        await consoles.read(host_id="hst_a", placement_id="plc_1")
    assert consoles.wishes.wanted("hst_a", "e", 9) == []


# Bare ASGI.


async def answered(error: BaseException | None) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[dict[str, object]] = []

    async def send(message: object) -> None:
        sent.append(message)  # type: ignore[arg-type]

    async def work() -> None:
        if error is not None:
            raise error

    await asgi.guarded(send, work())  # type: ignore[arg-type]
    if not sent:
        return 0, {}, b""
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]  # type: ignore[return-value,call-overload]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Refused(Code.CREDENTIAL_REVOKED, "m"), 401),
        (Refused(Code.STALE_AGENT_EPOCH, "m"), 409),
        (Refused(Code.SANDBOX_NOT_FOUND, "m"), 404),
        (Refused(Code.BODY_TOO_LARGE, "m"), 413),
        (Refused(Code.PROTOCOL_UNSUPPORTED, "m"), 400),
        (Unavailable(Code.STORE_FULL, "m", retry_after_s=7.2), 503),
        (Unavailable(Code.RATE_LIMITED, "m"), 429),
        (Bug(Code.INTERNAL, "m"), 500),
        (ValueError("tops3cret"), 500),
    ],
)
async def test_a_failure_becomes_an_answer_of_its_kind(error: BaseException, status: int) -> None:
    got, headers, body = await answered(error)
    assert got == status
    assert b"tops3cret" not in body
    if isinstance(error, AtollError):
        assert error.code.value.encode() in body
    assert (b"retry-after" in headers) == isinstance(error, Unavailable)


async def test_a_client_that_has_gone_gets_no_answer() -> None:
    assert await answered(ConnectionError()) == (0, {}, b"")


async def test_cancellation_passes_through() -> None:
    with pytest.raises(asyncio.CancelledError):
        await answered(asyncio.CancelledError())


async def test_a_body_is_read_to_its_end_and_not_beyond_its_limit() -> None:
    def receiver(*parts: bytes):  # type: ignore[no-untyped-def]
        messages = [{"type": "http.request", "body": part, "more_body": n < len(parts) - 1} for n, part in enumerate(parts)]

        async def receive() -> dict[str, object]:
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        return receive

    assert await asgi.body(receiver(b"ab", b"", b"cd"), limit=4) == b"abcd"
    with pytest.raises(Refused) as refused:
        await asgi.body(receiver(b"abc", b"de"), limit=4)
    assert refused.value.code is Code.BODY_TOO_LARGE
    with pytest.raises(ConnectionError):
        await asgi.body(receiver(), limit=4)
