"""The way between agents and control, with weather: delay, loss on the way there, loss on the way back, repetition, partition."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from atoll.base.errors import Code, OutcomeUnknown, Unavailable
from atoll.control.compose import Control
from atoll.domain.host import Host
from atoll.wire import agent as wire

M = TypeVar("M", bound=BaseModel)
A = TypeVar("A", bound=BaseModel)


@dataclass(slots=True)
class Weather:
    """Chances of each fault for one message. *Units*: seconds for the delay."""

    lost_there: float = 0.0
    lost_back: float = 0.0
    repeated: float = 0.0
    delay_s: float = 0.01


class Line:
    """One host's line to whatever control runs now. Implements agent.transport.Transport."""

    def __init__(self, control: Callable[[], Control | None], credential: str, dice: random.Random, weather: Weather) -> None:
        self._control = control
        self._credential = credential
        self._dice = dice
        self.weather = weather
        self.cut = False

    async def poll(self, message: wire.Poll) -> wire.PollAnswer:
        return await self._call(message, wire.PollAnswer, lambda control, host, m: control.sessions.poll(host, m))

    async def observe(self, message: wire.Observe) -> wire.ObserveAnswer:
        return await self._call(message, wire.ObserveAnswer, lambda control, host, m: control.sessions.observe(host, m))

    async def payloads(self, message: wire.PayloadsWanted) -> wire.Payloads:
        return await self._call(message, wire.Payloads, lambda control, host, m: control.sessions.payloads(host, m))

    async def collected(self, message: wire.Collected) -> None:
        raise Unavailable(Code.CONTROL_UNAVAILABLE, "no consoles are read here")

    async def close(self) -> None:
        """Nothing is held open."""

    async def _call(self, message: M, answer: type[A], do: Callable[[Control, Host, M], Awaitable[A]]) -> A:
        copy = type(message).model_validate_json(message.model_dump_json())
        await self._travel()
        if self._dice.random() < self.weather.lost_there:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "lost on the way there")
        if self._dice.random() < self.weather.repeated:
            await self._deliver(copy, do)
        result = await self._deliver(copy, do)
        await self._travel()
        if self._dice.random() < self.weather.lost_back:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "lost on the way back")
        return answer.model_validate_json(result.model_dump_json())

    async def _deliver(self, message: M, do: Callable[[Control, Host, M], Awaitable[A]]) -> A:
        control = self._control()
        if control is None or self.cut:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "no way to control")
        host = await control.sessions.host_of(self._credential)
        # The request dies with the control process that serves it.
        work = asyncio.ensure_future(do(control, host, message))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=0.5)
                if self._control() is not control or self.cut:
                    raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "control went away")
            return work.result()
        finally:
            work.cancel()

    async def _travel(self) -> None:
        if self.cut:
            raise Unavailable(Code.CONTROL_UNAVAILABLE, "the line is cut")
        await asyncio.sleep(self._dice.random() * self.weather.delay_s)
