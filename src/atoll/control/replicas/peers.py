"""Peers: what replicas ask of each other, because a host's poll, or its answer, came to another one than who waits for it.

Theory of operation. A console, usage or a layer is waited for in one process (`sessions/wishes.py`), and goes out with the host's poll,
which may be parked at any replica. Who waits asks the others, until one has the poll; that one gives the wish away with its next answer, once.
The agent's answer goes to whichever replica its connection reaches: what nobody waits for there is passed on to the others. A layer's bytes stay
where they came until the one who waits has fetched them. Nothing of this is kept: a wish that is lost is asked again by its reader.

A call is signed for a minute with the key that all replicas have, over its path and body: nobody else is heard, and nothing can be altered.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from pydantic import BaseModel

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.control.tokens import Tokens
from atoll.wire import replica as wire
from atoll.wire.agent import Collect, Collected, ImageCacheState

PREFIX: Final = "/replica/v1/"
SIGNATURE: Final = "atoll-replica"
LIFE_S: Final = 60.0
_LOOK_AGAIN_S: Final = 0.5
_WISHES_MAX: Final = 256
_DIGITS_MAX: Final = 15
_REFUSED: Final = 300
M = TypeVar("M", bound=BaseModel)


class Line(Protocol):
    """How another replica is reached. *Errors* of both: Unavailable CONTROL_UNAVAILABLE when it is not."""

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of the answer."""
        ...

    def get(self, url: str, headers: Mapping[str, str]) -> AbstractAsyncContextManager[tuple[int, AsyncIterator[bytes]]]:
        """Status and body of the answer, in parts."""
        ...


@dataclass(slots=True)
class Peers:
    """One per control process."""

    tokens: Tokens
    clock: Clock
    incarnation: str
    address: str
    """Of this replica."""
    line: Line | None = None
    others: Callable[[], Sequence[str]] = lambda: ()
    """Addresses of the other replicas that are heard of."""
    parked: Callable[[str], str | None] = lambda _: None
    """Which run of this host's agent has a poll here that waits for its answer; None: none."""
    wake: Callable[[str], None] = lambda _: None
    _wishes: defaultdict[str, list[Collect]] = field(default_factory=lambda: defaultdict(list))

    # Who waits.

    async def spread(self, host_id: str, wish: Collect, *, pending: Callable[[], bool], given: Callable[[str], None]) -> None:
        """Have the wish reach the host, wherever its poll is. `given`: to which run of its agent another replica gives it.

        Ends when it is given, there or here (`pending` says no); whoever waits no longer cancels it.
        """
        while self.line is not None and pending() and self.parked(host_id) is None:
            answers = await self._ask("wish", wire.Wish(host_id=host_id, collect=wish))
            if answers:
                given(wire.Given.model_validate_json(answers[0][1]).epoch)
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    # To whom something came that is not waited for here.

    async def pass_on(self, message: Collected) -> None:
        """An agent's answer."""
        await self._ask("collected", message)

    async def waiting(self, host_id: str, wish_id: str) -> str | None:
        """Where a layer is waited for; None: nowhere."""
        answers = await self._ask("waiting", wire.Waiting(host_id=host_id, wish_id=wish_id))
        return answers[0][0] if answers else None

    async def came(self, address: str, message: wire.Came) -> None:
        """Have the one who waits fetch a layer from here. *Errors*: Unavailable CONTROL_UNAVAILABLE when it did not."""
        if not await self._ask("came", message, of=(address,)):
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "the replica that waits for this layer did not take it")

    async def kept(self) -> list[ImageCacheState]:
        """What the hosts keep of images that the others have heard last, one sum of each replica that answers."""
        return [wire.Kept.model_validate_json(body).images for _, body in await self._ask("kept", wire.KeptAsked())]

    def wanted(self, host_id: str, room: int) -> list[Collect]:
        """Others' wishes to this host that were not given away yet; each is given once."""
        wishes = self._wishes.pop(host_id, [])
        if wishes[room:]:
            self._wishes[host_id] = wishes[room:]
        return wishes[:room]

    # What others ask of this one.

    def give(self, message: wire.Wish) -> wire.Given:
        """Take a wish for a host whose poll is here. *Errors*: Refused HOST_NOT_FOUND; Unavailable RATE_LIMITED."""
        epoch = self.parked(message.host_id)
        if epoch is None:
            raise Refused(Code.HOST_NOT_FOUND, "no poll of this host waits here")
        if len(self._wishes[message.host_id]) >= _WISHES_MAX:
            raise Unavailable(Code.RATE_LIMITED, "too much is wished of this host")
        self._wishes[message.host_id].append(message.collect)
        self.wake(message.host_id)
        return wire.Given(epoch=epoch)

    def fetch(self, address: str, digest: str) -> AbstractAsyncContextManager[tuple[int, AsyncIterator[bytes]]]:
        """A blob that another replica has. *Errors*: Refused INVALID_REQUEST when `address` is no replica's; Unavailable."""
        if self.line is None or address not in self.others():
            raise Refused(Code.INVALID_REQUEST, "the layer is at no replica's address")
        path = f"{PREFIX}blobs/{digest}"
        return self.line.get(address + path, {SIGNATURE: self._sign("GET", path, b"")})

    def require(self, method: str, path: str, content: bytes, signature: str) -> None:
        """*Errors*: Refused UNAUTHENTICATED when this is no replica's call, or an old one."""
        until, _, _ = signature.partition(".")
        now = self.clock.now()
        fresh = until.isascii() and until.isdigit() and len(until) < _DIGITS_MAX and now <= int(until) <= now + 2 * LIFE_S
        if not fresh or not self.tokens.is_replica(self._said(method, path, content, int(until)), signature.partition(".")[2]):
            raise Refused(Code.UNAUTHENTICATED, "only replicas of this deployment are heard here")

    async def _ask(self, call: str, message: BaseModel, *, of: Sequence[str] | None = None) -> list[tuple[str, bytes]]:
        """The addresses that said yes, with their answers."""
        line, addresses = self.line, self.others() if of is None else of
        if line is None or not addresses:
            return []
        path, content = PREFIX + call, message.model_dump_json().encode()
        headers = {SIGNATURE: self._sign("POST", path, content), "content-type": "application/json"}

        async def one(address: str) -> tuple[str, bytes] | None:
            try:
                status, body = await line.post(address + path, content, headers)
            except AtollError:
                return None
            return (address, body) if status < _REFUSED else None

        answers = await asyncio.gather(*(one(address) for address in addresses))
        return [answer for answer in answers if answer is not None]

    def _sign(self, method: str, path: str, content: bytes) -> str:
        until = int(self.clock.now() + LIFE_S)
        return f"{until}.{self.tokens.replica(self._said(method, path, content, until))}"

    def _said(self, method: str, path: str, content: bytes, until: int) -> str:
        return f"{self.incarnation}|{method}|{path}|{until}|{hashlib.sha256(content).hexdigest()}"
