"""E2B's sandbox routes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import parse_qsl, unquote

from atoll.base.errors import Code, Refused
from atoll.control.api.e2b import answers, requests
from atoll.control.api.exchange import Answer, Call, Headers, changed, json_answer
from atoll.control.api.moment import read_moment
from atoll.control.api.settings import ApiSettings
from atoll.control.service import Caller, Query, Service
from atoll.domain.sandbox import Sandbox
from atoll.domain.spec import SaveMode

PAGE_MAX: Final = 100
_ID: Final = re.compile(r"[a-z0-9]{1,128}")
_INTEGER: Final = re.compile(r"-?[0-9]{1,15}")
_NO_CONTENT: Final = 204


def sandbox_id(call: Call) -> str:
    """The id of the path, without the client id that older clients append. *Errors*: INVALID_REQUEST."""
    given = call.params["sandboxID"].partition("-")[0]
    if not _ID.fullmatch(given):
        raise Refused(Code.INVALID_REQUEST, "the sandbox id is not valid: it has characters of a-z and 0-9 only")
    return given


def not_found(given: str) -> Refused:
    """One answer for what never was, what has ended and what is another team's."""
    return Refused(Code.SANDBOX_NOT_FOUND, f'sandbox "{given}" was not found')


def integer(query: dict[str, str], name: str, *, default: int, low: int, high: int) -> int:
    """A whole number of the query. *Errors*: INVALID_REQUEST."""
    raw = query.get(name)
    if raw is None or raw == "":
        return default
    if not _INTEGER.fullmatch(raw) or not low <= int(raw) <= high:
        raise Refused(Code.INVALID_REQUEST, f"{name} must be a whole number of {low}..{high}")
    return int(raw)


def metadata_filter(raw: str | None) -> dict[str, str] | None:
    """`k=v&k2=v2` whose names and values are quoted twice by clients; the query's own quoting is off already.

    *Errors*: INVALID_REQUEST.
    """
    if not raw:
        return None
    try:
        pairs = parse_qsl(raw, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=PAGE_MAX)
        wanted = {unquote(name, errors="strict"): unquote(value, errors="strict") for name, value in pairs}
    except ValueError as error:
        raise Refused(Code.INVALID_REQUEST, "metadata must look like name=value&name=value, each part URL-encoded") from error
    if any("\0" in name or "\0" in value for name, value in wanted.items()):
        raise Refused(Code.INVALID_REQUEST, "metadata holds a NUL character")
    return wanted


def _states(raw: str | None) -> frozenset[str]:
    if not raw:
        return frozenset()
    wanted: set[str] = set()
    for word in raw.split(","):
        states = answers.STATES.get(word.strip())
        if states is None:
            raise Refused(Code.INVALID_REQUEST, f"state is one or both of {', '.join(answers.STATES)}")
        wanted.update(states)
    return frozenset(wanted)


def _ascending(raw: str | None) -> bool:
    if raw not in (None, "", "asc", "desc"):
        raise Refused(Code.INVALID_REQUEST, "order is asc or desc")
    return raw == "asc"


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """The handlers; each takes a call and answers it."""

    service: Service
    settings: ApiSettings

    async def create_v1(self, call: Call) -> Answer:
        return await self._create(call, v2=False)

    async def create_v2(self, call: Call) -> Answer:
        return await self._create(call, v2=True)

    async def _create(self, call: Call, *, v2: bool) -> Answer:
        request_id = requests.idempotency_key(call.headers.get(b"idempotency-key"))
        request = requests.create_request(call.json(requests.NewSandbox), v2=v2, request_id=request_id)
        sandbox = await self.service.create(call.caller, request)
        return self._created(201, sandbox)

    def _created(self, status: int, sandbox: Sandbox) -> Answer:
        body = answers.sandbox_created(
            sandbox,
            client_id=self.settings.client_id,
            domain=self.settings.domain,
            access=self.service.access_token(sandbox),
            traffic=self.service.traffic_token(sandbox),
        )
        return json_answer(status, body, changed(sandbox))

    async def get(self, call: Call) -> Answer:
        sandbox = await self._visible(call)
        body = answers.sandbox_detail(
            sandbox,
            client_id=self.settings.client_id,
            domain=self.settings.domain,
            access=self.service.access_token(sandbox),
        )
        return json_answer(200, body)

    async def _visible(self, call: Call) -> Sandbox:
        given = sandbox_id(call)
        try:
            return await self.service.get(call.caller, given)
        except Refused as error:
            raise _same_words(error, given) from error

    async def list_v1(self, call: Call) -> Answer:
        """All that run, in one list: this route has no pages."""
        query = Query(states=answers.RUNNING, metadata=metadata_filter(call.query().get("metadata")), limit=PAGE_MAX)
        found = [answers.sandbox_listed(one, client_id=self.settings.client_id) async for one in self._all(call.caller, query)]
        return json_answer(200, found)

    async def _all(self, caller: Caller, query: Query) -> AsyncIterator[Sandbox]:
        cursor: str | None = None
        while True:
            page = await self.service.find(caller, replace(query, cursor=cursor))
            for one in page.items:
                yield one
            cursor = page.next_cursor
            if cursor is None:
                return

    async def list_v2(self, call: Call) -> Answer:
        asked = call.query()
        query = Query(
            states=_states(asked.get("state")),
            metadata=metadata_filter(asked.get("metadata")),
            started_after=read_moment(asked.get("startedAfter"), "startedAfter"),
            ascending=_ascending(asked.get("order")),
            limit=integer(asked, "limit", default=PAGE_MAX, low=1, high=PAGE_MAX),
            cursor=asked.get("nextToken") or None,
            template=asked.get("template") or None,
        )
        if query.template is not None and ":" in query.template:
            raise Refused(Code.INVALID_REQUEST, "template takes an id or an alias, without a tag")
        page = await self.service.find(call.caller, query)
        headers: Headers = ()
        if not query.states or query.states & answers.RUNNING:
            headers = ((b"x-total-running", b"%d" % page.total_running),)
        if page.next_cursor is not None:
            headers += ((b"x-next-token", page.next_cursor.encode()),)
        return json_answer(200, [answers.sandbox_listed(one, client_id=self.settings.client_id) for one in page.items], headers)

    async def kill(self, call: Call) -> Answer:
        given = sandbox_id(call)
        try:
            sandbox = await self.service.release(call.caller, given)
        except Refused as error:
            raise _same_words(error, given) from error
        return Answer(_NO_CONTENT, headers=changed(sandbox))

    async def connect_v1(self, call: Call) -> Answer:
        return await self._connect(call, v2=False)

    async def connect_v2(self, call: Call) -> Answer:
        return await self._connect(call, v2=True)

    async def _connect(self, call: Call, *, v2: bool) -> Answer:
        """A running sandbox has its end moved away, never nearer; one that is paused is resumed. `memory` speaks of that alone."""
        body = call.json(requests.Connect, optional=v2)
        requests.refuse_unknown(body)
        if body.timeout is None and not v2:
            raise Refused(Code.INVALID_REQUEST, "timeout: the field is required")
        sandbox = await self._visible(call)
        timeout_s = requests.V2_TIMEOUT_S if body.timeout is None else body.timeout
        sandbox, rested = await self._resumed(call.caller, sandbox.id, timeout_s, memory=body.memory)
        if rested:
            return self._created(201, sandbox)
        return self._created(200, await self._set_end(call.caller, sandbox.id, timeout_s, only_extend=True))

    async def _resumed(self, caller: Caller, given: str, timeout_s: int, *, memory: bool | None) -> tuple[Sandbox, bool]:
        """It runs afterwards; whether it was paused. `memory=false`: booted anew from its files."""
        try:
            return await self.service.resume(caller, given, timeout_s=float(max(0, timeout_s)), reboot=memory is False)
        except Refused as error:
            raise _same_words(error, given) from error

    async def resume(self, call: Call) -> Answer:
        """The older way back: a sandbox that runs is in conflict with it."""
        given = sandbox_id(call)
        body = call.json(requests.Resume, optional=True)
        requests.refuse_unknown(body)
        await self._visible(call)
        timeout_s = requests.V1_TIMEOUT_S if body.timeout is None else body.timeout
        sandbox, rested = await self._resumed(call.caller, given, timeout_s, memory=body.memory)
        if not rested:
            raise Refused(Code.ILLEGAL_STATE, f'sandbox "{given}" is running already')
        return self._created(201, sandbox)

    async def pause(self, call: Call) -> Answer:
        """Saved, memory and files or files alone; the detail's `pauseMode` says what its host could save."""
        given = sandbox_id(call)
        body = call.json(requests.Pause, optional=True)
        requests.refuse_unknown(body)
        if (await self._visible(call)).state not in answers.RUNNING:
            raise Refused(Code.ILLEGAL_STATE, f'sandbox "{given}" is paused already')
        mode = SaveMode.FILES if body.memory is False else SaveMode.FULL
        try:
            sandbox = await self.service.suspend(call.caller, given, mode=mode, strict=bool(body.require_healthy_guest))
        except Refused as error:
            raise _same_words(error, given) from error
        return Answer(_NO_CONTENT, headers=changed(sandbox))

    async def set_timeout(self, call: Call) -> Answer:
        given = sandbox_id(call)
        body = call.json(requests.Timeout)
        requests.refuse_unknown(body)
        sandbox = await self._set_end(call.caller, given, body.timeout, only_extend=False)
        return Answer(_NO_CONTENT, headers=changed(sandbox))

    async def refresh(self, call: Call) -> Answer:
        given = sandbox_id(call)
        body = call.json(requests.Refresh, optional=True)
        requests.refuse_unknown(body)
        duration_s = requests.V1_TIMEOUT_S if body.duration is None else body.duration
        sandbox = await self._set_end(call.caller, given, duration_s, only_extend=True)
        return Answer(_NO_CONTENT, headers=changed(sandbox))

    async def _set_end(self, caller: Caller, given: str, timeout_s: int, *, only_extend: bool) -> Sandbox:
        try:
            return await self.service.set_end(caller, given, timeout_s=max(0, timeout_s), only_extend=only_extend)
        except Refused as error:
            raise _same_words(error, given) from error


def _same_words(error: Refused, given: str) -> Refused:
    return not_found(given) if error.code is Code.SANDBOX_NOT_FOUND else error
