"""Whatever a guest answers, it is a guest of ours, a refusal, or a reason to try again."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.guestline import LineBroken
from atoll.agent.handshake import check_hello, check_init
from atoll.agent.record import Blueprint, Record
from atoll.base.errors import Code, Refused
from atoll.domain.command import Kind
from atoll.domain.spec import Isolation, Spec

SPEC = Spec("default", "tpl_x", "sha256:aa", "base", Isolation.GVISOR, 1000, 128, 256, 64, 300)
RECORD = Record("plc_1", "i1", "tea", 1, Kind.ENSURE_RUNNING, 1, "c", "d", "boot", Blueprint(SPEC, "nonce", "key", "host"))
TEXT = st.text(max_size=20) | st.sampled_from(["i1", "plc_1", "nonce"])
ANSWER = st.fixed_dictionaries(
    {
        "sandbox_id": TEXT,
        "placement_id": TEXT,
        "generation": st.integers(-1, 3),
        "nonce": TEXT,
        "guest_version": TEXT,
        "envd_version": TEXT,
        "initialised": st.booleans(),
    }
)


def outcome(check):
    """What the check gave, and what it raised of the two that it may."""
    try:
        return check(), None
    except (Refused, LineBroken) as error:
        return None, error


@given(st.integers(100, 599), st.binary(max_size=200) | ANSWER.map(lambda answer: json.dumps(answer).encode()))
def test_hello(status, body):
    hello, error = outcome(lambda: check_hello(RECORD, status, body))
    if hello is not None:
        assert (status, hello.sandbox_id, hello.placement_id, hello.generation, hello.nonce) == (200, "i1", "plc_1", 1, "nonce")
    elif isinstance(error, Refused):
        assert error.code is Code.GUEST_IDENTITY_MISMATCH
    else:
        assert status != 200


@given(st.integers(100, 599), st.binary(max_size=2000))
def test_init(status, body):
    _, error = outcome(lambda: check_init(status, body))
    if isinstance(error, Refused):
        assert error.code is Code.START_FAILED
        assert len(error.message) < 300
    assert (error is None) == (status in (200, 204))
