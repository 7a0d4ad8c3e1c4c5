"""E2B's routes for snapshots and forks. Snapshots are templates there: they are deleted as such (`templates.py`), and created from by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.control.api.e2b import answers, requests
from atoll.control.api.e2b.account import Account
from atoll.control.api.e2b.sandboxes import integer, not_found, sandbox_id
from atoll.control.api.errors import e2b_body, row_of
from atoll.control.api.exchange import Answer, Call, Headers, changed, json_answer
from atoll.control.api.settings import ApiSettings
from atoll.control.service import Service
from atoll.domain.sandbox import Sandbox
from atoll.domain.snapshot import DEFAULT_TAG, Snapshot
from atoll.domain.spec import SaveMode

PAGE_MAX: Final = 100
COUNT_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The handlers."""

    service: Service
    settings: ApiSettings
    account: Account

    async def take(self, call: Call) -> Answer:
        given = sandbox_id(call)
        body = call.json(requests.NewSnapshot, optional=True)
        requests.refuse_unknown(body)
        mode = SaveMode.FILES if body.memory is False else SaveMode.FULL
        try:
            taken = await self.service.snapshot(call.caller, given, mode=mode, name=body.name or None)
        except Refused as error:
            raise not_found(given) if error.code is Code.SANDBOX_NOT_FOUND else error from error
        return json_answer(201, _shown(taken, team=call.caller.team.name))

    async def list(self, call: Call) -> Answer:
        asked = call.query()
        page = await self.service.snapshots(
            call.caller,
            sandbox_id=(asked.get("sandboxID") or "").partition("-")[0] or None,
            name=_bare(asked.get("name")),
            limit=integer(asked, "limit", default=PAGE_MAX, low=1, high=PAGE_MAX),
            cursor=asked.get("nextToken") or None,
        )
        headers: Headers = () if page.next_cursor is None else ((b"x-next-token", page.next_cursor.encode()),)
        return json_answer(200, [_shown(one, team=call.caller.team.name) for one in page.items], headers)

    async def delete(self, call: Call) -> Answer:
        """Of a template, or of a snapshot, which is one there."""
        reference = call.params["templateID"]
        try:
            template = await self.account.find(call, reference)
        except Refused as missing:
            if missing.code is not Code.TEMPLATE_NOT_FOUND:
                raise
            try:
                await self.service.delete_snapshot(call.caller, reference)
            except Refused as error:
                raise missing if error.code is Code.SNAPSHOT_NOT_FOUND else error from error
            return Answer(204)
        await self.service.delete_template(call.caller, template.id)
        return Answer(204)

    async def fork(self, call: Call) -> Answer:
        given = sandbox_id(call)
        body = call.json(requests.Fork, optional=True)
        requests.refuse_unknown(body)
        request_id = requests.idempotency_key(call.headers.get(b"idempotency-key"))
        timeout_s = requests.V1_TIMEOUT_S if body.timeout is None else body.timeout
        count = 1 if body.count is None else body.count
        try:
            made = await self.service.fork(call.caller, given, count=count, timeout_s=timeout_s, request_id=request_id)
        except Refused as error:
            raise not_found(given) if error.code is Code.SANDBOX_NOT_FOUND else error from error
        last = [one for one in made if isinstance(one, Sandbox)][-1:]
        return json_answer(201, [self._result(one) for one in made], changed(last[0]) if last else ())

    def _result(self, one: Sandbox | AtollError) -> dict[str, object]:
        if isinstance(one, AtollError):
            row = row_of(one)
            return {"error": e2b_body(row.e2b_status or row.status, one.message, row.e2b_code or one.code.value)}
        return {
            "sandbox": answers.sandbox_created(
                one,
                client_id=self.settings.client_id,
                domain=self.settings.domain,
                access=self.service.access_token(one),
                traffic=self.service.traffic_token(one),
            )
        }


def _shown(one: Snapshot, *, team: str) -> dict[str, object]:
    """E2B's `SnapshotInfo`. Its id is this version's own, so that a later one of the same name changes nothing for who has it."""
    names = [f"{team}/{one.name}:{one.tag}"] if one.name is not None else []
    return {"snapshotID": f"{one.id}:{DEFAULT_TAG}", "names": names}


def _bare(name: str | None) -> str | None:
    """A name without team and tag."""
    return name.rpartition("/")[2].partition(":")[0] if name else None
