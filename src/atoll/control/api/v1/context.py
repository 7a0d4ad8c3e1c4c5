"""What the routes of `/v1` share: who asks, and answers without a second pass of pydantic over what we made ourselves."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Header, Request, Response

from atoll.base.errors import Code, Refused
from atoll.control.api.exchange import Answer, Headers, json_answer
from atoll.control.api.v1.models import ErrorBody
from atoll.control.service import Caller

CALLER_KEY: Final = "atoll_caller"
REQUEST_ID_KEY: Final = "atoll_request_id"
_TAG: Final = re.compile(r'"([0-9]{1,15})"')

FAILURES: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorBody, "description": "The request is not valid, or asks for more than is allowed"},
    401: {"model": ErrorBody, "description": "No valid key"},
    403: {"model": ErrorBody, "description": "The key may not do this"},
    404: {"model": ErrorBody, "description": "There is no such thing, or it is another team's"},
    409: {"model": ErrorBody, "description": "The state or a quota does not allow it"},
    412: {"model": ErrorBody, "description": "It is not at the revision of `If-Match` any more"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    422: {"model": ErrorBody, "description": "The request id was used with another body"},
    429: {"model": ErrorBody, "description": "Too many requests"},
    500: {"model": ErrorBody, "description": "A fault of Atoll"},
    503: {"model": ErrorBody, "description": "Not possible now; nothing was changed"},
    504: {"model": ErrorBody, "description": "No answer in time; look before you repeat it"},
}


def etag(revision: int) -> Headers:
    """The revision, for `If-Match` of a later write."""
    return ((b"etag", b'"%d"' % revision),)


async def _expected(
    if_match: Annotated[
        str | None,
        Header(
            description='Carry it out only if the object is still at this revision, `"7"`: the `ETag` of an earlier answer. `*`: whatever it is.',
            max_length=64,
        ),
    ] = None,
) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    found = _TAG.fullmatch(if_match.strip())
    if found is None:
        raise Refused(Code.INVALID_REQUEST, 'If-Match takes one ETag of ours, like "7", or *')
    return int(found[1])


Expected = Annotated[int | None, Depends(_expected)]
"""The revision that a write insists on."""


async def _caller(request: Request) -> Caller:
    return cast("Caller", request.scope["state"][CALLER_KEY])


Who = Annotated[Caller, Depends(_caller)]
"""The caller, whom the front has found already."""


def respond(status: int, content: object, headers: Headers = ()) -> Response:
    """A JSON answer."""
    return response_of(json_answer(status, content, headers))


def response_of(answer: Answer) -> Response:
    """An `Answer` in Starlette's form."""
    response = Response(answer.body, status_code=answer.status)
    if answer.content_type is not None:
        response.raw_headers.append((b"content-type", answer.content_type))
    response.raw_headers.extend(answer.headers)
    return response
