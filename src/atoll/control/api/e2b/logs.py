"""E2B's log routes: the sandbox's events, each at its time, and its console, whose lines carry no times of their own.

A console line is dated with the sandbox's start, so that it stays in the same place in every answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code, Refused, Unavailable
from atoll.control.api.e2b import answers
from atoll.control.api.e2b.sandboxes import integer, not_found, sandbox_id
from atoll.control.api.exchange import Answer, Call, json_answer
from atoll.control.api.moment import timestamp
from atoll.control.service import EventRecord, Service
from atoll.domain.sandbox import TERMINAL, Sandbox

LEVELS: Final = ("debug", "info", "warn", "error")
LIMIT: Final = 1000
_MILLIS_MAX: Final = 253402300799000
_SEARCH_MAX: Final = 256
_EVENTS_PAGE: Final = 500
_CONSOLE_LINES_MAX: Final = 10000


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. *Units*: wall seconds."""

    at: float
    message: str
    level: str
    fields: dict[str, str]

    def json(self) -> answers.Json:
        return answers.log_entry(self.at, self.message, self.level, self.fields)


@dataclass(frozen=True, slots=True)
class Logs:
    """The handlers."""

    service: Service

    async def v1(self, call: Call) -> Answer:
        asked = call.query()
        start_ms = integer(asked, "start", default=0, low=0, high=_MILLIS_MAX)
        limit = integer(asked, "limit", default=LIMIT, low=0, high=2**31 - 1)
        entries = [one for one in await self._entries(call) if one.at * 1000 >= start_ms][: min(limit, LIMIT)]
        lines = [{"timestamp": timestamp(one.at), "line": one.message} for one in entries]
        return json_answer(200, {"logs": lines, "logEntries": [one.json() for one in entries]})

    async def v2(self, call: Call) -> Answer:
        asked = call.query()
        limit = integer(asked, "limit", default=LIMIT, low=0, high=LIMIT)
        direction = asked.get("direction") or "forward"
        level = asked.get("level") or LEVELS[0]
        search = asked.get("search", "")
        if direction not in ("forward", "backward"):
            raise Refused(Code.INVALID_REQUEST, "direction is forward or backward")
        if level not in LEVELS:
            raise Refused(Code.INVALID_REQUEST, f"level is one of {', '.join(LEVELS)}")
        if len(search) > _SEARCH_MAX:
            raise Refused(Code.INVALID_REQUEST, f"search is longer than {_SEARCH_MAX} characters")
        backward = direction == "backward"
        cursor_ms = integer(asked, "cursor", default=_MILLIS_MAX if backward else 0, low=0, high=_MILLIS_MAX)
        entries = await self._entries(call)
        if backward:
            entries = [one for one in reversed(entries) if one.at * 1000 <= cursor_ms]
        else:
            entries = [one for one in entries if one.at * 1000 >= cursor_ms]
        kept = [one for one in entries if LEVELS.index(one.level) >= LEVELS.index(level) and search in one.message]
        return json_answer(200, {"logs": [one.json() for one in kept[:limit]]})

    async def _entries(self, call: Call) -> list[Entry]:
        """All of it, oldest first; of ended sandboxes too, for as long as their record is kept."""
        given = sandbox_id(call)
        try:
            sandbox = await self.service.get(call.caller, given, ended=True)
            events = await self._events(call, given)
            console = await self._console(call, sandbox)
        except Refused as error:
            raise (not_found(given) if error.code is Code.SANDBOX_NOT_FOUND else error) from error
        started = sandbox.started_at if sandbox.started_at is not None else sandbox.created_at
        lines = [Entry(started, line, "info", {"source": "console"}) for line in console]
        return sorted([*(_of_event(event) for event in events), *lines], key=lambda one: one.at)

    async def _events(self, call: Call, given: str) -> list[EventRecord]:
        events: list[EventRecord] = []
        after = 0
        while len(events) < LIMIT:
            page = await self.service.events(call.caller, given, after=after, limit=_EVENTS_PAGE)
            events += page
            if len(page) < _EVENTS_PAGE:
                break
            after = page[-1].seq
        return events

    async def _console(self, call: Call, sandbox: Sandbox) -> list[str]:
        if sandbox.state in TERMINAL or sandbox.placement_id is None:
            return []
        try:
            raw = await self.service.logs(call.caller, sandbox.id)
        except Unavailable:
            # The host does not answer now; its events are worth having without its console.
            return []
        return raw.decode("utf-8", "replace").splitlines()[-_CONSOLE_LINES_MAX:]


def _of_event(event: EventRecord) -> Entry:
    failed = event.type.endswith(("failed", "refused")) or event.state == "failed"
    return Entry(event.at, event.type, "error" if failed else "info", answers.event_fields(event))
