"""From our codes to HTTP, in the two shapes that clients parse.

Theory of operation. One table gives each code its statuses; a code without a row goes by its family. E2B's clients retry 429, 502, 503
and 504 by themselves unless `Should-Retry` says otherwise, so each answer of ours that repeating cannot mend says `false`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from atoll.base.errors import HINTS, AtollError, Bug, Code, OutcomeUnknown, Refused, Unavailable
from atoll.control.api.exchange import Answer, Headers, json_answer


@dataclass(frozen=True, slots=True)
class Row:
    """How one code leaves. `e2b_code` None: our own code."""

    status: int
    e2b_status: int | None = None
    e2b_code: str | None = None
    retry: bool | None = None
    """E2B's `Should-Retry`; None: say nothing, the status decides."""


_BUSY: Final = Row(503, e2b_code="sandbox_capacity_unavailable", retry=False)
_START: Final = Row(503, e2b_code="sandbox_create_failed", retry=False)
_QUOTA: Final = Row(409, 429, retry=False)

TABLE: Final[Mapping[Code, Row]] = {
    Code.INVALID_REQUEST: Row(400),
    Code.UNAUTHENTICATED: Row(401),
    Code.FORBIDDEN: Row(403),
    Code.SANDBOX_NOT_FOUND: Row(404),
    Code.TEMPLATE_NOT_FOUND: Row(404),
    Code.HOST_NOT_FOUND: Row(404),
    Code.KEY_NOT_FOUND: Row(404),
    Code.IMPORT_NOT_FOUND: Row(404),
    Code.BUILD_NOT_FOUND: Row(404),
    Code.BUILD_QUOTA: Row(409, 429, retry=False),
    # E2B answers 400 to the deletion of a template that sandboxes use.
    Code.TEMPLATE_IN_USE: Row(409, 400, retry=False),
    Code.SNAPSHOT_NOT_FOUND: Row(404),
    Code.SNAPSHOT_IN_USE: Row(409, 400, retry=False),
    Code.SNAPSHOT_UNAVAILABLE: _START,
    # An option of a request. A route that is not there yet answers 501 (e2b/unsupported.py).
    Code.NOT_SUPPORTED: Row(400, retry=False),
    Code.CLASS_LIMIT: Row(400),
    Code.REQUEST_MISMATCH: Row(422, e2b_code="idempotency_request_mismatch", retry=False),
    # The first request still runs: a client that lost its answer gets it by asking again.
    Code.REQUEST_IN_PROGRESS: Row(409, e2b_code="idempotency_in_progress", retry=True),
    Code.ILLEGAL_STATE: Row(409),
    Code.REPLACEMENT_NOT_BLOCKED: Row(409),
    Code.BODY_TOO_LARGE: Row(413),
    Code.CONFIG_INVALID: Row(400),
    Code.CONFIG_CONFLICT: Row(409),
    Code.CONFIG_NOT_FOUND: Row(404),
    Code.REVISION_MISMATCH: Row(412),
    Code.RATE_LIMITED: Row(429),
    Code.TEAM_SANDBOX_QUOTA: _QUOTA,
    Code.DEPLOYMENT_SANDBOX_QUOTA: _QUOTA,
    Code.RECORDS_QUOTA: _QUOTA,
    Code.HOST_QUOTA: _QUOTA,
    Code.CLIENT_SANDBOX_QUOTA: _QUOTA,
    Code.DEPLOYMENT_RECORDS_QUOTA: _QUOTA,
    Code.ACTIVE_HOST_QUOTA: _QUOTA,
    Code.WARM_QUOTA: _QUOTA,
    # All that ends a create comes after its patience, so the client's own retries would only triple the wait.
    Code.NO_CAPACITY: _BUSY,
    Code.INSUFFICIENT_CPU: _BUSY,
    Code.INSUFFICIENT_MEMORY: _BUSY,
    Code.INSUFFICIENT_DISK: _BUSY,
    Code.INSUFFICIENT_SLOTS: _BUSY,
    Code.NO_HOSTS: Row(503, e2b_code="sandbox_no_compatible_node", retry=False),
    Code.HOST_NOT_ACTIVE: Row(503, e2b_code="sandbox_no_compatible_node", retry=False),
    Code.HOST_UNSUITABLE: Row(503, e2b_code="sandbox_no_compatible_node", retry=False),
    Code.CREATE_TIMEOUT: Row(503, e2b_code="sandbox_placement_timeout", retry=False),
    Code.START_TIMEOUT: _START,
    Code.IMAGE_TIMEOUT: _START,
    Code.GUEST_BOOT_TIMEOUT: _START,
    Code.GUEST_IDENTITY_MISMATCH: _START,
    Code.GUEST_EXITED: _START,
    Code.IMAGE_UNAVAILABLE: _START,
    Code.IMAGE_CORRUPT: _START,
    Code.IMAGE_REFUSED: _START,
    Code.START_FAILED: _START,
    Code.START_COMMAND_FAILED: _START,
    Code.RUNTIME_MISSING: _START,
    Code.HOST_DISK_FULL: _START,
    Code.PLACEMENT_LOST: _START,
    Code.BOOTSTRAP_DELIVERED: _START,
    Code.PAUSE_TIMEOUT: Row(503, retry=False),
    Code.PAUSE_FAILED: Row(503, retry=False),
    Code.SAVE_TIMEOUT: Row(503, retry=False),
    Code.SAVE_FAILED: Row(503, retry=False),
    Code.RESUME_TIMEOUT: Row(503, retry=False),
    Code.RESUME_FAILED: Row(503, retry=False),
    Code.GUEST_UNRESPONSIVE: Row(409, e2b_code="sandbox_snapshot_guest_agent_unresponsive", retry=False),
    Code.END_REACHED: _START,
    Code.LEASE_EXPIRED: _START,
    Code.RELEASE_REQUESTED: Row(409, e2b_code="sandbox_create_failed", retry=False),
    Code.CONTROL_UNAVAILABLE: Row(503, retry=True),
    Code.STORE_UNAVAILABLE: Row(503, retry=True),
    Code.STORE_FULL: Row(503, retry=False),
    Code.OUTCOME_UNKNOWN: Row(504, retry=False),
    Code.INTERNAL: Row(500, e2b_code="internal_server_error"),
}

_FAMILIES: Final[tuple[tuple[type[AtollError], Row], ...]] = (
    (Refused, Row(400)),
    (Unavailable, Row(503, retry=True)),
    (OutcomeUnknown, Row(504, retry=False)),
    (Bug, TABLE[Code.INTERNAL]),
)
_INTERNAL_MESSAGE: Final = "internal error; the log of control has the details under request id {}"


def row_of(error: AtollError) -> Row:
    """How this failure leaves."""
    if isinstance(error, Bug):
        return TABLE[Code.INTERNAL]
    row = TABLE.get(error.code)
    if row is not None:
        return row
    return next((row for family, row in _FAMILIES if isinstance(error, family)), TABLE[Code.INTERNAL])


def _retry_after(error: AtollError) -> Headers:
    wait_s = getattr(error, "retry_after_s", 1.0 if error.code is Code.RATE_LIMITED else None)
    # Whole seconds, rounded up: a client that comes back early is refused again.
    return () if wait_s is None else ((b"retry-after", b"%d" % max(1, math.ceil(wait_s))),)


def _e2b_headers(error: AtollError, row: Row) -> Headers:
    if row.retry is None:
        return _retry_after(error)
    if row.retry:
        return (*_retry_after(error), (b"should-retry", b"true"))
    return ((b"should-retry", b"false"),)  # a time to come back would contradict it


def e2b_body(status: int, message: str, error_code: str | None = None) -> dict[str, str | int]:
    """E2B's error object."""
    body: dict[str, str | int] = {"code": status, "message": message}
    if error_code is not None:
        body["error_code"] = error_code
    return body


def e2b_error(error: AtollError, request_id: str) -> Answer:
    """The failure as E2B's clients parse it."""
    row = row_of(error)
    status = row.e2b_status or row.status
    message = _INTERNAL_MESSAGE.format(request_id) if status == 500 else error.message
    return json_answer(status, e2b_body(status, message, row.e2b_code or error.code.value), _e2b_headers(error, row))


def v1_body(code: Code, message: str, request_id: str, *, hint: str | None = None, detail: object = None) -> dict[str, object]:
    """Our own error object."""
    error = {"code": code.value, "message": message, "hint": hint or HINTS[code], "detail": detail or {}, "requestId": request_id}
    return {"error": error}


def v1_error(error: AtollError, request_id: str) -> Answer:
    """The failure in our own shape."""
    row = row_of(error)
    if row.status == 500:
        return json_answer(500, v1_body(Code.INTERNAL, _INTERNAL_MESSAGE.format(request_id), request_id))
    body = v1_body(error.code, error.message, request_id, hint=error.hint, detail=error.detail)
    return json_answer(row.status, body, _retry_after(error))
