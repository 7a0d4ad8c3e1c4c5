"""Counting the agents' calls, around their application: what it does is none of the meter's business."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from atoll.control.asgi import Receive, Scope, Send
from atoll.control.metering import OTHER, Meter

CALLS: Final = frozenset({"enroll", "poll", "observe", "payloads", "collected"})


class Counted:
    """ASGI: the same application, with each call counted by name and class of status."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], meter: Meter) -> None:
        self.app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        call = str(scope["path"]).rpartition("/")[2]
        self._meter.parked += 1
        try:
            await self.app(scope, receive, noting)
        finally:
            self._meter.parked -= 1
            self._meter.agent_answered(call if call in CALLS else OTHER, status)
