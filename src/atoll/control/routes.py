"""The edges' view: which placement answers for which sandbox, as one snapshot and a stream of changes.

Every commit of a sandbox passes through `changed`; an edge that follows the stream therefore knows of it before, or at most a moment
after, the client whose call made it. An edge that is too slow is cut off: it comes back and gets a new snapshot.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from atoll.base.errors import Code, Refused, Unavailable
from atoll.control import asgi
from atoll.control.asgi import Receive, Scope, Send
from atoll.control.tokens import Tokens
from atoll.domain.placement import Placement
from atoll.domain.sandbox import Sandbox, State
from atoll.planning.pausing import wakes_by_traffic
from atoll.wire.edge import Line, Locate, Located, Reach, Route
from atoll.wire.guest import SCOPE_CONNECT

PREFIX: Final = "/internal/edge/v1/"
_QUEUE_MAX: Final = 10_000
_PING_S: Final = 15.0
_ENDED_MAX: Final = 20_000
"""As many as an edge remembers."""
_SIGNATURE_VERSION: Final = "v1_"
_AT_REST: Final = frozenset({State.PAUSING, State.PAUSED, State.SUSPENDING, State.SUSPENDED, State.RESUMING})
"""On these ways, too: requests that come meanwhile wait as those do that come later."""


class Routes:
    """All sandboxes that traffic can reach, and the edges that follow."""

    def __init__(self, tokens: Tokens, *, edge_token: str, incarnation: str) -> None:
        self._tokens = tokens
        self._edge_token = edge_token.encode()
        self._incarnation = incarnation
        self._routes: dict[str, Route] = {}
        self._secured: dict[str, bool] = {}
        self._cursor = 0
        self._changed_at: dict[str, int] = {}
        """Of each route: the cursor at which it came to be what it is."""
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Revisions as of which routes were gone, the latest ones: a word that is older, and comes late, brings nothing back."""
        self._followers: set[asyncio.Queue[bytes | None]] = set()
        self.wake: Callable[[str], Awaitable[None]] = _nobody_wakes
        """Resumes a sandbox because traffic has come for it. *Errors*: those of Service.resume."""

    def load(self, found: Iterable[tuple[Sandbox, Placement | None]]) -> None:
        """What is reachable at start."""
        for sandbox, placement in found:
            self.changed(sandbox, placement)

    @property
    def cursor(self) -> int:
        """Raised by each change; for `replace`."""
        return self._cursor

    def replace(self, found: Iterable[tuple[Sandbox, Placement | None]], *, since: int) -> None:
        """All that was reachable at some moment after the cursor stood at `since`. What has changed after that stays as it is."""
        there = {sandbox.id: (sandbox, placement) for sandbox, placement in found}
        for sandbox_id in [name for name, at in self._changed_at.items() if name not in there and at <= since]:
            self._gone(sandbox_id, self._routes[sandbox_id].revision + 1, reason="unknown")
        for sandbox, placement in there.values():
            if self._changed_at.get(sandbox.id, 0) <= since and self._route(sandbox, placement) != self._routes.get(sandbox.id):
                self.changed(sandbox, placement)

    def changed(self, sandbox: Sandbox, placement: Placement | None) -> None:
        """A commit of this sandbox: its route is there, another, or gone. *Idempotency*: one that is older than what is known changes nothing."""
        if sandbox.claimable is not None:
            # Nobody's yet: no edge need know of it.
            return
        known = self._routes.get(sandbox.id)
        if sandbox.revision < (self._ended.get(sandbox.id, 0) if known is None else known.revision):
            return
        route = self._route(sandbox, placement)
        if route is None:
            # Also of one that was not reachable before: the answer that says so is held back until edges have heard of its revision.
            if known is not None or sandbox.revision > self._ended.get(sandbox.id, sandbox.revision):
                self._gone(sandbox.id, sandbox.revision, reason=sandbox.reason or sandbox.state.value)
        else:
            self._cursor += 1
            self._routes[sandbox.id] = route
            self._changed_at[sandbox.id] = self._cursor
            self._secured[sandbox.id] = sandbox.secured
            if self._followers:
                self._tell(Line(type="route", cursor=self._cursor, route=route))

    def _gone(self, sandbox_id: str, revision: int, *, reason: str) -> None:
        self._cursor += 1
        for known in (self._routes, self._changed_at, self._secured):
            known.pop(sandbox_id, None)
        self._ended[sandbox_id] = revision
        if len(self._ended) > _ENDED_MAX:
            self._ended.popitem(last=False)
        if self._followers:
            self._tell(Line(type="gone", cursor=self._cursor, sandbox_id=sandbox_id, revision=revision, reason=reason))

    @property
    def followers(self) -> int:
        """How many edges follow the stream."""
        return len(self._followers)

    def get(self, sandbox_id: str) -> Route | None:
        """One route."""
        return self._routes.get(sandbox_id)

    def locate(self, wanted: Locate) -> str | None:
        """The sandbox whose access token made this signature. Cost: one hash for each secured live sandbox."""
        if not wanted.signature.startswith(_SIGNATURE_VERSION):
            return None
        for sandbox_id, secured in self._secured.items():
            if secured and hmac.compare_digest(self._signature(wanted, self._tokens.access(sandbox_id)), wanted.signature):
                return sandbox_id
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI for everything below PREFIX."""
        await asgi.guarded(send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not hmac.compare_digest(asgi.bearer(scope).encode(), self._edge_token):
            raise Refused(Code.UNAUTHENTICATED, "unknown edge credential")
        rest = str(scope["path"]).removeprefix(PREFIX)
        method = scope["method"]
        if method == "GET" and rest == "routes/stream":
            await self._stream(receive, send)
        elif method == "POST" and rest.startswith("routes/") and rest.endswith("/wake"):
            sandbox_id = rest.removeprefix("routes/").removesuffix("/wake")
            known = self._routes.get(sandbox_id)
            if known is None or (known.state != State.READY and not known.auto_resume):
                raise Refused(Code.SANDBOX_NOT_FOUND, "no such sandbox may be woken")
            await self.wake(sandbox_id)
            route = self._routes.get(sandbox_id)
            if route is None or route.state != State.READY:
                raise Unavailable(Code.RESUME_FAILED, "it has not come back", retry_after_s=5.0)
            await asgi.answer_model(send, route)
        elif method == "GET" and rest.startswith("routes/"):
            route = self._routes.get(rest.removeprefix("routes/"))
            if route is None:
                raise Refused(Code.SANDBOX_NOT_FOUND, "no such sandbox is reachable")
            await asgi.answer_model(send, route)
        elif method == "POST" and rest == "locate":
            found = self.locate(asgi.parse(Locate, await asgi.body(receive, limit=16384)))
            if found is None:
                raise Refused(Code.SANDBOX_NOT_FOUND, "no live sandbox made this signature")
            await asgi.answer_model(send, Located(sandbox_id=found))
        else:
            raise Refused(Code.INVALID_REQUEST, "no such call")

    async def _stream(self, receive: Receive, send: Send) -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_MAX)
        # Follow first, then read: no change falls between snapshot and stream.
        self._followers.add(queue)
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]})
            snapshot = Line(type="snapshot", cursor=self._cursor, incarnation=self._incarnation, routes=list(self._routes.values()))
            await send({"type": "http.response.body", "body": _line(snapshot), "more_body": True})
            await self._forward(queue, send, gone)
        finally:
            self._followers.discard(queue)
            gone.cancel()

    async def _forward(self, queue: asyncio.Queue[bytes | None], send: Send, gone: asyncio.Task[None]) -> None:
        while not gone.done():
            nxt = asyncio.ensure_future(queue.get())
            await asyncio.wait((nxt, gone), timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)
            if not nxt.done():
                nxt.cancel()
                content: bytes | None = _line(Line(type="ping", cursor=self._cursor))
            else:
                content = nxt.result()
                while content is not None and not queue.empty():
                    more = queue.get_nowait()
                    if more is None:
                        break
                    content += more
            if content is None or gone.done():
                break
            await send({"type": "http.response.body", "body": content, "more_body": True})
        if not gone.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """End every stream."""
        for queue in self._followers:
            _offer(queue, None)

    def _tell(self, line: Line) -> None:
        content = _line(line)
        for queue in tuple(self._followers):
            if not _offer(queue, content):
                self._followers.discard(queue)
                while not queue.empty():
                    queue.get_nowait()
                _offer(queue, None)

    def _route(self, sandbox: Sandbox, placement: Placement | None) -> Route | None:
        # A ready sandbox keeps its route although its agent may have to look again at the guest: that would be a route's end and its
        # return under one revision, and edges rightly take no older or equal word after an end.
        if sandbox.state in _AT_REST:
            return self._asleep(sandbox, placement)
        if sandbox.state is not State.READY or placement is None or placement.address is None:
            return None
        network = sandbox.spec.network
        traffic = None if network.public_traffic else hashlib.sha256(self._tokens.traffic(sandbox.id).encode()).hexdigest()
        return Route(
            sandbox_id=sandbox.id,
            revision=sandbox.revision,
            generation=sandbox.generation,
            placement_id=placement.id,
            host_id=placement.host_id,
            state=sandbox.state.value,
            reach=Reach(ip=placement.address),
            public_traffic=network.public_traffic,
            traffic_token_sha256=traffic,
            connect_token=self._tokens.guest(placement, SCOPE_CONNECT),
            mask_request_host=network.mask_request_host,
        )

    def _asleep(self, sandbox: Sandbox, placement: Placement | None) -> Route | None:
        """What edges know of one that traffic may wake: who may, and no way to it. None: it is resumed by its client alone."""
        if not wakes_by_traffic(sandbox) or (placement is None and not sandbox.rests_in_store):
            return None
        public = sandbox.spec.network.public_traffic
        return Route(
            sandbox_id=sandbox.id,
            revision=sandbox.revision,
            generation=sandbox.generation,
            placement_id=placement.id if placement is not None else "",
            host_id=placement.host_id if placement is not None else "",
            state=sandbox.state.value,
            reach=Reach(ip=""),
            public_traffic=public,
            traffic_token_sha256=None if public else hashlib.sha256(self._tokens.traffic(sandbox.id).encode()).hexdigest(),
            auto_resume=True,
        )

    @staticmethod
    def _signature(wanted: Locate, token: str) -> str:
        text = f"{wanted.path}:{wanted.operation}:{wanted.username}:{token}"
        if wanted.expiration is not None:
            text += f":{wanted.expiration}"
        return _SIGNATURE_VERSION + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


async def _nobody_wakes(sandbox_id: str) -> None:
    raise Refused(Code.NOT_SUPPORTED, f"nobody here resumes {sandbox_id}")


def _line(line: Line) -> bytes:
    return line.model_dump_json(exclude_none=True).encode() + b"\n"


def _offer(queue: asyncio.Queue[bytes | None], content: bytes | None) -> bool:
    try:
        queue.put_nowait(content)
    except asyncio.QueueFull:
        return False
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
