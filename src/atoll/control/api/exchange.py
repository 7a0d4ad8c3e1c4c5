"""One request and its answer as values: what handlers see, and what the front sends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.types import Send

from atoll.base.errors import Code, Refused
from atoll.control.service import Caller
from atoll.domain.sandbox import STARTING, Sandbox
from atoll.wire.edge import CHANGED_HEADER

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
M = TypeVar("M", bound=BaseModel)

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
_CHANGED = CHANGED_HEADER.lower().encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back; the front adds request id and length."""

    status: int
    body: bytes = b""
    headers: Headers = ()
    content_type: bytes | None = None

    async def send(self, send: Send) -> None:
        """Write it out."""
        headers = list(self.headers)
        if self.status != 204:
            headers.append((b"content-length", b"%d" % len(self.body)))
        if self.content_type is not None:
            headers.append((b"content-type", self.content_type))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_answer(status: int, content: object, headers: Headers = ()) -> Answer:
    """An answer with a JSON body."""
    return Answer(status, to_json(content), headers, JSON)


def changed(sandbox: Sandbox) -> Headers:
    """Tells the edge which revision its table must have before the client may act on this answer.

    A sandbox that is still starting has no route yet, so there is nothing to wait for.
    """
    if sandbox.state in STARTING:
        return ()
    return ((_CHANGED, f"{sandbox.id}:{sandbox.revision}".encode()),)


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a known caller to one of E2B's routes."""

    caller: Caller
    key: str = field(repr=False)
    """As it was presented."""
    params: Mapping[str, str]
    headers: Mapping[bytes, bytes] = field(repr=False)
    query_string: bytes = b""
    body: bytes = field(default=b"", repr=False)

    def query(self) -> dict[str, str]:
        """The query's parameters; of one that is repeated, the last. *Errors*: INVALID_REQUEST."""
        try:
            pairs = parse_qsl(self.query_string.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64)
        except ValueError as error:  # UnicodeDecodeError is one
            raise Refused(Code.INVALID_REQUEST, "the query string is malformed") from error
        if any("\0" in name or "\0" in value for name, value in pairs):
            raise Refused(Code.INVALID_REQUEST, "the query string holds a NUL character")
        return dict(pairs)

    def json(self, model: type[M], *, optional: bool = False) -> M:
        """The body as `model`; with `optional`, an empty one counts as `{}`. *Errors*: INVALID_REQUEST."""
        body = self.body
        if not body:
            if not optional:
                raise Refused(Code.INVALID_REQUEST, "the request needs a JSON body")
            body = b"{}"
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise Refused(Code.INVALID_REQUEST, first_problem(error.errors(include_url=False, include_input=False))) from None


Handler: TypeAlias = Callable[[Call], Awaitable[Answer]]


def first_problem(problems: object) -> str:
    """A sentence about the first of pydantic's findings; never with what was sent, which may be a secret."""
    problem = problems[0] if isinstance(problems, list) and problems else {}
    where = ".".join(str(part)[:80] for part in problem.get("loc", ()) if part not in ("body", "query", "path"))
    what = str(problem.get("msg", "the request is not valid"))[:400]
    text = f"{where[:200]}: {what}" if where else what
    return text.encode("utf-8", "replace").decode()
