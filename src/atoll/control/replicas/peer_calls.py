"""What other replicas ask of this one: ASGI for everything below `peers.PREFIX`. See `peers.py`."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.errors import Code, Refused
from atoll.control import asgi
from atoll.control.artifacts import giving
from atoll.control.artifacts.image_caches import ImageCaches
from atoll.control.asgi import Receive, Scope, Send
from atoll.control.replicas.peers import PREFIX, SIGNATURE, Peers
from atoll.control.sessions.captures import Captures
from atoll.control.sessions.consoles import Consoles
from atoll.wire import agent
from atoll.wire import replica as wire

_BLOBS = "blobs/"


@dataclass(frozen=True, slots=True)
class PeerCalls:
    """`captures`: None where this control keeps no images."""

    peers: Peers
    consoles: Consoles
    captures: Captures | None
    image_caches: ImageCaches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.guarded(send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = str(scope["path"]), str(scope["method"])
        content = await asgi.body(receive, limit=wire.MESSAGE_BYTES_MAX) if method == "POST" else b""
        self.peers.require(method, path, content, asgi.header(scope, SIGNATURE.encode()))
        call = path.removeprefix(PREFIX)
        if method == "GET" and call.startswith(_BLOBS) and self.captures is not None:
            await giving.give(self.captures.store, call.removeprefix(_BLOBS), scope, send)
            return
        match method, call:
            case "POST", "wish":
                await asgi.answer_model(send, self.peers.give(asgi.parse(wire.Wish, content)))
                return
            case "POST", "kept":
                asgi.parse(wire.KeptAsked, content)
                await asgi.answer_model(send, wire.Kept(images=self.image_caches.mine()))
                return
            case "POST", "collected":
                self._collected(asgi.parse(agent.Collected, content))
            case "POST", "waiting":
                self._waits(asgi.parse(wire.Waiting, content))
            case "POST", "came":
                await self._came(asgi.parse(wire.Came, content))
            case _:
                raise Refused(Code.INVALID_REQUEST, "no such call")
        await asgi.answer(send, 204, b"")

    def _collected(self, message: agent.Collected) -> None:
        if self.captures is not None and message.code is not None:
            self.captures.failed(message.host_id, message)
        self.consoles.collected(message.host_id, message)

    def _waits(self, message: wire.Waiting) -> None:
        if self.captures is None or self.captures.wishes.of(message.host_id, message.wish_id) is None:
            raise Refused(Code.HOST_NOT_FOUND, "nobody waits for this layer here")

    async def _came(self, message: wire.Came) -> None:
        if self.captures is None:
            raise Refused(Code.HOST_NOT_FOUND, "nobody waits for this layer here")
        await self.captures.fetch(message)
