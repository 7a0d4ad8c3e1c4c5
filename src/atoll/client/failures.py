"""From HTTP answers to Atoll's errors."""

from __future__ import annotations

import json
from typing import Any, Final

from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused, Unavailable

_BY_STATUS: Final = {
    400: Code.INVALID_REQUEST,
    401: Code.UNAUTHENTICATED,
    403: Code.FORBIDDEN,
    409: Code.ILLEGAL_STATE,
    413: Code.BODY_TOO_LARGE,
    422: Code.REQUEST_MISMATCH,
    429: Code.RATE_LIMITED,
    502: Code.CONTROL_UNAVAILABLE,
    503: Code.CONTROL_UNAVAILABLE,
    504: Code.CONTROL_UNAVAILABLE,
}
NOT_FOUND: Final = frozenset(
    {Code.SANDBOX_NOT_FOUND, Code.TEMPLATE_NOT_FOUND, Code.HOST_NOT_FOUND, Code.KEY_NOT_FOUND, Code.CONFIG_NOT_FOUND}
)


def of_control(status: int, body: bytes, *, retry_after: str | None = None) -> AtollError:
    """What an answer of `/v1` that is no success means. A code that this client doesn't know keeps its name in the message."""
    error = _error_object(body)
    text = str(error.get("message") or f"control answered {status}")
    hint = str(error["hint"]) if error.get("hint") else None
    detail = error.get("detail")
    more: dict[str, Any] = {"status": status}
    if isinstance(detail, dict):
        more |= {f"detail_{key}": value for key, value in detail.items() if isinstance(value, str | int | float) or value is None}
    if error.get("requestId"):
        more["request_id"] = str(error["requestId"])
    name = str(error.get("code") or "")
    try:
        code = Code(name)
    except ValueError:
        code = _BY_STATUS.get(status, Code.INTERNAL)
        text = f"{text} ({name})" if name else text
    if status >= 500:
        return Unavailable(code, text, hint=hint, retry_after_s=_seconds(retry_after), **more)
    return Refused(code, text, hint=hint, **more)


def of_guest(status: int, body: bytes, *, sandbox_id: str) -> AtollError:
    """What an answer on the way to a guest means: of the edge (it has gone, its port is closed) or of the guest itself."""
    error = _error_object(body)
    text = str(error.get("message") or f"the sandbox answered {status}")
    if status == 502 and "was not found" in text:
        return Refused(Code.SANDBOX_NOT_FOUND, f"sandbox {sandbox_id} is not running: it was not found")
    if status in {502, 503, 504}:
        return Unavailable(Code.CONTROL_UNAVAILABLE, text, hint="The guest does not answer; look at `atoll sandbox get` and try again.")
    if status == 404:
        return Refused(Code.INVALID_REQUEST, text, hint="Look at the path.", status=404)
    if status == 507:
        return Refused(Code.INVALID_REQUEST, text, hint="The sandbox's disk is full.", status=507)
    return Refused(_BY_STATUS.get(status, Code.INTERNAL), text, hint="The guest refused it.", status=status)


_BY_CONNECT: Final = {
    "invalid_argument": Code.INVALID_REQUEST,
    "not_found": Code.INVALID_REQUEST,
    "already_exists": Code.ILLEGAL_STATE,
    "failed_precondition": Code.ILLEGAL_STATE,
    "permission_denied": Code.FORBIDDEN,
    "unauthenticated": Code.UNAUTHENTICATED,
    "resource_exhausted": Code.RATE_LIMITED,
}


def of_stream(error: dict[str, Any], *, sandbox_id: str) -> AtollError:
    """What the end of a stream with an error means."""
    name, text = str(error.get("code") or "unknown"), str(error.get("message") or "the stream ended with an error")
    if "was not found" in text and name == "unavailable":
        return Refused(Code.SANDBOX_NOT_FOUND, f"sandbox {sandbox_id} is not running: it was not found")
    if name in {"unavailable", "aborted", "canceled"}:
        return Unavailable(Code.OUTCOME_UNKNOWN, text, hint="The sandbox may have ended; look at `atoll sandbox get`.")
    if name == "deadline_exceeded":
        return Refused(Code.END_REACHED, text, hint="The command ran longer than it was allowed to, and was killed.")
    return Refused(_BY_CONNECT.get(name, Code.INTERNAL), text, hint="The guest refused it.")


def connect_code(body: bytes) -> str:
    """The code of a Connect error; empty when it is none (a route that the guest does not have answers 404, too)."""
    code = _error_object(body).get("code")
    return code if isinstance(code, str) else ""


def unreachable(url: str, error: Exception, *, sent: bool) -> AtollError:
    """No answer at all. `sent`: a change may have been carried out."""
    reason = str(error) or type(error).__name__
    if sent:
        return OutcomeUnknown(Code.OUTCOME_UNKNOWN, f"no answer from {url}: {reason}")
    return Unavailable(Code.CONTROL_UNAVAILABLE, f"cannot reach {url}: {reason}")


def _error_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    inner = value.get("error")
    return inner if isinstance(inner, dict) else value


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 1.0))
    except ValueError:
        return 1.0
