"""Times on the wire: RFC 3339 both ways."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from atoll.base.errors import Code, Refused

_FORM: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?([Zz]|[+ -][0-9]{2}:?[0-9]{2})?")


def timestamp(at: float) -> str:
    """UTC with milliseconds. *Units*: wall seconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_moment(raw: str | None, name: str) -> float | None:
    """The time that `raw` says; without a zone it is UTC. *Units*: wall seconds. *Errors*: INVALID_REQUEST."""
    if not raw:
        return None
    if not _FORM.fullmatch(raw):
        raise Refused(Code.INVALID_REQUEST, f"{name} is not an RFC 3339 time")
    # A plus sign that was not quoted arrives as a blank.
    text = raw[:11] + raw[11:].replace(" ", "+")
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise Refused(Code.INVALID_REQUEST, f"{name} is not an RFC 3339 time") from error
