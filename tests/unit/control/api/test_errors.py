"""The table of failures: every code has a place in both shapes."""

from __future__ import annotations

import json

import pytest

from atoll.base.errors import AtollError, Bug, Code, OutcomeUnknown, Refused, Unavailable
from atoll.control.api.errors import TABLE, e2b_error, row_of, v1_error

E2B_RETRIED = {429, 502, 503, 504}


@pytest.mark.parametrize("code", list(Code))
@pytest.mark.parametrize("family", [Refused, Unavailable, OutcomeUnknown, Bug])
def test_every_failure_leaves_in_both_shapes(code: Code, family: type[AtollError]) -> None:
    error = family(code, "why", number=3)
    theirs, ours = e2b_error(error, "r1"), v1_error(error, "r1")
    theirs_body, ours_body = json.loads(theirs.body), json.loads(ours.body)
    assert theirs_body["code"] == theirs.status
    assert isinstance(theirs_body["message"], str)
    assert set(ours_body["error"]) == {"code", "message", "hint", "detail", "requestId"}
    assert 400 <= ours.status <= 599
    assert 400 <= theirs.status <= 599
    if family is Bug:
        assert (theirs.status, ours.status, ours_body["error"]["code"]) == (500, 500, "INTERNAL")
    elif ours.status != 500:
        assert ours_body["error"]["code"] == code.value
        assert ours_body["error"]["detail"] == {"number": 3}


@pytest.mark.parametrize("code", [code for code in TABLE if code is not Code.RATE_LIMITED])
def test_nothing_is_left_to_the_clients_own_idea_of_retrying(code: Code) -> None:
    """E2B's clients repeat these statuses by themselves, three times, unless they are told."""
    answer = e2b_error(Refused(code, "why"), "r1")
    if answer.status in E2B_RETRIED:
        assert dict(answer.headers).get(b"should-retry") in (b"true", b"false")


def test_quotas_differ_between_the_two() -> None:
    error = Refused(Code.TEAM_SANDBOX_QUOTA, "full")
    assert e2b_error(error, "r").status == 429
    assert v1_error(error, "r").status == 409


def test_rates_say_for_how_long() -> None:
    for seconds, header in ((0.1, b"1"), (1.0, b"1"), (2.5, b"3")):
        error = Unavailable(Code.RATE_LIMITED, "slow down", retry_after_s=seconds)
        assert dict(e2b_error(error, "r").headers) == {b"retry-after": header}
        assert dict(v1_error(error, "r").headers) == {b"retry-after": header}
    assert dict(e2b_error(Refused(Code.RATE_LIMITED, "slow down"), "r").headers) == {b"retry-after": b"1"}


def test_v1_says_when_to_come_back_even_where_e2bs_clients_should_not_by_themselves() -> None:
    error = Unavailable(Code.NO_CAPACITY, "full", retry_after_s=5)
    assert dict(v1_error(error, "r").headers) == {b"retry-after": b"5"}
    assert dict(e2b_error(error, "r").headers) == {b"should-retry": b"false"}


def test_a_code_without_a_row_goes_by_its_family() -> None:
    assert Code.PORT_TAKEN not in TABLE
    assert row_of(Refused(Code.PORT_TAKEN, "x")).status == 400
    assert row_of(Unavailable(Code.PORT_TAKEN, "x")).status == 503
    assert row_of(OutcomeUnknown(Code.PORT_TAKEN, "x")).status == 504
    assert row_of(AtollError(Code.PORT_TAKEN, "x")).status == 500
