"""Pages of lists that are short enough to be read whole: an order that does not shift, and a cursor that says where the last one ended."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Query

from atoll.base.errors import Code, Refused

T = TypeVar("T")

Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many")]
Cursor = Annotated[str | None, Query(max_length=1024, description="`nextCursor` of the page before")]


def page(items: Sequence[T], *, key: Callable[[T], str], limit: int, cursor: str | None) -> tuple[list[T], str | None]:
    """The items behind `cursor`, in the order of their keys, and where the next page begins; None on the last. *Errors*: INVALID_REQUEST."""
    last = _read(cursor) if cursor else ""
    found = sorted((item for item in items if key(item) > last), key=key)
    more = len(found) > limit
    return found[:limit], base64.urlsafe_b64encode(key(found[limit - 1]).encode()).decode() if more else None


def _read(cursor: str) -> str:
    try:
        return base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise Refused(Code.INVALID_REQUEST, "the cursor is not one of ours") from None
