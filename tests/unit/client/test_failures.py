import json

import pytest

from atoll.base.errors import Code, Refused, Unavailable
from atoll.client import failures


def body(**error: object) -> bytes:
    return json.dumps({"error": error}).encode()


def test_code_message_and_hint_come_through() -> None:
    error = failures.of_control(
        409, body(code="TEAM_SANDBOX_QUOTA", message="20 of 20", hint="release some", detail={"limit": 20}, requestId="r1")
    )
    assert isinstance(error, Refused)
    assert (error.code, error.message, error.hint) == (Code.TEAM_SANDBOX_QUOTA, "20 of 20", "release some")
    assert error.detail == {"status": 409, "detail_limit": 20, "request_id": "r1"}


def test_nothing_happened_keeps_the_time_to_wait() -> None:
    error = failures.of_control(503, body(code="NO_CAPACITY", message="full"), retry_after="7")
    assert isinstance(error, Unavailable)
    assert (error.code, error.retry_after_s) == (Code.NO_CAPACITY, 7.0)


def test_a_code_of_a_newer_server_keeps_its_name() -> None:
    error = failures.of_control(409, body(code="BRAND_NEW", message="no"))
    assert error.code is Code.ILLEGAL_STATE
    assert "BRAND_NEW" in error.message


@pytest.mark.parametrize("data", [b"", b"<html>", b"[]", b'{"error": 3}', b"\xff\xfe"])
@pytest.mark.parametrize(("status", "code"), [(401, Code.UNAUTHENTICATED), (404, Code.INTERNAL), (502, Code.CONTROL_UNAVAILABLE)])
def test_an_answer_that_is_not_ours_is_told_by_its_status(data: bytes, status: int, code: Code) -> None:
    assert failures.of_control(status, data).code is code


def test_a_gone_sandbox_is_told_apart_from_a_closed_port() -> None:
    gone = failures.of_guest(502, b'{"sandboxId":"i1","message":"The sandbox was not found","code":502}', sandbox_id="i1")
    closed = failures.of_guest(
        502, b'{"sandboxId":"i1","message":"The sandbox is running but port is not open","port":1,"code":502}', sandbox_id="i1"
    )
    assert isinstance(gone, Refused)
    assert gone.code is Code.SANDBOX_NOT_FOUND
    assert isinstance(closed, Unavailable)


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        ("unavailable", "The sandbox was not found", Code.SANDBOX_NOT_FOUND),
        ("unavailable", "reset", Code.OUTCOME_UNKNOWN),
        ("deadline_exceeded", "", Code.END_REACHED),
        ("invalid_argument", "cwd '/x' does not exist", Code.INVALID_REQUEST),
        ("something", "", Code.INTERNAL),
    ],
)
def test_how_streams_end(code: str, text: str, expected: Code) -> None:
    assert failures.of_stream({"code": code, "message": text}, sandbox_id="i1").code is expected


def test_only_connects_own_codes_count() -> None:
    assert failures.connect_code(b'{"code":"not_found","message":"x"}') == "not_found"
    assert failures.connect_code(b'{"code":404,"message":"x"}') == ""
    assert failures.connect_code(b"") == ""
