"""The front: what happens to every request before and after its handler.

Theory of operation. `extra` applications (the agents' and the edge's hot routes) are dispatched first, with nothing of ours around them.
Every other request gets an id, is counted against the limits, and is led to its room: paths of E2B's table are answered by their handler
directly, paths under `/v1` by FastAPI, but for plain requests of the hot ones (`v1/direct.py`). The order is the same for both: the path is looked up, then the key is checked, then the body is
read. So nobody without a key makes us read one. Failures leave in the shape of the room that the path is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.base.errors import AtollError, Bug, Code, Refused
from atoll.base.ids import Dice
from atoll.base.records import replace
from atoll.control.api import auth, limits
from atoll.control.api.errors import e2b_body, e2b_error, row_of, v1_body, v1_error
from atoll.control.api.exchange import Answer, Call, Handler, Headers, json_answer
from atoll.control.api.settings import ApiSettings
from atoll.control.api.table import Match, Table
from atoll.control.api.v1 import document
from atoll.control.api.v1.context import CALLER_KEY, REQUEST_ID_KEY
from atoll.control.api.v1.direct import Asked, Direct
from atoll.control.metering import OTHER, Meter
from atoll.control.service import Caller, Service
from atoll.telemetry import events
from atoll.telemetry.log import about_request, get_logger

HEALTH_PATH: Final = "/health"
METRICS_PATH: Final = "/metrics"
DOCS_PATH: Final = "/docs"
V1_PREFIX: Final = "/v1/"
_EXPOSED: Final = b"x-next-token, x-total-running, x-request-id, retry-after, should-retry"
_ECHO_MAX: Final = 1024

log = get_logger()


class Outlet:
    """The way out: adds the common headers, keeps the status, and leaves the body out of an answer to HEAD."""

    __slots__ = ("_common", "_head", "_send", "route", "status")

    def __init__(self, send: Send, common: Headers, *, head: bool) -> None:
        self._send = send
        self._common = common
        self._head = head
        self.status = 0
        """0: nothing was sent yet."""
        self.route = OTHER
        """The template of the path; never the path, which is a client's word."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._common]
        elif self._head and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await self._send(message)


@dataclass(frozen=True, slots=True)
class Visit:
    """One request on its way through the front."""

    scope: Scope
    receive: Receive
    out: Outlet
    headers: Mapping[bytes, bytes] = field(repr=False)
    request_id: str

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def ours(self) -> bool:
        """Whether it speaks `/v1`'s shape, not E2B's."""
        return self.path.startswith(V1_PREFIX) or self.path == METRICS_PATH


class Front:
    """An ASGI application for HTTP."""

    def __init__(  # noqa: PLR0913 - a composition
        self,
        service: Service,
        *,
        settings: ApiSettings,
        ready: Callable[[], bool],
        dice: Dice,
        extra: Sequence[tuple[str, ASGIApp]],
        e2b: Table[Handler],
        v1: Table[str],
        direct: Direct,
        inner: ASGIApp,
        meter: Meter,
    ) -> None:
        self._service = service
        self._settings = settings
        self._ready = ready
        self._dice = dice
        self._extra = tuple(extra)
        self._e2b = e2b
        self._v1 = v1
        self._direct = direct
        self._inner = inner
        self._meter = meter
        self._crowd = limits.Crowd(settings.requests_max)
        self._public = frozenset({document.PATH, DOCS_PATH} if settings.docs else {document.PATH})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        for prefix, app in self._extra:
            if path.startswith(prefix):
                await app(scope, receive, send)
                return
        headers = dict(scope["headers"])
        request_id = self._dice(8).hex()
        out = Outlet(send, self._common(request_id, headers), head=scope["method"] == "HEAD")
        visit = Visit(scope, receive, out, headers, request_id)
        began = time.perf_counter()
        self._meter.in_flight += 1
        try:
            with about_request(request_id):
                await self._answer(visit)
        finally:
            self._meter.in_flight -= 1
            self._meter.answered(out.route, visit.method, out.status, time.perf_counter() - began)

    async def _answer(self, visit: Visit) -> None:
        out = visit.out
        try:
            answer = await self._guarded(visit)
        except limits.ClientGone:
            return
        if answer is not None and out.status == 0:
            await answer.send(out)
        log.debug(events.REQUEST_DONE, method=visit.method, path=visit.path, status=out.status)

    def _common(self, request_id: str, headers: Mapping[bytes, bytes]) -> Headers:
        common: Headers = ((b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff"))
        if self._settings.allow_origin is not None and b"origin" in headers:
            allowed = self._settings.allow_origin.encode()
            common += ((b"access-control-allow-origin", allowed), (b"access-control-expose-headers", _EXPOSED))
        return common

    async def _guarded(self, visit: Visit) -> Answer | None:
        """The answer, whatever happens; None when it has been sent already."""
        try:
            limits.check_target(visit.scope, self._settings)
            with self._crowd:
                return await self._lead(visit)
        except AtollError as error:
            return self._failed(visit, error)
        except limits.SlowBody:
            return _plain_failure(visit, 408, f"the body did not come within {self._settings.body_s_max:g} s")
        except limits.ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - a task boundary: one request's fault must not end the connection unexplained
            return self._failed(visit, error)

    def _failed(self, visit: Visit, error: Exception) -> Answer:
        known = error if isinstance(error, AtollError) else Bug(Code.INTERNAL, "unexpected failure")
        row = row_of(known)
        fields: dict[str, Any] = {"method": visit.method, "path": visit.path, "code": known.code.value}
        if row.status == 500:
            log.error(events.REQUEST_FAILED, exc_info=error, **fields)
        elif row.status >= 503:
            log.warning(events.REQUEST_FAILED, message=known.message, **fields)
        return v1_error(known, visit.request_id) if visit.ours else e2b_error(known, visit.request_id)

    async def _lead(self, visit: Visit) -> Answer | None:
        if visit.path == HEALTH_PATH:
            visit.out.route = HEALTH_PATH
            return self._health(visit)
        if visit.path in self._public and visit.method in ("GET", "HEAD"):
            visit.out.route = visit.path
            await self._inner(_as_get(visit.scope), visit.receive, visit.out)
            return None
        raw_path = visit.scope.get("raw_path", b"").decode("latin-1") or visit.path
        if visit.ours:
            ours = self._v1.match(visit.method, visit.path, raw_path)
            dead_end = self._dead_end(visit, ours)
            if dead_end is None and ours is not None:
                await self._our_room(visit, ours)
            return dead_end
        match = self._e2b.match(visit.method, visit.path, raw_path)
        dead_end = self._dead_end(visit, match)
        if dead_end is not None or match is None or match.route is None:
            return dead_end
        key, caller = await self._who(visit)
        body = await limits.read_body(visit.receive, visit.headers, self._settings)
        call = Call(caller, key, match.params, visit.headers, visit.scope["query_string"], body)
        return await match.route.target(call)

    async def _our_room(self, visit: Visit, match: Match[str]) -> None:
        _, caller = await self._who(visit)
        body = await limits.read_body(visit.receive, visit.headers, self._settings)
        content = _read_json(body)
        if match.route is not None:
            response = await self._direct.answer(Asked(caller, match.route.target, match.params, visit.headers, content))
            if response is not None:
                await response(visit.scope, visit.receive, visit.out)
                return
        state = visit.scope.setdefault("state", {})
        state[CALLER_KEY] = caller
        state[REQUEST_ID_KEY] = visit.request_id
        # Bodies are JSON here, whatever the client calls them.
        headers = [(b"content-type", b"application/json"), *(pair for pair in visit.scope["headers"] if pair[0] != b"content-type")]
        await self._inner({**_as_get(visit.scope), "headers": headers}, limits.replay(body, visit.receive), visit.out)

    async def _who(self, visit: Visit) -> tuple[str, Caller]:
        key = auth.presented_key(visit.headers)
        caller = await auth.authenticate(self._service, key)
        return key, replace(caller, address=auth.address(visit.scope, visit.headers), request_id=visit.request_id)

    def _health(self, visit: Visit) -> Answer:
        if visit.method == "OPTIONS":
            return self._options(visit, frozenset({"GET", "HEAD", "OPTIONS"}))
        if visit.method not in ("GET", "HEAD"):
            return _plain_failure(visit, 405, "this path has GET, HEAD, OPTIONS", ((b"allow", b"GET, HEAD, OPTIONS"),))
        if self._ready():
            return Answer(204)
        return _plain_failure(visit, 503, "not ready yet", ((b"retry-after", b"1"),))

    def _dead_end(self, visit: Visit, match: Match[Any] | None) -> Answer | None:
        """What needs no handler: an unknown path, a method that it does not have, and OPTIONS."""
        if match is None:
            return _plain_failure(visit, 404, "there is no such path")
        visit.out.route = match.path
        if visit.method == "OPTIONS":
            return self._options(visit, match.methods)
        if match.route is None:
            names = ", ".join(sorted(match.methods))
            return _plain_failure(visit, 405, f"this path has {names}", ((b"allow", names.encode()),))
        return None

    def _options(self, visit: Visit, methods: frozenset[str]) -> Answer:
        names = ", ".join(sorted(methods)).encode()
        headers: Headers = ((b"allow", names),)
        if self._settings.allow_origin is not None and b"origin" in visit.headers:
            wanted = visit.headers.get(b"access-control-request-headers", b"")[:_ECHO_MAX]
            headers += ((b"access-control-allow-methods", names), (b"access-control-max-age", b"600"))
            if wanted:
                headers += ((b"access-control-allow-headers", wanted),)
        return Answer(204, headers=headers)


def _plain_failure(visit: Visit, status: int, message: str, headers: Headers = ()) -> Answer:
    """A failure of HTTP itself."""
    if visit.ours:
        return json_answer(status, v1_body(Code.INVALID_REQUEST, message, visit.request_id), headers)
    return json_answer(status, e2b_body(status, message), headers)


def _read_json(body: bytes) -> Any:
    # FastAPI reads JSON with Python's parser, which lets half surrogates, NaN and other encodings through; this one does not.
    try:
        return from_json(body or b"null", allow_inf_nan=False)
    except ValueError as error:
        raise Refused(Code.INVALID_REQUEST, f"the body is not JSON: {error}") from error


def _as_get(scope: Scope) -> Scope:
    # FastAPI's routes know no HEAD. The outlet drops the body, so the handler may believe that it was asked for one.
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
