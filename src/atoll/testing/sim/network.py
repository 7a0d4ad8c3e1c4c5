"""The way between agents and control, with weather: delay, loss either way, repetition, one-way partitions.

Theory of operation. `SimTransport` is the agent's real HTTP transport with another wire: what it would send goes, as bytes, into the ASGI
application of some replica, and what that answers comes back as bytes; so limits, parsing and errors are the product's own. A request
runs as a task of the replica that serves it and ends with it. A message that gets lost is noticed at once (a reset) or not at all (the
caller's patience ends); control learns that a caller has gone only when something arrives to say so.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from atoll.agent.transport import HttpTransport, refusal
from atoll.base.errors import Code, OutcomeUnknown, Unavailable
from atoll.base.secret import Secret
from atoll.control.compose import Control
from atoll.testing.sim.process import Process


@dataclass(slots=True)
class Weather:
    """Of one host's line. Shares of messages; *Units*: seconds."""

    lost: float = 0.0
    repeated: float = 0.0
    delay_s: float = 0.005
    requests_cut: bool = False
    answers_cut: bool = False


@dataclass(slots=True)
class Replica:
    """One control process that can be reached."""

    process: Process
    control: Control


@dataclass(slots=True)
class Line:
    """One host's line: its weather, and what has come over it."""

    weather: Weather = field(default_factory=Weather)
    answered_at: float = 0.0
    """When the last poll that was answered had been sent, by the boot clock."""
    longest_silence_s: float = 0.0
    """Between such a moment and the next answer that came."""
    messages: int = 0


class SimTransport(HttpTransport):
    """One agent run's way to control."""

    def __init__(
        self,
        line: Line,
        credential: Secret,
        dice: random.Random,
        *,
        replicas: Callable[[], Sequence[Replica]],
        boot: Callable[[], float],
        stray: Callable[[Any], object],
        faulty: Callable[[str], None],
    ) -> None:
        """`stray` runs a delivery that nobody waits for; `faulty` is told of an internal error of control, which no weather excuses."""
        super().__init__("http://localhost", credential)
        self._line = line
        self._key = credential
        self._dice = dice
        self._replicas = replicas
        self._boot = boot
        self._stray = stray
        self._faulty = faulty

    async def _send(self, name: str, message: BaseModel, *, within_s: float) -> bytes:
        self._line.messages += 1
        data = message.model_dump_json(exclude_none=True).encode()
        sent_at = self._boot()
        try:
            async with asyncio.timeout(within_s):
                status, headers, body = await self._exchange(name, data)
        except TimeoutError:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, f"no answer to {name}: TimeoutError") from None
        if status >= 300:
            raise refusal(status, body, headers.get("retry-after"))
        if name == "poll":
            self._line.longest_silence_s = max(self._line.longest_silence_s, self._boot() - self._line.answered_at)
            self._line.answered_at = sent_at
        return body

    async def _exchange(self, name: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
        weather = self._line.weather
        await self._travel()
        if weather.requests_cut or self._dice.random() < weather.lost:
            await self._silence()
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "control is not reachable")
        replica = self._some_replica()
        if replica is None:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "no control runs")
        if self._dice.random() < weather.repeated:
            self._stray(self._again(name, data, after_s=self._dice.random() ** 3 * 60.0))
        gone = asyncio.Event()
        work = replica.process.run(post(replica.control, f"/agent/v1/{name}", self._key, data, gone))
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            if not weather.requests_cut:
                gone.set()
            raise
        if work.cancelled() or not replica.process.alive:
            await self._silence()
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "control died")
        answer = work.result()
        if answer[0] == 500 and b"INTERNAL" in answer[2]:
            self._faulty(f"control answered {name} with {answer[2].decode()}")
        await self._travel()
        if weather.answers_cut or self._dice.random() < weather.lost:
            await self._silence()
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "the answer was lost")
        return answer

    async def _again(self, name: str, data: bytes, *, after_s: float) -> None:
        await asyncio.sleep(after_s)
        replica = self._some_replica()
        if replica is not None and not self._line.weather.requests_cut:
            await asyncio.wait({replica.process.run(post(replica.control, f"/agent/v1/{name}", self._key, data, asyncio.Event()))})

    def _some_replica(self) -> Replica | None:
        replicas = self._replicas()
        return self._dice.choice(replicas) if replicas else None

    async def _travel(self) -> None:
        await asyncio.sleep(self._dice.random() * self._line.weather.delay_s)

    async def _silence(self) -> None:
        """A loss is a reset at once, or nothing at all until the caller gives up."""
        if self._dice.random() < 0.5:
            await asyncio.sleep(3600.0)


async def post(control: Control, path: str, credential: Secret, data: bytes, gone: asyncio.Event) -> tuple[int, dict[str, str], bytes]:
    """One request into a control's application: status, headers, body. `gone`: the caller has hung up."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {credential.reveal()}".encode())],
        "client": ("sim", 1),
        "scheme": "http",
    }
    sent: list[MutableMapping[str, Any]] = []
    unread = [data]

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await next(served for prefix, served in control.hot if path.startswith(prefix))(scope, receive, send)
    if not sent:
        raise asyncio.CancelledError
    headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])
