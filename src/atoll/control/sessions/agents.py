"""The agents' routes: /agent/v1/{enroll,identity,poll,observe,accounts,payloads,blobs,manifests,machines,image-keys,moments}, bare ASGI (wire/agent.py says what each is for).

Each host has a rate of its own, in this replica: an agent that spins is told when to come again, and costs others nothing. Who shows no
valid credential, and who enrols, share one rate each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.control import asgi
from atoll.control.artifacts.giving import Giving
from atoll.control.artifacts.moments import Moments
from atoll.control.asgi import Receive, Scope, Send
from atoll.control.hosts.enrollment import Enrollment
from atoll.control.sessions.sessions import Sessions
from atoll.domain.host import Host
from atoll.planning.admission import Bucket
from atoll.wire import agent as wire

PREFIX: Final = "/agent/v1/"
LAYERS: Final = "layers/"
BLOBS: Final = "blobs/"
MANIFESTS: Final = "manifests/"
MACHINES: Final = "machines/"
MOMENTS: Final = "moments/"
IMAGE_KEYS: Final = "image-keys"
_DIGITS_MAX: Final = 15


@dataclass(frozen=True, slots=True)
class Pace:
    """So many calls a second on the long run, and so many at once."""

    per_s: float
    at_once: float


HOST_PACE: Final = Pace(1000.0, 2000.0)
"""Of one host: about twice what a host that starts and ends 300 sandboxes a second needs."""
STRANGERS_PACE: Final = Pace(50.0, 200.0)
ENROLL_PACE: Final = Pace(20.0, 200.0)


class Agents:
    """ASGI for everything below PREFIX."""

    def __init__(
        self,
        sessions: Sessions,
        enrollment: Enrollment,
        clock: Clock,
        *,
        giving: Giving | None = None,
        moments: Moments | None = None,
        pace: Pace = HOST_PACE,
    ) -> None:
        """`giving`: None where this control keeps no images; `moments`: nor what is saved of sandboxes."""
        self._giving = giving
        self._moments = moments
        self._sessions = sessions
        self._enrollment = enrollment
        self._clock = clock
        self._pace = pace
        self._buckets: dict[str, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.guarded(send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = str(scope["path"]).removeprefix(PREFIX)
        if call.startswith(MOMENTS):
            host = await self._host(scope)
            if self._moments is None:
                raise Refused(Code.MOMENT_UNAVAILABLE, "this control keeps no moments")
            await self._moments.serve(host, scope, receive, send, call.removeprefix(MOMENTS))
        elif scope["method"] == "PUT" and call.startswith(LAYERS):
            await self._layer(scope, receive, send, call.removeprefix(LAYERS))
        elif scope["method"] == "GET":
            await self._give(scope, send, call)
        else:
            await self._message(scope, receive, send, call)

    async def _message(self, scope: Scope, receive: Receive, send: Send, call: str) -> None:
        if scope["method"] != "POST":
            raise Refused(Code.INVALID_REQUEST, "agents' calls are POST")
        data = await asgi.body(receive, limit=wire.MESSAGE_BYTES_MAX)
        if call == "enroll":
            self._take(call, ENROLL_PACE)
            await asgi.answer_model(send, await self._enrollment.enroll(asgi.parse(wire.Enroll, data)), status=201)
            return
        host = await self._host(scope)
        match call:
            case "identity":
                await asgi.answer_model(send, await self._enrollment.identify(host))
            case "poll":
                poll = asgi.parse(wire.Poll, data)
                answer = await _unless_gone(self._sessions.poll(host, poll), receive)
                if answer is not None:
                    await asgi.answer_model(send, answer)
            case "observe":
                await asgi.answer_model(send, await self._sessions.observe(host, asgi.parse(wire.Observe, data)))
            case "accounts":
                await asgi.answer_model(send, await self._sessions.accounts(host, asgi.parse(wire.Accounts, data)))
            case "payloads":
                await asgi.answer_model(send, await self._sessions.payloads(host, asgi.parse(wire.PayloadsWanted, data)))
            case "collected":
                await self._sessions.collected(host, asgi.parse(wire.Collected, data))
                await asgi.answer(send, 204, b"")
            case _:
                raise Refused(Code.INVALID_REQUEST, "no such call")

    async def _layer(self, scope: Scope, receive: Receive, send: Send, wish_id: str) -> None:
        host = await self._host(scope)
        entries = asgi.header(scope, b"atoll-entries")
        if self._sessions.captures is None or not entries.isdigit() or len(entries) > _DIGITS_MAX:
            raise Refused(Code.INVALID_REQUEST, "a layer comes with its number of entries, to a control that asked for it")
        await self._sessions.captures.receive(host.id, wish_id, int(entries), receive)
        await asgi.answer(send, 204, b"")

    async def _give(self, scope: Scope, send: Send, call: str) -> None:
        if call != IMAGE_KEYS and not call.startswith((BLOBS, MANIFESTS, MACHINES)):
            raise Refused(Code.INVALID_REQUEST, "agents' calls are POST")
        await self._host(scope)
        if self._giving is None:
            raise Refused(Code.IMAGE_UNAVAILABLE, "this control keeps no images")
        if call.startswith(BLOBS):
            await self._giving.blob(call.removeprefix(BLOBS), scope, send)
        elif call.startswith(MANIFESTS):
            await self._giving.manifest(call.removeprefix(MANIFESTS), send)
        elif call.startswith(MACHINES):
            await self._giving.machine(call.removeprefix(MACHINES), send)
        else:
            await self._giving.key_chain(send)

    async def _host(self, scope: Scope) -> Host:
        """Who calls. *Errors*: Refused UNAUTHENTICATED, CREDENTIAL_REVOKED; Unavailable RATE_LIMITED."""
        try:
            host = await self._sessions.host_of(asgi.bearer(scope))
        except Refused:
            self._take("strangers", STRANGERS_PACE)
            raise
        self._take(host.id, self._pace)
        return host

    def _take(self, name: str, pace: Pace) -> None:
        boot = self._clock.boot()
        bucket = self._buckets.setdefault(name, Bucket(pace.per_s, pace.at_once, pace.at_once, boot))
        bucket.take(boot=boot)


async def _unless_gone(work: Coroutine[Any, Any, wire.PollAnswer], receive: Receive) -> wire.PollAnswer | None:
    """The answer, or None when the agent has hung up: a parked poll of a dead agent must not linger."""
    answering = asyncio.ensure_future(work)
    hung_up = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((answering, hung_up), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return await answering
        return None
    finally:
        for task in (answering, hung_up):
            task.cancel()
